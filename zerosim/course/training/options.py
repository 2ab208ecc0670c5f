"""What to train, and how, as a value that is checked before anything runs.

Legend: N ranks, B sequences of a micro-batch, T tokens of a sequence, k micro-batches.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerosim.course.training.optimizers import companions, learning_rate_of, optimizer_named
from zerosim.models.gpt import GPT, GPTConfig, config_of
from zerosim.models.text import VOCABULARY
from zerosim.models.units import Recompute
from zerosim.numerics.checks import is_count, is_finite_number
from zerosim.numerics.formats import format_of
from zerosim.numerics.loss_scale import Dynamic
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer
from zerosim.optim.schedules import Warmup
from zerosim.zero.layout import layout_of
from zerosim.zero.placements import stage_of

WARMUP = 20  # steps in which the learning rate rises
MOST_RANKS = 1024
FP8 = "fp8"  # matrix products of 8-bit operands, as an experiment


@dataclass(frozen=True, slots=True)
class Options:
    """What to train, and how. Raises ValueError, in one sentence, for what cannot be.

    ``batch`` is B of one rank's micro-batch. Chosen by what they depend on, where None: ``lr``, by the optimizer;
    ``layout``, "whole_matrices" for an optimizer that needs them and does not ``gather`` them, else "per_unit";
    ``loss_scale``, "dynamic" for fp16, else 1. ``capacity_nbytes`` is what each rank may hold while it trains.
    """

    model: str = "gpt-micro"
    ranks: int = 4
    stage: int = 3
    compute: str = "bf16"
    optimizer: str = "adamw"
    lr: float | None = None
    micro_batches: int = 1
    batch: int = 4
    recompute: str = "none"
    layout: str | None = None
    gather: bool = False
    steps: int = 200
    seed: int = 0
    clip_norm: float | None = 1.0
    loss_scale: float | str | None = None
    capacity_nbytes: int | None = None
    sample_tokens: int = 160

    def __post_init__(self) -> None:
        if not is_count(self.sample_tokens) or self.sample_tokens < 0:
            raise ValueError(f"sample_tokens={self.sample_tokens!r} must be a whole number, 0 or more")
        for name in ("ranks", "micro_batches", "batch", "steps"):
            if not is_count(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number, 1 or more")
        model = self.build()
        self._check_ranks(model.parameter_count)
        stage_of(self.stage)
        Recompute.parse(self.recompute)
        if self.lr is not None and (not is_finite_number(self.lr) or self.lr <= 0):
            raise ValueError(f"lr={self.lr!r} must be a positive number")
        self.policy()
        layout_of(model, self.ranks, self.layout_name)

    def _check_ranks(self, parameter_count: int) -> None:
        if self.ranks > parameter_count:
            raise ValueError(f"ranks={self.ranks:,}: {self.model} has {parameter_count:,} parameters, and no layout "
                             "has one for each rank; take fewer ranks, or a larger model")
        if self.ranks > MOST_RANKS:
            raise ValueError(f"ranks={self.ranks:,}: all of them train in this process, one after the other; take at "
                             f"most {MOST_RANKS:,}")

    def config(self) -> GPTConfig:
        """The model's shape, with a vocabulary of bytes."""
        return dataclasses.replace(config_of(self.model), vocabulary=VOCABULARY)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks and micro-batches."""
        return self.ranks * self.micro_batches * self.batch * self.config().context

    @property
    def learning_rate(self) -> float:
        """The one asked for, or the optimizer's."""
        return learning_rate_of(self.optimizer) if self.lr is None else self.lr

    @property
    def layout_name(self) -> str:
        """The layout asked for, or the one that the optimizer can be cut by."""
        if self.layout is not None:
            return self.layout
        return "per_unit" if self.gather or self.build_optimizer().cut == "anywhere" else "whole_matrices"

    def build(self) -> GPT:
        """The model, with first values by the seed."""
        return GPT(self.config(), seed=self.seed)

    def build_optimizer(self) -> Optimizer:
        """The optimizer by its name in any case."""
        return optimizer_named(self.optimizer, self.learning_rate)

    def schedule(self) -> Callable[[int], float]:
        """The factor of the learning rate, by step: it rises, and stays."""
        return Warmup(WARMUP)

    def policy(self) -> Policy:
        """The precision policy: fp16 is scaled dynamically unless told otherwise."""
        formats = {"compute": "bf16", "matmul": "fp8"} if self.compute == FP8 else {"compute": self._resting_format()}
        chosen = self.loss_scale
        if chosen is None:
            chosen = "dynamic" if formats["compute"] == "fp16" else 1.0
        if chosen == "dynamic":
            return Policy(**formats, loss_scale=Dynamic(window=100))
        try:
            return Policy(**formats, loss_scale=float(chosen))
        except ValueError:
            raise ValueError(f"loss_scale={chosen!r} is neither a positive number nor 'dynamic'") from None

    def _resting_format(self) -> str:
        """The compute format's name; ValueError for one of 8 bits, in which weights and gradients cannot rest."""
        name = format_of(self.compute).name
        if name.startswith("fp8"):
            raise ValueError(f"compute={self.compute!r}: weights and gradients that rest in 8 bits, without a scale of "
                             f"their own, learn nothing; take {FP8!r}, an experiment in which the operands of matrix "
                             "products alone are of 8 bits")
        return name

    @property
    def formats(self) -> str:
        """The formats in words."""
        if self.compute == FP8:
            return ("an experiment: bf16 with matrix products of fp8 operands (e4m3, gradients e5m2, a scale for each "
                    "tensor)")
        return self.compute

    def engine_settings(self, model: GPT) -> dict[str, Any]:
        """What an engine takes beside rank, model and optimizer."""
        return {"stage": self.stage, "policy": self.policy(), "layout": self.layout_name, "recompute": self.recompute,
                "clip_norm": self.clip_norm, "groups": companions(self.build_optimizer(), model),
                "schedule": self.schedule(), "gather": self.gather, "seed": self.seed}
