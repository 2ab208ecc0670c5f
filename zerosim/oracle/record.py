"""A recorded step of a distributed run: a folder with a small file of settings, and a file of arrays for each rank.

``record.json`` holds the fields of `StepSettings`; ``rank0.safetensors`` or ``rank0.npz``, and so on, hold arrays by
these names, each parameter whole, in its own shape:

    gradient/J/NAME        the rank's own gradient of its micro-batch J, as backward made it, before any reduction
    before/master/NAME     fp32: the weights that the optimizer updates; before/m, before/v, before/buffer: its state
    after/master/NAME      fp32: the same after the step; after/m, after/v, after/buffer where they were recorded
    after/weights/NAME     the copy that computes, after the step, where it is another one than the master

Nothing in a file is ever run. Legend: N ranks, k micro-batches, n elements of all parameters, one behind the other.
"""

import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from zerosim.numerics.checks import is_count, is_finite_number, unknown_name
from zerosim.numerics.files import ANY, json_of, misfit, write_whole
from zerosim.numerics.formats import FORMATS
from zerosim.numerics.ranges import AtLeastZero, Count, Positive, Range, one_of, require_ranges
from zerosim.numerics.safetensors import read_header, write_tensors
from zerosim.optim.base import DecayRate
from zerosim.oracle.profiles import SLOTS

SETTINGS, GRADIENT = "record.json", "gradient"
LAYOUTS = {  # which rank owns which elements, by whose cut it is
    "whole": "every rank all of them: DDP",
    "rows": "of each parameter ceil(rows/N) rows: FSDP2, as torch.chunk cuts",
    "tensors": "of each parameter ceil(elements/N): DeepSpeed's stage 3",
    "flat": "of the whole vector an N-th of an even number: DeepSpeed's stages 1 and 2",
}
PAIR = 2  # elements to which DeepSpeed aligns a rank's part (0.19.8, stage_1_and_2.py, nccl_start_alignment_factor)
LARGEST = 2**63  # of counts
FP32 = FORMATS["fp32"].dtype
READ = frozenset(fmt.dtype for fmt in FORMATS.values())
Shapes = Mapping[str, tuple[int, ...]]


def _is_tokens(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple) and all(
        isinstance(row, list | tuple) and all(is_count(one) and 0 <= one < LARGEST for one in row) for row in value))


