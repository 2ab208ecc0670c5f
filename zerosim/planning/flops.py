"""Floating-point operations of transformer blocks and whole models: forward, backward and a second time.

Legend: B batch, L tokens, d channels, H heads, d_h = d/H, F channels inside the feed-forward network, V vocabulary, n
blocks; P parameters of a whole model, D = B·L tokens of a step.

A multiplication and an addition are two operations. Causal attention is counted as the whole L x L square, as published
formulas count it. Of a whole model matrix products alone are counted.

Sources: Narayanan et al. 2021 (arXiv:2104.04473), appendix (the matmuls of a block: 24·BLd² + 4·BL²d forward, twice
that backward); Korthikanti et al. 2022 (arXiv:2205.05198), section 5 (what is cheap to compute again) and appendix A
(model and hardware FLOPs); Kaplan et al. 2020 (arXiv:2001.08361), section 2.1 (6PD); Chowdhery et al. 2022 (PaLM,
arXiv:2204.02311), appendix B (model FLOPs utilization). What an elementwise function costs is a convention; it is the
one by which the layers note it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from zerosim.models.transformer import Transformer
from zerosim.models.units import Recompute
from zerosim.numerics.checks import checked_count
from zerosim.planning.activations import Block, tensors

# Operations per element, a transcendental function counted as one. What layers note is held to these.
LAYERNORM_STATISTICS = 5        # the sum by a product with ones 2, the deviation 1, the sum of its squares 2
LAYERNORM_OUTPUT = 4            # deviation, ·1/σ, ·weight, +bias
LAYERNORM = LAYERNORM_STATISTICS + LAYERNORM_OUTPUT - 1  # forward has the deviation at hand
LAYERNORM_GRADIENT = 14
RMSNORM, RMSNORM_OUTPUT, RMSNORM_GRADIENT = 5, 2, 10
GELU, GELU_GRADIENT = 8, 14
SWIGLU, SWIGLU_GRADIENT = 5, 14  # per element of the product of both factors
ROTATION = 3                    # two products and a sum, per element of queries and keys, forward and back
SOFTMAX = 5                     # ·scale, -maximum, exp, sum, division
FROM_LOG_SUM = 3                # ·scale, -log-sum-exp, exp: P again in tiles
ROW_SUM = 2                     # P·dP and its sum; in tiles dO·O and its sum
SOFTMAX_GRADIENT = ROW_SUM + 3  # dS = P·(dP - that)·scale

# The steps of a block forward, in their order. LayerNorm stands for RMSNorm too, GELU for a gate; few blocks have norms
# of heads and rotations.
STEPS = ("LayerNorm 1", "QKV", "head norms", "rotation", "scores", "softmax", "values", "projection", "residual 1",
         "LayerNorm 2", "up", "GELU", "down", "residual 2")
LINEAR = ("QKV", "projection", "up", "down")
# What no policy makes again: backward needs the input of a part's last linear layer, and not the output.
CLOSING = ("projection", "residual 1", "down", "residual 2")
AGAIN: Mapping[str, tuple[str, ...]] = {
    "all": (), "selective": ("scores", "softmax"), "tiled": ("scores",),  # and P from its log-sum-exps
    "sub_block": tuple(step for step in STEPS if step not in CLOSING),
}
# What Korthikanti et al. 2022, section 5, make again selectively: all from Q, K and V to the attention output.
SELECTIVE_AS_PUBLISHED = ("scores", "values")


def matmul_flops(block: Block) -> int:
    """The operations of one block's matmuls forward: 24·BLd² + 4·BL²d in a plain block; backward makes twice as many.

    Of any block, two for each element of a weight and token that meets it, and two products of L x L for each head.
    Source: Narayanan et al. 2021, appendix; grouped queries, gates, latents, routers and experts by the same rule.
    """
    return sum(matmuls(block).values())


def matmuls(block: Block) -> dict[str, int]:
    """The operations of each matmul of one block forward.

    >>> matmuls(Block(1, 2, 6, 3))
    {'QKV': 432, 'scores': 48, 'values': 48, 'projection': 144, 'up': 576, 'down': 576}
    """
    of, per_channel, per_pair = block.sizes, 2 * block.stream, 2 * block.positions * block.tokens
    return {"QKV": 2 * block.positions * sum(map(prod, of.opening.values())), "scores": per_pair * of.query_channels,
            "values": per_pair * of.attention_channels, "projection": per_channel * of.attention_channels,
            "up": per_channel * (of.feed_forward * (1 + of.gated) + block.router),
            "down": per_channel * of.feed_forward}


def forward(block: Block) -> dict[str, int]:
    """The operations of one block forward, step by step: its products, biases, and elementwise functions.

    >>> sum(forward(Block(1, 2, 6, 3)).values()) > matmul_flops(Block(1, 2, 6, 3))
    True

    Of a Llama's block RMSNorm, rotations and the gate are counted where a plain one has LayerNorm and GELU.
    """
    of, stream, inside = block.sizes, block.stream, block.positions * block.sizes.feed_forward
    norm = (LAYERNORM if of.layer_norm else RMSNORM) * stream
    first, second = block.norms_of_parts
    elementwise = {"LayerNorm 1": norm * first, "head norms": RMSNORM * block.head_norms * _turned(block),
                   "rotation": ROTATION * (not of.layer_norm) * _turned(block), "softmax": SOFTMAX * block.square,
                   "residual 1": stream, "LayerNorm 2": norm * second, "residual 2": stream,
                   "GELU": (SWIGLU if of.gated else GELU) * inside}
    done = (matmuls(block), biases(block), elementwise)
    every = {step: sum(part.get(step, 0) for part in done) for step in STEPS}
    return {step: count for step, count in every.items() if count}


def biases(block: Block) -> dict[str, int]:
    """The elements to which each linear layer's bias is added: its outputs, where it has one."""
    of = block.sizes
    outputs = {"QKV": ("qkv", block.made_channels), "projection": ("projection", block.channels),
               "up": ("feed_forward", (1 + of.gated) * of.feed_forward), "down": ("feed_forward", block.channels)}
    return {layer: block.positions * width for layer, (name, width) in outputs.items() if name in of.biases}


