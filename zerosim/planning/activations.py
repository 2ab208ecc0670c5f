"""Bytes that transformer blocks keep of their forward pass for backward, to the byte.

Legend: B batch, L tokens of a sequence, d channels, H heads, n blocks, V vocabulary; elements are in the compute format
(2 bytes in 16 bit), statistics in fp32 whatever the format. Q and K are H·d_h and H_kv·d_h channels, both d in a plain
block; F are the channels inside the feed-forward network, 4d in a plain block. Formulas are those of a plain block.

Of each block backward needs the input of every linear layer, of every LayerNorm and of the GELU, the output of the
softmax, and Q, K and V. The outputs of the LayerNorms are not kept: they are computed again from the kept inputs. A
gated feed-forward network keeps both factors' linear outputs and their product, and makes the gate's SiLU again. Rotary
positions turn queries and keys where they are. Where each head's queries and keys have a norm, Q, K and V are kept as
they were before it, with a number for each head, and both are made again. Norms behind a part keep its output; parts
beside each other keep one input. Latent attention keeps its latents too. Of experts a token keeps what those that it
passes keep, as if they were one network so wide, and nothing for its route.

Sources: Korthikanti et al. 2022, "Reducing activation recomputation" (arXiv:2205.05198), section 4.1 (what a block
keeps), section 5 (selective); Chen et al. 2016 (arXiv:1604.06174), section 4 (segments); Dao et al. 2022,
"FlashAttention" (arXiv:2205.14135), section 3.1 (only a log-sum-exp is kept of attention).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from zerosim.models.transformer import Transformer
from zerosim.models.units import Recompute
from zerosim.numerics.checks import checked_count, count_fields

FP32_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Block:
    """One transformer block and the batch that it sees: B sequences of L tokens, d channels in H heads.

    `itemsize` is the bytes of an element at rest. `sizes` are those of a model of such blocks, by default plain ones,
    GPT-2's; their feed-forward network is as wide as all experts that a token passes. RMSNorm comes with rotary
    positions, as Llamas have both. Raises ValueError for counts below one, and for heads that do not divide the
    channels.
    """

    batch: int
    tokens: int
    channels: int
    heads: int
    itemsize: int = 2
    sizes: Transformer = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        count_fields(self, batch=1, tokens=1, channels=1, heads=1, itemsize=1)
        given: Any = self.sizes
        object.__setattr__(self, "sizes", given or Transformer(self.channels, 1, self.heads, 1))

    @classmethod
    def kinds(cls, model: Transformer, batch: int, tokens: int, itemsize: int = 2) -> Counter[Block]:
        """The blocks of a transformer, and the batch that they see: how many of each kind, one without experts.

        Raises ValueError for counts below one, and for a model of encoder and decoder, whose blocks differ.
        """
        if model.encoder_blocks:
            raise ValueError("what a block keeps and computes is counted for decoders alone, and this model has "
                             f"{model.encoder_blocks} blocks of encoder beside {model.blocks} of decoder; its states "
                             "and its traffic are counted")
        found = Counter(map(model.experts_of, range(model.blocks)))
        return Counter({cls(batch, tokens, model.channels, model.heads, itemsize, replace(
            model, experts=experts, feed_forward=experts.active if experts else model.feed_forward)): count
            for experts, count in found.items()})

    @classmethod
    def of(cls, model: Transformer, batch: int, tokens: int, itemsize: int = 2) -> Block:
        """The widest block of a transformer; raises ValueError as `kinds` does."""
        return max(cls.kinds(model, batch, tokens, itemsize), key=lambda block: block.sizes.feed_forward)

    @property
    def is_plain(self) -> bool:
        """True where queries, keys and values have d channels each, the feed-forward network 4d and no gate, and norms
        are LayerNorms before the parts, which follow each other."""
        of, d = self.sizes, self.channels
        return of.layer_norm and of.norms == "before" and not (of.gated or of.parallel or of.normed_widths) and (
            of.query_channels, of.key_channels, of.value_channels, of.feed_forward, self.router) == (d, d, d, 4 * d, 0)

    @property
    def positions(self) -> int:
        """B·L."""
        return self.batch * self.tokens

    @property
    def stream(self) -> int:
        """B·L·d: elements of what flows from block to block."""
        return self.positions * self.channels

    @property
    def norm_statistics(self) -> int:
        """Numbers of fp32 that a norm keeps of all tokens: mean and 1/σ, or RMSNorm's one."""
        return (1 + self.sizes.layer_norm) * self.positions

    @property
    def norms_of_parts(self) -> tuple[int, int]:
        """The norms of attention and of the feed-forward network."""
        return {"around": (2, 2), "shared": (1, 0)}.get(self.sizes.norms, (1, 1))

    @property
    def head_norms(self) -> bool:
        """True where queries and keys have norms, head by head or all together."""
        return self.sizes.head_norms or self.sizes.joint_norms

    @property
    def made_channels(self) -> int:
        """Channels of all queries, keys and values together."""
        return self.sizes.query_channels + self.sizes.key_channels + self.sizes.value_channels

    @property
    def router(self) -> int:
        """Numbers that a token's route is chosen by."""
        return 0 if self.sizes.experts is None else self.sizes.experts.router

    @property
    def square(self) -> int:
        """B·H·L²: elements of the attention probabilities."""
        return self.batch * self.heads * self.tokens**2


