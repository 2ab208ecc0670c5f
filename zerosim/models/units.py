"""A model is a list of units; a unit is what is gathered, computed with and freed at a time.

In order: the recomputation policies, units and models.

Legend: B batch, T tokens, I inputs, O outputs, V vocabulary; S loss scale.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from zerosim.models import layers
from zerosim.models.initializers import Filled, Initializer, Normal
from zerosim.models.layers import INSIDE, Context, Gradients, require_inside
from zerosim.models.losses import HalfSquaredError, Loss
from zerosim.numerics.arrays import Array
from zerosim.numerics.checks import require_integers

# -- Recomputation policies --------------------------------------------------------------------------------------------
# Between units: the inputs of some units are saved and the others run again (Chen et al. 2016, arXiv:1604.06174,
# section 4). Inside them: a block drops what is cheap to compute again (Korthikanti et al. 2022, arXiv:2205.05198,
# section 5), or never makes it whole (Dao et al. 2022, arXiv:2205.14135, section 3.1).

SEGMENT = re.compile(r"segment\(\s*(\d+)\s*\)")
ALL, SUB_BLOCK, SELECTIVE, TILED = INSIDE


@dataclass(frozen=True, slots=True)
class Recompute:
    """Keep the input of every ``units_per_segment``-th unit and run the rest again; None keeps everything.

    ``inside`` is what a unit keeps where it has a choice: "all"; "sub_block": the inputs of attention and of the
    feed-forward network; "selective": all but the attention probabilities; "tiled": all but the probabilities, which
    exist tile by tile only, and one log-sum-exp for each of their rows.

    >>> Recompute(2).segments(5)
    [range(0, 2), range(2, 4), range(4, 5)]
    """

    units_per_segment: int | None = None
    inside: str = ALL

    def __post_init__(self) -> None:
        """Raises ValueError for a segment of less than one unit, and for an inside that there is not."""
        if self.units_per_segment is not None:
            require_integers("segment(k)", 1, k=self.units_per_segment)
        require_inside("Recompute", self.inside)

    @classmethod
    def parse(cls, text: Any) -> Recompute:
        """The policy that a text names; a policy itself.

        >>> Recompute.parse("segment(2)+tiled")
        Recompute(units_per_segment=2, inside='tiled')

        Raises ValueError unless the text is "none", "block", "segment(k)", "sub_block", "selective" or "tiled", or
        joins one of the second and third with one of the last three by a "+".
        """
        if isinstance(text, Recompute):
            return text
        words = str(text).strip()
        between, plus, inside = (part.strip() for part in words.partition("+"))
        match = SEGMENT.fullmatch(between)
        if words in NAMED:
            return NAMED[words]
        if (between != "block" and (match is None or int(match[1]) < 1)) or (plus and inside not in INSIDE[1:]):
            raise ValueError(f"recompute={text!r} names no policy; write 'none', 'block' or 'segment(k)' with k of at "
                             f"least 1, as in 'segment(2)', or {', '.join(map(repr, INSIDE[1:]))}, or "
                             "two of them, as in 'segment(2)+tiled'")
        return cls(1 if match is None else int(match[1]), inside or ALL)

    def segments(self, unit_count: int) -> list[range]:
        """The runs of units that are run again together, the last maybe shorter; none when all is saved."""
        if self.units_per_segment is None:
            return []
        return [range(start, min(start + self.units_per_segment, unit_count))
                for start in range(0, unit_count, self.units_per_segment)]

    def __str__(self) -> str:
        """The text that `parse` reads back."""
        inside = [] if self.inside == ALL else [self.inside]
        if self.units_per_segment is None:
            return "+".join(inside) or "none"
        between = "block" if self.units_per_segment == 1 else f"segment({self.units_per_segment})"
        return "+".join([between, *inside])


NAMED = {"none": Recompute(), "block": Recompute(1)} | {inside: Recompute(None, inside) for inside in INSIDE[1:]}


# -- Units and models --------------------------------------------------------------------------------------------------

Weights = Mapping[str, Array]
ACTIVATIONS = (None, "relu", "gelu")


class Unit(ABC):
    """A pure pair of functions with named parameters.

    Pure means: no hidden state. All that backward needs are the weights it is handed and what forward
    returned as saved, which never holds weights; between the two they may have been freed.
    """

    name: str
    integer_inputs: ClassVar[bool] = False  # True where inputs are indices, which no cast may touch

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Each parameter's shape by its full name, used by no other unit, in the order of the flat vector."""

    @abstractmethod
    def forward(self, ctx: Context, w: Weights, x: Array) -> tuple[Array, Any]:
        """The output, and what backward needs. ``w`` holds every parameter in its own format at rest."""

    @abstractmethod
    def backward(self, ctx: Context, w: Weights, saved: Any, dy: Array) -> tuple[Array | None, Gradients]:
        """The gradient of the input (or None), and that of each parameter, in ctx.gradients(self), in the
        parameter's own format."""

    @abstractmethod
    def initializer(self, name: str) -> Initializer:
        """The initializer of one parameter, which makes its first values."""

    @property
    def tied_weights(self) -> Mapping[str, str]:
        """Parameters of earlier units that this one uses too: by name, the unit they belong to."""
        return {}

    @property
    def factored(self) -> frozenset[str]:
        """The weights of which backward hands ctx.observe the input and the output gradient."""
        return frozenset()

    @property
    def in_compute_format(self) -> frozenset[str]:
        """The parameters that are read as they rest: a Group may give the others alone a format of their own."""
        return frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """The full names of the parameters, in the order of the flat vector."""
        return tuple(self.shapes)

    @cached_property
    def parameter_count(self) -> int:
        """Elements of all parameters together."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def initial(self, name: str, start: int, count: int) -> Array:
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

    The parameters are ``name.weight`` (I, O) and ``name.bias`` (O,). Saves x, and for ReLU one bit per
    output, for GELU its input. The ``first`` unit of a model computes no gradient of its input, which nobody
    would read. ``initializers`` replaces, under "weight" and "bias", what makes the first values: by default
    Normal(seed, deviation 1/sqrt(I)) and Filled(0).
    """

    name: str
    inputs: int
    outputs: int
    activation: str | None = None
    bias: bool = True
    initializers: Mapping[str, Initializer] = field(default_factory=dict)
    first: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a width below 1, an unknown activation, or an initializer of no parameter."""
        where = f"LinearUnit({self.name!r})"
        require_integers(where, 1, inputs=self.inputs, outputs=self.outputs)
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
    def in_compute_format(self) -> frozenset[str]:
        """The weight and the bias."""
        return frozenset(self.shapes)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weight, then the bias where there is one."""
        return {f"{self.name}.{local}": shape for local, shape in self._local_shapes.items()}

    def initializer(self, name: str) -> Initializer:
        """The initializer of one parameter, which makes its first values."""
        weight = Normal(self.seed, 1 / math.sqrt(self.inputs))
        defaults: dict[str, Initializer] = {"weight": weight, "bias": Filled(0)}
        return {**defaults, **self.initializers}[name.removeprefix(f"{self.name}.")]

    def forward(self, ctx: Context, w: Weights, x: Array) -> tuple[Array, Any]:
        """x (B, I) -> y (B, O); saves x and what the activation keeps."""
        h, saved_x = layers.linear_forward(ctx, x, w[f"{self.name}.weight"], w.get(f"{self.name}.bias"))
        if self.activation == "relu":
            y, saved = layers.relu_forward(ctx, h, out=h)  # in place: backward needs h's signs only
        elif self.activation == "gelu":
            y, saved = layers.gelu_forward(ctx, h)
        else:
            y, saved = h, None
        return y, (saved_x, saved)

    def backward(self, ctx: Context, w: Weights, saved: Any, dy: Array) -> tuple[Array | None, Gradients]:
        """dy (B, O) -> dx (B, I), or None for the first unit; writes the gradients of weight and bias."""
        x, saved_by_activation = saved
        if self.activation == "relu":
            dy = layers.relu_backward(ctx, saved_by_activation, dy)
        elif self.activation == "gelu":
            dy = layers.gelu_backward(ctx, saved_by_activation, dy)
        ctx.observe(f"{self.name}.weight", x, dy)
        grads = ctx.gradients(self)
        dx = layers.linear_backward(ctx, w[f"{self.name}.weight"], x, dy, grads[f"{self.name}.weight"],
                                    grads.get(f"{self.name}.bias"), input_gradient=not self.first)
        return dx, grads


