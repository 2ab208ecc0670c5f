"""Parameters that an update has just made, in the compute format: where they go, and when.

Where the optimizer's state rests on the device they are cast into the parameters, and that is all. Where the host
updates, they wait there, in memory of their own, until the whole update is known to be good, and go to the parameters
then; or, where the update is delayed, when the next one is.

Legend: n elements of a stretch of a piece.
Source of the delayed update: Ren et al. 2021 (ZeRO-Offload), section 5.2.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zerosim.numerics.places import DEVICE, DISK, HOST
from zerosim.zero.layout import ParameterPiece, Piece, Region
from zerosim.zero.param_group import ParamGroup, at
from zerosim.zero.placements import SHARDED
from zerosim.zero.unshard import ParameterAllGather


class UpdatedParameters(dict[ParamGroup, Any]):
    """By param group, what waits on the host; None where parameters rest beside the optimizer's state, and are written
    there; no entry where the device updates."""

    def make(self, group: ParamGroup) -> None:
        """Makes room for one update of a group. Where the parameter is the master, what is updated is a copy."""
        transfers, stage = group.transfers, group.stage
        if transfers.update_place == DEVICE:
            return
        self[group] = None
        if transfers.offload.parameters != transfers.offload.optimizer or transfers.offload.delayed_update:
            self[group] = group.rank.memory.host.alloc(group.length(stage.optimizer), group.policy.compute_dtype,
                                                       "parameter", "updated")
            for piece in group.regions_held(stage.optimizer) if group.parameter_is_master else []:
                transfers.move(group.parameter[at(piece, stage.parameters)], self[group][at(piece, stage.optimizer)])

    def master(self, group: ParamGroup, piece: ParameterPiece) -> Any:
        """The elements of a piece that the optimizer updates."""
        if group.parameter_is_master and self.get(group) is not None:
            return self[group][at(piece, group.stage.optimizer)]
        return group.master[at(piece, group.master_placement)]

    def cast(self, group: ParamGroup, piece: ParameterPiece, here: slice, master: Any, place: str) -> int:
        """Rounds a stretch of an updated master (n,) at ``place``, as far as this rank has both; the bytes of that."""
        if group.parameter_is_master:
            return 0
        if self.get(group) is not None:
            target = self[group][at(piece, group.stage.optimizer)][here]
        else:
            low = piece.vector.start + here.start
            high, rank = low + len(master), group.rank.index
            target = group.parameter[low:high] if group.stage.parameters is not SHARDED else None
            if target is None:
                cut = group.layout.cut(low, high)
                target, master = group.parameter[group.layout.owned(rank, low, high)], master[cut[rank]:cut[rank + 1]]
        with group.transfers.staged({"": target}, place, read=()) as arrays:
            group.transfers.kernels_at(place).cast_pack(master, arrays[""])
        return int(master.nbytes + target.nbytes)


def in_turn(updated: UpdatedParameters, delayed: UpdatedParameters) -> tuple[UpdatedParameters, UpdatedParameters]:
    """Those that go to the parameters now, and those that wait for the next update."""
    is_delayed = any(group.transfers.offload.delayed_update for group in updated)
    return (delayed, updated) if is_delayed else (updated, delayed)


def bring(updated: UpdatedParameters, *, to_disk: bool) -> None:
    """Moves what the host has updated to parameters on disk, which is a part of the update, or to all others, after it.
    """
    for group, parameters in updated.items():
        if parameters is not None and to_disk == (group.transfers.offload.parameters == DISK):
            for _, piece in _updated(group):
                group.transfers.move(parameters[at(piece, group.stage.optimizer)],
                                     group.parameter[at(piece, group.stage.parameters)])


def publish(updated: UpdatedParameters, all_gathers: Mapping[ParamGroup, ParameterAllGather]) -> None:
    """Brings what the host has updated to where parameters rest, and lets the other ranks have it."""
    bring(updated, to_disk=False)
    for group in updated:
        for region, _ in _updated(group):
            all_gathers[group].shard_updated(region)
        group.transfers.drain()


def _updated(group: ParamGroup) -> Iterator[tuple[Region, Piece]]:
    """The regions, and what this rank has updated of each and keeps."""
    stage = group.stage
    narrower = SHARDED if SHARDED in (stage.parameters, stage.optimizer) else stage.optimizer
    return zip(group.layout.regions, group.regions_held(narrower), strict=True)


def check_delayed(groups: Sequence[ParamGroup]) -> None:
    """Raises ValueError where parameters that are their own masters could not stay behind them."""
    if groups[0].transfers.offload.delayed_update and any(group.parameter_is_master for group in groups):
        raise ValueError("a delayed update needs masters beside the parameters, which go on for a step with what they "
                         "are, and in fp32 they are one; compute in bf16 or fp16, or leave delayed_update out")


def after_load(groups: Sequence[ParamGroup]) -> UpdatedParameters:
    """The parameters that a delayed update has made and not brought yet, which are the masters, rounded."""
    found = UpdatedParameters()
    for group in groups if groups[0].transfers.offload.delayed_update else []:
        found.make(group)
        for piece in group.pieces:
            for here in group.transfers.stretches(piece.count):
                with group.transfers.staged({"": group.master[at(piece, group.master_placement)][here]}, HOST,
                                            written=()) as arrays:
                    found.cast(group, piece, here, arrays[""], HOST)
    return found
