"""Precision policies as values: in which format a step computes, reduces, accumulates and rests."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from zerosim.numerics.checks import FP64, unknown_name
from zerosim.numerics.formats import format_of
from zerosim.numerics.loss_scale import LossScaler, Scaling, scaling_of

MEANS = ("sum_then_divide", "divide_then_sum", "split", "premultiply")  # by which a collective averages
AVERAGES = ("cast_then_divide", *MEANS)  # or adds up alone, and what reads the sum divides
MATMULS = (None, "fp8")
FIRST_VALUES, FROM_COMPUTE = MASTERS_FROM = ("first_values", "compute")  # what masters begin as
BY_RANK, BY_MICRO_BATCH = REDUCTIONS = ("rank", "micro_batch")  # the orders in which gradients are added


@dataclass(frozen=True, slots=True)
class Policy:
    """The formats of a training step, by name.

    ``compute``: weights, activations and their gradients at rest. ``output``: the model's last output, which the loss
    reads (None: as compute). ``reduce``: gradients on the wire (None: as compute). ``accumulate``: gradients added up
    over micro-batches (None: as compute). ``wire``: the format in which the ring's partial sums travel (None: as
    reduce). ``average``: where the mean over ranks divides; ``cast_then_divide`` sums in the reduce format, casts to
    fp32 and divides there, once. ``loss_scale``: the factor S of the loss, or a rule of `numerics.loss_scale`.
    ``master``: the weights that the optimizer updates; where that is the compute format, there is no second copy.
    ``master_from``: what masters begin as, the model's "first_values", as under FSDP, or those rounded to the format of
    "compute" first, as under DeepSpeed, which casts the model before it makes masters of it; loaded weights too.
    ``state``: the optimizer's fp32 state at rest. Less than fp32 for these two is there to be seen failing.
    ``matmul``: "fp8" is an experiment: values enter matrix products in e4m3, gradients in e5m2, a scale per tensor.
    ``compute="fp64"`` is for checking gradients: finite differences are sharp in it. Updates are made in fp32 as ever.

    Raises ValueError for an unknown format or rule, for a loss scale that is not a positive finite number, for a master
    with fewer mantissa bits than the copy that computes (beside fp64: than fp32), for fp8 products in fp8 or fp64.
    """

    compute: str = "fp32"
    reduce: str | None = None
    accumulate: str | None = None
    wire: str | None = None
    average: str = AVERAGES[0]
    loss_scale: float | Scaling = 1.0
    master: str = "fp32"
    state: str = "fp32"
    output: str | None = None
    matmul: str | None = None
    master_from: str = FIRST_VALUES

    def __post_init__(self) -> None:
        optional = [name for name in (self.reduce, self.accumulate, self.wire, self.output) if name is not None]
        for name in ([self.compute] * (str(self.compute) != "fp64") + [self.master, self.state, *optional]):
            format_of(name)
        if self.average not in AVERAGES:
            raise unknown_name(f"no averaging rule {self.average!r}", self.average, AVERAGES)
        if self.master_from not in MASTERS_FROM:
            raise unknown_name(f"masters do not begin as {self.master_from!r}", self.master_from, MASTERS_FROM)
        if self.matmul not in MATMULS:
            raise ValueError(f"matmul={self.matmul!r} is no way to multiply; choose one of None, 'fp8'")
        rule = scaling_of(self.loss_scale)
        if isinstance(rule, type) or not callable(getattr(rule, "start", None)):
            raise ValueError(f"loss_scale={self.loss_scale!r} must be a positive finite number of fp32's normal range, "
                             "or zs.numerics.loss_scale.Dynamic('torch'); 1.0 scales nothing")
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if self.compute == "fp64":
            if (self.matmul, self.master) != (None, "fp32"):
                raise ValueError(f"compute='fp64' is for checking gradients, which matmul={self.matmul!r}, master="
                                 f"{self.master!r} would hide in roundings; take matmul=None, master='fp32'")
            return
        compute, master = format_of(self.compute), format_of(self.master)
        if master.mantissa_bits < compute.mantissa_bits:
            raise ValueError(f"master={master.name!r} has fewer mantissa bits than compute={compute.name!r}, so that "
                             "the copy that computes would be finer than the weights that are updated; take "
                             f"master='fp32', or master={compute.name!r} for no second copy")
        if self.matmul is not None and compute.nbytes == 1:
            raise ValueError(f"matmul={self.matmul!r} rounds what rests in more bits, and compute={compute.name!r} has "
                             "8 already; take compute='bf16' with it, or matmul=None")

    @classmethod
    def of(cls, policy: "Policy | str | None") -> "Policy":
        """The policy that computes in the named format; a policy itself; fp32 where nothing is said.

        Raises ValueError for a name that is no format.
        """
        if policy is None or isinstance(policy, str):
            return cls(policy or "fp32")
        if not isinstance(policy, Policy):
            raise ValueError(f"policy must be a Policy or the name of a format, found {policy!r}; write policy='bf16', "
                             "or zs.Policy('bf16', ...)")
        return policy

    def start_scaling(self) -> LossScaler:
        """The loss scaler at the start of a run."""
        return scaling_of(self.loss_scale).start()

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype of weights, activations and local gradients."""
        return _dtype_of(self.compute)

    @property
    def output_dtype(self) -> np.dtype[Any]:
        """The dtype of the model's last output, which the loss reads."""
        return _dtype_of(self.output or self.compute)

    @property
    def reduce_dtype(self) -> np.dtype[Any]:
        """The dtype in which gradients are handed to the ring."""
        return _dtype_of(self.reduce or self.compute)

    @property
    def accumulate_dtype(self) -> np.dtype[Any]:
        """The dtype in which gradients rest and add up."""
        return _dtype_of(self.accumulate or self.compute)

    @property
    def master_dtype(self) -> np.dtype[Any]:
        """The dtype of the weights that the optimizer updates."""
        return _dtype_of(self.master)

    @property
    def first_format(self) -> str:
        """The format to which a trained weight's first value is rounded, before its master and its copy are made."""
        return self.compute if self.master_from == FROM_COMPUTE and self.compute != "fp64" else self.master

    @property
    def state_dtype(self) -> np.dtype[Any]:
        """The dtype in which the optimizer's state rests."""
        return _dtype_of(self.state)

    @property
    def reduction(self) -> dict[str, Any]:
        """The options of every reduction of gradients."""
        rule = {} if self.average == AVERAGES[0] else {"op": "mean", "average": self.average}
        return {"wire": self.wire} | rule

    def divisor(self, ranks: int, micro_batches: int, scale: float) -> float:
        """The divisor of the reduced gradient, in fp32: S * N * k, without N where the reduction has averaged."""
        return scale * micro_batches * (ranks if self.average == AVERAGES[0] else 1)


@cache
def _dtype_of(name: str) -> np.dtype[Any]:
    return FP64 if name == "fp64" else format_of(name).dtype  # no row: nothing rounds to it
