"""Weights in Hugging Face's files, under its names: exported from a checkpoint, and loaded into an engine.

Either one file, ``model.safetensors``, or several, ``model-00001-of-00003.safetensors``, with an index
``model.safetensors.index.json``. Weights of the types in `zerosim.models.model_types` have the names there that
`transformers` gives them; those of other models keep their own. Optimizer state is not among them.

Legend: a matrix (I, O), inputs by outputs, as a linear layer has it here.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.models.llama import decoder
from zerosim.models.model_types import CONFIG, config_of_fields, read_fields, refuse_other_model, stored_names
from zerosim.models.stored import ONE_FILE, WEIGHTS_INDEX, StoredNames, StoredWeights, find_weights
from zerosim.numerics.checks import require_count
from zerosim.numerics.files import write_durably
from zerosim.numerics.rounding import round_to
from zerosim.numerics.safetensors import BLOCK_NBYTES, DTYPES, tensor_nbytes, write_tensors
from zerosim.zero.checkpoint import (
    MASTER,
    PARAMETER,
    Checkpoint,
    Resting,
    TrainingState,
    all_or_none,
    open_checkpoint,
    path_of,
    read_sources,
    resting_of,
)
from zerosim.zero.param_group import ParamGroup

SUFFIX = ".safetensors"
FILES = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


# -- Exporting ---------------------------------------------------------------------------------------------------------


def export_weights(checkpoint: str | Path, out: str | Path, *, shard_nbytes: int | None = None,
                   kind: str = MASTER, config: Any = None) -> list[Path]:
    """Writes a checkpoint's weights into the folder ``out``, or the file, FILE.safetensors; returns the files, the
    index and the configuration last.

    One file, or, where ``shard_nbytes`` is given, files of at most so many bytes of weights, or of one larger tensor,
    and an index. ``kind`` is "master", or "parameter" for the copies in the compute format, where there are any.
    ``config``, as `zs.models.from_hugging_face` takes it, is written beside them as config.json, so that `transformers`
    reads the folder; of its keys that of the weights' type alone changes. Needs the memory of one tensor. Raises
    ValueError for what is no whole checkpoint, for a ``config`` of another model, and for a folder that has weights
    which would lie beside the new ones, or between them after a failure; OSError for what cannot be written.
    """
    require_count("shard_nbytes", shard_nbytes, 1, "a number of bytes", none="for one file")
    source, place = open_checkpoint(path_of(checkpoint)), path_of(out)
    is_file = place.suffix == SUFFIX and not place.is_dir()
    if is_file and shard_nbytes is not None:
        raise ValueError(f"shard_nbytes={shard_nbytes} asks for several files, and {str(out)!r} is one; name a folder, "
                         "or leave shard_nbytes out")
    folder = place.parent if is_file else place
    tensors = source.content["tensors"]
    shapes = {name: tuple(one["shape"]) for name, one in source.content["parameters"].items()}
    missing = next((name for name in shapes if math.prod(shapes[name]) and f"{kind}/{name}" not in tensors), None)
    if missing is not None:
        raise ValueError(f"{checkpoint} has no {kind} of {missing}; export kind={MASTER!r}, which every checkpoint has")
    fields = None if config is None else _fields_of(config, shapes)
    kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    arrays: dict[str, Callable[[], np.ndarray]] = {}
    for name, there in stored_names(shapes).items():
        shape, start = shapes[name], 0
        dtype = DTYPES[tensors.get(f"{kind}/{name}", {"dtype": "F32"})["dtype"]]  # without elements it is in no file
        for part, width in zip(there.names, _widths(name, there, shapes), strict=True):
            columns = slice(start, start + width)
            whole = (*shape[:-1], width) if shape else ()
            kinds[part] = dtype, tuple(reversed(whole)) if there.transposed else whole
            arrays[part] = partial(_whole, source, f"{kind}/{name}", shape, dtype, columns, transposed=there.transposed)
            start += width
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(kinds, shard_nbytes)
    names = [place.name] if is_file else [ONE_FILE] if len(shards) == 1 else [
        f"model-{number:05}-of-{len(shards):05}{SUFFIX}" for number in range(1, len(shards) + 1)]
    others = sorted(file.name for file in folder.iterdir() if FILES.fullmatch(file.name))
    if FILES.fullmatch(names[0]) and others and not others == names == [ONE_FILE]:  # which is replaced at once
        raise ValueError(f"weights were to be exported into {str(out)!r}, where there are others: "
                         f"{', '.join(others[:3])}; name another folder, or remove them first")
    for file, shard in zip(names, shards, strict=True):
        write_tensors(folder / file, {part: kinds[part] for part in shard}, lambda part: arrays[part](),
                      {"format": "pt"})  # which `transformers` asks for
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(tensor_nbytes(*kind) for kind in kinds.values())},
                 "weight_map": {part: file for file, shard in zip(names, shards, strict=True) for part in shard}}
        write_durably(folder / WEIGHTS_INDEX, [json.dumps(index, indent=2).encode()])
        names.append(WEIGHTS_INDEX)
    if fields is not None:
        types = {dtype.name for dtype, _ in kinds.values()}
        key = "torch_dtype" if "torch_dtype" in fields else "dtype"
        write_durably(folder / CONFIG, [json.dumps({**fields, key: types.pop() if len(types) == 1 else None},
                                                   indent=2).encode()])
        names.append(CONFIG)
    return [folder / name for name in names]


def _fields_of(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The fields of a configuration; ValueError where it is of a model with other weights."""
    name, fields = read_fields(config)
    own, tied = config_of_fields(name, fields, 1, tuple(fields))  # of any context, with keys of any meaning
    wanted = decoder(own, tied=tied).shapes
    for parameter in {**wanted, **shapes}:
        if wanted.get(parameter) != shapes.get(parameter):
            raise ValueError(f"{name} is of a model with {parameter} of shape {wanted.get(parameter)}, and in the "
                             f"checkpoint it is of {shapes.get(parameter)}; give the configuration of the model that "
                             "was trained")
    return dict(fields)


