"""What transformer blocks compute, forward, backward and a second time, in floating-point operations; pencil and paper.

Legend: B batch, L tokens, d channels, H heads, d_h = d/H, V vocabulary, n blocks. A multiplication and an addition are
two operations. Causal attention is counted as the whole L x L square, as published formulas count it.

Sources: Narayanan et al. 2021 (arXiv:2104.04473), appendix (the matmuls of a block: 24·BLd² + 4·BL²d forward, twice
that backward); Korthikanti et al. 2022 (arXiv:2205.05198), section 5 (what is cheap to compute again). What an
elementwise function costs is a convention; it is the one by which the layers note it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.planning.activations import Block, parse, peak, refuse_unless_plain, tensors
from zerosim.planning.cuts import checked_count

# Operations per element, a transcendental function counted as one.
LAYERNORM_STATISTICS = 5        # the sum by a product with ones 2, the deviation 1, the sum of its squares 2
LAYERNORM_OUTPUT = 4            # deviation, ·1/σ, ·weight, +bias
LAYERNORM = LAYERNORM_STATISTICS + LAYERNORM_OUTPUT - 1  # forward has the deviation at hand
LAYERNORM_GRADIENT = 14
GELU, GELU_GRADIENT = 8, 14
SOFTMAX = 5                     # ·scale, -maximum, exp, sum, division
FROM_LOG_SUM = 3                # ·scale, -log-sum-exp, exp: P again in tiles
ROW_SUM = 2                     # P·dP and its sum; in tiles dO·O and its sum
SOFTMAX_GRADIENT = ROW_SUM + 3  # dS = P·(dP - that)·scale


def forward(block: Block) -> dict[str, int]:
    """The operations of one block forward, step by step.

    >>> sum(forward(Block(1, 2, 6, 3)).values()) > matmul_flops(Block(1, 2, 6, 3))
    True

    Raises ValueError for a block that is not plain: what its elementwise functions cost, no layer has noted.
    """
    refuse_unless_plain(block, "the count of every step's operations", "take matmul_flops")
    return _forward_attention(block) | _forward_feed_forward(block)


def _forward_attention(block: Block) -> dict[str, int]:
    stream, d = block.stream, block.channels
    return {"LayerNorm 1": LAYERNORM * stream, "QKV": (2 * d + 1) * 3 * stream, **_attention(block),
            "projection": (2 * d + 1) * stream, "residual 1": stream}


def _forward_feed_forward(block: Block) -> dict[str, int]:
    stream, d = block.stream, block.channels
    return {"LayerNorm 2": LAYERNORM * stream, "up": (2 * d + 1) * 4 * stream, "GELU": GELU * 4 * stream,
            "down": (2 * 4 * d + 1) * stream, "residual 2": stream}


def _attention(block: Block) -> dict[str, int]:
    product = 2 * block.square * (block.channels // block.heads)
    return {"scores": product, "softmax": SOFTMAX * block.square, "values": product}


def backward(block: Block, policy: str = "none") -> dict[str, int]:
    """The operations of one block backward, those that the policy makes again inside the block included.

    Of a linear layer: the gradients of input and weight, as many as forward each, and the bias's sums. Of attention:
    four products where forward has two, and dS. The outputs of the LayerNorms are made again under every policy.
    Raises ValueError for a text that names no policy.
    """
    stream, d = block.stream, block.channels
    product = 2 * block.square * (block.channels // block.heads)
    linear = {"QKV": (4 * d + 1) * 3 * stream, "projection": 4 * d * stream + stream,
              "up": (4 * d + 1) * 4 * stream, "down": 4 * 4 * d * stream + stream}
    tiled = parse(policy)[1] == "tiled"
    row_sums = ROW_SUM * (stream if tiled else block.square)
    rest = {"attention": 4 * product + (SOFTMAX_GRADIENT - ROW_SUM) * block.square + row_sums,
            "GELU": GELU_GRADIENT * 4 * stream,
            "LayerNorms": 2 * LAYERNORM_GRADIENT * stream, "LayerNorm outputs": 2 * LAYERNORM_OUTPUT * stream,
            "residuals": 2 * stream}
    return linear | rest | {"again": _again(block, parse(policy)[1])}


def _again(block: Block, inside: str) -> int:
    """Operations that the inside of one block makes a second time."""
    done = forward(block)
    if inside == "sub_block":
        return sum(flops for step, flops in done.items() if step not in CLOSING)
    if inside == "tiled":
        return done["scores"] + FROM_LOG_SUM * block.square
    return done["scores"] + done["softmax"] if inside == "selective" else 0


# What no sub-block makes again: backward needs the input of its last linear layer, and not the output.
CLOSING = ("projection", "residual 1", "down", "residual 2")


def recomputed(block: Block, blocks: int = 1, policy: str = "none") -> int:
    """Operations that n blocks make a second time: segments all of forward, finer policies less; joined, both.

    >>> example = Block(batch=4, tokens=2048, channels=4096, heads=32)
    >>> [round(recomputed(example, 1, policy) / matmul_flops(example), 2) for policy in ("block", "sub_block", "tiled")]
    [1.0, 0.62, 0.04]

    Raises ValueError for fewer than one block and for a text that names no policy.
    """
    segment, inside = parse(policy)
    whole = sum(forward(block).values()) if segment is not None else 0
    return checked_count("blocks", blocks, 1) * (whole + _again(block, inside))


def matmul_flops(block: Block) -> int:
    """The operations of one block's matmuls forward: 24·BLd² + 4·BL²d in a plain block; backward makes twice as many.

    Of any block, two for each element of a weight and each token, and two products of L x L for each head.
    Source: Narayanan et al. 2021, appendix; grouped queries and gates by the same rule.
    """
    return sum(matmuls(block).values())


def matmuls(block: Block) -> dict[str, int]:
    """The operations of each matmul of one block forward.

    >>> matmuls(Block(1, 2, 6, 3))
    {'QKV': 432, 'scores': 48, 'values': 48, 'projection': 144, 'up': 576, 'down': 576}
    """
    per_channel = 2 * block.stream
    product = 2 * block.positions * block.tokens * block.query_channels
    return {"QKV": per_channel * (block.query_channels + 2 * block.key_channels), "scores": product, "values": product,
            "projection": per_channel * block.query_channels,
            "up": per_channel * block.feed_forward * (1 + block.gated), "down": per_channel * block.feed_forward}


def step_matmul_flops(block: Block, blocks: int, vocabulary: int, policy: str = "none") -> int:
    """The matmuls of a model forward and backward, and forward again where there are segments, as published.

    >>> B, s, h, l, V = 4, 2048, 4096, 32, 51200
    >>> exactly = 96 * B * s * l * h**2 + 16 * B * s**2 * l * h + 6 * B * s * h * V
    >>> step_matmul_flops(Block(B, s, h, 32), l, V, "block") == exactly
    True

    That is 96·Bslh²(1 + s/6h + V/16lh). Policies finer than segments make less again, and are not in this count.
    Raises ValueError for counts below one and for a text that names no policy.
    Source: Narayanan et al. 2021, equation 3.
    """
    passes = 3 if parse(policy)[0] is None else 4
    logits = 6 * block.stream * checked_count("vocabulary", vocabulary, 1)
    return passes * checked_count("blocks", blocks, 1) * matmul_flops(block) + logits


@dataclass(frozen=True, slots=True)
class Saving:
    """One tensor that could be made again instead of kept: bytes, operations, and how it would be made."""

    tensor: str
    nbytes: int
    flops: int
    made_by: str

    @property
    def nbytes_per_flop(self) -> float:
        """Bytes saved for each operation made again."""
        return self.nbytes / self.flops


MADE_BY: Mapping[str, str] = {
    "post-GELU": "GELU of the pre-GELU", "probabilities": "QKᵀ and softmax", "attention output": "P·V",
    "LayerNorm statistics": "sums over each token", "LayerNorm 2 input": "projection, from the attention output",
    "pre-GELU": "up", "QKV": "qkv",
}


def savings(block: Block) -> list[Saving]:
    """The kept tensors of a block, ranked by bytes saved per operation made again; each from its kept neighbors.

    >>> [(row.tensor, float(f"{row.nbytes_per_flop:.2g}")) for row in savings(Block(4, 2048, 4096, 32))][:4]
    [('post-GELU', 0.25), ('probabilities', 0.0077), ('attention output', 0.00049), ('LayerNorm statistics', 0.00039)]

    Source of the idea: Korthikanti et al. 2022, section 5.
    """
    done, held = forward(block), tensors(block)
    flops = {"post-GELU": done["GELU"], "probabilities": done["scores"] + done["softmax"],
             "attention output": done["values"], "LayerNorm statistics": 2 * LAYERNORM_STATISTICS * block.stream,
             "LayerNorm 2 input": done["projection"] + done["residual 1"], "pre-GELU": done["up"], "QKV": done["QKV"]}
    nbytes: dict[str, int] = {name: held[name].nbytes for name in flops if name in held}
    nbytes["LayerNorm statistics"] = held["LayerNorm 1 statistics"].nbytes + held["LayerNorm 2 statistics"].nbytes
    rows = [Saving(name, nbytes[name], flops[name], made_by) for name, made_by in MADE_BY.items()]
    return sorted(rows, key=lambda row: -row.nbytes_per_flop)


def table(block: Block, blocks: int) -> list[dict[str, Any]]:
    """For each policy the bytes that n blocks keep at their peak, and the operations made again per forward one."""
    once = sum(forward(block).values()) * blocks
    return [{"policy": policy, "nbytes": peak(block, blocks, policy).nbytes,
             "recomputed_flops": recomputed(block, blocks, policy),
             "share_of_forward": recomputed(block, blocks, policy) / once}
            for policy in ("none", "tiled", "selective", "sub_block", "block")]