# The published example: d = 4096, H = 32, L = 2048, B = 4 in 16 bit.
EXAMPLE = Block(batch=4, tokens=2048, channels=4096, heads=32)

@dataclass(frozen=True, slots=True)
class Inside:
    """The tensors that a policy keeps of a block, and those that it makes again: one of `again`'s parts at a time."""

    kept: tuple[str, ...]
    again: tuple[tuple[str, ...], ...] = ()


_ATTENTION = ("LayerNorm 1 statistics", "QKV", "head norm statistics", "probabilities", "attention output",
              "normed attention")
_FEED_FORWARD = ("LayerNorm 2 statistics", "pre-GELU", "post-GELU", "normed network")
_ALL = ("LayerNorm 1 input", *_ATTENTION, "LayerNorm 2 input", *_FEED_FORWARD)
_ALL_BUT_PROBABILITIES = tuple(name for name in _ALL if name != "probabilities")

INSIDE: Mapping[str, Inside] = {
    "all": Inside(_ALL),
    "sub_block": Inside(("LayerNorm 1 input", "LayerNorm 2 input"), (_ATTENTION, _FEED_FORWARD)),
    "selective": Inside(_ALL_BUT_PROBABILITIES, (("probabilities",),)),
    "tiled": Inside((*_ALL_BUT_PROBABILITIES, "log-sum-exp")),
}


