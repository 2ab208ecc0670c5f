"""The literature's count of activations, sbh(34 + 5as/h) bytes a block, under its policies and parallelisms.

Legend, as published: s tokens of a sequence (L), b sequences (B), h channels (d), a heads (H), t ranks of tensor
parallelism. Bytes are those of 16-bit training; masks of dropout take one byte an element.

Source: Korthikanti et al. 2022, "Reducing activation recomputation" (arXiv:2205.05198), sections 4 and 5.
"""

from collections.abc import Mapping

from zerosim.planning.activations import Block, refuse_unless_plain
from zerosim.planning.cuts import checked_count

# Bytes of each tensor, as multiples of sbh, section 4.1: those that tensor parallelism leaves whole on each of t ranks,
# and those that it cuts.
WHOLE: Mapping[str, int] = {
    "LayerNorm 1 input": 2, "QKV input": 2, "attention mask": 1, "LayerNorm 2 input": 2, "up input": 2,
    "feed-forward mask": 1,
}
CUT: Mapping[str, int] = {"Q and K": 4, "V": 2, "projection input": 2, "pre-GELU": 8, "post-GELU": 8}
# The same as multiples of as²b, which selective recomputation drops, and tensor parallelism cuts too.
SQUARE: Mapping[str, int] = {"softmax output": 2, "probabilities' mask": 1, "dropped probabilities": 2}
RECOMPUTED = ("none", "selective", "full")


def layer_nbytes(block: Block, *, tensor_parallel: int = 1, sequence_parallel: bool = False,
                 recompute: str = "none") -> int:
    """Bytes that one block keeps on each of t ranks: a row of the published table, sbh(34 + 5as/h) on one.

    >>> block = Block(batch=1, tokens=2048, channels=12288, heads=96)
    >>> sbh = block.stream
    >>> layer_nbytes(block, tensor_parallel=8, sequence_parallel=True, recompute="selective") == sbh * 34 // 8
    True

    Tensor parallelism cuts all but 10 sbh, sequence parallelism those too; selective recomputation drops 5as²b; full
    recomputation keeps the 2 sbh of the input, on every rank. The project's own layers keep less: no outputs of
    LayerNorms (4 sbh), no dropout masks of one byte an element (2 sbh and as²b), and the softmax's output once.
    Raises ValueError for ranks that do not divide the heads, sequence parallelism of a single rank, another
    recomputation than none, selective and full, elements that do not have 2 bytes, and a block that is not plain, for
    which the count was made. Source: Korthikanti et al. 2022, table 2.
    """
    refuse_unless_plain(block, "the count sbh(34 + 5as/h)", "take planning.activations, which counts any block")
    if block.itemsize != 2:
        raise ValueError(f"the count sbh(34 + 5as/h) is in bytes of 16-bit training, and the block has elements of "
                         f"{block.itemsize} bytes; give it itemsize=2, or take planning.activations")
    t = checked_count("tensor_parallel", tensor_parallel, 1)
    if block.heads % t:
        raise ValueError(f"tensor parallelism of {t} ranks was asked for {block.heads} heads; take ranks that divide "
                         "them")
    if sequence_parallel and t == 1:
        raise ValueError("sequence parallelism cuts what tensor parallelism leaves whole, and there is one rank; take "
                         "tensor_parallel=2 or more")
    if recompute not in RECOMPUTED:
        raise ValueError(f"recompute={recompute!r} is not in the published table; it has {', '.join(RECOMPUTED)}; for "
                         "the other policies take planning.activations")
    if recompute == "full":
        return WHOLE["LayerNorm 1 input"] * block.stream
    whole, cut = sum(WHOLE.values()) * block.stream, sum(CUT.values()) * block.stream
    square = sum(SQUARE.values()) * block.square if recompute == "none" else 0
    return (whole + cut + square) // t if sequence_parallel else whole + (cut + square) // t


def zero_nbytes(block: Block) -> int:
    """Bytes of one block as ZeRO's paper estimates them: 12·BLd elements, attention's square left out.

    Source: Rajbhandari et al. 2020 (ZeRO), section 3.2, footnote.
    """
    return 12 * block.stream * block.itemsize


def zero_infinity_nbytes(block: Block) -> int:
    """Bytes of one block as ZeRO-Infinity's table counts them: 16·BLd + 2·BHL² elements.

    Source: Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv:2104.07857), section 3 and figure 2a.
    """
    return (16 * block.stream + 2 * block.square) * block.itemsize
