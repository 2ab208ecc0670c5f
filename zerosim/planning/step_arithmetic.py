"""The arithmetic of a decoder's units in one micro-batch: operations and bytes of each piece, as the layers note them.

The layers of one block between an embedding and a head go forward and back on arrays without data, and say what each
product, norm or activation computes, reads and writes; other blocks do the same. No engine runs, and no rank.

Legend: B sequences of a micro-batch, L tokens of each.
Source of the seconds: Williams, Waterman & Patterson 2009 ("Roofline", doi:10.1145/1498765.1498785): a piece takes as
long as its operations at the device's rate, or as its bytes at the memory's, whichever is longer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from zerosim.models.layers import Context
from zerosim.models.llama import decoder
from zerosim.models.transformer import Transformer, config_of_transformer
from zerosim.models.units import Recompute
from zerosim.numerics.checks import LINEAR_LAYERS
from zerosim.numerics.kernels import NullKernels
from zerosim.numerics.policy import Policy
from zerosim.planning.activations import Block
from zerosim.planning.flops import ends_flops, matmul_flops, recomputed_flops
from zerosim.planning.hardware import Machine
from zerosim.planning.step_activations import Place

EMBED, BLOCK, HEAD = range(3)  # the units of a model of one block


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Operations, (n,), and bytes read and written, (n,), of the n pieces of arithmetic that a unit makes in turn."""

    flops: np.ndarray
    nbytes: np.ndarray

    def seconds(self, machine: Machine) -> float:
        """The sum of the pieces' seconds."""
        return float(machine.compute_seconds(self.flops, self.nbytes).sum())

    def bounds(self, machine: Machine) -> tuple[float, float]:
        """(operations of the pieces that take as long as those, bytes of the pieces that take as long as memory)."""
        nothing = 0 * self.flops
        waits = machine.compute_seconds(nothing, self.nbytes) > machine.compute_seconds(self.flops, nothing)
        return float(self.flops[~waits].sum()), float(self.nbytes[waits].sum())


def products_alone(*flops: float) -> Pieces:
    """Products of which the operations are known, and are taken to last longer than what they read and write."""
    return Pieces(np.array(flops, np.float64), np.zeros(len(flops)))


def of_micro_batch(model: Transformer, batch: int, tokens: int, policy: Policy,
                   recompute: Recompute) -> Mapping[Place, Pieces]:
    """The pieces of every unit at each of its places; of products alone where the layers here make no such block.

    >>> from zerosim.planning.shapes import PRESETS
    >>> found = of_micro_batch(PRESETS["gpt2"], 1, 1024, Policy("bf16"), Recompute())
    >>> len(found["forward", 1].flops), len(found["backward", 1].flops), f"{found['forward', 1].flops.sum():.4g}"
    (10, 20, '1.783e+10')

    Raises ValueError for counts below one and for an encoder-decoder.
    """
    again, last = recompute.units_per_segment is not None, model.blocks + 1
    kinds = [model.experts_of(place) for place in range(model.blocks)]
    noted = {one: _of_one_block(replace(model, blocks=1, experts=None if one is None else replace(one, dense=())),
                                batch, tokens, policy, recompute.inside) for one in dict.fromkeys(kinds)}
    units = [(EMBED, kinds[0]), *((BLOCK, one) for one in kinds), (HEAD, kinds[0])]
    found = {(phase, unit): noted[one][phase, kind] for phase in ("forward", "backward")
             for unit, (kind, one) in enumerate(units)}
    if again:
        found |= {("again", unit): found["forward", unit] for unit in range(len(units))}
    return found | {("loss", last): noted[kinds[0]]["loss", HEAD]}


@lru_cache(maxsize=256)
def _of_one_block(model: Transformer, batch: int, tokens: int, policy: Policy,
                  inside: str) -> Mapping[tuple[str, int], Pieces]:
    """The pieces that the layers of one block and its ends note, forward, in the loss and back; of products alone where
    there are no such layers.

    What no block has is left out: places that are neither learned nor rotary, a norm after the embedding, weights and
    biases that a block lacks, and where its norms stand. Experts are a network as wide as those that a token passes,
    and a product for its route.
    """
    block, plain = Block.of(model, batch, tokens), model.layer_norm and not model.gated
    nearest = replace(
        model, positions=model.positions or tokens * plain, embedding_norm=False, norm_weights=True, layer_norm=plain,
        norms="before", parallel=False, last_norm=True, head_norms=model.head_norms and not plain, joint_norms=False,
        caps=(), token_types=0, head_bias=False, experts=None, feed_forward=block.sizes.feed_forward,
        biases=LINEAR_LAYERS if plain else model.biases)
    try:
        layers = decoder(config_of_transformer(nearest, tokens=tokens), tied=model.tied)
    except ValueError:
        return _products(model, block, inside)
    rows, found, kernels = list[tuple[int, int]](), dict[tuple[str, int], Pieces](), NullKernels()
    used = {unit: (*unit.shapes, *unit.tied_weights) for unit in layers.units}

    def arrays(unit: Any) -> dict[str, Any]:
        return {name: kernels.empty(layers.shapes[name], policy.compute_dtype) for name in used[unit]}

    def note(*, flops: int = 0, nbytes: int = 0) -> None:
        rows.append((flops, nbytes))

    def keep(phase: str, unit: int) -> None:
        if unit == BLOCK and block.router:
            note(flops=(4 if phase == "backward" else 2) * block.stream * block.router)
        flops, nbytes = np.array(rows, np.float64).reshape(-1, 2).T
        found[phase, unit] = Pieces(flops, nbytes)
        rows.clear()

    ctx = Context(kernels.xp, policy, kernels, None, note, arrays, keep=inside)  # type: ignore[arg-type]
    values: Any = kernels.empty((batch, tokens), np.int64)
    target, saved = values, list[Any]()
    for place, unit in enumerate(layers.units):
        values, of_unit = unit.forward(ctx, arrays(unit), values)
        saved.append(of_unit)
        keep("forward", place)
    _, of_loss = layers.loss.forward(ctx, values, target)
    gradient: Any = layers.loss.backward(ctx, of_loss, 1.0)
    keep("loss", HEAD)
    for place, unit in reversed([*enumerate(layers.units)]):
        gradient, _ = unit.backward(ctx, arrays(unit), saved.pop(), gradient)
        keep("backward", place)
    return found


def _products(model: Transformer, block: Block, inside: str) -> Mapping[tuple[str, int], Pieces]:
    products, second = matmul_flops(block), recomputed_flops(block, str(Recompute(inside=inside)))
    opening, logits = ends_flops(model, block.batch, block.tokens)
    forward = {EMBED: opening, BLOCK: products, HEAD: logits}
    return {**{("forward", unit): products_alone(*[flops] * bool(flops)) for unit, flops in forward.items()},
            **{("backward", unit): products_alone(*[2 * flops] * bool(flops)) for unit, flops in forward.items()},
            ("backward", BLOCK): products_alone(2 * products, second), ("loss", HEAD): products_alone()}
