"""Models on paper that are trained further: frozen and quantized weights, adapters, and states in 8 bits.

Legend: n elements of a tensor, r the rank of an adapter.

Sources: Hu et al. 2021, "LoRA" (arXiv:2106.09685), section 4.1; Dettmers et al. 2023, "QLoRA" (arXiv:2305.14314),
sections 2 and 3; Dettmers et al. 2022, "LLM.int8()" (arXiv:2208.07339), section 3.1; Dettmers et al. 2022, "8-bit
Optimizers via Block-wise Quantization" (arXiv:2110.02861), section 2. What they come to in bytes is as `peft` and
`bitsandbytes` have it, as of 2026-11.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import filter as filter_names
from fractions import Fraction
from typing import ClassVar

from zerosim.numerics.checks import checked_count, unknown_name
from zerosim.optim.base import Cut
from zerosim.planning.closed_forms import Job
from zerosim.planning.efficiency import products
from zerosim.planning.flops import StepFlops
from zerosim.planning.shapes import ModelShape, TensorShape, UnitShape
from zerosim.planning.step_events import At, CollectiveIssue, CollectiveWait, StepEvent

# Bits of a parameter of a matrix (..., inputs, outputs). NF4 has an absmax in fp32 for each 64; where these are
# quantized too they take 8 bits, and an absmax more for each 256 of them: 4.127. LLM.int8() has one for each output.
STORED: Mapping[str, Callable[[tuple[int, ...]], Fraction]] = {
    "nf4": lambda shape: 4 + Fraction(8, 64) + Fraction(32, 64 * 256),
    "nf4-single": lambda shape: 4 + Fraction(32, 64),
    "int8": lambda shape: 8 + Fraction(32, shape[-2]),
}
# Layers of blocks that are no linear layers, or that no adapter and no quantization touches.
ROUTES = ("router", "relative")


def frozen(model: ModelShape, *, but: Sequence[str] = ()) -> ModelShape:
    """The model with all tensors frozen, ``but`` those of units, as "head" or "block3[01]", and of layers, by their
    last name, as "ln_f", which match a pattern as `fnmatch` has them.

    >>> from zerosim.planning.shapes import model_shape
    >>> frozen(model_shape("llama-3.1-8b"), but=["lm_head"]).trainable_parameters == 128_256 * 4096
    True

    Raises ValueError for a pattern that no unit and no layer matches.
    """
    names = {(unit.name, _layer(tensor)) for unit in model.units for tensor in unit.tensors}
    matched = {pattern: {of for of in names if filter_names(of, pattern)} for pattern in but}
    _require_layers(model, [pattern for pattern, found in matched.items() if not found], {
        name.rstrip("0123456789") + "*" * name[-1].isdigit() for of in names for name in of})
    trained = {of for found in matched.values() for of in found}
    return replace(model, units=tuple(UnitShape(unit.name, tuple(
        tensor._replace(frozen=tensor.frozen or (unit.name, _layer(tensor)) not in trained) for tensor in unit.tensors))
        for unit in model.units))


def quantized(model: ModelShape, stored: str = "nf4") -> ModelShape:
    """The model with the matrices of its blocks in 8 or 4 bits, which cannot be trained: they are frozen.

    >>> from zerosim.planning.shapes import model_shape
    >>> float(round(quantized(model_shape("llama-2-7b")).tensors[2].bits, 3))
    4.127

    Raises ValueError for a name that is none of STORED.
    """
    if stored not in STORED:
        raise unknown_name(f"weights stored as {stored!r} were asked for", stored, STORED, "take one of")
    return _changed(model, lambda tensor: (tensor._replace(frozen=True, bits=STORED[stored](tensor.shape))
                                           if _is_matrix(tensor) else tensor,))


def lora(model: ModelShape, rank: int, targets: Sequence[str] = (), *, stored: str = "") -> ModelShape:
    """The model frozen, with adapters (inputs, r) and (r, outputs) beside the linear layers ``targets`` of its blocks.

    ``targets`` are last names of layers, as "q" or "down", or "all"; left out, "q" and "v", or "qkv" where one matrix
    makes all three. Experts, which are stacked, get none. ``stored``: the blocks' matrices quantized, as in QLoRA.

    >>> from zerosim.planning.shapes import model_shape
    >>> adapted = lora(model_shape("llama-2-7b"), 8)
    >>> adapted.trainable_parameters, adapted.parameters
    (4194304, 6742609920)

    Raises ValueError for a rank below one, and for names of layers and of STORED that there are not.
    """
    r = checked_count("rank", rank, 1)
    layers = {_layer(tensor) for unit in model.units[1:-1] for tensor in unit.tensors
              if _is_matrix(tensor) and len(tensor.shape) == 2}
    usual = next((names for names in (["q", "v"], ["qkv"]) if layers.issuperset(names)), [])
    if layers and not targets and not usual:
        raise ValueError(f"{model.name} has neither q and v nor qkv, which adapters are beside if no others are named; "
                         f"plan zs.planning.lora(model, {r}, targets), with targets of {', '.join(sorted(layers))}")
    wanted = [*targets] or usual or ["qkv"]
    wanted = sorted(layers) if wanted == ["all"] else wanted
    _require_layers(model, wanted, layers)

    def adapted(tensor: TensorShape) -> tuple[TensorShape, ...]:
        if not _is_matrix(tensor) or len(tensor.shape) > 2 or _layer(tensor) not in wanted:
            return (tensor,)
        inputs, outputs = tensor.shape
        name = tensor.name.removesuffix(".weight")
        return (tensor, TensorShape(f"{name}.lora_a.weight", (inputs, r)),
                TensorShape(f"{name}.lora_b.weight", (r, outputs)))

    return _changed(frozen(quantized(model, stored) if stored else model), adapted)


def _is_matrix(tensor: TensorShape) -> bool:
    """True for the weight of a block's linear layer, or a stack of such of all experts."""
    return len(tensor.shape) > 1 and _layer(tensor) not in ROUTES


