"""A row of a plan: what one rank holds, sends and waits for in a step, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from zerosim.models.units import ALL, TILED, Recompute
from zerosim.numerics.places import DEVICE, DISK, HOST
from zerosim.planning.runtimes import AccountRow, total_nbytes

ZEROSIM = "zerosim"  # the runtime that is the engine here
STATES = ("parameters", "gradients", "optimizer")
TRANSIENT = ("activations", "logits", "gathered", "buckets")
KINDS = (*STATES, *TRANSIENT, "overhead")  # of what is held, in the order of a table


def missing_nbytes(held: Iterable[AccountRow], capacities: Mapping[str, int]) -> dict[str, int]:
    """The bytes that each place lacks: none where all is held."""
    rows = list(held)
    over = {place: total_nbytes(rows, place) - nbytes for place, nbytes in capacities.items()}
    return {place: nbytes for place, nbytes in over.items() if nbytes > 0}


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One stage under one recomputation policy: what a rank holds at most and sends in a step, and its seconds.

    ``held`` are the rows of the runtime's account at the step's fullest moment, so that they add up: bytes by kind,
    what they are and the source of the formula, each on the device, on the host or on disk. Capacities are a rank's;
    ``margin_nbytes`` of the device are to stay free. ``host_transfer_nbytes_per_step`` and
    ``disk_transfer_nbytes_per_step`` go there and back; 0 without offload. ``tokens_per_step`` are those of all ranks.
    """

    stage: int
    recompute: str
    runtime: str
    ranks: int
    held: tuple[AccountRow, ...]
    margin_nbytes: int
    capacity_nbytes: int
    host_capacity_nbytes: int
    disk_capacity_nbytes: int
    sent_nbytes_per_step: int
    flops_per_step: int
    model_flops_per_step: int
    tokens_per_step: int
    peak_flops_per_second: float
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    update_seconds: float
    host_transfer_nbytes_per_step: int
    host_transfer_seconds: float
    disk_transfer_nbytes_per_step: int
    disk_transfer_seconds: float

    def nbytes_of(self, *kinds: str, place: str = DEVICE) -> int:
        """The bytes of these kinds at a place; of all kinds where none is named."""
        return sum(one.nbytes for one in self.held if one.place == place and (not kinds or one.kind in kinds))

    @property
    def states_nbytes(self) -> int:
        """Parameters, gradients, and all that the optimizer keeps on the device."""
        return self.nbytes_of(*STATES)

    @property
    def transient_nbytes(self) -> int:
        """All that comes and goes, at the step's fullest moment."""
        return self.nbytes_of(*TRANSIENT)

    @property
    def overhead_nbytes(self) -> int:
        """Bytes that the runtime itself takes."""
        return self.nbytes_of("overhead")

    @property
    def parts(self) -> dict[str, int]:
        """The bytes that the device holds at the step's fullest moment, by kind."""
        return {kind: self.nbytes_of(kind) for kind in KINDS}

    @property
    def total_nbytes(self) -> int:
        """All that the device holds at the step's fullest moment."""
        return self.nbytes_of()

    @property
    def host_nbytes(self) -> int:
        """The bytes that rest on the host."""
        return self.nbytes_of(place=HOST)

    @property
    def disk_nbytes(self) -> int:
        """The bytes that rest on disk."""
        return self.nbytes_of(place=DISK)

    @property
    def spare_nbytes(self) -> int:
        """The capacity less the total; negative where it does not fit."""
        return self.capacity_nbytes - self.total_nbytes

    @property
    def fits(self) -> bool:
        """True where the device holds it, and host and disk what is offloaded."""
        return not self.missing_nbytes

    @property
    def missing_nbytes(self) -> int:
        """The bytes that device, host and disk lack together: 0 where it fits."""
        return sum(self.missing_nbytes_by_place.values())

    @property
    def missing_nbytes_by_place(self) -> dict[str, int]:
        """The bytes that each place lacks: none where it fits."""
        return missing_nbytes(self.held, {DEVICE: self.capacity_nbytes, HOST: self.host_capacity_nbytes,
                                          DISK: self.disk_capacity_nbytes})

    @property
    def has_margin(self) -> bool:
        """True where it fits, and the margin of the device stays free."""
        return self.fits and self.spare_nbytes >= self.margin_nbytes

    @property
    def step_seconds(self) -> float:
        """Arithmetic, what is exposed of the communication, the update, and what goes to host and disk, and back."""
        return (self.compute_seconds + self.exposed_communication_seconds + self.update_seconds
                + self.host_transfer_seconds + self.disk_transfer_seconds)

    @property
    def model_flops_utilization(self) -> float:
        """The share of the device's peak that the model's own arithmetic takes; 0 where the step takes no time."""
        seconds = self.step_seconds
        return self.model_flops_per_step / (seconds * self.peak_flops_per_second) if seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks over the seconds of a step; infinite where it takes no time."""
        return self.tokens_per_step / self.step_seconds if self.step_seconds else math.inf

    @property
    def tokens_per_second_per_rank(self) -> float:
        """Tokens of one rank over the seconds of a step."""
        return self.tokens_per_second / self.ranks

    @property
    def title(self) -> str:
        """``ZeRO-2 with block recomputation``."""
        return f"ZeRO-{self.stage} {recomputation_text(self.recompute, self.runtime)}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, and what follows from them."""
        computed = ("states_nbytes", "transient_nbytes", "overhead_nbytes", "total_nbytes", "host_nbytes",
                    "disk_nbytes", "spare_nbytes", "fits", "has_margin", "step_seconds", "tokens_per_second",
                    "tokens_per_second_per_rank", "model_flops_utilization")
        return asdict(self) | {"held": tuple(one._asdict() for one in self.held)} | {
            f"{kind}_nbytes": nbytes for kind, nbytes in self.parts.items()} | {
            name: getattr(self, name) for name in computed}


def fused_policy(policy: str, runtime: str = ZEROSIM) -> tuple[str, bool]:
    """A policy's name where attention is taken to be fused, as the engine's "tiled" has it and every other runtime; and
    True where it is not."""
    if runtime != ZEROSIM:
        return policy, False
    parsed = Recompute.parse(policy)
    return str(replace(parsed, inside=ALL) if parsed.inside == TILED else parsed), parsed.inside == ALL


def recomputation_text(policy: str, runtime: str = ZEROSIM) -> str:
    """A policy in words; attention is taken to be fused unless it is said not to be.

    >>> [recomputation_text(policy) for policy in ("tiled", "block+tiled", "block")]
    ['without recomputation', 'with block recomputation', 'with block recomputation, attention unfused']
    """
    named, unfused = fused_policy(policy, runtime)
    how = "without recomputation" if named == "none" else f"with {named} recomputation"
    return how + ", attention unfused" * unfused
