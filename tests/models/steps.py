"""Forward and backward of a whole model without ranks: the simplest engine."""

import numpy as np

from zerosim.models import Context, Model

Arrays = dict[str, np.ndarray]


def initial_weights(ctx: Context, model: Model) -> Arrays:
    """Every parameter of the model, first values in the compute dtype."""
    return {name: ctx.cast(unit.initial(name, 0, int(np.prod(shape)))).reshape(shape)
            for unit in model.units for name, shape in unit.shapes.items()}


def loss_of(ctx: Context, model: Model, w: Arrays, x: np.ndarray, target: np.ndarray) -> float:
    """Forward only."""
    for unit in model.units:
        x, _ = unit.forward(ctx, w, x)
    return model.loss.forward(ctx, x, target)[0]


def loss_and_gradients(ctx: Context, model: Model, w: Arrays, x: np.ndarray, target: np.ndarray,
                       scale: float = 1.0) -> tuple[float, Arrays]:
    """Forward and backward; the gradients are those of scale times the loss."""
    kept = []
    for unit in model.units:
        x, k = unit.forward(ctx, w, x)
        kept.append(k)
    loss, k = model.loss.forward(ctx, x, target)
    dy, gradients = model.loss.backward(ctx, k, scale), {}
    for unit in reversed(model.units):
        dy, of_unit = unit.backward(ctx, w, kept.pop(), dy)
        gradients.update(of_unit)
    return loss, gradients
