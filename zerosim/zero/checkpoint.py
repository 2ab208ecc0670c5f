"""Sharded checkpoints: each rank writes what it owns, and reads what it needs, whoever wrote it.

A checkpoint is a folder: one safetensors file of each rank, and an index in JSON, which names what lies where, with a
checksum for every block of every tensor. A tensor is written in the pieces that ranks own of it, under its kind and its
parameter's name: ``master/wte``, ``parameter/wte`` where a second copy is kept, ``optimizer.m/wte``. In the middle of a
step each rank's gradients and observed factors are there too. No rank gathers anything, and nothing is ever run.

`save` writes the files under new names and the index last, by a rename: until then the folder is the checkpoint that
it was before, whenever the processes are killed. `load` first reads and checks all that this rank needs, and then once
more into the arrays at rest: what cannot be read changes nothing. An error on one rank is an error of all of them.
Ranks of one process do all that side by side, on threads.

Source of the idea: Rajbhandari et al. 2020 (ZeRO), by which each rank has all of its own state and nothing else.
Legend: N ranks; pieces and ranges count elements of one tensor.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from zerosim.models.gpt import Decoder
from zerosim.models.units import Model
from zerosim.numerics.arrays import AnyArray, has_data
from zerosim.numerics.checks import is_count
from zerosim.numerics.files import ANY, UNFINISHED, json_of, misfit, only_writer, write_durably
from zerosim.numerics.loss_scale import Static
from zerosim.numerics.policy import BY_MICRO_BATCH
from zerosim.numerics.safetensors import (
    BLOCK_NBYTES,
    CODES,
    DTYPES,
    StoredTensor,
    checksums,
    crc32,
    read_blocks,
    read_header,
    write_tensors,
)
from zerosim.ranks import together
from zerosim.ranks.rank import Rank
from zerosim.zero.factors import Factors, empty_factor
from zerosim.zero.gradients import Accumulator, Observer, StepCounts
from zerosim.zero.layout import ParameterPiece
from zerosim.zero.micro_batch_order import OF_THE_CUT
from zerosim.zero.param_group import ParamGroup, elements_of
from zerosim.zero.placements import Placement
from zerosim.zero.update import Update

T = TypeVar("T")
FORMAT, VERSION, INDEX = "zerosim sharded checkpoint", 1, "index.json"
SHARD = re.compile(r"shard-(\d{6,})-rank-(\d+)-of-\d+\.safetensors")
LEFT = re.compile(rf"\.({SHARD.pattern}|{re.escape(INDEX)})\.\d+{re.escape(UNFINISHED)}")  # by a run that was killed
MASTER, PARAMETER, OPTIMIZER, OF_RANK = "master", "parameter", "optimizer", "rank"
# Of an index, as `misfit` has it.
FORM = {
    "format": str, "version": int, "number": int, "files": [{"name": str, "nbytes": int, "header_crc32": str}],
    "counts": [{"scale": float, "step": int, "forwards": int, "tokens": [int], "places": [int], "rows": {ANY: int}}],
    "steps_taken": int, "micro_batches": int, "loss_scale": {"kind": str, "rule": str, "state": {ANY: float}},
    "progress": object, "settings": {ANY: str},
    "parameters": {ANY: {"shape": [int], "optimizer": (str, None), "slots": [str]}},
    "tensors": {ANY: {"shape": [int], "dtype": str,
                      "pieces": [{"file": int, "start": int, "count": int, "crc32": [str]}]}}}


class CheckpointError(ValueError):
    """A checkpoint could not be written or read; every rank of the group raises it.

    Nothing was changed, unless a file that had been good failed while it was read the second time: then the engine
    takes no step until a load succeeds.
    """


all_or_none = partial(together.all_or_none, error=CheckpointError)


@dataclass(frozen=True, slots=True)
class Restored:
    """The report of a load: the caller's ``progress``, and ``differences`` from the engine that saved.

    Without differences, training goes on as if it had never been interrupted, bit for bit, as far as settings tell: of
    a schedule that is no dataclass they know the next factor alone, of such a unit names and shapes. Where gradients
    are added by micro-batch it does so on another number of ranks too, if each step has the same ones. ``nbytes_read``
    are the bytes of state that this rank took from files, whose blocks were read whole and twice: to check them first.
    """

    progress: Any
    differences: tuple[str, ...]
    nbytes_read: int


@dataclass(frozen=True, slots=True)
class TrainingState:
    """All that one rank goes on from: what rests in its param groups, the parts that count steps, and in words what
    else its bits depend on."""

    rank: Rank
    model: Model
    param_groups: Sequence[ParamGroup]
    update: Update
    gradients: Accumulator
    observer: Observer
    counts: StepCounts
    settings: Mapping[str, str]

    def values(self, resting: AnyArray) -> AnyArray:
        """The values of an array at rest: itself, or of one on disk a copy on the host."""
        return self.param_groups[0].store.saved(resting)

    def on_a_thread(self, work: Callable[[], T], of: Iterable[AnyArray]) -> T:
        """The result of work with the files of these arrays at rest, whose size stands for its time: beside the work of
        other ranks, unless some rest off the device, whose moves are the store's."""
        arrays = list(of)
        if not all(map(self.param_groups[0].store.is_array, arrays)):
            return work()
        return self.rank.compute(work, operations=sum(array.size for array in arrays))

    def all_settings(self, steps_taken: int) -> dict[str, str]:
        """In words, by name: what the bits of a training that goes on depend on, beside what is restored."""
        return {"ranks": str(self.rank.size), **self.settings,
                "layout": ", ".join(f"{group.layout.name} (units {crc32(' '.join(group.layout.units).encode())})"
                                    for group in self.param_groups),
                "formats": "; ".join(_settings_text(group.policy) for group in self.param_groups),
                **self.update.settings(),
                "schedule": _schedule_text(self.update, steps_taken + 1)}