def _turned(block: Block) -> int:
    """Elements of queries and keys."""
    return block.positions * (block.sizes.query_channels + block.sizes.key_channels)


def backward(block: Block, policy: str = "none") -> dict[str, int]:
    """The operations of one block backward, those that the policy makes again inside the block included.

    Of a linear layer: the gradients of input and weight, as many as forward each, and the bias's sums. Of attention:
    four products where forward has two, and dS. The outputs of the norms are made again under every policy, and where
    heads have norms, so are the turned queries and keys. Raises ValueError for a text that names no policy.
    """
    products, stream, inside = matmuls(block), block.stream, Recompute.parse(policy).inside
    norms, of = sum(block.norms_of_parts), block.sizes
    row_sums = ROW_SUM * (block.positions * of.attention_channels if inside == "tiled" else block.square)
    attention = 2 * (products["scores"] + products["values"])
    output, gradient = (LAYERNORM_OUTPUT, LAYERNORM_GRADIENT) if of.layer_norm else (RMSNORM_OUTPUT, RMSNORM_GRADIENT)
    return {**{layer: 2 * products[layer] + biases(block).get(layer, 0) for layer in LINEAR},
            "attention": attention + (SOFTMAX_GRADIENT - ROW_SUM) * block.square + row_sums,
            "head norms": (RMSNORM_OUTPUT + RMSNORM_GRADIENT) * block.head_norms * _turned(block),
            "rotation": ROTATION * (1 + block.head_norms) * (not of.layer_norm) * _turned(block),
            "GELU": (SWIGLU_GRADIENT if of.gated else GELU_GRADIENT) * block.positions * of.feed_forward,
            "LayerNorms": norms * gradient * stream, "LayerNorm outputs": norms * output * stream,
            "residuals": 2 * stream, "again": recomputed(block, policy=str(Recompute(inside=inside)))}


