"""What any optimizer keeps beside the weights, with pencil and paper, from what it declares itself.

Legend: N ranks. An optimizer is a value that says for a tensor's shape which slots it keeps, and where that state may
be cut: anywhere (then a rank's is that of its flat share), or on borders of tensors (then ranks own whole tensors, and
the fullest one is counted).
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

from zerosim.numerics.formats import format_of
from zerosim.planning.cuts import Cut, checked_count

Shape = tuple[int, ...]


class SlotLike(Protocol):
    """A tensor of state: its shape, and the name of its format."""

    @property
    def shape(self) -> Shape: ...
    @property
    def format(self) -> str: ...


class OptimizerLike(Protocol):
    """What `zerosim.optim` declares of each optimizer, as far as pencil and paper need it."""

    @property
    def cut(self) -> str: ...
    def slots(self, shape: Shape) -> Mapping[str, Any]:
        """The state kept for a tensor of this shape, or for a flat piece of one."""


@dataclass(frozen=True, slots=True)
class Elementwise:
    """An optimizer of which only the bytes that it keeps for each parameter are known; it may be cut anywhere.

    >>> Elementwise(8).slots((10,))["state"].shape
    (80,)

    Raises ValueError for a number of bytes that is negative or not whole.
    """

    bytes_per_parameter: int
    cut: str = "anywhere"

    def __post_init__(self) -> None:
        checked_count("bytes_per_parameter", self.bytes_per_parameter, 0)

    def slots(self, shape: Shape) -> Mapping[str, "Bytes"]:
        """All of its state, as bytes."""
        return {"state": Bytes((math.prod(shape) * self.bytes_per_parameter,))}


@dataclass(frozen=True, slots=True)
class Bytes:
    """So many bytes of state, in a format of one byte each."""

    shape: Shape
    format: str = "fp8_e4m3"


ADAM = Elementwise(8)  # m and v in fp32: Kingma & Ba 2015, algorithm 1


def state_nbytes(optimizer: OptimizerLike, shape: Shape) -> int:
    """Bytes that the optimizer keeps for a tensor of this shape, beside the weights.

    >>> state_nbytes(ADAM, (3, 4))
    96
    """
    return sum(math.prod(slot.shape) * format_of(slot.format).nbytes for slot in optimizer.slots(shape).values())


def is_cut_anywhere(optimizer: OptimizerLike) -> bool:
    """Whether a shard of the optimizer's state may begin inside a tensor."""
    return optimizer.cut == "anywhere"


def whole_tensor_cut(lengths: Sequence[int], ranks: int) -> Cut:
    """Boundaries in the flat vector, each on the border of a tensor nearest to an equal share; nothing is padded.

    >>> whole_tensor_cut((6, 1, 1, 4), 3)
    (0, 6, 8, 12)

    Of two borders as near as each other it is the first. Raises ValueError for fewer than one rank.
    """
    count, borders = checked_count("ranks", ranks, 1), [*accumulate(lengths, initial=0)]
    total = borders[-1]

    def nearest(rank: int) -> int:
        after = bisect_left(borders, rank * total / count) if total else 0
        around = borders[max(0, after - 2):after + 2]  # one more on each side: the share is rounded to a double
        return min(around, key=lambda border: (abs(border * count - rank * total), border))

    return (*(nearest(rank) for rank in range(count)), total)


def shares_nbytes(optimizer: OptimizerLike, shapes: Iterable[Shape], ranks: int) -> list[tuple[int, int]]:
    """For each rank (elements, bytes of state) of the whole tensors that it owns."""
    tensors = list(shapes)
    lengths = [math.prod(shape) for shape in tensors]
    cut = whole_tensor_cut(lengths, ranks)
    starts = [*accumulate(lengths, initial=0)]
    state = [*accumulate((state_nbytes(optimizer, shape) for shape in tensors), initial=0)]
    places = [bisect_left(starts, border) for border in cut]
    return [(starts[high] - starts[low], state[high] - state[low]) for low, high in pairwise(places)]
