"""The shape of a GPT as a value, and the shapes that have a name.

Legend: C channels, H heads, T tokens of the longest sequence, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.models.checks import require_positive
from zerosim.numerics.checks import is_number
from zerosim.numerics.names import did_you_mean


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Transformer blocks (``layers``) of C ``channels`` in H ``heads``, T tokens of ``context``, V of ``vocabulary``.

    ``dropout`` is the rate after the embedding and after both residual projections of each block; the attention
    probabilities have none, since tiled attention never holds them. ``epsilon`` is the LayerNorms'.
    Raises ValueError for counts below one, heads that do not divide the channels, and a rate outside [0, 1).
    """

    layers: int
    channels: int
    heads: int
    context: int
    vocabulary: int
    dropout: float = 0.0
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        require_positive("GPTConfig", layers=self.layers, channels=self.channels, heads=self.heads,
                         context=self.context, vocabulary=self.vocabulary)
        if self.channels % self.heads:
            raise ValueError(f"GPTConfig was given {self.channels} channels in {self.heads} heads; all heads are "
                             "equally wide, so take a number of heads that divides the channels")
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(f"GPTConfig was given dropout={self.dropout!r}; it is the share of elements that are "
                             "dropped, from 0 to less than 1")
        if not is_number(self.epsilon) or not self.epsilon > 0:
            raise ValueError(f"GPTConfig was given epsilon={self.epsilon!r}; it keeps LayerNorm from dividing by 0, so "
                             "take a small positive number, as 1e-5")

    @property
    def hidden(self) -> int:
        """F = 4C, the width of the feed-forward network's inside."""
        return 4 * self.channels


# gpt-nano is for tests: everything odd. gpt-micro reads bytes and trains in a minute or two on a laptop. The others:
# Radford et al. 2019, "Language models are unsupervised multitask learners", table 2, with the head counts of the
# published checkpoints.
PRESETS: Mapping[str, GPTConfig] = {
    "gpt-nano": GPTConfig(layers=2, channels=12, heads=3, context=8, vocabulary=17),
    "gpt-micro": GPTConfig(layers=4, channels=128, heads=4, context=64, vocabulary=256),
    "gpt2": GPTConfig(layers=12, channels=768, heads=12, context=1024, vocabulary=50257),
    "gpt2-medium": GPTConfig(layers=24, channels=1024, heads=16, context=1024, vocabulary=50257),
    "gpt2-large": GPTConfig(layers=36, channels=1280, heads=20, context=1024, vocabulary=50257),
    "gpt2-xl": GPTConfig(layers=48, channels=1600, heads=25, context=1024, vocabulary=50257),
}


def config_of(config: Any) -> GPTConfig:
    """The config of a preset's name, or a config itself; ValueError for anything else."""
    if isinstance(config, GPTConfig):
        return config
    if not isinstance(config, str) or config not in PRESETS:
        raise ValueError(f"GPT was asked for {config!r}, which is no GPTConfig and no preset; the presets are "
                         f"{', '.join(PRESETS)}"
                         f"{did_you_mean(config, PRESETS)}")
    return PRESETS[config]