def _schedule_text(update: Update, step: int) -> str:
    """The schedule in words, as far as it has any, and its factor of the next lr, where it has one: it may end."""
    schedule: Any = update.schedule
    said = f"{_settings_text(schedule)}, of which the next is " if is_dataclass(schedule) else ""
    try:
        return f"{said}{update.lr_factor(step)}"
    except Exception as error:
        return f"{said}{type(error).__name__}"


def model_text(model: Model) -> str:
    """The passes of a model in words: a decoder's config, or a checksum of its units; and its loss."""
    units = str(model.config) if isinstance(model, Decoder) else (
        f"{type(model).__name__} (units {crc32(' '.join(map(_settings_text, model.units)).encode())})")
    return f"{units}, {_settings_text(model.loss)}"


def _settings_text(thing: Any) -> str:
    """The class, and what a dataclass has been given, but for what makes first values, which a checkpoint replaces."""
    given = [(one.name, getattr(thing, one.name)) for one in (fields(thing) if is_dataclass(thing) else ())
             if one.name not in ("seed", "initializers", "master_from")]
    return re.sub(" at 0x[0-9a-f]+", "", f"{type(thing).__name__}({', '.join(f'{k}={v!r}' for k, v in given)})")


# -- What rests on a rank, by name -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resting:
    """Elements of one tensor, from ``start`` on, in an array at rest; ``shape`` is the whole tensor's."""

    key: str
    shape: tuple[int, ...]
    start: int
    array: AnyArray


def owned(training: TrainingState) -> Iterator[Resting]:
    """All state of which this rank is the owner: every element of a tensor has one."""
    for group in training.param_groups:
        if group.rank.index == training.rank.index:  # on a mesh the first node's; the others have the same
            yield from resting_of(group, owned=True)
    if training.gradients.micro_batch:
        yield from _of_step(training, training.observer.sums)


