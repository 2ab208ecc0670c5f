"""The quantities that published rows name, each computed by the planner's own formulas.

Legend: N ranks; a vector is what one rank contributes, n bytes of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerosim.models.transformer import Transformer
from zerosim.numerics.checks import LINEAR_LAYERS
from zerosim.numerics.formats import format_of
from zerosim.planning import activations, closed_forms, collectives, flops, hardware
from zerosim.planning.activations import Block
from zerosim.planning.closed_forms import STAGES, Job
from zerosim.planning.collectives import Sent, sent
from zerosim.planning.conventions import Convention, convention_of, estimate_nbytes, states_nbytes
from zerosim.planning.cost import BUS_FACTORS, bus_bytes_per_second, cost
from zerosim.planning.cuts import ceil_cut
from zerosim.planning.finetuning import STORED, lora
from zerosim.planning.hardware import OVERHEADS, Link, Network
from zerosim.planning.shapes import PRESETS, ModelShape, model_of, model_of_parameters, model_shape

ELEMENTS_PER_RANK = 240  # which 2^m divides wherever some of the ranks sit out
SLOW = Network(Link("one byte a second", 1, 0, "made up, so that seconds are bytes", "today"))
UNITS = {"B": 1, "GB": 10**9, "GiB": 2**30, "MiB": 2**20, "TiB": 2**40}
A100_FLOPS_PER_SECOND = 312e12  # bf16, dense: NVIDIA A100 data sheet, 2021
TEXTS_OVERHEADS = ("runtime context", "allocator fragmentation", "communication channels")
MANY = 10**6


def states(parameters: int, ranks: int, stage: int, convention: str = "zero-paper") -> float:
    """GB at rest on one rank, Adam."""
    held = states_nbytes(model_of_parameters(parameters), ranks, STAGES[stage], convention)
    return sum(held.values()) / 1e9


def states_of_blocks(blocks: int, channels: int, convention: str) -> float:
    """Of 12nd² parameters: the weights of the blocks alone."""
    model = model_of("blocks", Transformer(channels, blocks, 1, 1, biases=()))
    weights = sum(tensor.parameters for tensor in model.tensors if len(tensor.shape) == 2 and tensor.name != "wte")
    return estimate_nbytes(weights, 1, STAGES[0], convention) / UNITS["TiB"]


def estimate(ranks: int, stage: int, convention: str | Convention, model: str = "", parameters: int = 0,
             largest_layer: int = 0, unit: str = "GiB", **states: int) -> float:
    """The number that an estimator prints of a model whose shapes are known, or that knows a number of parameters."""
    if model:
        shape = model_shape(model)
        parameters, largest_layer = shape.parameters, shape.largest_layer_parameters
    held = estimate_nbytes(parameters, ranks, STAGES[stage], convention, largest_layer=largest_layer, **states)
    return held / UNITS[unit]


def estimate_beside_host(ranks: int, **of_model: Any) -> float:
    """DeepSpeed's third case of ZeRO-3: the shares of 16-bit parameters and the largest layer stay on the device."""
    on_device = replace(convention_of("deepspeed-zero3"), gradient_copy=0, master=0)
    return estimate(ranks, 3, on_device, **of_model, optimizer_nbytes=0)


def kinds_of_preset(model: str, kinds: Sequence[str], multiple: int = 1, unit: str = "GiB") -> float:
    """Some kinds of a model's states, on one rank."""
    held = states_nbytes(model_shape(model, vocabulary_multiple=multiple), 1, STAGES[0])
    return sum(held[kind] for kind in kinds) / UNITS[unit]


def bytes_per_parameter(stage: int, ranks: int, convention: str = "zero-paper") -> float:
    """At rest on one rank, Adam, without padding."""
    replicated, shared = convention_of(convention).per_parameter(STAGES[stage])
    return replicated + shared / ranks


