"""Given weights by name: one pass without ranks, forward and backward, with what can be seen on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zerosim.models.initializers import Initializer
from zerosim.models.layers import Context
from zerosim.models.units import Model
from zerosim.numerics.arrays import Array
from zerosim.numerics.checks import is_floating
from zerosim.numerics.formats import FORMATS
from zerosim.numerics.policy import Policy


@dataclass(frozen=True, slots=True)
class Pass:
    """``loss`` is unscaled. ``largest`` is the largest magnitude of each unit's output, by unit; NaN where one is.

    ``output_gradient`` is where backward begins, the gradient of the model's output, ``gradients`` where it ends, those
    of the parameters by name: all of S times the loss, in the compute format, each in its own shape.
    """

    loss: float
    largest: dict[str, float]
    output_gradient: Array
    gradients: dict[str, Array]


def one_pass(model: Model, weights: Mapping[str, Array], policy: Policy | str, x: Array, target: Array,
             scale: float = 1.0) -> Pass:
    """Forward and backward of S times the loss of one batch; ``weights`` by name, fp32, each in its own shape.

    The weights are rounded to the compute format, as an engine does with its masters; x too, unless it is tokens.
    Under "fp64" they may be float64, for a difference of two losses that is a derivative.
    Raises ValueError for weights that are missing, too many or of another shape, and for what is no policy.
    """
    require_weights("one_pass", model, weights)
    policy = Policy.of(policy)
    used = {unit: (*unit.shapes, *unit.tied_weights) for unit in model.units}
    ctx = replace(Context.standalone(policy), gradients=lambda unit: {
        name: np.empty(model.shapes[name], policy.compute_dtype) for name in used[unit]})
    own = [{name: ctx.cast(weights[name]) for name in names} for names in used.values()]
    y = x if model.units[0].integer_inputs else ctx.cast(x)
    saved, largest = [], {}
    for unit, w in zip(model.units, own, strict=True):
        y, of_unit = unit.forward(ctx, w, y)
        saved.append(of_unit)
        largest[unit.name] = float(np.abs(y.astype(np.float32)).max())  # of 8 bits, NumPy knows no maximum
    loss, of_loss = model.loss.forward(ctx, y, target)
    begun = model.loss.backward(ctx, of_loss, scale)
    output_gradient, gradients = begun.copy(), dict[str, Array]()
    dy: Array | None = begun
    for unit, w, of_unit in zip(reversed(model.units), reversed(own), reversed(saved), strict=True):
        assert dy is not None, "only the first unit gives back no gradient of its input"
        dy, found = unit.backward(ctx, w, of_unit, dy)
        for name, gradient in found.items():
            if name in gradients:  # tied: a later user's part is the first addend
                ctx.kernels.add_rounded(gradients[name], gradient, gradient)
            gradients[name] = gradient
    return Pass(loss, largest, output_gradient, gradients)


def require_weights(where: str, model: Model, weights: Mapping[str, Array]) -> None:
    """Raises ValueError unless these are arrays of floats for all of the model's parameters, by name."""
    if not isinstance(weights, Mapping):
        raise ValueError(f"{where} takes weights by name, found {type(weights).__name__}; write {{name: array}} for "
                         "every name of model.shapes, as zs.models.first_weights(model) does")
    if wrong := sorted(map(str, weights.keys() ^ model.shapes.keys())):
        raise ValueError(f"{where} takes the model's {len(model.shapes)} weights by name, and nothing else; missing "
                         f"or not of this model: {', '.join(wrong[:5])}; zs.models.first_weights(model) | {{...}} has "
                         "the model's own for the rest")
    for name, shape in model.shapes.items():
        found: Any = weights[name]
        if not isinstance(found, np.ndarray) or found.shape != shape:
            seen = type(found).__name__ + (f" of shape {found.shape}" if isinstance(found, np.ndarray) else "")
            raise ValueError(f"{where} asked for {name} as an array of shape {shape}, and found {seen}; "
                             "first_weights(model) shows the form of all")
        if not is_floating(weights[name].dtype):
            raise ValueError(f"{where} asked for {name} in floating point, and found {weights[name].dtype}; take "
                             "np.float32")


def first_weights(model: Model) -> dict[str, Array]:
    """A model's first values by name, fp32, each in its own shape."""
    first = initializer_of(model)
    return {name: first(name, 0, math.prod(shape)).reshape(shape) for name, shape in model.shapes.items()}


def initializer_of(model: Model, weights: Mapping[str, Array] | None = None) -> Initializer:
    """The initializer of all parameters: of these values, or of the model's own where none are given.

    Raises ValueError for weights that are missing, too many, of another shape, no floats, or no numbers of fp32.
    """
    units = {name: unit for unit in model.units for name in unit.shapes}
    if weights is None:
        return model.first or (lambda name, start, count: units[name].initial(name, start, count))
    require_weights("weights=", model, weights)
    flat = {name: np.ravel(array) for name, array in weights.items()}
    for name, values in flat.items():
        if spoiled := int((~(np.abs(values.astype(np.float64)) <= FORMATS["fp32"].largest)).sum()):
            raise ValueError(f"weights= has NaN, inf or numbers beyond fp32 in {spoiled} of {values.size} values of "
                             f"{name}; look at where they come from")
    return lambda name, start, count: flat[name][start:start + count]