def resting_of(group: ParamGroup, *, owned: bool) -> Iterator[Resting]:
    """The state of a param group that rests on this rank, or the part of it of which the rank is the owner."""
    layout, stage = group.layout, group.stage

    def pieces(placement: Placement) -> list[ParameterPiece]:
        return layout.parameter_pieces(group.rank.index) if owned else layout.by_parameter(
            group.regions_held(placement))

    copies = [(MASTER, group.master, group.master_placement)]
    if not group.parameter_is_master:
        copies.append((PARAMETER, group.parameter, stage.parameters))
    for kind, array, placement in copies:
        for piece in pieces(placement):
            yield Resting(f"{kind}/{piece.entry.name}", piece.entry.shape, piece.start,
                          elements_of(array, piece, placement))
    for piece in [] if group.frozen else pieces(stage.optimizer):
        for name, slot in group.slots_of(piece.entry).items():
            key = f"{OPTIMIZER}.{name}/{piece.entry.name}"
            if group.is_flat(piece.entry, name):
                yield Resting(key, slot.shape, piece.start, group.slot(piece, name))
            elif piece.start == 0 or not owned:  # all who own of the parameter keep it whole
                yield Resting(key, slot.shape, 0, group.slot(piece, name).reshape(-1))


def _of_step(training: TrainingState, observed: Mapping[str, Factors]) -> Iterator[Resting]:
    """The rank's own addends or sums of a step under way, as they rest, and the factors that it has observed."""
    rank = training.rank.index
    for index, group in enumerate(training.param_groups):
        yield Resting(f"{OF_RANK}.gradient/{index}@{rank}", group.gradient.shape, 0, group.gradient)
    for weight, factors in observed.items():
        for name, factor in zip("AG", factors, strict=True):
            yield Resting(f"{OF_RANK}.factor.{name}/{weight}@{rank}", factor.shape, 0, factor.reshape(-1))


def state_dict(training: TrainingState) -> dict[str, AnyArray]:
    """The owned state by name, as views: in its own shape where all of it is here, else flat (n,)."""
    return {one.key: values.reshape(one.shape) if values.size == math.prod(one.shape) else values
            for one in owned(training) for values in [training.values(one.array)]}


def _parameters(training: TrainingState) -> dict[str, Any]:
    """Each parameter's shape, and the state and settings of its optimizer; None where it is frozen."""
    return {entry.name: {"shape": list(entry.shape),
                         "optimizer": None if group.frozen else str(group.optimizers[entry.name]),
                         "slots": [] if group.frozen else sorted(group.slots_of(entry))}
            for group in training.param_groups for entry in group.layout.entries}


# -- Saving ------------------------------------------------------------------------------------------------------------


def save(path: str | Path, training: TrainingState, progress: Any) -> None:
    """Writes a checkpoint into the folder ``path``, which is made, in place of the one that is there.

    That one stays until the new one is whole, so that there must be room for both. ``progress``, a JSON value, is the
    same on every rank. Raises CheckpointError on every rank where one cannot write, after which the training may go on:
    the earlier checkpoint is as it was, or, where only the folder could not be brought to the disk, the new one is
    there. Raises ValueError for another progress, for a step that is between backward and the all-gather of parameters,
    and for arrays without data.
    """
    rank, folder = training.rank, path_of(path)
    _require_data(training)
    _require_at_rest(training)
    text = _as_json(progress)
    rank = rank.agreeing(f"save to {str(path)!r} after {training.update.steps_taken} steps, "
                         f"{training.gradients.micro_batch} micro-batches, progress {text}")
    with rank.trace.span("save"), ExitStack() as until_saved:
        number = np.array([all_or_none(rank, partial(_begin, folder, until_saved), only=0) or 0], np.int64)
        rank.broadcast(number, out=number, purpose="control")
        this = int(number[0])
        try:
            all_or_none(rank, partial(_write_shard, folder / _name(this, rank.index, rank.size), training))
            all_or_none(rank, partial(_write_index, folder, this, training, json.loads(text)), only=0)
        except CheckpointError:
            with suppress(OSError):  # of an index that cannot be read, and may be the new one's
                if rank.index == 0 and _named(folder) != this:  # on a full disk they would be in the way
                    _remove_shards(folder, lambda number, index: number == this)
            raise
        mine = partial(_remove_shards, folder, lambda number, index: number != this and index % rank.size == rank.index)
        all_or_none(rank, partial(training.on_a_thread, mine, [one.array for one in owned(training)]))