def _layer(tensor: TensorShape) -> str:
    return (tensor.name.rpartition(".")[0] or tensor.name).rpartition(".")[2]


def _require_layers(model: ModelShape, names: Sequence[str], layers: set[str]) -> None:
    if unknown := [name for name in names if name not in layers]:
        raise ValueError(f"{model.name} has no layer called {' or '.join(map(repr, unknown))}; take of "
                         f"{', '.join(sorted(layers)) or 'a model whose layers are known'}")


def _changed(model: ModelShape, change: Callable[[TensorShape], tuple[TensorShape, ...]]) -> ModelShape:
    """The model with the tensors of its blocks changed; equal blocks stay equal."""
    blocks = model.units[1:-1]
    changed = {tensors: tuple(new for tensor in tensors for new in change(tensor))
               for tensors in dict.fromkeys(block.tensors for block in blocks)}
    return replace(model, units=(*model.units[:1], *(UnitShape(one.name, changed[one.tensors]) for one in blocks),
                                 *model.units[1 + len(blocks):]))


# -- A step in which some weights are frozen ---------------------------------------------------------------------------


def without_frozen(events: Iterable[StepEvent], job: Job, trained: Job, first: int) -> Iterator[StepEvent]:
    """The events of a micro-batch, with the gradients of trained weights alone, and without gathers of units before the
    first of them in backward, which they have not."""
    back, issued = False, set[tuple[str, int]]()
    for event in events:
        back = back or (isinstance(event, At) and event.phase == "loss")
        if isinstance(event, CollectiveIssue):
            unit, gathers = event.unit, event.operation == "all_gather"
            part = (not back or unit >= first) * job.padded_lengths[unit] if gathers else trained.padded_lengths[unit]
            event = event._replace(nbytes=event.nbytes * part // (job.padded_lengths[unit] or 1))
            if not event.nbytes:
                continue
            issued.add(event.key)
        elif isinstance(event, CollectiveWait):
            if event.key not in issued:
                continue
            issued.remove(event.key)
        yield event


def sent_in_rings(events: Iterable[StepEvent]) -> int:
    """Bytes that a rank sends by rings: (N-1)/N of a vector, twice that to reduce it to all."""
    return sum(event.nbytes * (event.ranks - 1) * (1 + (event.operation == "all_reduce")) // event.ranks
               for event in events if isinstance(event, CollectiveIssue))


def flops_of_trained(model: ModelShape, every: StepFlops, batch: int, tokens: int) -> StepFlops:
    """The operations of a micro-batch, of which ``every`` are those of the same step with all weights trained, without
    adapters: products for gradients of frozen weights are none, nor is backward before the first unit that is trained.

    >>> from zerosim.planning.flops import step_flops
    >>> from zerosim.planning.shapes import PRESETS, model_shape
    >>> every = step_flops(PRESETS["llama-2-7b"], 1, 2048)
    >>> found = flops_of_trained(lora(model_shape("llama-2-7b"), 8), every, 1, 2048)
    >>> f"{found.forward / every.forward:.3f} {found.backward / every.backward:.3f}"
    '1.001 0.538'
    """
    of, positions, last = model.transformer, batch * tokens, len(model.units) - 1
    assert of is not None  # whose operations every are
    first, ends = min(model.first_trained, last), model.units[0 if of.tied else last].tensors
    adapters = spared = 0
    for place, one in ((unit, each) for unit in range(1, last) for each in products(of, model.units[unit])):
        flops = round(2 * positions * one.share * one.stack * one.inputs * one.outputs)
        adapter = ".lora_" in one.name
        adapters += flops * adapter
        spared += flops * (not adapter) * (2 if place < first else one.frozen)
    spared += 4 * positions * tokens * (of.query_channels + of.attention_channels) * max(0, first - 1)  # attention's
    spared += 2 * positions * of.vocabulary * of.channels * all(
        one.frozen for one in ends if one.name in ("wte", "lm_head.weight"))
    again = every.recomputed * (last - max(1, first)) // (last - 1)
    return StepFlops(every.forward + adapters, every.backward + 2 * adapters - spared,
                     again + again * adapters // every.forward)


# -- Optimizers that keep their state in 8 bits ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EightBit:
    """AdamW with two states in 8 bits, as `bitsandbytes` and `torchao` have it: an optimizer for plans alone.

    What a rank is handed of a tensor is quantized in blocks of 256, each with an absmax in fp32, if it has at least
    4,096 elements, and stays in fp32 if not. `bitsandbytes` rounds a vector's blocks up (its version 0.50); it does not
    update DTensors (its issue 1633, 2025), as `torchao.optim` does, which keeps in fp32 a matrix that is no whole
    number of blocks (pytorch/ao, torchao/optim/adam.py, 2026). No engine of zerosim's updates with either: the table of
    8-bit numbers is none of zerosim's formats.
    """

    cut: ClassVar[Cut] = "tensor"
    needs: ClassVar[frozenset[str]] = frozenset()
    name: ClassVar[str] = "AdamW8bit"

    def state_nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of state beside a tensor of this shape; `zerosim.optim.state_nbytes` asks for them.

        >>> ADAM_8BIT.state_nbytes((4096, 4096)) / 4096**2, ADAM_8BIT.state_nbytes((4095,)) / 4095
        (2.03125, 8.0)
        """
        count = math.prod(shape)
        small = count >= 4096 and (len(shape) == 1 or count % 256 == 0)
        return 2 * (count + 4 * -(-count // 256) if small else 4 * count)


ADAM_8BIT = EightBit()
