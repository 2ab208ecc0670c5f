"""What a unit's backward wrote, sorted by kin: checked, completed with borrowers' parts, and handed on.

Legend: u elements of one padded unit.
A parameter that another unit borrows (tied weights) is complete only after its own unit's backward, which is its last
user: the borrower's part is added first, its own second, in the accumulate format, and the sum is reduced once.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from zerosim.models.units import Unit
from zerosim.numerics.arrays import is_same_memory
from zerosim.zero.gradients import Gradients
from zerosim.zero.reduction import Agreement
from zerosim.zero.states import States


class Accumulator:
    """One step's gradients of one rank."""

    def __init__(self, families: Sequence[States], *, bucket_nbytes: int | None, overlap: bool,
                 agreement: Agreement) -> None:
        self.families, self.rank = families, families[0].rank
        self.trained = {states: Gradients(states, bucket_nbytes=bucket_nbytes, overlap=overlap, agreement=agreement)
                        for states in families if not states.frozen}
        self.micro_batch = 0
        self._lent: dict[str, dict[States, np.ndarray]] = {}  # by unit: the vectors of which it was lent views
        self._borrowed: dict[str, np.ndarray] = {}            # by parameter: what its borrowers wrote, added up

    def views(self, unit: Unit) -> dict[str, np.ndarray]:
        """Where the unit writes its gradients, by name: views of one vector (u,) per kin; new memory for borrowed ones.

        A frozen parameter has a place too, which nobody reads.
        """
        lent = self._lent[unit.name] = {states: self._place(states, unit.name) for states in self.families
                                        if unit.name in states.layout.units}
        views = {name: view for states, whole in lent.items()
                 for name, view in states.layout.unit_views(unit.name, whole).items()}
        for name in unit.borrows:
            states = self._family_of(name)
            views[name] = self.rank.memory.alloc(states.layout.by_name[name].shape, states.policy.compute_dtype,
                                                 "unit_gradient", f"{unit.name} {name}")
        return views

    def _place(self, states: States, unit: str) -> np.ndarray:
        if states in self.trained:
            return self.trained[states].place(unit)
        lies = states.layout.units[unit]
        return self.rank.memory.alloc(lies.stop - lies.start, states.policy.compute_dtype, "unit_gradient", unit)

    def _family_of(self, name: str) -> States:
        return next(states for states in self.families if name in states.layout.by_name)

    def absorb(self, unit: Unit, gradients: Mapping[str, np.ndarray | None]) -> None:
        """Takes the gradients that a unit's backward returned; None for a parameter that was not used, as zeros.

        Raises ValueError unless there is one of the right shape for each parameter, own or borrowed.
        """
        if unit.name not in self._lent:
            self.views(unit)
        lent = self._lent.pop(unit.name)
        own = {name: view for states, whole in lent.items()
               for name, view in states.layout.unit_views(unit.name, whole).items()}
        self._check(unit, gradients)
        for name, view in own.items():
            self._write(gradients[name], view)
        for states, whole in lent.items():
            if states in self.trained:
                self.trained[states].absorb(unit.name, self._completed(states, unit.name, whole))
        for name in unit.borrows:
            self._note_borrower(name, gradients[name])

    def _check(self, unit: Unit, gradients: Mapping[str, np.ndarray | None]) -> None:
        wanted = dict(unit.shapes) | {name: self._family_of(name).layout.by_name[name].shape for name in unit.borrows}
        found = {name: wanted.get(name) if gradient is None else gradient.shape for name, gradient in gradients.items()}
        if found != wanted:
            raise ValueError(
                f"the backward of unit {unit.name!r} returned gradients of the shapes {found}; its parameters "
                f"have {wanted}, so return one of that shape for each, or None for one that was not used"
            )

    def _write(self, gradient: np.ndarray | None, place: np.ndarray) -> None:
        if gradient is None:
            place[...] = 0
        elif not is_same_memory(gradient, place):
            self.rank.kernels.cast_pack(gradient, place)

    def _note_borrower(self, name: str, gradient: np.ndarray | None) -> None:
        """Keeps a borrower's part until the parameter's own unit has gone back."""
        states = self._family_of(name)
        if gradient is None or states.frozen:
            return
        part = self.rank.memory.alloc(gradient.size, states.policy.accumulate_dtype, "unit_gradient", name)
        self.rank.kernels.cast_pack(gradient.reshape(-1), part)
        if name in self._borrowed:
            self.rank.kernels.add_rounded(self._borrowed[name], part, part)
        self._borrowed[name] = part

    def _completed(self, states: States, unit: str, whole: np.ndarray) -> np.ndarray:
        """The unit's gradient with its borrowers' parts: theirs first, its own second, in the accumulate format."""
        borrowed = [entry for entry in states.layout.unit_entries(unit) if entry.name in self._borrowed]
        if borrowed and whole.dtype != states.policy.accumulate_dtype:
            sums = self.rank.memory.alloc(len(whole), states.policy.accumulate_dtype, "unit_gradient", unit)
            self.rank.kernels.cast_pack(whole, sums)
            whole = sums
        start = states.layout.units[unit].start
        for entry in borrowed:
            own = whole[entry.low - start:entry.high - start]
            self.rank.kernels.add_rounded(self._borrowed.pop(entry.name), own, own)
        return whole

    def end_of_backward(self) -> None:
        """Closes a micro-batch: what waits in buckets is reduced."""
        for gradients in self.trained.values():
            gradients.end_of_backward()
        self.micro_batch += 1

    def reduce(self, scale: float, token_share: float) -> None:
        """Leaves every kin's sum over ranks where the optimizer finds it."""
        for gradients in self.trained.values():
            gradients.reduce(scale, token_share)

    def reset(self) -> None:
        """Forgets this step's gradients: the next micro-batch is the first."""
        self.micro_batch = 0
        self._lent.clear()
        self._borrowed.clear()
        for gradients in self.trained.values():
            gradients.reset()