Name = Annotated[str, one_of(tuple(FORMATS))]
PositiveOrNone = Annotated[float | None, Range("{name} is a number above 0, or null", lambda value: value is None or (
    is_finite_number(value) and value > 0))]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The settings of a recorded step; raises ValueError for one that cannot be.

    ``parameters`` are shapes by name, in the model's order; ``layout`` is one of `LAYOUTS`; ``compute`` is the format
    of the weights that compute, ``reduce`` that of gradients on the wire. The sum of all recorded gradients over
    ``divisor`` is the right mean: N·k·S, unless losses were divided before. ``tokens``, a row of counts for each rank,
    says that each gradient is of its micro-batch's own mean, and that the mean asked for is that over all tokens.
    ``order`` is the algorithm of the reduction, where it is known.
    """

    ranks: Count
    parameters: Annotated[Shapes, Range("{name} are lists of sizes by name, one or more", lambda value: bool(value)
                                       and not misfit(value, {ANY: [int]}, ""))]
    optimizer: Annotated[str, one_of(tuple(SLOTS))]
    lr: AtLeastZero
    micro_batches: Count = 1
    step: Annotated[int, Range("{name} is a whole number, from 1 on, below 2^63", lambda value: is_count(value)
                               and 1 <= value < LARGEST)] = 1
    layout: Annotated[str, one_of(tuple(LAYOUTS))] = "whole"
    compute: Name = "fp32"
    reduce: Name = "fp32"
    loss_scale: Positive = 1.0
    divisor: PositiveOrNone = None
    clip_norm: PositiveOrNone = None
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: AtLeastZero = 1e-8
    weight_decay: AtLeastZero = 0.0
    momentum: DecayRate = 0.0
    tokens: Annotated[Any, Range("{name} are lists of counts, one list for each rank, or null", _is_tokens)] = None
    order: Annotated[str | None, Range("{name} is a text, or null", lambda value: value is None or isinstance(
        value, str))] = None

    def __post_init__(self) -> None:
        require_ranges(self)
        if self.tokens is not None:
            sizes = (len(self.tokens), *{len(row) for row in self.tokens})
            if sizes != (self.ranks, self.micro_batches) or not sum(map(sum, self.tokens)):
                raise ValueError(f"StepSettings was given tokens={self.tokens!r}; they are {self.ranks} lists, one for "
                                 f"each rank, of {self.micro_batches} counts, not all 0")

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of what an update reads and writes: the master and the optimizer's state."""
        return ("master", *SLOTS[self.optimizer])

    @property
    def mean_divisor(self) -> float:
        """``divisor``, or N·k·S where none is given."""
        return self.divisor or self.ranks * self.micro_batches * self.loss_scale

    @property
    def length(self) -> int:
        """n."""
        return sum(map(math.prod, self.parameters.values()))

    def stretches(self) -> list[tuple[str, slice]]:
        """The parameters, and where each lies in the vector (n,)."""
        bounds = accumulate(map(math.prod, self.parameters.values()), initial=0)
        return [(name, slice(*here)) for name, here in zip(self.parameters, pairwise(bounds), strict=True)]

    def owners(self) -> np.ndarray:
        """The rank that owns each element, (n,); 0 where every rank owns all."""
        if self.layout == "whole":
            return np.zeros(self.length, int)
        if self.layout == "flat":
            return np.arange(self.length) // max(1, PAIR * -(-self.length // (PAIR * self.ranks)))
        parts = []
        for shape in self.parameters.values():
            rows = (shape[0] if shape else 1) if self.layout == "rows" else math.prod(shape)
            each = max(1, -(-rows // self.ranks))
            parts.append(np.repeat(np.arange(rows) // each, math.prod(shape) // max(1, rows)))
        return np.concatenate(parts)

    def place(self, element: int) -> str:
        """``NAME[1, 2]``, of an element of the vector."""
        name, here = next((name, here) for name, here in self.stretches() if here.start <= element < here.stop)
        index = np.unravel_index(element - here.start, self.parameters[name])
        return f"{name}[{', '.join(map(str, map(int, index)))}]" if index else name


@dataclass(frozen=True, slots=True)
class Record:
    """A step: ``gradients[rank][j]`` (n,), ``before`` by slot (n,), ``after`` by slot and ``weights`` a (n,) by rank.

    ``before`` is the same on all ranks; ``weights`` are empty where the master computes. Raises ValueError for what
    does not fit the settings, and for masters from before that are not finite.
    """

    settings: StepSettings
    gradients: list[list[np.ndarray]]
    before: dict[str, np.ndarray]
    after: dict[str, list[np.ndarray]]
    weights: list[np.ndarray]

    def __post_init__(self) -> None:
        s, shape, given = self.settings, (self.settings.length,), (_kinds(self.gradients) or [[]])[0][:1]
        master, copy = (FP32, shape), (FORMATS[s.compute].dtype, shape)
        own = (given[0][0] if given and given[0][0] in READ else "fp32, or a smaller format", shape)
        asked = {"gradients": [[own] * s.micro_batches] * s.ranks,
                 "weights": [copy] * s.ranks * bool(self.weights), **{f"before/{slot}": master for slot in s.slots},
                 **{f"after/{slot}": [master] * s.ranks for slot in s.slots if slot in {"master", *self.after}}}
        found = {"gradients": _kinds(self.gradients), "weights": _kinds(self.weights), **{
            f"{when}/{slot}": _kinds(x) for when, of in (("before", self.before), ("after", self.after))
            for slot, x in of.items()}}
        for name in [*asked, *found]:
            if asked.get(name) != found.get(name):
                raise ValueError(f"Record of {s.ranks} ranks, {s.micro_batches} micro-batches and {s.length} elements "
                                 f"was given {name} of {found.get(name)}, asked for {asked.get(name)}")
        if not np.isfinite(self.before["master"]).all():
            raise ValueError("before/master holds inf or NaN, and nothing can be said of a step from there; record an "
                             "earlier one")

    def write(self, folder: str | Path) -> Path:
        """Writes it as a folder, which `read` reads."""
        folder, found = Path(folder), self.settings
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(found.ranks):
            vectors = {f"{GRADIENT}/{j}": g for j, g in enumerate(self.gradients[rank])}
            vectors |= {f"before/{slot}": x for slot, x in self.before.items()}
            vectors |= {f"after/{slot}": x[rank] for slot, x in self.after.items()}
            vectors |= {"after/weights": self.weights[rank]} if self.weights else {}
            write_rank(folder, rank, {f"{what}/{name}": vector[here].reshape(found.parameters[name])
                                      for what, vector in vectors.items() for name, here in found.stretches()})
        write_settings(folder, found)
        return folder


def _kinds(x: Any) -> Any:
    """(dtype, shape) of an array, and a list of them of a list."""
    return [*map(_kinds, x)] if isinstance(x, list) else (getattr(x, "dtype", type(x)), getattr(x, "shape", None))


def write_rank(folder: Path, rank: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays of one rank."""
    write_tensors(folder / f"rank{rank}.safetensors", {name: (x.dtype, x.shape) for name, x in arrays.items()},
                  lambda name: np.ascontiguousarray(arrays[name]), {})


def write_settings(folder: Path, settings: StepSettings) -> None:
    """Writes the file of settings."""
    write_whole(folder / SETTINGS, json.dumps(asdict(settings), indent=1).encode())


# -- Reading -----------------------------------------------------------------------------------------------------------


def read(folder: str | Path) -> Record:
    """The record in a folder. Raises ValueError, which names the file, for what is no record or not all of one."""
    folder = Path(folder)
    settings = _settings(folder / SETTINGS)
    gradients, weights = [], []
    before: dict[str, np.ndarray] = {}
    after: dict[str, list[np.ndarray]] = {}
    for rank in range(settings.ranks):
        of_rank = _RankFile(settings, *_arrays(folder, rank))
        gradients.append([of_rank(f"{GRADIENT}/{j}") for j in range(settings.micro_batches)])
        for slot in settings.slots:
            known = slot == "master" or settings.step > 1 or of_rank.has(f"before/{slot}")
            x = of_rank(f"before/{slot}", np.float32) if known else np.zeros(settings.length, np.float32)
            apart = np.flatnonzero(before.setdefault(slot, x).view(np.uint32) != x.view(np.uint32))
            if apart.size:
                raise ValueError(f"{of_rank.path}: before/{slot} differs from rank 0's, first at "
                                 f"{settings.place(int(apart[0]))}: the ranks had drifted apart before this step; "
                                 "record an earlier one")
            if slot == "master" or of_rank.has(f"after/{slot}"):
                after.setdefault(slot, []).append(of_rank(f"after/{slot}", np.float32))
        if of_rank.has("after/weights"):
            weights.append(of_rank("after/weights", FORMATS[settings.compute].dtype))
        if left := sorted(of_rank.arrays.keys() - of_rank.taken):
            raise ValueError(f"{of_rank.path} has {left[0]}, of which {SETTINGS} says nothing: look at its "
                             "micro_batches, parameters and optimizer")
    try:
        return Record(settings, gradients, before, after, weights)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _settings(path: Path) -> StepSettings:
    try:
        found = json_of(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"asked for the record {str(path.parent)!r}, but: {path.name}: {error.strerror}; name a "
                         "folder that zerosim.frameworks.hooks wrote") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); record the step again") from None
    known = [field.name for field in fields(StepSettings)]
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object of settings; it has {', '.join(known)}")
    for name in found.keys() - set(known):
        raise unknown_name(f"{path}: no setting is called {name!r}", name, known)
    try:
        return StepSettings(**found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _arrays(folder: Path, rank: int) -> tuple[Path, Mapping[str, np.ndarray]]:
    """The file of a rank, and all arrays in it."""
    named = [path for path in (folder / f"rank{rank}.safetensors", folder / f"rank{rank}.npz") if path.is_file()]
    if len(named) != 1:
        raise ValueError(f"{folder} has {len(named)} files of rank {rank}, asked for one: rank{rank}.safetensors or "
                         f"rank{rank}.npz; record the step on every rank, into a new folder")
    path = named[0]
    try:
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                return path, {name: archive[name] for name in archive.files}
        header, content = read_header(path), path.read_bytes()
        return path, {name: np.frombuffer(content, one.dtype, math.prod(one.shape), one.start).reshape(one.shape)
                      for name, one in header.tensors.items()}
    except (OSError, EOFError, KeyError, TypeError, AttributeError, ValueError, RuntimeError, MemoryError, SyntaxError,
            zipfile.BadZipFile, zlib.error) as error:  # what NumPy and zipfile raise for bytes at random
        raise ValueError(f"{path} cannot be read as arrays ({error}); take another copy of it, or record the step again"
                         ) from None


@dataclass(frozen=True, slots=True)
class _RankFile:
    """The arrays of a rank, and, called, a vector (n,) of them, one parameter's behind the other's."""

    settings: StepSettings
    path: Path
    arrays: Mapping[str, np.ndarray]
    taken: set[str] = field(default_factory=set)

    def has(self, what: str) -> bool:
        """True if the array is there of any parameter."""
        return any(f"{what}/{name}" in self.arrays for name in self.settings.parameters)

    def __call__(self, what: str, dtype: Any = None) -> np.ndarray:
        parts: list[np.ndarray] = []
        for name, shape in self.settings.parameters.items():
            found = self.arrays.get(f"{what}/{name}")
            if found is None:
                raise ValueError(f"{self.path} has no {what}/{name}; record {what.split('/')[0]} of every parameter")
            wanted = parts[0].dtype if parts and dtype is None else dtype
            if found.shape != tuple(shape) or found.dtype not in READ or wanted not in (None, found.dtype):
                raise ValueError(f"{self.path}: {what}/{name} is {found.dtype} {found.shape}, asked for "
                                 f"{np.dtype(wanted).name if wanted else 'floating point'} {tuple(shape)}; record it "
                                 "whole, in its own format (bf16 in safetensors; masters and state are fp32)")
            parts.append(found.reshape(-1))
            self.taken.add(f"{what}/{name}")
        return np.concatenate(parts)