def _again(done: Mapping[str, int], recompute: Recompute) -> int:
    """Of the operations of one block forward, step by step, those that a policy makes a second time."""
    whole = sum(done.values()) if recompute.units_per_segment else 0
    return whole + sum(done.get(step, 0) for step in AGAIN[recompute.inside])


def recomputed(block: Block, blocks: int = 1, policy: str = "none") -> int:
    """Operations that n blocks make a second time: segments all of forward, finer policies less; joined, both.

    >>> example = Block(batch=4, tokens=2048, channels=4096, heads=32)
    >>> [round(recomputed(example, 1, policy) / matmul_flops(example), 2) for policy in ("block", "sub_block", "tiled")]
    [1.0, 0.62, 0.04]

    Raises ValueError for fewer than one block and for a text that names no policy.
    """
    recompute = Recompute.parse(policy)
    from_log_sums = FROM_LOG_SUM * block.square * (recompute.inside == "tiled")
    return checked_count("blocks", blocks, 1) * (_again(forward(block), recompute) + from_log_sums)


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


# How each kept tensor would be made again, and by which steps of forward.
MADE_BY: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "post-GELU": ("GELU of the pre-GELU", ("GELU",)), "probabilities": ("QKᵀ and softmax", ("scores", "softmax")),
    "attention output": ("P·V", ("values",)), "LayerNorm statistics": ("sums over each token", ()),
    "LayerNorm 2 input": ("projection, from the attention output", ("projection", "residual 1")),
    "pre-GELU": ("up", ("up",)), "QKV": ("qkv", ("QKV",)),
}


def savings(block: Block) -> list[Saving]:
    """The kept tensors of a block, ranked by bytes saved per operation made again; each from its kept neighbors.

    >>> [(row.tensor, float(f"{row.nbytes_per_flop:.2g}")) for row in savings(Block(4, 2048, 4096, 32))][:4]
    [('post-GELU', 0.25), ('probabilities', 0.0077), ('attention output', 0.00049), ('LayerNorm statistics', 0.00039)]

    Raises ValueError for a block that is not plain. Source of the idea: Korthikanti et al. 2022, section 5.
    """
    if not block.is_plain:
        of, width = block.sizes, block.channels
        raise ValueError(f"the ranking of tensors to make again is of blocks with {width} channels of queries and of "
                         f"keys and a feed-forward network of {4 * width}; this one has {of.query_channels}, "
                         f"{of.key_channels} and {'a gated' if of.gated else 'a'} network of {of.feed_forward}; take "
                         "recomputed")
    done, nbytes = forward(block), {name: held.nbytes for name, held in tensors(block).items()}
    nbytes["LayerNorm statistics"] = nbytes["LayerNorm 1 statistics"] + nbytes["LayerNorm 2 statistics"]
    rows = [Saving(name, nbytes[name], sum(done[step] for step in steps) or 2 * LAYERNORM_STATISTICS * block.stream,
                   made_by) for name, (made_by, steps) in MADE_BY.items()]
    return sorted(rows, key=lambda row: -row.nbytes_per_flop)


# -- a whole model in a step, by several published rules; and utilization ---------------------------------------------