def path_of(path: Any) -> Path:
    """The path that a user names; ValueError for what is none."""
    if not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path):
        raise ValueError(f"{path!r} is no path; name a folder or a file, as 'my-run'")
    return Path(path)


def _require_data(training: TrainingState) -> None:
    if not has_data(training.rank.kernels.empty(0, np.float32)):
        raise ValueError("a checkpoint holds numbers, and the arrays of this run have shapes and types alone; run the "
                         "program on a Cluster")


def _require_at_rest(training: TrainingState) -> None:
    """Raises ValueError where a checkpoint would not hold all that a later run needs."""
    training.update.refuse_if_broken_off()
    if training.update.is_ready:
        raise ValueError("save() was called between reduce() and update(), where gradients are under way; call "
                         "update() first, or save before reduce()")
    training.gradients.refuse_if_broken_off()
    if training.gradients.is_last:
        raise ValueError("save() was called after the step's last backward, whose gradients may have been reduced; "
                         "call reduce() and update() first")
    training.update.refuse_if_out_of_date("save")


def _as_json(progress: Any) -> str:
    try:
        text = json.dumps(progress, allow_nan=False)
        if (found := json_of(text)) != progress:
            raise ValueError(f"it would come back as {found!r}")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"progress={progress!r} is to come back from JSON as it was: {error}; pass numbers, texts, "
                         "lists and dicts of them by text, or None") from None
    return text


def _name(number: int, index: int, ranks: int) -> str:
    return f"shard-{number:06}-rank-{index:05}-of-{ranks:05}.safetensors"


def _begin(folder: Path, until_saved: ExitStack) -> int:
    """A number that no shard in the folder has; the folder is made, and must not hold anybody else's index.

    Nobody else saves there until then. What killed runs and failed saves left is removed: on a full disk it is in the
    way.
    """
    if not_folder := next((one for one in (folder, *folder.parents) if one.exists() and not one.is_dir()), None):
        raise ValueError(f"{not_folder} is a file, and a checkpoint is a folder of files; name another folder, or move "
                         "the file away")
    folder.mkdir(parents=True, exist_ok=True)
    until_saved.enter_context(only_writer(folder))
    index = folder / INDEX
    if index.exists() and FORMAT not in index.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{index} is of no zerosim checkpoint, and would be overwritten; name another folder")
    if (named := _named(folder)) is not None:  # without a whole index, nothing says which shards are whole
        _remove_shards(folder, lambda number, index: number != named)
    return 1 + max((int(match[1]) for match in map(SHARD.fullmatch, _names(folder)) if match), default=0)


def _names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def _write_shard(path: Path, training: TrainingState) -> None:
    own = list(owned(training))
    training.on_a_thread(partial(_write, path, training, own), (one.array for one in own))


def _write(path: Path, training: TrainingState, own: Sequence[Resting]) -> None:
    about = {one.key: {"shape": one.shape, "start": one.start, "crc32": checksums(training.values(one.array))}
             for one in own}
    counts = asdict(training.counts) | {"rows": training.observer.rows}
    arrays = {one.key: one.array for one in own}
    write_tensors(path, {key: (array.dtype, array.shape) for key, array in arrays.items()},
                  lambda key: training.values(arrays[key]),
                  {FORMAT: json.dumps({"version": VERSION, "counts": counts, "tensors": about})})


