"""What a whole model computes in a step, in floating-point operations, by several published rules; and utilization.

Legend: P parameters, B batch, L tokens of a sequence, D = B·L tokens of a step, d channels, V vocabulary, n blocks. A
multiplication and an addition are two operations. All count matrix products alone; attention is the whole square.

Sources: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1 (6PD); Narayanan et al. 2021 (arXiv:2104.04473), appendix;
Korthikanti et al. 2022 (arXiv:2205.05198), appendix A (model and hardware FLOPs); Chowdhery et al. 2022 (PaLM,
arXiv:2204.02311), appendix B (model FLOPs utilization).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from zerosim.planning.activations import Block, parse
from zerosim.planning.cuts import checked_count
from zerosim.planning.shapes import Transformer
from zerosim.planning.transformer_flops import CLOSING, matmul_flops, matmuls

# What a finer policy makes again of a block's products; the last of each part no backward asks for.
AGAIN: Mapping[str, tuple[str, ...]] = {
    "all": (), "selective": ("scores",), "tiled": ("scores",),
    "sub_block": tuple(name for name in ("QKV", "scores", "values", "projection", "up", "down") if name not in CLOSING),
}
# What Korthikanti et al. 2022, section 5, make again selectively: all from Q, K and V to the attention output.
SELECTIVE_AS_PUBLISHED = ("scores", "values")


@dataclass(frozen=True, slots=True)
class StepFlops:
    """The operations of one micro-batch: forward, backward, and forward a second time."""

    forward: int
    backward: int
    recomputed: int

    @property
    def model(self) -> int:
        """What any implementation must compute: forward and backward. Divided by peak and time it is the MFU."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """What the device computes, the second forward included. Divided by peak and time it is the HFU."""
        return self.model + self.recomputed


def step_flops(model: Transformer, batch: int, tokens: int, policy: str = "none") -> StepFlops:
    """The matrix products of a micro-batch of B sequences of L tokens, exactly, of any decoder.

    >>> from zerosim.planning.shapes_presets import PRESETS
    >>> flops = step_flops(PRESETS["llama-2-7b"], 4, 2048, "block")
    >>> flops.forward, flops.backward == 2 * flops.forward, round(flops.hardware / flops.model, 3)
    (117046448750592, True, 1.327)

    Backward makes two products for each of forward's. Segments are run again whole; the head and the embedding are not.
    Raises ValueError for counts below one, a text that names no policy, and an encoder-decoder.
    Source: Narayanan et al. 2021, appendix; Korthikanti et al. 2022, appendix A.
    """
    block = model.block(batch, tokens)
    forward = model.blocks * matmul_flops(block) + logits_flops(block, model.vocabulary)
    return StepFlops(forward, 2 * forward, model.blocks * recomputed_flops(block, policy))


def logits_flops(block: Block, vocabulary: int) -> int:
    """The operations of the head's product forward: 2·BLdV."""
    return 2 * block.stream * checked_count("vocabulary", vocabulary, 1)


def recomputed_flops(block: Block, policy: str = "none") -> int:
    """The products of one block that a policy makes a second time: all of forward for segments, finer ones less.

    >>> block, policies = Block(batch=4, tokens=2048, channels=4096, heads=32), ("block", "sub_block", "selective")
    >>> [round(recomputed_flops(block, policy) / matmul_flops(block), 3) for policy in policies]
    [1.0, 0.615, 0.038]

    Raises ValueError for a text that names no policy.
    """
    segment, inside = parse(policy)
    products = matmuls(block)
    return sum(products[name] for name in AGAIN[inside]) + (matmul_flops(block) if segment is not None else 0)


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
