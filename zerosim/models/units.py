"""A model is a list of units; a unit is what is gathered, computed with and freed at a time.

Legend: B batch, I inputs, O outputs.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from zerosim.models import layers
from zerosim.models.checks import require_positive
from zerosim.models.context import Context, Gradients
from zerosim.models.initializers import Initializer, Normal, Zeros
from zerosim.models.losses import HalfSquaredError, Loss

Weights = Mapping[str, np.ndarray]
ACTIVATIONS = (None, "relu", "gelu")


class Unit(ABC):
    """A pure pair of functions with named parameters.

    Pure means: no hidden state. All that backward needs are the weights it is handed and what forward
    returned as kept, which never holds weights; between the two they may have been freed.
    """

    name: str
    integer_inputs: ClassVar[bool] = False  # True where inputs are indices, which no cast may touch

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Each parameter's shape by its full name, used by no other unit, in the order of the flat vector."""

    @abstractmethod
    def forward(self, ctx: Context, w: Weights, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """The output, and what backward needs. ``w`` holds every parameter in its own format at rest."""

    @abstractmethod
    def backward(self, ctx: Context, w: Weights, kept: Any,
                 dy: np.ndarray) -> tuple[np.ndarray | None, Gradients]:
        """The gradient of the input (or None), and that of each parameter, in ctx.gradients(self), in the
        parameter's own format."""

    @abstractmethod
    def initializer(self, name: str) -> Initializer:
        """What makes the first values of one parameter."""

    @property
    def borrows(self) -> Mapping[str, str]:
        """Parameters of earlier units that this one is lent too (tied weights): by name, the unit they belong to."""
        return {}

    @property
    def factored(self) -> frozenset[str]:
        """The weights of which backward hands ctx.observe the input and the output gradient."""
        return frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of the parameters, in the order of the flat vector."""
        return tuple(self.shapes)

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters together."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def initial(self, name: str, start: int, count: int) -> np.ndarray:
        """First values of elements start to start+count, fp32 (count,); any cut gives the same bits.

        Raises ValueError for a name that is not the unit's and for elements that the parameter does not have.
        """
        if name not in self.shapes:
            raise ValueError(f"unit {self.name!r} was asked for the first values of {name!r}; its "
                             f"parameters are {', '.join(self.names)}")
        length = math.prod(self.shapes[name])
        if start < 0 or count < 0 or start + count > length:
            raise ValueError(f"{name} was asked for {count} elements from {start}; it has {length}, so ask "
                             "for a piece that lies inside")
        return self.initializer(name)(name, start, count)


@dataclass(frozen=True, eq=False)
class LinearUnit(Unit):
    """y = activation(x @ weight + bias): x (B, I) -> y (B, O).

    The parameters are ``name.weight`` (I, O) and ``name.bias`` (O,). Keeps x, and for ReLU one bit per
    output, for GELU its input. The ``first`` unit of a model computes no gradient of its input, which nobody
    would read. ``initializers`` replaces, under "weight" and "bias", what makes the first values: by default
    Normal(seed 0, deviation 1/sqrt(I)) and Zeros.
    """

    name: str
    inputs: int
    outputs: int
    activation: str | None = None
    bias: bool = True
    initializers: Mapping[str, Initializer] = field(default_factory=dict)
    first: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a width below 1, an unknown activation, or an initializer of no parameter."""
        where = f"LinearUnit({self.name!r})"
        require_positive(where, inputs=self.inputs, outputs=self.outputs)
        require_activation(where, self.activation)
        unknown = sorted(self.initializers.keys() - self._local_shapes.keys())
        if unknown:
            raise ValueError(f"{where} was given initializers for {', '.join(unknown)}; its parameters are "
                             f"{', '.join(self._local_shapes)}")

    @property
    def _local_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.inputs, self.outputs)} | ({"bias": (self.outputs,)} if self.bias else {})

    @property
    def factored(self) -> frozenset[str]:
        """The weight."""
        return frozenset({f"{self.name}.weight"})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weight, then the bias where there is one."""
        return {f"{self.name}.{local}": shape for local, shape in self._local_shapes.items()}

    def initializer(self, name: str) -> Initializer:
        """What makes the first values of one parameter."""
        defaults: dict[str, Initializer] = {"weight": Normal(0, 1 / math.sqrt(self.inputs)), "bias": Zeros()}
        return {**defaults, **self.initializers}[name.removeprefix(f"{self.name}.")]

    def forward(self, ctx: Context, w: Weights, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """x (B, I) -> y (B, O); keeps x and what the activation keeps."""
        h, kept_x = layers.linear_forward(ctx, x, w[f"{self.name}.weight"], w.get(f"{self.name}.bias"))
        if self.activation == "relu":
            y, kept = layers.relu_forward(ctx, h, out=h)  # in place: backward needs h's signs only
        elif self.activation == "gelu":
            y, kept = layers.gelu_forward(ctx, h)
        else:
            y, kept = h, None
        return y, (kept_x, kept)

    def backward(self, ctx: Context, w: Weights, kept: Any,
                 dy: np.ndarray) -> tuple[np.ndarray | None, Gradients]:
        """dy (B, O) -> dx (B, I), or None for the first unit; writes the gradients of weight and bias."""
        x, kept_by_activation = kept
        if self.activation == "relu":
            dy = layers.relu_backward(ctx, kept_by_activation, dy)
        elif self.activation == "gelu":
            dy = layers.gelu_backward(ctx, kept_by_activation, dy)
        ctx.observe(f"{self.name}.weight", x, dy)
        grads = ctx.gradients(self)
        dx = layers.linear_backward(ctx, w[f"{self.name}.weight"], x, dy, grads[f"{self.name}.weight"],
                                    grads.get(f"{self.name}.bias"), input_gradient=not self.first)
        return dx, grads


class Model:
    """A list of units and a loss."""

    def __init__(self, units: Sequence[Unit], loss: Loss | None = None) -> None:
        """``loss`` is HalfSquaredError where none is given.

        Raises ValueError for a model without units and where two units, or two parameters, have the same
        name.
        """
        if not units:
            raise ValueError("Model was asked for with no units; give it one unit or more")
        self.units = tuple(units)
        self.loss: Loss = HalfSquaredError() if loss is None else loss
        _refuse_twins("unit", (unit.name for unit in units))
        _refuse_twins("parameter", (name for unit in units for name in unit.names))
        _refuse_early_borrowers(units)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by name, in the order of the flat vector."""
        return {name: shape for unit in self.units for name, shape in unit.shapes.items()}

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters of all units."""
        return sum(unit.parameter_count for unit in self.units)


def require_activation(where: str, activation: Any) -> None:
    """Raises ValueError unless a linear unit can have this activation."""
    if activation not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{where} was given activation={activation!r}; the activations are {known}")


def _refuse_early_borrowers(units: Sequence[Unit]) -> None:
    """A parameter's own unit goes back last of its users, so that its gradient is complete then."""
    earlier: dict[str, Unit] = {}
    for unit in units:
        for name, owner in unit.borrows.items():
            if owner not in earlier or name not in earlier[owner].shapes:
                raise ValueError(f"unit {unit.name!r} borrows {name!r} of the unit {owner!r}, which does not come "
                                 "before it or has no such parameter; declare a shared parameter in the first unit "
                                 "that uses it")
        earlier[unit.name] = unit


def _refuse_twins(what: str, names: Iterable[str]) -> None:
    twins = [name for name, count in Counter(names).items() if count > 1]
    if twins:
        raise ValueError(f"Model was given more than one {what} named {', '.join(map(repr, twins))}; state "
                         f"is kept by name, so give each {what} a name of its own")
