"""The parts of a step over an `OffloadStore`: where they do otherwise than with state on the device.

Gradients that rest elsewhere leave the device unit by unit, and what the step's last backward makes of them on the
device is reduced at once. Parameters come unit by unit, as gathers do. An update by the host hands on its parameters
when all of it is known to be good.

Sources: Ren et al. 2021 (ZeRO-Offload), sections 4 and 5.2; Rajbhandari et al. 2021 (ZeRO-Infinity), section 6.
Legend: u elements of one padded unit.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from zerosim.numerics.arrays import spans
from zerosim.numerics.places import DEVICE, DISK, HOST, TO_DEVICE
from zerosim.zero.gradients import Reducer
from zerosim.zero.layout import ParameterPiece, Region
from zerosim.zero.offload import OffloadError, OffloadStore
from zerosim.zero.param_group import ParamGroup, StepContext, elements_of
from zerosim.zero.placements import SHARDED, Move
from zerosim.zero.unshard import ParameterAllGather, UnitGather, Unsharder
from zerosim.zero.update import Norms, Update


class OffloadedParamGroup(ParamGroup):
    """A param group with room for what the host's update makes: see `HostUpdate`."""

    store: OffloadStore
    updated_parameter: Any = None  # in the compute format, in an update by the host alone

    def master_elements(self, piece: ParameterPiece) -> np.ndarray:
        """The piece of the master, or of a copy of it where the parameter is the master and is not updated itself."""
        if self.parameter_is_master and self.updated_parameter is not None:
            return elements_of(self.updated_parameter, piece, self.stage.optimizer)
        return super().master_elements(piece)

    def cast_target(self, piece: ParameterPiece, here: slice, master: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The elements of the master, and of what becomes the parameter, that this rank has both of."""
        if self.updated_parameter is None:
            return super().cast_target(piece, here, master)
        return master, elements_of(self.updated_parameter, piece, self.stage.optimizer)[here]


class OffloadedReducer(Reducer):
    """The gradients of a param group, some of which rest on the host or on disk."""

    store: OffloadStore

    def begin_backward(self, *, last: bool) -> None:
        """Opens a micro-batch. What the last one makes on the device, and would have to come back, is reduced at once.
        """
        super().begin_backward(last=last)
        self._reduces_now = self._reduces_now or (last and self.store.offload.gradients != DEVICE)

    def _accumulated(self, gradient: np.ndarray, resting: np.ndarray) -> np.ndarray:
        if self.store.offload.gradients == DEVICE:
            return super()._accumulated(gradient, resting)
        add = self.micro_batch > 0
        if not self._reduces_now:
            self.store.put(gradient, resting, add=add)
            return gradient
        if not add and gradient.dtype == resting.dtype:
            return gradient
        return super()._accumulated(gradient, self.store.at(DEVICE, resting, read=add))

    def end_of_backward(self) -> None:
        """Closes a micro-batch, when all that left the device has arrived."""
        super().end_of_backward()
        self.store.finish()


class CopyToDevice(UnitGather):
    """The gather of a unit whose parameters are whole on the host or on disk: a copy."""

    may_share = False

    def __init__(self, store: OffloadStore) -> None:
        self.store = store

    def start(self, group: ParamGroup, name: str, whole: np.ndarray, *, async_op: bool) -> Iterator[Move]:
        """Begins to copy one unit (u,); `OffloadedUnsharder` waits for it."""
        self.store.move(group.parameter[group.layout.units[name]], whole, wait=False)
        return iter(())

    def own_parts(self, group: ParamGroup, name: str) -> Iterator[np.ndarray]:
        """The unit's parameters."""
        yield group.parameter[group.layout.units[name]]


class OffloadedUnsharder(Unsharder):
    """Gives out weights that come from the host or the disk."""

    param_groups: Sequence[OffloadedParamGroup]

    def reshard_all(self) -> None:
        """Frees what was kept or prefetched, and what was read ahead."""
        store = self.param_groups[0].store
        store.forget_ahead()
        super().reshard_all()
        store.wait()

    def _unshard(self, name: str, *, users: int) -> dict[ParamGroup, np.ndarray]:
        whole = super()._unshard(name, users=users)
        if self.gather is not None:
            self.param_groups[0].store.wait(TO_DEVICE)
        return whole

    def _prefetch(self, name: str) -> None:
        """Begins to gather the units that are asked for next, and to read the one after them from disk."""
        super()._prefetch(name)
        store = self.param_groups[0].store
        if store.offload.parameters == DISK and self.gather is not None:
            for next_name in self._ahead[self.prefetch:self.prefetch + 1]:
                for group, _ in self._groups_of[next_name] if next_name not in self._unsharded else []:
                    store.read_ahead(*self.gather.own_parts(group, next_name))


class OffloadedAllGather(ParameterAllGather):
    """Makes parameters on the host or on disk equal again: after the update, or all buckets would be on the device."""

    param_group: OffloadedParamGroup

    def shard_updated(self, region: Region) -> None:
        """Marks this rank's shard of a region as updated."""
        if self.param_group.store.offload.parameters == DEVICE:
            super().shard_updated(region)
        elif self.is_needed and region is self.param_group.layout.regions[0]:
            self._waiting = list(self._buckets)

    def finish(self) -> None:
        """Gathers; what is written to disk takes effect on all ranks or on none."""
        try:
            super().finish()
        except OffloadError as error:  # which says that nothing has changed, of this all-gather
            raise OffloadError(f"the step's update is made, and its all-gather of parameters is not; call "
                               f"all_gather_parameters() again before the next step. {error}") from None

    def _finish(self) -> None:
        store = self.param_group.store
        with store.transaction(store.offload.parameters == DISK):
            super()._finish()


class OffloadedUpdate(Update):
    """The optimizer's part of a step on state that rests elsewhere, computed on the device.

    What it writes to disk takes effect at its end on all ranks, or on none: then the step may be taken again.
    """

    trained: Sequence[OffloadedParamGroup]
    store: OffloadStore

    @contextmanager
    def changing_state(self, what: str) -> Iterator[None]:
        """The block goes from one whole state to the next. If it fails no step may follow."""
        with super().changing_state(what), self.store.transaction():
            yield

    def _update_piece(self, group: ParamGroup, piece: ParameterPiece, context: StepContext,
                      norms: Norms | None) -> None:
        """One step on a piece; meanwhile what the next one needs first is read from disk, where that is of elements."""
        following = group.pieces[group.pieces.index(piece) + 1:][:1] if self.store.offload.optimizer == DISK else []
        for after in following:
            if group.optimizers[after.entry.name].cut_of(after.entry.shape) == "anywhere":
                self.store.read_next = group.at_rest(after)
        super()._update_piece(group, piece, context, norms)
        self.store.read_next = {}


class HostUpdate(OffloadedUpdate):
    """The update that the host computes, and the way of the parameters that it makes, in the compute format.

    An updated parameter waits on the host, at its param group, until the whole update is known to be good, and goes to
    the parameter then; or, where the update is delayed, when the next one is: ``delayed`` has it so long, by param
    group. Where parameters rest beside the optimizer's state, they are written there at once: none waits.

    Raises ValueError for a delayed update of parameters that are their own masters, and could not stay behind them.
    Source of the delayed update: Ren et al. 2021 (ZeRO-Offload), section 5.2.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.offload, self.delayed = self.store.offload, dict[OffloadedParamGroup, Any]()
        if self.offload.delayed_update and any(group.parameter_is_master for group in self.trained):
            raise ValueError("a delayed update needs masters beside the parameters, which go on for a step with what "
                             "they are, and in fp32 they are one; compute in bf16 or fp16, or leave delayed_update out")

    def settings(self) -> dict[str, str]:
        """In words, by name: what the bits of a training that goes on depend on here, beside a schedule."""
        return super().settings() | ({"delayed update": "True"} if self.offload.delayed_update else {})

    def _take(self, context: StepContext) -> None:
        taken = self.steps_taken
        try:
            with Update.changing_state(self, f"update of step {context.step}"):  # until parameters are in place
                try:
                    with self.store.transaction():
                        for group in self.trained:
                            self._make_room(group)
                            self._update_group(group, context)
                        self.steps_taken = context.step
                        updated: dict[OffloadedParamGroup, Any] = {
                            group: group.updated_parameter for group in self.trained}
                        due = self.delayed if self.offload.delayed_update else updated
                        if self.offload.parameters == DISK:
                            self._put_parameters(due)
                except BaseException:
                    if self.offload.optimizer == DISK and not self.store.has_taken_effect:  # nothing has changed
                        self._changing, self.steps_taken = None, taken
                    raise
                if self.offload.parameters != DISK:
                    self._put_parameters(due)
                for group in due:
                    for region in group.layout.regions:
                        self.all_gathers[group].shard_updated(region)
                    self.store.finish()
                self.delayed = updated if self.offload.delayed_update else {}
        finally:
            for group in self.trained:
                group.updated_parameter = None

    def _region_updated(self, group: ParamGroup, region: Region) -> None:
        """Lets no rank gather it yet: all regions follow when the update is known to be good."""

    def _make_room(self, group: OffloadedParamGroup) -> None:
        """Makes room for one update of a group. Where the parameter is the master, what is updated is a copy."""
        group.updated_parameter, stage = None, group.stage
        if self.offload.parameters != self.offload.optimizer or self.offload.delayed_update:
            updated = group.updated_parameter = group.rank.memory.host.alloc(
                group.length(stage.optimizer), group.policy.compute_dtype, "parameter", "updated")
            for piece in group.regions_held(stage.optimizer) if group.parameter_is_master else []:
                self.store.move(elements_of(group.parameter, piece, stage.parameters),
                                elements_of(updated, piece, stage.optimizer))

    def after_load(self, *, masters: bool = True) -> None:
        """Makes what a delayed update has left: the ``masters``, rounded; without them, nothing."""
        self.delayed = {}
        for group in self.trained if self.offload.delayed_update and masters else []:
            self._make_room(group)
            for piece in group.pieces:
                master = group.master_elements(piece)
                for here in spans(piece.count, group.rank.kernels.STRETCH):
                    group.cast(piece, here, self.store.at(HOST, master[here]))
            self.delayed[group], group.updated_parameter = group.updated_parameter, None

    def _put_parameters(self, due: Mapping[OffloadedParamGroup, Any]) -> None:
        """Brings updated parameters to where parameters rest, as far as they are not there."""
        for group, updated in due.items():
            stage = group.stage
            narrower = SHARDED if SHARDED in (stage.parameters, stage.optimizer) else stage.optimizer
            for piece in group.regions_held(narrower) if updated is not None else []:
                self.store.move(elements_of(updated, piece, stage.optimizer),
                                elements_of(group.parameter, piece, stage.parameters))
