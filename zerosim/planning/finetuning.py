"""Models on paper that are trained further: frozen and quantized weights, adapters, and states in 8 bits.

Legend: n elements of a tensor, r the rank of an adapter.

Sources: Hu et al. 2021, "LoRA" (arXiv:2106.09685), section 4.1; Dettmers et al. 2023, "QLoRA" (arXiv:2305.14314),
sections 2 and 3; Dettmers et al. 2022, "LLM.int8()" (arXiv:2208.07339), section 3.1; Dettmers et al. 2022, "8-bit
Optimizers via Block-wise Quantization" (arXiv:2110.02861), section 2. What they come to in bytes is as `peft` and
`bitsandbytes` have it, as of 2026-11.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from zerosim.numerics.checks import checked_count, did_you_mean
from zerosim.optim.base import Cut
from zerosim.planning.shapes import ModelShape, TensorShape, UnitShape

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
    """The model with all tensors frozen, but those of layers ``but``, by their last name, as "lm_head" or "ln_f".

    >>> from zerosim.optim.base import Cut
from zerosim.planning.shapes import model_shape
    >>> frozen(model_shape("llama-3.1-8b"), but=["lm_head"]).trainable_parameters == 128_256 * 4096
    True

    Raises ValueError for a name that no layer has.
    """
    _require_layers(model, but, {_layer(tensor) for tensor in model.tensors})
    return _changed(model, lambda tensor: (tensor if _layer(tensor) in but else replace(tensor, frozen=True),))


def quantized(model: ModelShape, stored: str = "nf4") -> ModelShape:
    """The model with the matrices of its blocks in 8 or 4 bits, which cannot be trained: they are frozen.

    >>> from zerosim.optim.base import Cut
from zerosim.planning.shapes import model_shape
    >>> float(round(quantized(model_shape("llama-2-7b")).tensors[2].bits, 3))
    4.127

    Raises ValueError for a name that is none of STORED.
    """
    if stored not in STORED:
        raise ValueError(f"weights stored as {stored!r} were asked for; take one of {', '.join(STORED)}"
                         f"{did_you_mean(stored, STORED)}")
    matrices = set(_matrices(model))
    return _changed(model, lambda tensor: (replace(tensor, frozen=True, bits=STORED[stored](tensor.shape))
                                           if tensor.name in matrices else tensor,))


def lora(model: ModelShape, rank: int, targets: Sequence[str] = (), *, stored: str = "") -> ModelShape:
    """The model frozen, with adapters (inputs, r) and (r, outputs) beside the linear layers ``targets`` of its blocks.

    ``targets`` are last names of layers, as "q" or "down", or "all"; left out, "q" and "v", or "qkv" where one matrix
    makes all three. Experts, which are stacked, get none. ``stored``: the blocks' matrices quantized, as in QLoRA.

    >>> from zerosim.optim.base import Cut
from zerosim.planning.shapes import model_shape
    >>> adapted = lora(model_shape("llama-2-7b"), 8)
    >>> adapted.trainable_parameters, adapted.parameters
    (4194304, 6742609920)

    Raises ValueError for a rank below one, and for names of layers and of STORED that there are not.
    """
    r = checked_count("rank", rank, 1)
    sizes = {name: shape for name, shape in _matrices(model).items() if len(shape) == 2}
    layers = {name.split(".")[-2] for name in sizes}
    wanted = [*targets] or [name for name in ("q", "v") if name in layers] or ["qkv"]
    wanted = sorted(layers) if wanted == ["all"] else wanted
    _require_layers(model, wanted, layers)

    def adapted(tensor: TensorShape) -> tuple[TensorShape, ...]:
        if tensor.name not in sizes or _layer(tensor) not in wanted:
            return (tensor,)
        inputs, outputs = tensor.shape
        name = tensor.name.removesuffix(".weight")
        return (tensor, TensorShape(f"{name}.lora_a.weight", (inputs, r)),
                TensorShape(f"{name}.lora_b.weight", (r, outputs)))

    return _changed(frozen(quantized(model, stored) if stored else model), adapted)


def _matrices(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of the blocks' linear layers, stacks of experts among them, by name."""
    return {tensor.name: tensor.shape for unit in model.units[1:-1] for tensor in unit.tensors
            if len(tensor.shape) > 1 and _layer(tensor) not in ROUTES}


def _layer(tensor: TensorShape) -> str:
    return (tensor.name.rpartition(".")[0] or tensor.name).rpartition(".")[2]


def _require_layers(model: ModelShape, names: Sequence[str], layers: set[str]) -> None:
    if unknown := [name for name in names if name not in layers]:
        raise ValueError(f"{model.name} has no layer called {' or '.join(map(repr, unknown))}; take of "
                         f"{', '.join(sorted(layers)) or 'a model whose layers are known'}")


def _changed(model: ModelShape, change: Callable[[TensorShape], tuple[TensorShape, ...]]) -> ModelShape:
    return replace(model, units=tuple(
        UnitShape(unit.name, tuple(new for tensor in unit.tensors for new in change(tensor))) for unit in model.units))


# -- Optimizers that keep their state in 8 bits ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EightBit:
    """Tensors of state in 8 bits beside each parameter, as `bitsandbytes` has them: an optimizer for plans alone.

    What a rank is handed of a tensor is quantized in blocks of 256, each with an absmax in fp32, if it has at least
    4,096 elements, and stays in fp32 if not. `bitsandbytes` rounds a vector's blocks up (its version 0.50); it does not
    update DTensors (its issue 1633, 2025), as `torchao.optim` does, which keeps in fp32 a matrix that is no whole
    number of blocks (pytorch/ao, torchao/optim/adam.py, 2026). No engine of zerosim's updates with either: the table of
    8-bit numbers is none of zerosim's formats.
    """

    cut: ClassVar[Cut] = "tensor"
    needs: ClassVar[frozenset[str]] = frozenset()
    name: str
    states: int

    def state_nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of state beside a tensor of this shape; `zerosim.optim.state_nbytes` asks for them.

        >>> ADAM_8BIT.state_nbytes((4096, 4096)) / 4096**2, ADAM_8BIT.state_nbytes((4095,)) / 4095
        (2.03125, 8.0)
        """
        count = math.prod(shape)
        small = count >= 4096 and (len(shape) == 1 or count % 256 == 0)
        return self.states * (count + 4 * -(-count // 256) if small else 4 * count)


ADAM_8BIT, LION_8BIT = EightBit("AdamW8bit", 2), EightBit("Lion8bit", 1)