class Model:
    """A list of units and a loss. ``first`` is the initializer of all parameters, where it is not each unit's own."""

    first: Initializer | None = None

    def __init__(self, units: Sequence[Unit], loss: Loss | None = None) -> None:
        """``loss`` is HalfSquaredError where none is given.

        Raises ValueError for a model without units and where two units, or two parameters, have the same
        name.
        """
        if not units:
            raise ValueError("Model was asked for with no units; give it one unit or more")
        self.units = tuple(units)
        self.loss: Loss = HalfSquaredError() if loss is None else loss
        _refuse_duplicates("unit", (unit.name for unit in units))
        _refuse_duplicates("parameter", (name for unit in units for name in unit.names))
        _refuse_late_owners(units)

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


def _refuse_late_owners(units: Sequence[Unit]) -> None:
    """A parameter's own unit goes back last of its users, so that its gradient is complete then."""
    earlier: dict[str, Unit] = {}
    for unit in units:
        for name, owner in unit.tied_weights.items():
            if owner not in earlier or name not in earlier[owner].shapes:
                raise ValueError(f"unit {unit.name!r} ties {name!r} to the unit {owner!r}, which does not come "
                                 "before it or has no such parameter; declare a shared parameter in the first unit "
                                 "that uses it")
        earlier[unit.name] = unit


def _refuse_duplicates(what: str, names: Iterable[str]) -> None:
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        raise ValueError(f"Model was given more than one {what} named {', '.join(map(repr, duplicates))}; state "
                         f"is kept by name, so give each {what} a name of its own")
