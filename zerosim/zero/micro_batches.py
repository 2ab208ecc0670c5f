"""The micro-batches of a step: what is charged for them, what is drawn for them, and how many tokens they have.

Legend: B batch, T tokens of a sample; N ranks, k micro-batches. Micro-batch j of rank r has the number j·N + r in its
step: whatever is drawn for it depends on that number, and on no layout and no length.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from zerosim.models.context import Context, draw_for
from zerosim.models.units import Model
from zerosim.numerics.arrays import contiguous
from zerosim.numerics.policy import Policy
from zerosim.ranks.rank import Rank
from zerosim.zero.passes import Tape

FP32 = np.dtype(np.float32)


class MicroBatches:
    """One rank's micro-batches of the step under way."""

    def __init__(self, rank: Rank, model: Model, policy: Policy, ctx: Context, seed: int) -> None:
        self.rank, self.model, self.policy, self.ctx, self.seed = rank, model, policy, ctx, seed
        self.step = 0
        self.tokens: list[int] = []  # of each micro-batch that has gone back in this step
        self.places: list[int] = []
        self._forwards = 0

    def next_step(self) -> None:
        """Begins to count anew."""
        self.step += 1
        self._forwards = 0
        self.tokens, self.places = [], []

    def context(self) -> Context:
        """The context of the next forward: what it draws, its backward draws again."""
        number = self._forwards * self.rank.size + self.rank.index
        self._forwards += 1
        return replace(self.ctx, draw=partial(self._draw, self.step, number))

    def _draw(self, step: int, number: int, name: str, count: int, span: slice) -> np.ndarray:
        return draw_for(self.seed, step, number, name, span)

    # -- memory -------------------------------------------------------------------------------------------------------

    def charged(self, x: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copies of a micro-batch, charged as input: x in the compute format, targets in fp32, indices as they are."""
        first, loss = self.model.units[0], self.model.loss
        return (self._charged(x, self.policy.compute_dtype, "x", indices=first.integer_inputs),
                self._charged(target, FP32, "target", indices=loss.integer_targets))

    def _charged(self, values: np.ndarray, dtype: np.dtype[Any], name: str, *, indices: bool) -> np.ndarray:
        values = contiguous(values)
        if indices:
            dtype = values.dtype
        else:
            self._refuse_nan(values, name)
        if not indices and (values.dtype.kind in "iu" or not values.dtype.isnative):
            values = values.astype(np.float64)
        charged = self.rank.memory.alloc(values.shape, dtype, "input", name)
        self.rank.kernels.cast_pack(values, charged)
        return charged

    def _refuse_nan(self, values: np.ndarray, name: str) -> None:
        """Raises ValueError for a NaN: it would make every gradient NaN, and every step a skipped one."""
        if count := self.rank.kernels.count_nan(values):
            raise ValueError(f"{name} has NaN in {count} of {values.size} values, and with it every gradient; "
                             "look at where the data come from")

    # -- tokens -------------------------------------------------------------------------------------------------------

    def count(self, tape: Tape) -> None:
        """Counts the tokens of a micro-batch that has gone back.

        Raises ValueError where a loss is normalized by all tokens and micro-batches have not the same places: each
        mean is over its own, and a mean of those would weigh tokens differently.
        """
        if self.model.loss.is_global and self.places and tape.places != self.places[0]:
            raise ValueError("normalization='global' weighs every token the same only where micro-batches have equally "
                             f"many places, found {self.places[0]} and {tape.places}; fill shorter ones up with "
                             "targets of -1")
        self.tokens.append(tape.tokens)
        self.places.append(tape.places)

    def token_share(self) -> float:
        """1, or where the loss is normalized by all ranks' tokens, the share of places that have one: tokens/(N·k·B·T).

        A loss that divides by its B·T places, and a mean gradient divided by this, weigh every token the same.
        """
        if not self.model.loss.is_global:
            return 1.0
        places = sum(self.places)
        found = self.rank.all_gather(np.array([sum(self.tokens)], np.int64), purpose="control",
                                     agreement=f"{places} places in all micro-batches of the step")
        tokens = int(found.sum())
        if not tokens:
            raise ValueError("no rank has a valid target in this step, and a mean over none does not exist; "
                             "leave the step out")
        return tokens / (self.rank.size * places)


