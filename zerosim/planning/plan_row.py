"""A row of a plan: what one rank holds, sends and waits for in a step, and whether it fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from zerosim.models.units import ALL, TILED, Recompute
from zerosim.numerics.places import DEVICE, DISK, HOST

MARGIN = 0.05  # of the device's memory, which a plan wants spare: an allocator's fragments, and peaks that no model has


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One stage under one recomputation policy: what a rank holds at most and sends in a step, and its seconds.

    Activations, what is gathered, secondary shards (hpZ), and ``buckets_nbytes``, gradients on their way with the
    buffers of collectives, are each at its own fullest moment; ``transient_nbytes`` is all that comes and goes, the
    micro-batch's tokens too, at the fullest moment of all, and part of the total. ``host_nbytes`` rest on the host,
    ``disk_nbytes`` on disk, each of a rank's share of the capacity there, and ``host_transfer_nbytes_per_step`` and
    ``disk_transfer_nbytes_per_step`` go there and back; 0 without offload.
    """

    stage: int
    recompute: str
    convention: str
    parameters_nbytes: int
    gradients_nbytes: int
    optimizer_nbytes: int
    activations_nbytes: int
    gathered_nbytes: int
    secondary_nbytes: int
    buckets_nbytes: int
    transient_nbytes: int
    overhead_nbytes: int
    host_nbytes: int
    capacity_nbytes: int
    sent_nbytes_per_step: int
    flops_per_step: int
    model_flops_per_step: int
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    update_seconds: float
    host_transfer_nbytes_per_step: int
    host_transfer_seconds: float
    disk_nbytes: int
    disk_transfer_nbytes_per_step: int
    disk_transfer_seconds: float
    peak_flops_per_second: float
    host_capacity_nbytes: int
    disk_capacity_nbytes: int

    @property
    def states_nbytes(self) -> int:
        """Parameters, gradients, and all that the optimizer keeps on the device."""
        return self.parameters_nbytes + self.gradients_nbytes + self.optimizer_nbytes

    @property
    def parts(self) -> dict[str, int]:
        """The bytes that the device holds at the step's fullest moment, by what they are."""
        return {"parameters": self.parameters_nbytes, "gradients": self.gradients_nbytes,
                "optimizer": self.optimizer_nbytes, "transient": self.transient_nbytes,
                "overhead": self.overhead_nbytes}

    @property
    def total_nbytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

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
        over = {DEVICE: -self.spare_nbytes, HOST: self.host_nbytes - self.host_capacity_nbytes,
                DISK: self.disk_nbytes - self.disk_capacity_nbytes}
        return {place: nbytes for place, nbytes in over.items() if nbytes > 0}

    @property
    def least_seconds(self) -> float:
        """A lower bound of the step's seconds, in which all that goes to host and disk, and back, is beside the rest.
        """
        here = self.step_seconds - self.host_transfer_seconds - self.disk_transfer_seconds
        return max(here, self.host_transfer_seconds / 2, self.disk_transfer_seconds / 2)  # both ways at once

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
    def has_margin(self) -> bool:
        """True where it fits, and `MARGIN` of the device stays free."""
        return self.fits and self.spare_nbytes >= MARGIN * self.capacity_nbytes

    @property
    def title(self) -> str:
        """``ZeRO-2 with block recomputation``."""
        return f"ZeRO-{self.stage} {recomputation_text(self.recompute)}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, and what follows from them."""
        computed = ("states_nbytes", "total_nbytes", "spare_nbytes", "fits", "step_seconds",
                    "model_flops_utilization")
        return asdict(self) | {name: getattr(self, name) for name in computed}


def fused_policy(policy: str) -> tuple[str, bool]:
    """A policy's name where attention is taken to be fused, as "tiled" has it; and True where it is not."""
    parsed = Recompute.parse(policy)
    return str(replace(parsed, inside=ALL) if parsed.inside == TILED else parsed), parsed.inside == ALL


def recomputation_text(policy: str) -> str:
    """A policy in words; attention is taken to be fused unless it is said not to be.

    >>> [recomputation_text(policy) for policy in ("tiled", "block+tiled", "block")]
    ['without recomputation', 'with block recomputation', 'with block recomputation, attention unfused']
    """
    named, unfused = fused_policy(policy)
    how = "without recomputation" if named == "none" else f"with {named} recomputation"
    return how + ", attention unfused" * unfused