@dataclass(frozen=True, slots=True)
class Kept:
    """Elements in the compute format and numbers in fp32; `nbytes` of both together."""

    elements: int
    statistics: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes at rest."""
        return self.elements * self.itemsize + self.statistics * FP32_NBYTES

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.elements + other.elements, self.statistics + other.statistics, self.itemsize)

    def __mul__(self, times: int) -> Kept:
        return Kept(self.elements * times, self.statistics * times, self.itemsize)


def tensors(block: Block, policy: str = "none") -> dict[str, Kept]:
    """Each tensor that one block keeps from forward to backward, as `policy` has it inside the block.

    >>> {name: kept.nbytes for name, kept in tensors(EXAMPLE, "sub_block").items()}
    {'LayerNorm 1 input': 67108864, 'LayerNorm 2 input': 67108864}

    Raises ValueError for a text that names no policy.
    """
    every = every_tensor(block)
    kept = {name: every[name] for name in INSIDE[Recompute.parse(policy).inside].kept}
    return {name: held for name, held in kept.items() if held.nbytes}  # norms of heads few models have


def kept(block: Block, policy: str = "none") -> Kept:
    """The numbers that one block keeps, its input too: 14·BLd + BHL² elements and 4·BL statistics where all is kept.

    >>> kept(EXAMPLE).elements == 14 * EXAMPLE.stream + EXAMPLE.square, kept(EXAMPLE).statistics
    (True, 32768)

    For "block" and "segment(k)" it is what a block keeps while its segment goes back. Raises ValueError for a text
    that names no policy. Source: Korthikanti et al. 2022, section 4.1, without its masks and LayerNorm outputs.
    """
    return total(block, INSIDE[Recompute.parse(policy).inside].kept)


def peak_nbytes(block: Block, blocks: int, policy: str = "none") -> Kept:
    """The most that n blocks keep at one moment, which is in backward: what rests, and what was computed again.

    none: n(14·BLd + BHL²). selective: 14n·BLd + BHL². sub_block: 2n·BLd + max(4·BLd + BHL², 8·BLd). tiled:
    14n·BLd, and n·BHL numbers of fp32. segment(k): the inputs of the earlier segments, and all of one segment:
    (n/k - 1)·BLd + k(14·BLd + BHL²), where k divides n; block is k = 1. (Texts that write n/k for n/k - 1 count the
    input of the segment that goes back twice.)

    >>> policies = ("none", "block", "selective", "sub_block")
    >>> [round(peak_nbytes(EXAMPLE, 32, policy).nbytes / 1e9, 2) for policy in policies]
    [64.43, 4.09, 31.14, 5.64]

    Raises ValueError for fewer than one block and for a text that names no policy.
    Source: Chen et al. 2016, section 4; Korthikanti et al. 2022, section 5.
    """
    count = checked_count("blocks", blocks, 1)
    recompute = Recompute.parse(policy)
    inside, stream = INSIDE[recompute.inside], Kept(block.stream, 0, block.itemsize)
    of_block, again = total(block, inside.kept), [total(block, part) for part in inside.again]
    in_use = max(again, key=lambda part: part.nbytes, default=total(block, ()))
    runs = recompute.segments(count) or [range(count)]
    moments = [stream * index + of_block * len(run) + in_use for index, run in enumerate(runs)]
    return max(moments, key=lambda moment: moment.nbytes)


def best_segment(block: Block, blocks: int) -> float:
    """The k, not rounded, of the segment(k) that keeps least: √(n·BLd/(14·BLd + BHL²)).

    >>> round(best_segment(EXAMPLE, 32), 2)
    1.03

    It is where the inputs that are kept weigh as much as the segment that is computed again. The popular k = √n takes
    a block's inside to weigh as much as its input. Raises ValueError for fewer than one block.
    """
    return math.sqrt(checked_count("blocks", blocks, 1) * Fraction(block.stream, kept(block).elements))


def logits_nbytes(block: Block, vocabulary: int) -> int:
    """Bytes of the logits (B, L, V), their gradient in the same place, and of the log-sum-exps that the loss keeps.

    >>> logits_nbytes(Block(4, 2048, 4096, 32), 32000)
    524320768

    Programs that hold logits in 16 bits in fp32 too, for the softmax, hold 4·BLV more (Korthikanti et al. 2022, section
    4.3; `runtimes`). Raises ValueError for an empty vocabulary.
    """
    return block.positions * (checked_count("vocabulary", vocabulary, 1) * block.itemsize + FP32_NBYTES)


def total(block: Block, names: Iterable[str]) -> Kept:
    """The elements and the numbers of fp32 that these tensors of a block hold."""
    every = every_tensor(block)
    return sum((every[name] for name in names), Kept(0, 0, block.itemsize))


def every_tensor(block: Block) -> dict[str, Kept]:
    """All tensors of a block that some policy keeps: elements in the compute format, or numbers in fp32.

    Norms behind a part keep what they read, the part's output or, "last", the sum that it ends in.
    """
    of, bl, stream = block.sizes, block.positions, block.stream
    latents = 0 if of.latent is None else of.latent.query_rank + of.latent.key_value_rank + of.latent.rotary
    inner = of.heads + of.key_value_heads if of.head_norms else len(of.normed_widths)
    first, second = block.norms_of_parts
    elements = {
        "LayerNorm 1 input": stream, "QKV": bl * (block.made_channels + latents), "probabilities": block.square,
        "attention output": bl * of.attention_channels, "normed attention": stream * (of.norms in ("after", "around")),
        "LayerNorm 2 input": stream * (not of.parallel), "pre-GELU": (1 + of.gated) * bl * of.feed_forward,
        "post-GELU": bl * of.feed_forward, "normed network": stream * (of.norms in ("after", "around", "last"))}
    statistics = {"LayerNorm 1 statistics": first * block.norm_statistics, "head norm statistics": bl * inner,
                  "LayerNorm 2 statistics": second * block.norm_statistics, "log-sum-exp": bl * of.heads}
    return {**{name: Kept(count, 0, block.itemsize) for name, count in elements.items()},
            **{name: Kept(0, count, block.itemsize) for name, count in statistics.items()}}