def _widths(name: str, there: StoredNames, shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The columns of each joined matrix: equally many, but for queries, which are as many as the projection has
    inputs."""
    whole, count = (*shapes[name][-1:], 1)[0], len(there.names)
    if count != 3:
        return [whole // count] * count
    projection = name.replace(".qkv.", ".projection.").removesuffix("bias").removesuffix("weight") + "weight"
    queries = shapes[projection][0]
    return [queries, (whole - queries) // 2, (whole - queries) // 2]


def _whole(source: Checkpoint, key: str, shape: tuple[int, ...], dtype: np.dtype[Any], columns: slice, *,
           transposed: bool) -> np.ndarray:
    """The columns of a tensor, put together from its pieces in all files."""
    for _ in source.stretches(key, shape, 0, math.prod(shape)):  # are there, before room is made for them
        pass
    found = np.empty(math.prod(shape), dtype)
    buffer = np.empty(BLOCK_NBYTES, np.uint8)
    for block, target in read_sources(source.sources(key, shape, 0, found), buffer):
        target[...] = block
    if not shape:
        return found.reshape(())
    part = found.reshape(shape)[..., columns]
    return np.ascontiguousarray(part.T if transposed else part)


def _shards(kinds: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], most: int | None) -> list[list[str]]:
    """The tensors of each file, in order: a file is full when the next one does not fit."""
    shards: list[list[str]] = [[]]
    room = math.inf if most is None else most
    left = room
    for name, kind in kinds.items():
        if shards[-1] and tensor_nbytes(*kind) > left:
            shards.append([])
            left = room
        shards[-1].append(name)
        left -= tensor_nbytes(*kind)
    return shards


# -- Loading -----------------------------------------------------------------------------------------------------------


def load_weights(path: str | Path, training: TrainingState, abandon: Callable[[], object]) -> None:
    """Fills this rank's weights, in every copy, from files; it reads what it needs of each tensor.

    ``path`` is a safetensors file, or a folder with one or with an index. Optimizer state stays as it is; ``abandon``
    drops a step under way, once all weights have been found. There are no checksums in these files. Raises
    CheckpointError on every rank where one does not find all weights in the right shapes, and numbers of fp32 in its
    part of them: then nothing was changed.
    """
    folder = path_of(path)
    training.update.refuse_if_broken_off()  # which left optimizer state that is in no file of weights
    rank = training.rank.agreeing(f"load of weights from {str(path)!r}")
    found = all_or_none(rank, partial(_found, folder, training))
    abandon()
    with training.update.changing_state(f"load of weights from {str(path)!r}"):
        all_or_none(rank, partial(_fill, found, training))
    training.update.after_load(masters=False)


def _found(path: Path, training: TrainingState) -> StoredWeights:
    """The places of all weights. Raises ValueError or OSError where they are not those of this model."""
    if path.is_dir():
        refuse_other_model(path, training.model)
    shapes = {entry.name: entry.shape for group in training.param_groups for entry in group.layout.entries}
    found = find_weights(path, stored_names(shapes), shapes)
    for _, one, name in _weights_at_rest(training):
        for _ in found.by_name[name].blocks(one.start, one.array.size):  # refused before anything is changed
            pass
    return found


def _weights_at_rest(training: TrainingState) -> Iterator[tuple[ParamGroup, Resting, str]]:
    """This rank's parts of all weights, in every copy, each with its param group and its parameter's name."""
    for group in training.param_groups:
        for one in resting_of(group, owned=False):
            kind, _, name = one.key.partition("/")
            if kind in (MASTER, PARAMETER):
                yield group, one, name


def _fill(weights: StoredWeights, training: TrainingState) -> None:
    kernels = training.rank.kernels
    for group, one, name in _weights_at_rest(training):
        for start, values in weights.by_name[name].blocks(one.start, one.array.size):
            training.rank.memory.hold(values, "workspace", name)
            # As first values are: rounded to the master's format, and from there to the copy's.
            rounded = values if group.frozen else round_to(values, group.policy.first_format)
            with group.store.writing(one.array[start:start + len(values)]) as target:
                kernels.cast_pack(rounded, target)
