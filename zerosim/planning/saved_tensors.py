"""The tensors that are kept of a decoder's forward pass for backward, layer by layer, from a measured table.

The table stands in `saved_tensors.toml` and is measured anew by `benchmarks/torch_saved_tensors.py`. Attention is a
fused kernel of SDPA, which keeps a log-sum-exp and no probabilities (Dao et al. 2022, FlashAttention, section 3.1), but
for models with soft caps, which transformers runs in eager mode. Residual sums, rotary positions and embeddings keep
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from zerosim.models.transformer import Transformer
from zerosim.numerics.files import facts
from zerosim.planning.shapes import TensorShape

EAGER, COMPILED, MEGATRON = KEEPERS = ("eager", "compiled", "megatron")
# Numbers of one token that a tensor has, of L in its sequence.
WIDTHS: Mapping[str, Callable[[Transformer, int], int]] = {
    "one": lambda of, tokens: 1,
    "channels": lambda of, tokens: of.channels,
    "queries": lambda of, tokens: of.query_channels,
    "keys": lambda of, tokens: of.key_channels,
    "values": lambda of, tokens: _made_with_values(of),
    "output": lambda of, tokens: of.attention_channels,
    "output, copied": lambda of, tokens: of.attention_channels * _is_turned_in_part(of),
    "queries and keys": lambda of, tokens: of.query_channels + of.key_channels,
    "heads": lambda of, tokens: of.heads,
    "normed heads": lambda of, tokens: 2 if of.joint_norms else of.heads + of.key_value_heads,
    "latents": lambda of, tokens: sum(of.normed_widths.values()),
    "scores": lambda of, tokens: of.heads * tokens,
    "feed_forward": lambda of, tokens: of.feed_forward,
    "routed": lambda of, tokens: of.channels * of.experts.per_token if of.experts else 0,
    "router": lambda of, tokens: of.experts.router if of.experts else 0,
    "vocabulary": lambda of, tokens: of.vocabulary,
}
WRITTEN_OUT = ("gelu_new", "gelu_fast")
# The table's parts and weights by what a model's tensors are called; the weights of all others open a part.
PARTS = {"attention": "attention", "ffn": "feed_forward"}
WEIGHTS = {"ln": "norm", "ln_after": "norm", "ln_f": "norm", "q_norm": "inner", "k_norm": "inner", "q_a_norm": "inner",
           "kv_a_norm": "inner", "projection": "closing", "down": "closing"}


def _made_with_values(of: Transformer) -> int:
    """Values are a view of what one matrix makes, which is kept whole: with queries and keys, or out of the latents.

    With learned positions queries and keys are views of it too.
    """
    *_, (_, made) = of.opening.values()
    return made if of.latent or (of.fused and not of.positions) else of.value_channels


def _is_turned_in_part(of: Transformer) -> bool:
    """True for Phi and GPT-NeoX, which put queries together from channels that positions turn and others: then SDPA
    gives its output head by head, and the projection reads a copy."""
    return (of.fused and not of.positions) or of.norms == "shared"


@lru_cache(maxsize=1024)
def block_of(of: Transformer, index: int) -> Transformer:
    """A model with blocks as one of its own by its place: of experts the networks that a token passes, as one."""
    experts = of.experts_of(index)
    return replace(of, experts=None) if experts is None else replace(of, feed_forward=experts.active)


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward pass of B sequences of L tokens, and who keeps its tensors, one of KEEPERS.

    `itemsize` are the bytes of an element in the compute format, `stream_itemsize` in that of what flows from block to
    block; 0: the same.
    """

    batch: int
    tokens: int
    itemsize: int = 2
    stream_itemsize: int = 0
    by: str = EAGER

    def nbytes_each(self, format: str) -> int:
        """Bytes of an element in a format of the table."""
        return {"fp32": 4, "mask": 1, "compute": self.itemsize,
                "stream": self.stream_itemsize or self.itemsize}[format]


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that a kind of layer keeps: a row of the table; `weight`, whose gradient alone reads it, or none."""

    layer: str
    name: str
    width: str
    format: str
    by: tuple[str, ...]
    weight: str

    def nbytes(self, of: Transformer, run: Forward) -> int:
        """Bytes that the tensor has in a pass."""
        return WIDTHS[self.width](of, run.tokens) * run.batch * run.tokens * run.nbytes_each(self.format)


@cache
def table() -> Mapping[str, tuple[Saved, ...]]:
    """The tensors of each kind of layer, by its name."""
    read = facts(__package__, "saved_tensors")["layers"]
    return {layer: tuple(Saved(layer, name, row["width"], row["format"], tuple(row.get("by", KEEPERS)),
                               row.get("weight", "")) for name, row in rows.items()) for layer, rows in read.items()}


def parts(of: Transformer) -> dict[str, list[str]]:
    """The kinds of layers in each half of a block, in the order of forward, and behind the last block.

    >>> from zerosim.planning.shapes import PRESETS
    >>> parts(PRESETS["llama-3-8b"])["feed_forward"]
    ['rms_norm', 'linear', 'gated']
    """
    plain = "layer_norm" if of.norm_weights else "plain_norm"
    wide = "_in_fp32" * (of.joint_norms or (of.gated and of.activation == "gelu_pytorch_tanh"))  # OLMo 2, Gemma
    norm = plain if of.layer_norm else "rms_norm" + wide
    before, after = [norm] * (of.norms not in ("after", "last")), [norm] * (of.norms in ("after", "around", "last"))
    inner = ["latents"] if of.latent else ["head_norms" + wide] * (of.head_norms or of.joint_norms)
    attention = "capped_attention" if "attention" in of.caps else "attention"
    network = "gated" if of.gated else "gelu_new" if of.activation in WRITTEN_OUT else (
        "relu" if of.activation == "relu" else "gelu")
    second = ["second_norm", "linear"] if of.parallel and of.layer_norm else [*before, "linear"]
    dropped = ["dropout"] * of.layer_norm
    return {"attention": [*before, "linear", *inner, attention, *after, *dropped],
            "feed_forward": [*second * (of.norms != "shared"), *["experts"] * bool(of.experts), network, *after,
                             *dropped],
            "head": [*[norm] * of.last_norm, "linear"],
            "loss": ["loss", *["cap"] * ("logits" in of.caps)]}


def weights_of(tensors: Iterable[TensorShape]) -> set[str]:
    """The table's weights, each after its part, that are trained of a block's or the root's tensors.

    >>> sorted(weights_of([TensorShape("ffn.down.weight", (8, 2)), TensorShape("ffn.up.weight", (2, 8), frozen=True)]))
    ['feed_forward.closing']
    """
    found = set()
    for words in (tensor.name.split(".") for tensor in tensors if not tensor.frozen):
        weight = next((WEIGHTS[word] for word in words if word in WEIGHTS), "opening")
        found.add(f"{PARTS.get(words[0], 'head')}.{weight}")
    return found


def saved(of: Transformer, part: str, by: str = EAGER, trained: Container[str] | None = None) -> Iterator[Saved]:
    """The tensors that a part of `parts` keeps, of all weights or of the ``trained`` ones that `weights_of` names."""
    return (one for layer in parts(of)[part] for one in table()[layer] if by in one.by and (
        trained is None or not one.weight or f"{part}.{one.weight}" in trained))


def saved_nbytes(of: Transformer, part: str, run: Forward, trained: Container[str] | None = None) -> int:
    """Bytes that a part keeps.

    >>> from zerosim.planning.shapes import PRESETS
    >>> block = PRESETS["llama-3-8b"]
    >>> sum(saved_nbytes(block, part, Forward(1, 1)) for part in ("attention", "feed_forward")) / (2 * 4096)
    24.5166015625
    """
    return sum(one.nbytes(of, run) for one in saved(of, part, run.by, trained))