def _write_index(folder: Path, number: int, training: TrainingState, progress: Any) -> None:
    """Reads the headers of all shards, and writes what lies where."""
    files, counts = [], []
    tensors: dict[str, Any] = {}
    for index in range(training.rank.size):
        name = _name(number, index, training.rank.size)
        try:
            shard = read_header(folder / name)
        except FileNotFoundError:
            raise ValueError(f"rank 0 does not find {folder / name}, which rank {index} has written; name a folder "
                             "that all ranks share") from None
        about = json.loads(shard.metadata[FORMAT])
        counts.append(about["counts"])
        files.append({"name": name, "nbytes": shard.nbytes, "header_crc32": shard.header_crc32})
        for key, piece in about["tensors"].items():
            stored = shard.tensors[key]
            whole = tensors.setdefault(key, {"shape": piece["shape"], "dtype": CODES[stored.dtype], "pieces": []})
            whole["pieces"].append({"file": index, "start": piece["start"], "count": stored.shape[0],
                                    "crc32": piece["crc32"]})
    scaler = training.update.loss_scale
    content = {
        "format": FORMAT, "version": VERSION, "number": number, "files": files, "counts": counts,
        "steps_taken": training.update.steps_taken, "micro_batches": training.gradients.micro_batch,
        "loss_scale": {"kind": scaler.kind, "rule": _rule(training), "state": scaler.state()}, "progress": progress,
        "settings": training.all_settings(training.update.steps_taken), "parameters": _parameters(training),
        "tensors": tensors}
    text = json.dumps({"sha256": _sha256(content), "checkpoint": content}, indent=1, allow_nan=False)
    write_durably(folder / INDEX, [text.encode()])


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _remove_shards(folder: Path, which: Callable[[int, int], bool]) -> None:
    """Removes the shards of checkpoints of these numbers and ranks, and what killed runs left."""
    for name in _names(folder):
        shard = SHARD.fullmatch(name)
        if LEFT.fullmatch(name) or (shard and which(int(shard[1]), int(shard[2]))):
            with suppress(OSError):  # the next save tries again
                (folder / name).unlink()


def _named(folder: Path) -> Any:
    """The number of the checkpoint whose index is there; None without a whole one."""
    with suppress(ValueError):
        return open_checkpoint(folder).content["number"]
    return None


