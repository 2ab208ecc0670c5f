"""What the engine refuses, and in which words: what was asked, what was found, what to do."""

from collections.abc import Iterable, Sequence
from typing import Any, cast, get_args

import numpy as np

from zerosim.models.units import Model
from zerosim.numerics.checks import is_count, is_number
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Cut, Optimizer, Slot
from zerosim.optim.trials import reads_its_group
from zerosim.ranks.rank import Rank
from zerosim.zero.layout import Entry
from zerosim.zero.states import States
from zerosim.zero.tensors import is_torn

CUTS = get_args(Cut)
Batch = tuple[np.ndarray, np.ndarray]


def check_parts(rank: Rank, model: Model, optimizer: Optimizer, policy: Policy | None) -> None:
    """Raises ValueError for what is no rank, no model, no policy or no optimizer."""
    if not isinstance(rank, Rank):
        raise ValueError(f"an engine is made by a rank program, found rank={rank!r}; write Engine(rank, model, ...) in "
                         "a program that a cluster runs")
    if not isinstance(model, Model):
        raise ValueError(
            f"model must be a zerosim model, found {type(model).__name__}; build one from units with Model([...])"
        )
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(
            f"policy must be a Policy, found {policy!r}; write zs.Policy({policy!r}) to compute in that format"
        )
    check_optimizer(optimizer)


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError for what is no optimizer, and for one that does not say how it may be cut."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer must be an optimizer with its settings, found {optimizer!r}; write zs.optim.Adam(lr=...)"
        )
    if getattr(optimizer, "cut", None) not in CUTS:
        raise ValueError(f"{type(optimizer).__name__} does not say where its state may be cut; write cut = one of "
                         f"{', '.join(map(repr, CUTS))} into its class, as check_shardable finds it")


def check_levers(model: Model, bucket_nbytes: Any, prefetch: Any, keep_gathered: Any, seed: Any, *,
                 overlap: Any, gather: Any) -> frozenset[str]:
    """The units that stay gathered; ValueError for levers that are no count, and for units that there are not."""
    if bucket_nbytes is not None and (not is_count(bucket_nbytes) or bucket_nbytes < 1):
        raise ValueError(f"bucket_nbytes={bucket_nbytes!r} must be a number of bytes, 1 or more; pass None for one "
                         "collective per unit")
    if not is_count(prefetch) or prefetch < 0:
        raise ValueError(f"prefetch={prefetch!r} must be a number of units, 0 or more")
    if not is_count(seed):
        raise ValueError(f"seed={seed!r} must be a whole number")
    for name, switch in (("overlap", overlap), ("gather", gather)):
        if not isinstance(switch, bool | np.bool):
            raise ValueError(f"{name}={switch!r} must be True or False")
    names = [unit.name for unit in model.units]
    if keep_gathered is None:
        return frozenset(source for unit in model.units for source in unit.borrows.values())
    kept = names if keep_gathered == "all" else [keep_gathered] if isinstance(keep_gathered, str) else keep_gathered
    if not isinstance(kept, list | tuple | set | frozenset) or not all(name in names for name in kept):
        raise ValueError(f"keep_gathered={keep_gathered!r} must be 'all', or names of units: {', '.join(names)}")
    return frozenset(kept)


def _check_schedule(schedule: Any) -> None:
    """Raises ValueError for what gives no factor of the learning rate for a step."""
    if schedule is None:
        return
    factor = schedule(1) if callable(schedule) else None
    if not is_number(factor):
        raise ValueError(f"schedule={schedule!r} must be a function from the step's number, counted from 1, to the "
                         "factor of every lr, as zs.optim.WarmupCosine(20, 200) is")


def check_optimizers(model: Model, families: Sequence[States], schedule: Any, *, gather: bool) -> frozenset[str]:
    """The weights whose factors are to be observed.

    Raises ValueError for an optimizer that would update part of a tensor that it needs whole, for one without the lr
    that a schedule changes, and for a layer that hands over no factors.
    """
    _check_schedule(schedule)
    if all(states.frozen for states in families):
        raise ValueError("all parameters are frozen, and a step would train nothing; leave some to the optimizer")
    factored = {name for unit in model.units for name in unit.factored}
    observed = set()
    for states in families:
        for entry in states.layout.entries if not states.frozen else ():
            optimizer = states.optimizers[entry.name]
            kind = type(optimizer).__name__
            if schedule is not None and not hasattr(optimizer, "lr"):
                raise ValueError(f"schedule changes lr, and {kind}, which updates {entry.name}, has none")
            _check_slots(optimizer, entry)
            if optimizer.cut_of(entry.shape) != "anywhere" and not gather and is_torn(states, entry):
                raise ValueError(
                    f"{kind} needs all of {entry.name} {entry.shape}, which the layout {states.layout.name!r} lays on "
                    "several ranks; take layout='whole_matrices', or gather=True, which gathers it for each update "
                    "and pays in the ledger, or give this parameter an elementwise optimizer by a Group")
            if "tensor_norm" in optimizer.needs and not callable(getattr(optimizer, "direction", None)):
                raise ValueError(f"{kind} needs norms of whole tensors, and has no direction() that says of what; "
                                 "write advance() and direction() as LAMB has them")
            if "input_factors" in optimizer.needs:
                if entry.name not in factored:
                    raise ValueError(
                        f"{kind} needs the factors of inputs and output gradients, which the layer of {entry.name} "
                        f"does not hand over; the weights that have them are {', '.join(sorted(factored)) or 'none'}. "
                        "Give the others another optimizer by a Group")
                observed.add(entry.name)
    if schedule is not None:
        _check_lr_is_read({id(one): one for states in families for one in states.optimizers.values()}.values())
    return frozenset(observed)


def _check_slots(optimizer: Optimizer, entry: Entry) -> None:
    """Raises ValueError for state that the engine could not keep as the optimizer means it."""
    kind, slots = type(optimizer).__name__, cast(Any, optimizer.slots(entry.shape))  # a user's may return anything
    if not isinstance(slots, dict) or not all(isinstance(slot, Slot) for slot in slots.values()):
        raise ValueError(f"{kind}.slots({entry.shape}) returns {slots!r}; return a dict of names and Slot(shape)")
    other = next((name for name, slot in slots.items() if slot.shape != entry.shape), None)
    if other is not None and optimizer.cut_of(entry.shape) == "anywhere":
        raise ValueError(f"{kind} says cut='anywhere', but its state {other!r} for {entry.name} {entry.shape} is of "
                         f"shape {slots[other].shape}, and cannot be cut with it; say cut='tensor'")


def _check_lr_is_read(optimizers: Iterable[Optimizer]) -> None:
    for optimizer in optimizers:
        if not reads_its_group(optimizer):
            kind = type(optimizer).__name__
            raise ValueError(f"schedule changes lr from step to step, and {kind}.update reads another one; let it take "
                             "self.for_group(group).lr")


def checked_batches(batches: Any) -> list[Batch]:
    """The micro-batches as a list; ValueError unless there is at least one, and each is a pair."""
    listed = list(batches) if isinstance(batches, Iterable) else []
    pairs = sum(isinstance(batch, tuple | list) and len(batch) == 2 for batch in listed)
    if not listed or pairs != len(listed):
        raise ValueError(f"a step takes micro-batches (x, target), at least one; found {len(listed)} items, {pairs} of "
                         "them pairs. Pass [(x, target), ...]")
    return listed
