"""What PyTorch keeps of a Hugging Face decoder's forward pass for backward, layer by layer, from a measured table.

The table stands in `saved_tensors.toml` and is measured anew by `benchmarks/torch_saved_tensors.py`. Attention is SDPA's
fused kernel, which keeps a log-sum-exp and no probabilities (Dao et al. 2022, FlashAttention, section 3.1); grouped keys
and values are not repeated; residual sums, rotary positions and embeddings keep nothing of their own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from zerosim.models.transformer import Transformer

# Numbers of one token that a tensor has.
WIDTHS: Mapping[str, Callable[[Transformer], int]] = {
    "one": lambda of: 1,
    "channels": lambda of: of.channels,
    "queries": lambda of: of.query_channels,
    "keys": lambda of: of.key_channels,
    # With one matrix for all three, the values are a view of its output, which is kept whole.
    "values": lambda of: of.key_channels + of.fused * (of.query_channels + of.key_channels),
    "queries and keys": lambda of: of.query_channels + of.key_channels,
    "heads": lambda of: of.heads,
    "normed heads": lambda of: of.heads + of.key_value_heads,
    "feed_forward": lambda of: of.feed_forward,
    "vocabulary": lambda of: of.vocabulary,
}
FP32_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that a kind of layer keeps: numbers of a token by WIDTHS, in "fp32" or in the format of "compute"."""

    layer: str
    name: str
    width: str
    format: str
    eager: bool = True
    compiled: bool = True

    def nbytes(self, of: Transformer, tokens: int, itemsize: int) -> int:
        """Bytes of so many tokens."""
        return WIDTHS[self.width](of) * tokens * (FP32_NBYTES if self.format == "fp32" else itemsize)


@cache
def table() -> Mapping[str, tuple[Saved, ...]]:
    """The tensors of each kind of layer, by its name."""
    read = tomllib.loads(files("zerosim.planning").joinpath("saved_tensors.toml").read_text("utf-8"))["layers"]
    return {layer: tuple(Saved(layer, name, **row) for name, row in rows.items()) for layer, rows in read.items()}


def parts(of: Transformer) -> dict[str, list[str]]:
    """The kinds of layers of a block in the order of forward, for its two halves; and of the model's end."""
    norm = "layer_norm" if of.layer_norm else "rms_norm"
    return {"attention": [norm, "linear", *["head_norms"] * of.head_norms, "attention"],
            "feed_forward": [norm, "linear", "gated" if of.gated else "gelu"],
            "head": [norm, "linear"], "loss": ["loss"]}


def saved(of: Transformer, part: str, *, compiled: bool = False) -> Iterator[Saved]:
    """The tensors that a part of the model keeps, of which `parts` has the names."""
    for layer in parts(of)[part]:
        yield from (one for one in table()[layer] if (one.compiled if compiled else one.eager))


def saved_nbytes(of: Transformer, part: str, tokens: int, itemsize: int = 2, *, compiled: bool = False) -> int:
    """Bytes that a part keeps of so many tokens.

    >>> from zerosim.models.transformer import llama
    >>> block = llama(4096, 32, 32, 128_256, 14_336, 8)
    >>> sum(saved_nbytes(block, part, 1) for part in ("attention", "feed_forward")) / (2 * 4096)
    24.5166015625
    """
    return sum(one.nbytes(of, tokens, itemsize) for one in saved(of, part, compiled=compiled))