# -- Loading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """A stretch [low, high) of a tensor's piece in a file, and the resting elements that it fills."""

    path: Path
    tensor: StoredTensor
    low: int
    high: int
    crc32: list[str]
    target: AnyArray


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint's index, and the headers of its files as far as they have been read."""

    folder: Path
    content: dict[str, Any]
    headers: dict[int, Any] = field(default_factory=dict)

    def header(self, index: int) -> Any:
        """The header of one rank's file. Raises ValueError where it is not the file that the index is of."""
        if index not in self.headers:
            entry = self.content["files"][index]
            path = self.folder / entry["name"]
            try:
                header = read_header(path)
            except FileNotFoundError:
                raise ValueError(f"{path} is missing, which {self.folder / INDEX} names; take another copy of the "
                                 "checkpoint") from None
            if (header.nbytes, header.header_crc32) != (entry["nbytes"], entry["header_crc32"]):
                raise ValueError(f"{path} is not the file that {self.folder / INDEX} names: it has {header.nbytes} "
                                 f"bytes and a header with the checksum {header.header_crc32}, where {entry['nbytes']} "
                                 f"and {entry['header_crc32']} were written; take another copy of the checkpoint")
            self.headers[index] = header
        return self.headers[index]

    def stretches(self, key: str, shape: tuple[int, ...], low: int,
                  high: int) -> Iterator[tuple[int, int, Mapping[str, Any], Path, StoredTensor]]:
        """The places of elements [low, high) of a tensor: each stretch with the piece, the file and the tensor in it.

        Raises ValueError for a tensor that is not all there.
        """
        done, index = low, self.folder / INDEX
        whole = self.content["tensors"].get(key, {"pieces": [], "shape": shape})
        if tuple(whole["shape"]) != shape:
            raise ValueError(f"{index}: the tensor {key} is of shape {tuple(whole['shape'])}, and "
                             f"{shape} is asked for; build the model and optimizer that were saved")
        for piece in sorted(whole["pieces"], key=lambda piece: piece["start"]):
            start, stop = max(low, piece["start"]), min(high, piece["start"] + piece["count"])
            if start < stop and start == done:
                file = self.header(piece["file"])
                stored = file.tensors.get(key)
                if stored is None or (stored.shape, CODES[stored.dtype]) != ((piece["count"],), whole["dtype"]):
                    raise ValueError(f"{file.path} has not the {piece['count']} elements of the tensor {key} that "
                                     f"{index} names; take another copy of the checkpoint")
                yield start, stop, piece, file.path, stored
                done = stop
        if done < high:
            raise ValueError(f"{index} names no file for the elements {done} to {high} of the tensor {key}; the "
                             "checkpoint is not whole")

    def sources(self, key: str, shape: tuple[int, ...], low: int, target: AnyArray) -> Iterator[Source]:
        """The stretches of files in which the elements of a tensor from ``low`` on lie, as many as the target has;
        raises as `stretches`."""
        for start, stop, piece, path, stored in self.stretches(key, shape, low, low + target.size):
            yield Source(path, stored, start - piece["start"], stop - piece["start"], piece["crc32"],
                         target[start - low:stop - low])


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads and checks the index of a checkpoint.

    Raises ValueError, with the file's name, where there is none, or it is damaged, another format's or a newer one's.
    """
    index = folder / INDEX
    try:
        text = index.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} holds no checkpoint: there is no {INDEX} in it; name the folder that save() was "
                         "given") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{index} is damaged: {error}; take another copy of it") from None
    try:
        found = json_of(text)
        content, sha256 = found["checkpoint"], found["sha256"]
        known, version = content["format"] == FORMAT, content["version"]
    except (ValueError, TypeError, KeyError) as error:
        what = "is damaged" if FORMAT in text else "is of no zerosim checkpoint"
        raise ValueError(f"{index} {what} ({type(error).__name__}: {error}); take another copy of the checkpoint, or "
                         "name the folder of a checkpoint") from None
    if not known:
        raise ValueError(f"{index} is of the format {content['format']!r}, and load() reads {FORMAT!r}; name the "
                         "folder of a checkpoint")
    if not is_count(version) or version > VERSION:
        raise ValueError(f"{index} is of version {version}, and this zerosim reads versions up to {VERSION}; install a "
                         "newer zerosim")
    if sha256 != _sha256(content):
        raise ValueError(f"{index} is damaged: its content has not the checksum that was written with it; take another "
                         "copy of it")
    if wrong := misfit(content, FORM, "checkpoint") or _impossible(content):
        raise ValueError(f"{index} was not written by save(): {wrong}; take another copy of it")
    return Checkpoint(folder, content)


def _impossible(content: Mapping[str, Any]) -> str:
    """The first thing in an index of the right form that no file can have, nothing without one."""
    if not content["files"] or len(content["counts"]) != len(content["files"]):
        return f"there are {len(content['files'])} files, and counts of {len(content['counts'])} ranks"
    for entry in content["files"]:
        if not SHARD.fullmatch(entry["name"]):
            return f"the file {entry['name']!r} is no shard of this folder"
    for key, whole in content["tensors"].items():
        if whole["dtype"] not in DTYPES:
            return f"the tensor {key} is of the type {whole['dtype']!r}, and there are {', '.join(DTYPES)}"
        for piece in whole["pieces"]:
            if piece["file"] >= len(content["files"]):
                return f"the tensor {key} has elements in file {piece['file']}, of {len(content['files'])}"
    return ""


def load(path: str | Path, training: TrainingState, abandon: Callable[[], StepCounts]) -> Restored:
    """Puts a checkpoint's state in the place of this rank's, and returns a report.

    What this rank needs is read from the files of whichever ranks wrote it, in any number, stage or layout; where it
    rests in another format here, it is rounded to it. ``abandon`` drops what is under way here, once all is known to be
    good, and returns the counts that are to be set. Raises CheckpointError on every rank where one cannot read all of
    it, ValueError for arrays without data.
    """
    folder = path_of(path)
    rank, update = training.rank.agreeing(f"load of {str(path)!r}"), training.update
    _require_data(training)
    with rank.trace.span("load"):
        plan = all_or_none(rank, partial(_plan, folder, training))
        _require_same_checkpoint(rank, folder, plan.content)
        counts = abandon()
        with update.changing_state(f"load of {str(path)!r}"):
            all_or_none(rank, partial(_fill, folder, plan, training, counts))
    return Restored(plan.content["progress"], plan.differences, plan.nbytes)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All of a load that has been checked: where each element comes from, and what is set beside the arrays."""

    content: Mapping[str, Any]
    differences: tuple[str, ...]
    sources: list[Source]
    counts: dict[str, Any]
    rows: dict[str, int]
    factors: dict[str, Factors]
    nbytes: int


