"""The word of an optimizer about itself: the bytes that it keeps, and checks of what it says."""

import math
from typing import Any, ClassVar, Protocol, get_args

from zerosim.numerics.formats import FORMATS, format_of
from zerosim.optim.base import NEEDS, BrokenPromise, Cut, Optimizer, Slot


def bytes_per_parameter(optimizer: Optimizer, shape: tuple[int, ...] = (1024, 1024)) -> float:
    """Bytes of weights, gradient, master and state in 16-bit mixed precision, per element of a tensor of this shape.

    2 + 2 + 4, and what the optimizer keeps: 16 with Adam. Source: Rajbhandari et al. 2020 (ZeRO), section 3.1.
    Raises ValueError for a tensor without elements.

    >>> from zerosim.optim import Adam, Lion
    >>> bytes_per_parameter(Adam()), bytes_per_parameter(Lion())
    (16.0, 12.0)
    """
    count = math.prod(shape)
    if count < 1:
        raise ValueError(f"bytes_per_parameter was asked for a tensor of shape {shape}, which has no elements")
    return 2 + 2 + 4 + state_nbytes(optimizer, shape) / count


class OwnState(Protocol):
    """An optimizer for plans alone, which has no slots and says its bytes itself."""

    cut: ClassVar[Cut]
    needs: ClassVar[frozenset[str]]

    def state_nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of state beside a tensor of this shape."""


Stateful = Optimizer | OwnState


def state_nbytes(optimizer: Stateful, shape: tuple[int, ...], fp32_itemsize: int = 4) -> int:
    """Bytes that the optimizer keeps for a tensor of this shape, beside the weights.

    What it declares in fp32 rests in elements of `fp32_itemsize` bytes, where a policy keeps state in less.
    """
    if not isinstance(optimizer, Optimizer):
        return optimizer.state_nbytes(shape)
    return sum(math.prod(slot.shape) * (fp32_itemsize if slot.format == "fp32" else format_of(slot.format).nbytes)
               for slot in optimizer.slots(shape).values())


def require_cut_and_needs(optimizer: Optimizer) -> None:
    """Raises ValueError for a ``cut`` or ``needs`` that nobody understands."""
    name, cut = type(optimizer).__name__, getattr(optimizer, "cut", None)
    needs: Any = getattr(optimizer, "needs", None)
    if cut not in get_args(Cut):
        raise ValueError(f"{name} does not say where its state may be cut, found cut={cut!r}; write one of "
                         f"{', '.join(map(repr, get_args(Cut)))} into its class, 'anywhere' where each element is "
                         "updated by itself; check_shardable tries what it says")
    if not isinstance(needs, frozenset | set) or not needs <= NEEDS:
        raise ValueError(f"{name} says needs={needs!r}; write a frozenset of {', '.join(sorted(NEEDS))} into its class")


def checked_slots(optimizer: Optimizer, shape: tuple[int, ...]) -> dict[str, Slot]:
    """The slots for a tensor of this shape; BrokenPromise where `slots` returns something else."""
    slots: Any = optimizer.slots(shape)  # a user's may return anything
    if not isinstance(slots, dict) or not all(isinstance(slot, Slot) and slot.format in FORMATS
                                              for slot in slots.values()):
        raise BrokenPromise(f"{type(optimizer).__name__}.slots({shape}) returns {slots!r}; return a dict of names and "
                            f"Slot(shape, format), with a format of {', '.join(FORMATS)}")
    return slots


def require_halves(optimizer: Any) -> None:
    """Raises ValueError for an optimizer that needs norms of tensors, and does not say of what."""
    if "tensor_norm" in optimizer.needs and not all(
            callable(getattr(optimizer, name, None)) for name in ("advance", "direction")):
        raise ValueError(f"{type(optimizer).__name__} needs norms of whole tensors, and has no direction() that says "
                         "of what; write advance() and direction() as LAMB has them")


def require_usable(optimizer: Optimizer, name: str, shape: tuple[int, ...], *, scheduled: bool) -> None:
    """Raises ValueError for an optimizer that cannot update the parameter of this name and shape as it says, or whose
    lr a schedule could not change."""
    kind = type(optimizer).__name__
    if scheduled:
        if not hasattr(optimizer, "lr"):
            raise ValueError(f"schedule changes lr, and {kind}, which updates {name}, has none")
        optimizer.with_lr(optimizer.lr)  # refuses one whose lr cannot be replaced
    odd = next((key for key, slot in checked_slots(optimizer, shape).items() if slot.shape != shape), None)
    if odd is not None and optimizer.cut_of(shape) == "anywhere":
        raise ValueError(f"{kind} says cut='anywhere', but its state {odd!r} for {name} {shape} is of shape "
                         f"{optimizer.slots(shape)[odd].shape}, and cannot be cut with it; say cut='tensor'")
    require_halves(optimizer)