def largest_model(capacity_nbytes: int, ranks: int, stage: int, model_parallel: int) -> float:
    """Billions of parameters whose states fill the capacity."""
    return model_parallel * capacity_nbytes / bytes_per_parameter(stage, ranks) / 1e9


def vectors(stage: int, micro_batches: int) -> float:
    """Sent in a step by many ranks, in vectors of all parameters: the limit of (N-1)/N."""
    return float(sum(closed_forms.vectors_sent(Job((MANY,), 2, STAGES[stage], micro_batches=micro_batches)).values()))


def vectors_at(stage: int, ranks: int) -> float:
    """Sent in a step by one of N ranks, in vectors of all parameters."""
    job = Job((MANY,), ranks, STAGES[stage])
    sent = closed_forms.sent_nbytes(job)
    return (sent["gradients"][0] + sent["parameters"][0]) / (2 * sum(job.padded_lengths))


def all_reduce_then_all_gather(ranks: int) -> float:
    """Sent by one of N ranks that all-reduces gradients and then gathers parameters, in vectors."""
    sent = [collectives.sent(name, "ring", ceil_cut(ranks * MANY, ranks), 1) for name in ("all_reduce", "all_gather")]
    return sum(part.nbytes[0] for part in sent) / (ranks * MANY)


def kept(blocks: int, parameters: int = 0, **block: Any) -> float:
    """The elements that n blocks keep, in GB of 16 bit, and Adam's states of so many parameters."""
    return (activations.peak_nbytes(Block(**block), blocks).elements * 2 + 16 * parameters) / 1e9


def tensor(name: str, blocks: int, unit: float, **block: Any) -> float:
    """Bytes that n blocks keep of one tensor, in units of so many bytes."""
    return blocks * activations.tensors(Block(**block))[name].nbytes / unit


def quadratic_peak(blocks: int, policy: str, **block: Any) -> float:
    """The part of the peak that grows with L²: what it exceeds the same policy's peak without probabilities by."""
    found, sizes = activations.peak_nbytes(Block(**block), blocks, policy), Block(**block)
    linear = {"none": 14 * blocks, "block": blocks + 13}[policy]
    return (found.elements - linear * sizes.stream) * 2 / 1e9


def largest_in_blocks(**block: Any) -> float:
    """The largest tensor of a block, in BLd elements."""
    return max(part.elements for part in activations.tensors(Block(**block)).values()) / Block(**block).stream


def selective_saving(**block: Any) -> float:
    """Per cent of what a layer keeps that selective recomputation spares."""
    none, selective = (layer_nbytes(Block(**block), recompute=name) for name in ("none", "selective"))
    return 100 * (1 - selective / none)


def layer(tensor_parallel: int, sequence_parallel: bool, recompute: str, **block: Any) -> float:
    """Bytes that a layer keeps by the literature's count, in sbh."""
    sizes = Block(**block)
    return layer_nbytes(sizes, tensor_parallel=tensor_parallel, sequence_parallel=sequence_parallel,
                        recompute=recompute) / sizes.stream


def days(model: str, tokens: int, devices: int, achieved: float) -> float:
    """Of a training at 8 operations per parameter and token."""
    return flops.eight_n(model_shape(model).parameters, tokens) / (devices * achieved) / 86_400


def days_of_steps(model: str, sequence: int, tokens: int, devices: int, achieved: float) -> float:
    """By the matrix products of each sequence, blocks forward a second time: Narayanan et al. 2021, equation 3."""
    shape = PRESETS[model]
    return flops.step_flops(shape, 1, sequence, "block").hardware * (tokens / sequence) / (devices * achieved) / 86_400


def mfu(model: str, batch: int, tokens: int, seconds: float, devices: int) -> float:
    """Per cent of an A100's peak that the model's operations reach."""
    step = flops.step_flops(PRESETS[model], batch, tokens)
    return 100 * flops.utilization(step.model, seconds, A100_FLOPS_PER_SECOND, devices)