def _plan(folder: Path, training: TrainingState) -> LoadPlan:
    """Reads and checks all that this rank needs. Raises ValueError or OSError where it cannot."""
    rank, checkpoint = training.rank, open_checkpoint(folder)
    content = checkpoint.content
    _require_same_parameters(training, content, folder)
    differences = _differences(training, content)
    if content["micro_batches"]:
        _require_same_place(training, content, folder)
    counts = dict(content["counts"][rank.index if len(content["counts"]) == rank.size else 0])
    rows, factors = counts.pop("rows"), dict[str, Factors]()
    wanted = [one for group in training.param_groups for one in resting_of(group, owned=False)]
    if content["micro_batches"]:
        for weight in rows:
            inputs, outputs = content["parameters"][weight]["shape"]
            factors[weight] = empty_factor(training.rank, inputs, weight), empty_factor(training.rank, outputs, weight)
        wanted += _of_step(training, factors)
    sources = sorted((source for one in wanted
                      for source in checkpoint.sources(_key_of(one, content), one.shape, one.start, one.array)),
                     key=lambda source: (source.path, source.tensor.start))
    return LoadPlan(content, differences, sources, counts, rows, factors, _read(training, sources, check_only=True))


def _key_of(one: Resting, content: Mapping[str, Any]) -> str:
    """The tensor in the checkpoint that fills this one: a second copy of another format is made from the master."""
    kind, _, name = one.key.partition("/")
    saved = content["tensors"].get(one.key)
    if kind == PARAMETER and (saved is None or DTYPES[saved["dtype"]] != one.array.dtype):
        return f"{MASTER}/{name}"
    return one.key


def _fill(folder: Path, plan: LoadPlan, training: TrainingState, counts: StepCounts) -> None:
    """Sets all state to the checkpoint's."""
    content, update = plan.content, training.update
    if _keeps_loss_scale(training, content):
        try:
            update.loss_scale.restore(content["loss_scale"]["state"])
        except ValueError as error:
            raise ValueError(f"{folder / INDEX}: {error}") from None
    _read(training, plan.sources, check_only=False)
    update.steps_taken = content["steps_taken"]
    for name, count in plan.counts.items():
        setattr(counts, name, count)
    training.observer.rows, training.observer.sums = plan.rows, plan.factors
    for reducer in training.gradients.reducers.values():
        reducer.micro_batch = content["micro_batches"]
    update.after_load()


def _read(training: TrainingState, sources: Sequence[Source], *, check_only: bool) -> int:
    """Reads and checks the blocks of all sources, and puts them where they belong; returns how many bytes they are."""
    rank = training.rank
    most = max((min(source.tensor.nbytes, BLOCK_NBYTES) for source in sources), default=0)
    buffer = rank.memory.alloc(most, np.uint8, "workspace", "checkpoint", like=np.empty(0))  # on the host
    store, cast_pack = training.param_groups[0].store, rank.kernels.cast_pack

    def work() -> int:
        nbytes = 0
        for block, target in read_sources(sources, buffer):
            nbytes += block.nbytes
            if not check_only:
                with store.writing(target) as room:
                    cast_pack(block, room)
        return nbytes

    return training.on_a_thread(work, (source.target for source in sources))