@dataclass(frozen=True, slots=True)
class StepFlops:
    """The operations of one micro-batch: forward, backward, and forward a second time."""

    forward: int
    backward: int
    recomputed: int

    @property
    def model(self) -> int:
        """Operations that any implementation makes: forward and backward. Divided by peak and time it is the MFU."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """Operations of the device, the second forward included. Divided by peak and time it is the HFU."""
        return self.model + self.recomputed


def step_flops(model: Transformer, batch: int, tokens: int, policy: str = "none") -> StepFlops:
    """The matrix products of a micro-batch of B sequences of L tokens, exactly, of any decoder, and of BERT.

    >>> from zerosim.planning.shapes import PRESETS
    >>> flops = step_flops(PRESETS["llama-2-7b"], 4, 2048, "block")
    >>> flops.forward, flops.backward == 2 * flops.forward, round(flops.hardware / flops.model, 3)
    (117046448750592, True, 1.327)

    Backward makes two products for each of forward's. Segments are run again whole; the head and the embedding are not.
    Of experts a token meets those that it passes; attention is of the whole square, whatever a kernel leaves out.
    Of a GPT it is 96·BLnd²(1 + L/6d + V/16nd) where blocks are run again (Narayanan et al. 2021, equation 3).
    Raises ValueError for counts below one, a text that names no policy, and an encoder-decoder.
    Source: Narayanan et al. 2021, appendix; Korthikanti et al. 2022, appendix A.
    """
    blocks, ends = Block.kinds(model, batch, tokens), sum(ends_flops(model, batch, tokens))
    forward = sum(count * matmul_flops(block) for block, count in blocks.items()) + ends
    again = sum(count * recomputed_flops(block, policy) for block, count in blocks.items())
    return StepFlops(forward, 2 * forward, again)


def ends_flops(model: Transformer, batch: int, tokens: int) -> tuple[int, int]:
    """The operations of the embedding's products forward, few have any, and of the head's: 2·BLdV.

    >>> ends_flops(Transformer(8, 1, 2, 100), 3, 5)
    (0, 24000)

    Raises ValueError for counts below one.
    """
    sequences, square = checked_count("batch", batch, 1), model.channels**2
    of_each, narrow = 2 * sequences * checked_count("tokens", tokens, 1), model.embedding_channels
    widening = of_each * narrow * model.channels * (narrow != model.channels)
    head = of_each * (model.vocabulary * narrow + square * model.masked_head)
    return widening, widening + head + 2 * sequences * (square + 2 * model.channels) * model.next_sentence


def recomputed_flops(block: Block, policy: str = "none") -> int:
    """The products of one block that a policy makes a second time: all of forward for segments, finer ones less.

    >>> block, policies = Block(batch=4, tokens=2048, channels=4096, heads=32), ("block", "sub_block", "selective")
    >>> [round(recomputed_flops(block, policy) / matmul_flops(block), 3) for policy in policies]
    [1.0, 0.615, 0.038]

    Raises ValueError for a text that names no policy.
    """
    return _again(matmuls(block), Recompute.parse(policy))


def six_n(parameters: int, tokens: int) -> int:
    """6PD: forward and backward of D tokens, without attention's products. Source: Kaplan et al. 2020, section 2.1.

    >>> f"{six_n(174_600_000_000, 300_000_000_000):.3g}"
    '3.14e+23'

    Raises ValueError for counts below one.
    """
    return 6 * checked_count("parameters", parameters, 1) * checked_count("tokens", tokens, 1)


def eight_n(parameters: int, tokens: int) -> int:
    """8PD: as 6PD, with forward a second time. Source: Narayanan et al. 2021, equation 4.

    Raises ValueError for counts below one.
    """
    return 8 * checked_count("parameters", parameters, 1) * checked_count("tokens", tokens, 1)


def six_n_and_attention(parameters: int, blocks: int, query_channels: int, tokens: int) -> int:
    """6P + 12·n·(H·d_h)·L for each token, PaLM's count for its utilization. Source: Chowdhery et al. 2022, appendix B.

    >>> six_n_and_attention(540_350_000_000, 118, 48 * 256, 2048)
    3277734806784

    Raises ValueError for counts below one.
    """
    attention = 12 * checked_count("blocks", blocks, 1) * checked_count("query_channels", query_channels, 1)
    return six_n(parameters, 1) + attention * checked_count("tokens", tokens, 1)


def utilization(flops: float, seconds: float, flops_per_second: float, devices: int = 1) -> float:
    """The share of what the devices could compute that was computed: MFU of model FLOPs, HFU of hardware FLOPs.

    >>> utilization(1e15, 2.0, 1e15)
    0.5

    Raises ValueError for times and peaks that are not positive, negative FLOPs, and fewer than one device.
    Source: Chowdhery et al. 2022, section 4.1.
    """
    if not (flops >= 0 and seconds > 0 and flops_per_second > 0):
        raise ValueError(f"a utilization was asked for {flops:g} FLOPs in {seconds:g} s at {flops_per_second:g} per "
                         "second; FLOPs are 0 or more, the others above 0")
    return flops / (seconds * flops_per_second * checked_count("devices", devices, 1))