def selective_flops(**block: Any) -> float:
    """Per cent of forward; attention's two products again, as the paper recomputes them."""
    products = flops.matmuls(Block(**block))
    again = sum(products[name] for name in flops.SELECTIVE_AS_PUBLISHED)
    return 100 * again / sum(products.values())


def hardware_over_model(model: str, batch: int, tokens: int) -> float:
    """Operations made, attention's products twice, beside those of the model."""
    shape = PRESETS[model]
    step, products = flops.step_flops(shape, batch, tokens), flops.matmuls(Block.of(shape, batch, tokens))
    again = shape.blocks * sum(products[name] for name in flops.SELECTIVE_AS_PUBLISHED)
    return (step.model + again) / step.model


def again(policy: str, **block: Any) -> float:
    """Operations made again, beside those of a step."""
    return flops.recomputed_flops(Block(**block), policy) / (3 * flops.matmul_flops(Block(**block)))


def palm_mfu(tokens_per_second: float, devices: int, peak: float, **model: Any) -> float:
    """Per cent of the peak, counted as PaLM counts."""
    return 100 * flops.utilization(flops.six_n_and_attention(**model) * tokens_per_second, 1, peak, devices)


def six_n_mfu(parameters: int, tokens_per_second: float, devices: int, peak: float) -> float:
    """Per cent of the peak at 6 operations per parameter and token."""
    return 100 * flops.utilization(flops.six_n(parameters, 1) * tokens_per_second, 1, peak, devices)


def derived(states: Callable[..., float], bytes_per_parameter: Callable[..., float], vectors: Callable[..., float],
            kept: Callable[..., float]) -> dict[str, Callable[..., float]]:
    """Four quantities and what follows from them, by name: the same whether formulas or runs say the four."""
    return {
        "states": states, "bytes per parameter": bytes_per_parameter, "vectors": vectors, "kept": kept,
        "kept and states": kept,
        "free": lambda parameters, capacity_nbytes: capacity_nbytes / 1e9 - states(parameters, 1, 0),
        "redundant": lambda parameters, ranks: (ranks - 1) * states(parameters, 1, 0),
        "parameters of a terabyte": lambda: 1e12 / bytes_per_parameter(0, 1) / 1e9,
        "states beside fp32": lambda: bytes_per_parameter(0, 1) / bytes_per_parameter(0, 1, "fp32"),
        "vectors beside ddp": lambda stage, micro_batches: vectors(stage, micro_batches) / vectors(0, micro_batches),
        "added": lambda longer, blocks, **block: kept(blocks, **{**block, "tokens": longer}) - kept(blocks, **block),
    }


def gpt(biases: Iterable[str] = LINEAR_LAYERS, **sizes: Any) -> ModelShape:
    """A GPT of these sizes; ``biases`` is a list where it is read from a file."""
    return model_of("gpt", Transformer(biases=tuple(biases), **sizes))


def without_embedding(vocabulary: int, channels: int, **sizes: Any) -> int:
    """A GPT's parameters without its embedding and its head."""
    return gpt(vocabulary=vocabulary, channels=channels, **sizes).parameters - 2 * vocabulary * channels


def busiest_vectors(collective: str, algorithm: str, ranks: int) -> float:
    """Through the busiest links one after the other, in vectors of n bytes."""
    found = cost(collective, algorithm, ceil_cut(ELEMENTS_PER_RANK * ranks, ranks), 1, SLOW)
    return found.seconds / found.nbytes


def sent_evenly(collective: str, algorithm: str, ranks: int) -> Sent:
    """The traffic of a vector that all algorithms cut evenly, of one byte an element."""
    return sent(collective, algorithm, ceil_cut(ELEMENTS_PER_RANK * ranks, ranks), 1)


