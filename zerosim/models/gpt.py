"""GPT-2's model as a list of units: the embedding, the blocks, the head, in units as large as one chooses.

Legend: B batch, T tokens, C channels, V vocabulary.
Source: Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zerosim.models.blocks import Attention, FeedForward, Part, PartsUnit
from zerosim.models.checks import require_integer
from zerosim.models.cross_entropy import CrossEntropy, Normalization
from zerosim.models.ends import Embed, Head
from zerosim.models.gpt_config import GPTConfig, config_of
from zerosim.models.units import Model
from zerosim.numerics.checks import is_count


class GPT(Model):
    """Units ``embed``, ``block0``, ``block1``, …, ``head``: tokens (B, T) -> logits (B, T, V), with cross-entropy.

    ``units`` is what is gathered at a time: "block"; "sub_block", attention and feed-forward network each; or a number
    of blocks that are joined. Parameters have the same names, order and first values with any of them.

    >>> GPT("gpt2").parameter_count
    124439808
    >>> [unit.name for unit in GPT("gpt-nano", units="sub_block").units]
    ['embed', 'block0.attention', 'block0.ffn', 'block1.attention', 'block1.ffn', 'head']
    """

    def __init__(self, config: GPTConfig | str = "gpt-nano", *, tied: bool = True, seed: int = 0,
                 units: str | int = "block", normalization: Normalization = "own") -> None:
        """``config`` is a GPTConfig or a preset's name; ``tied``: the head borrows the embedding's table.

        ``normalization`` is the loss's: over the rank's own tokens, or "global". Raises ValueError for a preset that
        there is not, a seed that is no whole number, and units of no whole number of blocks.
        """
        require_integer("GPT", seed=seed)
        self.config, self.tied, self.seed = config_of(config), bool(tied), seed
        self.granularity, self.normalization = units, normalization
        super().__init__([Embed(self.config, seed), *_units(self.config, seed, units),
                          Head(self.config, seed, tied=self.tied)], CrossEntropy(normalization))

    def without_dropout(self) -> GPT:
        """The same model, units and names, in which nothing is dropped: for evaluation, and for what it writes."""
        return GPT(replace(self.config, dropout=0.0), tied=self.tied, seed=self.seed, units=self.granularity,
                   normalization=self.normalization)


def _units(config: GPTConfig, seed: int, units: Any) -> list[PartsUnit]:
    blocks: list[list[Part]] = [[Attention(f"block{index}", config, seed), FeedForward(f"block{index}", config, seed)]
                                for index in range(config.layers)]
    if units == "sub_block":
        return [PartsUnit(part.name, [part]) for block in blocks for part in block]
    per_unit = 1 if units == "block" else units
    if not is_count(per_unit) or per_unit < 1:
        raise ValueError(f"GPT was asked for units={units!r}; a unit is a 'block', a 'sub_block', or a whole number of "
                         "blocks, 1 or more")
    return [PartsUnit(_name(start, min(start + per_unit, len(blocks)) - 1),
                      [part for block in blocks[start:start + per_unit] for part in block])
            for start in range(0, len(blocks), per_unit)]


def _name(first: int, last: int) -> str:
    return f"block{first}" if first == last else f"block{first}-{last}"