def read_sources(sources: Iterable[Source], buffer: np.ndarray) -> Iterator[tuple[np.ndarray, AnyArray]]:
    """Each block of the sources (n,), in ``buffer``, and the n elements that it fills; raises as `read_blocks`."""
    for path, of_file in groupby(sources, lambda source: source.path):
        with path.open("rb") as file:
            for one in of_file:
                for start, block in read_blocks(file, path, one.tensor, one.low, one.high, buffer, one.crc32):
                    yield block, one.target[start - one.low:start - one.low + len(block)]


def _require_same_checkpoint(rank: Rank, folder: Path, content: Mapping[str, Any]) -> None:
    """Raises CheckpointError on every rank where some read different checkpoints, as from disks of their own."""
    mine = np.frombuffer(_sha256(content).encode(), np.uint8)
    found = rank.all_gather(mine, purpose="control").reshape(rank.size, -1)
    others = [index for index, one in enumerate(found) if one.tobytes() != found[0].tobytes()]
    if others:
        raise CheckpointError(f"rank {others[0]} finds another checkpoint in {folder} than rank 0; name a folder that "
                              "all ranks share")


def _require_same_parameters(training: TrainingState, content: Mapping[str, Any], folder: Path) -> None:
    """Raises ValueError where the checkpoint is of other parameters, or of other optimizer state."""
    saved, here = content["parameters"], _parameters(training)
    for name in [*here, *saved]:
        if name not in saved or name not in here:
            where = "the checkpoint" if name not in saved else "this model"
            raise ValueError(f"{folder}: {where} has no parameter {name}; load into the model that was saved")
        for what in ("shape", "slots"):
            if saved[name][what] != here[name][what]:
                raise ValueError(f"{folder}: {name} has the {what} {saved[name][what]} there "
                                 f"({saved[name]['optimizer']}) and {here[name][what]} here "
                                 f"({here[name]['optimizer']}); load into the model and optimizer that were saved")


def _require_same_place(training: TrainingState, content: Mapping[str, Any], folder: Path) -> None:
    """Raises ValueError where the gradients of a step under way cannot go on."""
    saved, here = content["settings"], training.all_settings(content["steps_taken"])
    for name in ("ranks", "stage", "layout", "formats"):
        if saved[name] != here[name]:
            raise ValueError(f"{folder} was saved in the middle of a step, after {content['micro_batches']} "
                             f"micro-batches, whose gradients are those of {name} {saved[name]}; here it is "
                             f"{here[name]}. Load it where it was saved, and finish the step there")


def _differences(training: TrainingState, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Why training may go on with other bits, a line each: what is here another than in the engine that saved."""
    saved, here = content["settings"], training.all_settings(content["steps_taken"])
    free = OF_THE_CUT if saved.get("reduction") == here["reduction"] == BY_MICRO_BATCH else ()
    found = [f"{name}: saved with {saved.get(name)}, here {value}" for name, value in here.items()
             if saved.get(name) != value and name not in free]
    optimizers = {name: (content["parameters"][name]["optimizer"], one["optimizer"])
                  for name, one in _parameters(training).items()}
    changed = [name for name, (there, here_) in optimizers.items() if there != here_]
    if changed:
        there, now = optimizers[changed[0]]
        found.append(f"optimizer of {len(changed)} parameters, as {changed[0]}: saved with {there}, here {now}")
    if not _keeps_loss_scale(training, content):
        found.append(f"loss scale: saved with {content['loss_scale']['rule']}, and begins anew here with "
                     f"{_rule(training)}")
    return tuple(found)


def _keeps_loss_scale(training: TrainingState, content: Mapping[str, Any]) -> bool:
    """True for a scaler of the kind that was saved; a number that is asked for here is that number."""
    saved = content["loss_scale"]
    return bool(saved["kind"] == training.update.loss_scale.kind
                and (saved["kind"] != "static" or saved["rule"] == _rule(training)))


def _rule(training: TrainingState) -> str:
    rule = training.param_groups[0].policy.loss_scale
    return str(rule.scale if isinstance(rule, Static) else rule)  # a number is a static scale