def transfer_milliseconds(collective: str, algorithm: str, ranks: int, nbytes: int, link: str) -> float:
    """Without latency."""
    network = Network(hardware.link(link))
    return 1e3 * cost(collective, algorithm, ceil_cut(nbytes, ranks), 1, network).transfer_seconds


def gigabytes_per_second(bytes_per_second: float | None) -> float | None:
    """10⁹ bytes; None of None, which is the bandwidth of what takes no time."""
    return None if bytes_per_second is None else bytes_per_second / 1e9


# -- the literature's count of activations, sbh(34 + 5as/h) bytes a block, under its policies and parallelisms ---------
# s tokens of a sequence (L), b sequences (B), h channels (d), a heads (H), t ranks of tensor parallelism, as published.
# Bytes are those of 16-bit training; masks of dropout take one byte an element.
# Source: Korthikanti et al. 2022, "Reducing activation recomputation" (arXiv:2205.05198), sections 4 and 5.

# Bytes of each tensor, as multiples of sbh, section 4.1: those that tensor parallelism leaves whole on each of t ranks,
# and those that it cuts.
WHOLE: Mapping[str, int] = {
    "LayerNorm 1 input": 2, "QKV input": 2, "attention mask": 1, "LayerNorm 2 input": 2, "up input": 2,
    "feed-forward mask": 1,
}
CUT: Mapping[str, int] = {"Q and K": 4, "V": 2, "projection input": 2, "pre-GELU": 8, "post-GELU": 8}
# The same as multiples of as²b, which selective recomputation drops, and tensor parallelism cuts too.
SQUARE: Mapping[str, int] = {"softmax output": 2, "probabilities' mask": 1, "dropped probabilities": 2}


def layer_nbytes(block: Block, *, tensor_parallel: int = 1, sequence_parallel: bool = False,
                 recompute: str = "none") -> int:
    """Bytes that one block keeps on each of t ranks: a row of the published table, sbh(34 + 5as/h) on one.

    >>> block = Block(batch=1, tokens=2048, channels=12288, heads=96)
    >>> sbh = block.stream
    >>> layer_nbytes(block, tensor_parallel=8, sequence_parallel=True, recompute="selective") == sbh * 34 // 8
    True

    Tensor parallelism cuts all but 10 sbh, sequence parallelism those too; selective recomputation drops 5as²b; full
    recomputation keeps the 2 sbh of the input, on every rank. The project's own layers keep less: no outputs of
    LayerNorms (4 sbh), no dropout masks of one byte an element (2 sbh and as²b), and the softmax's output once. The
    count is of plain blocks in 16 bit, on ranks that divide the heads. Source: Korthikanti et al. 2022, table 2.
    """
    if recompute == "full":
        return WHOLE["LayerNorm 1 input"] * block.stream
    whole, cut = sum(WHOLE.values()) * block.stream, sum(CUT.values()) * block.stream
    square = sum(SQUARE.values()) * block.square if recompute == "none" else 0
    cut, whole = (cut + square + whole, 0) if sequence_parallel else (cut + square, whole)
    return whole + cut // tensor_parallel


# -- the table ---------------------------------------------------------------------------------------------------------

