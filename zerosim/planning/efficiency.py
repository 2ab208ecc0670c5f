"""The seconds of a step's arithmetic as runtimes reach them: shares of a device's peaks, by measurement and by fit.

Legend: p = B·L tokens of a micro-batch, B sequences of L; I inputs and O outputs of a matrix product.

- A product takes its operations at the share of the peak that large ones were measured to reach, and its operands at
  the memory's rate, one after the other: its first tiles are loaded, and its last ones stored, beside nothing. So small
  and narrow products reach less.
- Attention takes what its kernel computes, half of the square, at that kernel's measured share; less where L is short.
  Of a window shorter than L a kernel that knows windows computes what is in it; SDPA is handed a mask, and computes the
  whole square.
- What is elementwise takes the bytes that its operators read and write, by a table: eager ones more than fused ones.
- Communication behind computation takes memory and processors from it, and makes it longer (contention).
- In fp8, linear layers multiply at its rate; their inputs, weights and gradients are cast first, each once.
- The host launches one kernel after the other: a block takes no less than its launches do.

Waiting for data is not in it.

Sources: Williams, Waterman & Patterson 2009 (the roofline, of which the two times are added here); each constant has
its own in efficiency.toml. What is fitted stands apart there: on every second published step of
`zerosim.course.published`; the other half gives the error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from zerosim.models.transformer import Transformer
from zerosim.models.units import Recompute
from zerosim.numerics.checks import unknown_name
from zerosim.numerics.files import facts
from zerosim.planning import nccl
from zerosim.planning.hardware import Device, Network
from zerosim.planning.shapes import ModelShape, UnitShape
from zerosim.planning.step_activations import Place

ITEMSIZE, FP8_ITEMSIZE = 2, 1
CAST_NBYTES = 4            # of each element: 2 are read, 1 is written twice, once transposed
BACKWARD_ATTENTION = 2.5   # five products of L x L for forward's two (Dao et al. 2022, algorithm 4)
SELECTIVE = "selective"    # torchtitan's list: every second product is made again, and what is elementwise


@lru_cache(maxsize=1)
def constants() -> Mapping[str, Any]:
    """The tables of efficiency.toml."""
    return facts(__package__, "efficiency")


class Product(NamedTuple):
    """A linear layer of a block, or a stack of so many, each of which a share of the tokens passes; `bits` of each
    weight where they are quantized, as of a TensorShape."""

    name: str
    stack: int
    share: float
    inputs: int
    outputs: int
    frozen: bool = False
    bits: Fraction | int = 0


def products(of: Transformer, block: UnitShape) -> tuple[Product, ...]:
    """The linear layers of a block, in its order.

    >>> from zerosim.planning.shapes import PRESETS, model_of
    >>> gpt2 = PRESETS["gpt2"]
    >>> [each[3:5] for each in products(gpt2, model_of("gpt2", gpt2).units[1])]
    [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    """
    found = list[Product]()
    for tensor in block.tensors:
        layer, _, part = tensor.name.rpartition(".")
        if part == "weight" and len(tensor.shape) > 1:
            *experts, inputs, outputs = tensor.shape
            share = of.experts.per_token / of.experts.count if experts and of.experts else 1.0
            found.append(Product(layer, prod(experts), share, inputs, outputs, tensor.frozen, tensor.bits))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Efficiency:
    """Rates that a device reaches under a runtime, in operations and bytes per second.

    `products` are those in 16 bits, by `source`; `linear` those of linear layers; `attention` forward and backward,
    where `causal` of half the square, and where the kernel knows `windows` of what is in them; `elementwise` bytes and
    launches by operator; `contention` the share of hidden copies that computation gets longer by; `network` of a
    network's rate. The host takes `launch` seconds to launch a kernel, and updates `host_update` parameters a second.
    `error` is the mean error of held-out steps; with none `published` of a device, the largest so predicted.
    """

    device: Device
    runtime: str
    products: float
    linear: float
    attention: tuple[float, float]
    half_tokens: int
    causal: bool
    windows: bool
    memory: float
    elementwise: Mapping[str, Any]
    contention: float
    network: float
    launch: float
    host_update: float
    fp8: bool
    error: float
    published: bool
    source: str

    def product_seconds(self, positions: float, inputs: int, outputs: int, *, linear: bool = True) -> float:
        """Seconds of the product (p, I) x (I, O).

        >>> from zerosim.planning.hardware import device
        >>> a100 = efficiency(device("a100-80"), "fsdp2")
        >>> [round(2 * n**3 / a100.product_seconds(n, n, n) / 312e12, 2) for n in (256, 1024, 4096, 16384)]
        [0.22, 0.49, 0.71, 0.81]
        """
        itemsize, rate = (FP8_ITEMSIZE, self.linear) if linear and self.fp8 else (ITEMSIZE, self.products)
        nbytes = itemsize * inputs * (positions + outputs) + ITEMSIZE * positions * outputs
        return 2 * positions * inputs * outputs / rate + nbytes / self.memory

    def unit_seconds(self, model: ModelShape, batch: int, tokens: int,
                     recompute: float | str = "none") -> dict[Place, float]:
        """Seconds of each unit of a decoder, forward, in the loss and back, in a micro-batch.

        What runs forward again is in backward: of `recompute` blocks a share, "selective", or what a policy's text says
        of whole blocks. Frozen weights have no gradients, and what comes before the first that is trained goes not
        back. Raises ValueError for a text that names none, and for what is no decoder of known sizes.
        """
        of, positions, last = model.transformer, batch * tokens, len(model.units) - 1
        if of is None or of.encoder_blocks:
            raise ValueError(f"the seconds of {model.name} were asked for, which is no decoder of known sizes; name a "
                             "decoder, as llama-2-7b")
        share = (recompute if isinstance(recompute, float | int) else recompute != SELECTIVE and
                 bool(Recompute.parse(recompute).segments(1)))
        embedding = 2 * ITEMSIZE * positions * of.channels / self.memory
        head = self.product_seconds(positions, of.channels, of.vocabulary, linear=False)
        found: dict[Place, float] = {
            ("forward", 0): embedding, ("backward", 0): embedding,
            ("forward", last): head, ("backward", last): 2 * head,
            ("loss", last): positions * of.vocabulary * sum(self.elementwise["logits"]) / self.memory}
        ends = model.units[0 if of.tied else last].tensors
        found["backward", last] -= head * all(one.frozen for one in ends if one.name in ("wte", "lm_head.weight"))
        found["backward", 0] *= model.first_trained == 0
        of_kind = dict[int, tuple[float, float]]()  # equal blocks take as long
        for unit, kind in enumerate(model.first_equal, 1):
            if kind not in of_kind:
                listed = products(of, model.units[unit])
                once = [each.stack * self.product_seconds(positions * each.share, each.inputs, each.outputs)
                        for each in listed]
                launches = (self.launch * sum(times * row[2 + way] for row, _, times in self._operators(of, listed))
                            for way in (0, 1))
                gradients = sum(seconds for each, seconds in zip(listed, once, strict=True) if not each.frozen)
                forward, back = (max(sum(once) + way * gradients + self._beside(of, listed, batch, tokens, way), least)
                                 for way, least in enumerate(launches))
                again = share * forward if recompute != SELECTIVE else (
                    sum(once[1::2]) + self._elementwise_nbytes(of, listed, positions, 0) / self.memory)
                of_kind[kind] = forward, again + back
            found["forward", unit], found["backward", unit] = of_kind[kind]
            found["backward", unit] *= unit >= model.first_trained
        return found

    def contention_seconds(self, hidden_seconds: float, network: Network) -> float:
        """Seconds by which computation gets longer while so many seconds of communication hide behind it.

        What takes memory and processors is bytes that are copied, at a rate up to that of the links inside a node; of
        a slower network most is waiting.
        """
        share, between = 1.0, network.between
        if between is not None and network.ranks_per_node is not None:
            share = min(1.0, between.bytes_per_second * network.ranks_per_node / network.inside.bytes_per_second)
        return self.contention * hidden_seconds * share

    def collective_seconds(self, operation: str, ranks: int, nbytes: int, network: Network) -> float:
        """Seconds of a collective by NCCL's own model, at the runtime's share of the network."""
        return nccl.collective_seconds(operation, ranks, nbytes, network) / self.network if ranks > 1 else 0.0

    def _beside(self, of: Transformer, listed: Sequence[Product], batch: int, tokens: int, way: int) -> float:
        """Seconds of a block beside its products: attention, elementwise operators and casts; way 0 forward, 1 back."""
        positions, square = batch * tokens, batch * tokens**2
        flops = 2 * square * (of.query_channels + of.attention_channels) * (1, BACKWARD_ATTENTION)[way]
        nbytes = self._elementwise_nbytes(of, listed, positions, way)
        if self.causal:
            edge, width = self.half_tokens / tokens, of.window / tokens
            share = of.windowed / of.blocks * (width < 1)
            half = (1 + edge) / 2
            in_window = min(half, width - width**2 / 2 + edge) if self.windows else 1.0
            flops *= (1 - share) * half + share * in_window
        else:
            nbytes += self.elementwise["probability"][way] * square * of.heads
        nbytes += sum((ITEMSIZE + each.bits / 8) * each.stack * each.inputs * each.outputs  # made wide for each product
                      for each in listed if each.bits)
        if self.fp8:
            nbytes += CAST_NBYTES * sum(each.stack * (positions * each.share * each.outputs if way else
                                                      each.inputs * (positions * each.share + each.outputs))
                                        for each in listed)
        return flops / self.attention[way] + nbytes / self.memory

    def _elementwise_nbytes(self, of: Transformer, listed: Sequence[Product], positions: int, way: int) -> float:
        """Bytes of a block's elementwise operators."""
        return float(positions * sum(width * row[way] for row, width, _ in self._operators(of, listed)))

    def _operators(self, of: Transformer, listed: Sequence[Product]) -> list[tuple[Sequence[int], float, int]]:
        """A block's operators: bytes forward and back, and kernels, of each; how wide they are, and how often they run.

        What is inside the feed-forward network is as wide as its last product.
        """
        inside = sum(each.stack * each.share * each.inputs for each in listed if each.name.endswith("down"))
        adapters = [each.outputs for each in listed if each.name.endswith("lora_b")]
        heads = of.query_channels + of.key_channels
        return [(self.elementwise[name], width * times, times) for name, width, times in (
            ("layer_norm" if of.layer_norm else "rms_norm", of.channels, 2), ("residual", of.channels, 2),
            ("gate" if of.gated else "gelu", inside, 1), ("rotation", heads, int(not of.positions)),
            ("adapter", sum(adapters) / (len(adapters) or 1), len(adapters)),
            ("rms_norm", heads / 2, 2 * of.head_norms), ("attention" if self.causal else "unfused_attention", 0, 1),
            ("product", 0, sum(each.stack for each in listed)))]


@lru_cache(maxsize=64)
def efficiency(device: Device, runtime: str = "fsdp2", *, compiled: bool = False, attention: str | None = None,
               format: str = "bf16", linear: str | None = None) -> Efficiency:
    """The efficiency of a device under a runtime, eager or compiled; its kernel of attention unless another is named.

    `format` is that of products, `linear` that of linear layers, where it is fp8. A device that was not measured has
    the defaults of its tables. Raises ValueError for a runtime or kernel that the tables lack, and for a format that
    the device lacks.
    """
    tables = constants()
    if runtime not in tables["runtime"]:
        raise unknown_name(f"no efficiency of runtime={runtime!r} is known", runtime, tables["runtime"])
    of_runtime = tables["runtime"][runtime]
    name = of_runtime["attention"] if attention is None else attention
    if name not in tables["attention"]:
        raise unknown_name(f"no kernel of attention is called {name!r}", name, tables["attention"])
    kernel, fitted = tables["attention"][name], tables["fitted"][of_runtime["fitted"]]
    factor, own = fitted.get(device.name, fitted["default"]), tables["products"].get(device.name, {})
    peak, share = device.flops_per_second_in(format) * factor["factor"], tables["products"]["default"] | own
    rate = peak * share["share"]
    faster = rate if linear is None else device.flops_per_second_in(linear) * factor["factor"] * share["fp8"]
    forward, backward = kernel.get(device.name, kernel["default"])
    return Efficiency(
        device, runtime, rate, faster, (forward * peak, backward * peak), kernel["half_tokens"], kernel["causal"],
        kernel.get("windows", False), device.memory_bytes_per_second * of_runtime["memory"],
        tables["elementwise"]["fused" if compiled or of_runtime["fused"] else "eager"], of_runtime["contention"],
        of_runtime["network"], tables["host"]["launch_seconds"], tables["host"][of_runtime["host_update"]],
        linear is not None, factor["error"], device.name in fitted, share["source"])
