"""The literature's count of activations, sbh(34 + 5as/h) bytes a block, under every policy and parallelism.

Legend, as published: s tokens of a sequence (L), b sequences (B), h channels (d), a heads (H), n blocks, t ranks of
tensor parallelism, v vocabulary. Bytes are those of 16-bit training; masks of dropout take one byte an element.

Source: Korthikanti et al. 2022, "Reducing activation recomputation" (arXiv:2205.05198), sections 4 and 5.
"""

from collections.abc import Mapping

from zerosim.models.units import INSIDE, Recompute
from zerosim.planning.activations import FP32_NBYTES, Block, refuse_unless_plain
from zerosim.planning.cuts import checked_count

# Bytes of each tensor, as multiples of sbh and of as²b: section 4.1.
INPUTS: Mapping[str, tuple[int, int]] = {"LayerNorm 1 input": (2, 0), "LayerNorm 2 input": (2, 0)}
ATTENTION: Mapping[str, tuple[int, int]] = {
    "QKV input": (2, 0), "Q and K": (4, 0), "V": (2, 0), "softmax output": (0, 2), "probabilities' mask": (0, 1),
    "dropped probabilities": (0, 2), "projection input": (2, 0), "attention mask": (1, 0),
}
FEED_FORWARD: Mapping[str, tuple[int, int]] = {
    "up input": (2, 0), "pre-GELU": (8, 0), "post-GELU": (8, 0), "feed-forward mask": (1, 0),
}
RECOMPUTED = ("none", "selective", "full")


def tensors_nbytes(block: Block) -> dict[str, int]:
    """Bytes of each tensor that one block keeps, sbh(34 + 5as/h) together.

    The project's own layers keep less: no outputs of LayerNorms (4 sbh), no dropout masks of one byte an element (2 sbh
    and as²b), and the softmax's output once. Raises ValueError where elements do not have 2 bytes or the block is not
    plain, for which the count was made.
    """
    _check(block)
    every = {**INPUTS, **ATTENTION, **FEED_FORWARD}
    return {name: stream * block.stream + square * block.square for name, (stream, square) in every.items()}


def peak_nbytes(block: Block, blocks: int, policy: str = "none") -> int:
    """The most bytes that n blocks keep at one moment, by the literature's count, under a recomputation policy.

    >>> example = Block(batch=4, tokens=2048, channels=4096, heads=32)
    >>> [round(peak_nbytes(example, 32, policy) / 1e9, 1) for policy in ("none", "selective", "block")]
    [122.4, 39.2, 5.9]

    What rests and what was computed again are as in `planning.activations.peak_nbytes`: a block that is run again keeps
    all of its tensors, selective recomputation leaves the as²b of one block, tiled attention a log-sum-exp instead of
    it. Raises ValueError as that and as `tensors_nbytes` does.
    """
    n, sizes, recompute = checked_count("blocks", blocks, 1), tensors_nbytes(block), Recompute.parse(policy)
    inputs, attention, feed_forward = (sum(sizes[name] for name in part) for part in (INPUTS, ATTENTION, FEED_FORWARD))
    every, square = inputs + attention + feed_forward, 5 * block.square
    kept, again = {
        "all": (every, 0), "sub_block": (inputs, max(attention, feed_forward)), "selective": (every - square, square),
        "tiled": (every - square + FP32_NBYTES * block.positions * block.heads, 0)}[recompute.inside]
    runs = recompute.segments(n) or [range(n)]
    return max(index * 2 * block.stream + len(run) * kept + again for index, run in enumerate(runs))


def layer_nbytes(block: Block, *, tensor_parallel: int = 1, sequence_parallel: bool = False,
                 recompute: str = "none") -> int:
    """Bytes that one block keeps on each of t ranks: a row of the published table.

    >>> block = Block(batch=1, tokens=2048, channels=12288, heads=96)
    >>> sbh = block.stream
    >>> layer_nbytes(block, tensor_parallel=8, sequence_parallel=True, recompute="selective") == sbh * 34 // 8
    True

    Tensor parallelism cuts all but 10 sbh (LayerNorm inputs and outputs, two masks), sequence parallelism those too;
    selective recomputation drops 5as²b; full recomputation keeps the 2 sbh of the input, on every rank.
    Raises ValueError for ranks that do not divide the heads, sequence parallelism of a single rank, and another
    recomputation than none, selective and full. Source: Korthikanti et al. 2022, table 2.
    """
    _check(block)
    t, sbh, square = checked_count("tensor_parallel", tensor_parallel, 1), block.stream, 5 * block.square
    if block.heads % t:
        raise ValueError(f"tensor parallelism of {t} ranks was asked for {block.heads} heads; take ranks that divide "
                         "them")
    if sequence_parallel and t == 1:
        raise ValueError("sequence parallelism cuts what tensor parallelism leaves whole, and there is one rank; take "
                         "tensor_parallel=2 or more")
    if recompute not in RECOMPUTED:
        raise ValueError(f"recompute={recompute!r} is not in the published table; it has {', '.join(RECOMPUTED)}; for "
                         f"block, segment(k), {', '.join(INSIDE[1:])} take peak_nbytes")
    if recompute == "full":
        return 2 * sbh
    cut = 34 * sbh if sequence_parallel else 24 * sbh
    whole = 0 if sequence_parallel else 10 * sbh
    return whole + (cut + (square if recompute == "none" else 0)) // t


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


def _check(block: Block) -> None:
    refuse_unless_plain(block, "the count sbh(34 + 5as/h)", "take planning.activations, which counts any block")
    if block.itemsize != 2:
        raise ValueError(f"the count sbh(34 + 5as/h) is in bytes of 16-bit training, and the block has elements of "
                         f"{block.itemsize} bytes; give it itemsize=2, or take planning.activations")