QUANTITIES: dict[str, Callable[..., Any]] = {
    **derived(states, bytes_per_parameter, vectors, kept), "states of blocks": states_of_blocks, "estimate": estimate,
    "estimate of a preset": estimate, "kind of a preset": kinds_of_preset,
    "largest model": largest_model,
    "vectors at": vectors_at, "all-reduce then all-gather": all_reduce_then_all_gather,
    "optimizer bytes": lambda stage: convention_of("zero-paper").per_parameter(STAGES[stage])[1],
    "estimate, optimizer on the host": estimate_beside_host,
    "parameters": lambda model, multiple=1: model_shape(model, vocabulary_multiple=multiple).parameters,
    "active parameters": lambda model: model_shape(model).active_parameters / 1e9,
    "adapters": lambda model, **asked: lora(model_shape(model), **asked).trainable_parameters,
    "bits of a weight": lambda stored: float(STORED[stored]((4096, 4096))),
    "transformer": lambda **sizes: gpt(**sizes).parameters, "transformer without embedding": without_embedding,
    "16-bit parameters": lambda parameters, unit="GiB": 2 * parameters / UNITS[unit],
    "largest layer": lambda model, nbytes, unit="GiB":
        nbytes * model_shape(model).largest_layer_parameters / UNITS[unit],
    "millions": lambda model: model_shape(model).parameters / 1e6,
    "gpt": lambda **sizes: gpt(**sizes).parameters / 1e9,
    "vocabulary": lambda model, multiple: model_shape(model, vocabulary_multiple=multiple).units[0].tensors[0].shape[0],
    "quadratic peak": quadratic_peak, "largest in BLd": largest_in_blocks,
    "linear": lambda **block: 28 * Block(**block).stream / 1e6,
    "probabilities": lambda **block: tensor("probabilities", 1, 1e6, **block),
    "probabilities of all": lambda blocks, **block: tensor("probabilities", blocks, 1e9, **block),
    "best segment": lambda blocks, **block: activations.best_segment(Block(**block), blocks),
    "scores": lambda **block: flops.matmuls(Block(**block))["scores"] / 1e9,
    "5as/h": lambda **block: 5 * Block(**block).square / Block(**block).stream,
    "selective saving": selective_saving, "layer": layer,
    # 12·BLd elements of each block, attention's square left out; and 16·BLd + 2·BHL². Of 2 bytes each.
    "zero": lambda blocks, **block: blocks * 2 * 12 * Block(**block).stream / 1e9,
    "zero-infinity": lambda blocks, unit, **block:
        blocks * 2 * (16 * Block(**block).stream + 2 * Block(**block).square) / UNITS[unit],
    "checkpoints": lambda blocks, **block: blocks * 2 * Block(**block).stream / UNITS["TiB"],
    "overhead": lambda which: sum(getattr(OVERHEADS[name], f"{which}_nbytes") for name in TEXTS_OVERHEADS) / 1e9,
    "6PD": lambda tokens, model="", parameters=0:
        flops.six_n(parameters or model_shape(model).parameters, tokens),
    "days": days, "mfu": mfu,
    "days of steps": days_of_steps,
    "days at 6PD": lambda parameters, tokens, devices, achieved:
        flops.six_n(parameters, tokens) / (devices * achieved) / 86_400,
    "forward": lambda model, batch, tokens: flops.step_flops(PRESETS[model], batch, tokens).forward,
    "step": lambda model, batch, tokens: flops.step_flops(PRESETS[model], batch, tokens).model,
    "6N and attention": lambda tokens, **model: tokens * flops.six_n_and_attention(tokens=tokens, **model),
    "hardware over model": hardware_over_model, "selective flops": selective_flops, "again": again,
    "palm mfu": palm_mfu, "6N mfu": six_n_mfu,
    "spacing": lambda formats: 2.0 ** (format_of(formats[1]).mantissa_bits - format_of(formats[0]).mantissa_bits),
    "underflow": lambda format: format_of(format).smallest_subnormal / 2,
    "steps": lambda **of: sent_evenly(**of).steps, "vectors through a link": busiest_vectors,
    "sent vectors": lambda ranks, **of: max(sent_evenly(ranks=ranks, **of).nbytes) / (ELEMENTS_PER_RANK * ranks),
    "transfer milliseconds": transfer_milliseconds,
    "bus factor": lambda collective, ranks: float(BUS_FACTORS[collective](ranks)),
    "algorithm GB/s": lambda nbytes, microseconds: gigabytes_per_second(nbytes / (microseconds * 1e-6)),
    "bus GB/s": lambda collective, ranks, nbytes, microseconds: gigabytes_per_second(
        bus_bytes_per_second(collective, ranks, nbytes, microseconds * 1e-6)),
}
