"""Automatic differentiation, slow and clear: units of which one writes the forward alone.

    def gated(w, x):                                             # x (B, I) -> (B, O)
        return (x @ w["up"]).gelu() * (x @ w["gate"] + w["bias"])

    unit = AutodiffUnit("gated", {"up": (8, 16), "gate": (8, 16), "bias": (16,)}, gated)

Each operation on a `TrackedArray` makes an array of its own in the rank's memory, in the compute format, rounded once,
and notes in a `Graph` how the gradient of its result becomes those of its operands. Backward goes through the notes in
reverse. An array is kept as long as a note needs it; a weight is never kept: a note names it, and backward looks it up
in the weights that it is handed, which may have been freed and gathered again in between. Where an operation is a layer
of `layers`, it is that very pair of functions; bits differ from those of a unit written by hand only where that one
rounds less often, as x @ w + b does twice and linear(x, w, b) once.

Source: Griewank & Walther 2008, Evaluating Derivatives, 2nd edition, chapter 3 (reverse mode).
Legend: B batch, T tokens, M rows, I inputs, O outputs, C channels, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NoReturn, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from zerosim.models import layers
from zerosim.models.initializers import Filled, Initializer, Normal
from zerosim.models.layers import Context, Gradients, rows_of
from zerosim.models.units import Unit, Weights
from zerosim.numerics.arrays import Array, copy_elements, has_data
from zerosim.numerics.checks import is_count, is_number, require_shape, unknown_name

# -- The graph ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NotedValue:
    """An operand or a result: its elements, unless it is a weight, which has a name, or a note that needs none of them.

    ``number`` is None where nobody needs a gradient.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    number: int | None
    name: str | None = None
    array: Any = None

    @property
    def outline(self) -> NotedValue:
        """The same without elements: all that is needed to make its gradient."""
        return self if self.array is None else replace(self, array=None)


# Given the graph and the gradient of a result, the gradient of each operand in its shape, None where nobody needs it.
# It refers to values and never to the graph: a cycle of references would keep all arrays until Python looks for cycles.
Backward = Callable[["Graph", Array], Sequence[Array | None]]


class Graph:
    """The notes of one forward, for one backward: from which operands each result was made, and how to go back.

    Values are known by numbers, counted from 0; ``weights`` has the arrays of weights while forward or backward runs,
    and nothing in between.
    """

    def __init__(self) -> None:
        self._notes: list[tuple[int, list[int | None], Backward]] = []
        self._numbers = 0
        self._weight_numbers: dict[str, int] = {}
        self._context: Context | None = None
        self.weights: Weights = {}
        self._own: Gradients = {}

    @property
    def context(self) -> Context:
        """The context of the forward or backward that runs now; ValueError between the two and after them."""
        if self._context is None:
            raise ValueError("a tracked array was used after the forward in which it was made; compute with it inside "
                             "the function of its unit")
        return self._context

    @contextmanager
    def running(self, context: Context, weights: Weights) -> Iterator[None]:
        """The ``with`` block has this context and these weights."""
        self._context, self.weights = context, weights
        try:
            yield
        finally:
            self._context, self.weights, self._own = None, {}, {}

    def weight(self, name: str) -> TrackedArray:
        """The weight of this name."""
        number = self._weight_numbers[name] = self._next_number()
        return TrackedArray(self, NotedValue(self.weights[name].shape, self.weights[name].dtype, number, name))

    def tracked(self, array: Array, *, constant: bool) -> TrackedArray:
        """The array, tracked; a constant has no gradient."""
        number = None if constant else self._next_number()
        return TrackedArray(self, NotedValue(array.shape, array.dtype, number, array=array))

    def elements(self, value: NotedValue) -> Array:
        """The elements of a value; of a weight, those that are gathered now."""
        found: Array = value.array if value.name is None else self.weights[value.name]
        return found

    def result(self, array: Array, operands: Sequence[TrackedArray], backward: Backward) -> TrackedArray:
        """The result of an operation; noted, unless none of the operands needs a gradient."""
        numbers = [x.value.number for x in operands]
        found = self.tracked(array, constant=all(number is None for number in numbers))
        if found.value.number is not None:
            self._notes.append((found.value.number, numbers, backward))
        return found

    def operand(self, value: Any, of: str) -> TrackedArray:
        """A tracked array of this graph, a number or a NumPy array as one that can be computed with.

        A number is rounded to the format of arithmetic, fp32; an array is copied into the rank's memory in that format.
        Raises ValueError for a wider one.
        """
        ctx = self.context
        if isinstance(value, TrackedArray):
            if value.graph is not self:
                raise ValueError(f"{of} was given a tracked array of another forward; compute with the arguments of "
                                 "the function, and with nothing that an earlier call has left")
            return value
        if is_number(value):
            number = ctx.empty((), dtype=ctx.wide_dtype, name="autodiff.constant")
            number.fill(value)
            return self.tracked(number, constant=True)
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{of} takes tracked arrays, numbers and NumPy arrays, found {type(value).__name__}")
        if value.dtype.kind not in "biu" and value.dtype.itemsize > ctx.wide_dtype.itemsize:
            raise ValueError(f"{of} computes in {ctx.wide_dtype}, and found a constant array in {value.dtype}; round "
                             f"it first, with astype(np.{ctx.wide_dtype})")
        copy = ctx.empty(value.shape, dtype=ctx.wide_dtype, name="autodiff.constant")
        copy_elements(value.astype(ctx.wide_dtype), copy)
        return self.tracked(copy, constant=True)

    def gradient_room(self, x: NotedValue) -> Array:
        """An array, not initialized, into which a gradient of ``x`` may be written: for a weight's first one its own
        place among the gradients of the unit."""
        own = self._own.pop(x.name, None) if x.name is not None else None
        return self.context.empty(x.shape, "activation_gradient", x.dtype, "autodiff.gradient") if own is None else own

    def backward(self, unit: Unit, dy: Array, last: int | None, first: int | None) -> tuple[Array | None, Gradients]:
        """The gradients of the input, whose number is ``first``, and of each weight, None for one that was not used.

        ``last`` is the number of the result, whose gradient is ``dy``. Uses the notes up.
        """
        gradients = self.context.gradients(unit)
        self._own = dict(gradients)
        found: dict[int, Array] = {} if last is None else {last: dy}
        while self._notes:
            number, operands, backward = self._notes.pop()
            dy_here = found.pop(number, None)
            if dy_here is None:
                continue  # a result that nothing was made of
            for operand, gradient in zip(operands, backward(self, dy_here), strict=True):
                if operand is not None and gradient is not None:
                    found[operand] = self._sum(found[operand], gradient) if operand in found else gradient
            del backward, dy_here
        for name, number in self._weight_numbers.items():
            gradient = found.get(number)
            if gradient is not None and gradient is not gradients[name]:
                self.context.kernels.cast_pack(gradient, gradients[name])
        used = {name: gradients[name] if number in found else None for name, number in self._weight_numbers.items()}
        return None if first is None else found.get(first), cast(Gradients, used)

    def _sum(self, a: Array, b: Array) -> Array:
        """a + b, rounded once, in an array of its own: the addends may be the gradients of other operands too."""
        total = self.context.empty(a.shape, "activation_gradient", a.dtype, "autodiff.gradient")
        self.context.kernels.add_rounded(a, b, total)
        self.context.note(flops=a.size, nbytes=3 * a.nbytes)
        return total

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers - 1


# -- Tracked arrays ----------------------------------------------------------------------------------------------------


def _refusal(what: str, remedy: str) -> TypeError:
    return TypeError(f"a tracked array cannot {what}; {remedy}")


def _refused(what: str, remedy: str) -> Callable[..., NoReturn]:
    def method(self: TrackedArray, *arguments: Any, **options: Any) -> NoReturn:
        raise _refusal(what, remedy)

    return method


COMPARISONS = frozenset({"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"})
SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/", "power": "**", "matmul": "@"}


class TrackedArray(NDArrayOperatorsMixin):
    """An array whose operations are noted: +, -, *, /, **, @, methods, slices, and the functions of this module.

    Operands are broadcast as NumPy broadcasts. It has no elements to look at, since what one computed from them would
    have no gradient: `detach` gives a constant. NumPy's functions apply where they are elementwise and tracked
    (np.exp(x) is x.exp()); all others, in-place writes and comparisons raise TypeError by their name.
    """

    __slots__ = ("graph", "value")

    def __init__(self, graph: Graph, value: NotedValue) -> None:
        self.graph, self.value = graph, value

    @property
    def _array(self) -> Array:
        return self.graph.elements(self.value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements: the compute format's, or a weight's own."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"TrackedArray({self.shape}, {self.dtype}{', constant' if self.value.number is None else ''})"

    # Elementwise operations; each rounds once. Operators are NumPy's functions, by its own mixin.
    def exp(self) -> TrackedArray:
        """e to the power of each element."""
        return _elementwise("exp", self)

    def log(self) -> TrackedArray:
        """The natural logarithm of each element."""
        return _elementwise("log", self)

    def sqrt(self) -> TrackedArray:
        """The square root of each element."""
        return _elementwise("sqrt", self)

    def tanh(self) -> TrackedArray:
        """The hyperbolic tangent of each element."""
        return _elementwise("tanh", self)

    def relu(self) -> TrackedArray:
        """max(x, 0); see `layers.relu_forward`."""
        return _by_layer(layers.relu_forward, layers.relu_backward, self)

    def gelu(self, *, exact: bool = False) -> TrackedArray:
        """See `layers.gelu_forward`."""
        return _by_layer(partial(layers.gelu_forward, exact=exact), partial(layers.gelu_backward, exact=exact), self)

    # Sums, shapes.
    def sum(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> TrackedArray:
        """The sum over some axes, or over all: added one after the other in fp32, rounded once."""
        return _summed(self, _axes(self, axis), 1, keepdims=keepdims)

    def mean(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> TrackedArray:
        """The mean over some axes, or over all: a sum in fp32, divided there, rounded once."""
        axes = _axes(self, axis)
        return _summed(self, axes, math.prod(self.shape[one] for one in axes), keepdims=keepdims)

    def reshape(self, *shape: Any) -> TrackedArray:
        """The same elements in another shape, lengths or a tuple of them, copied."""
        asked: tuple[int, ...] = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return _moved("reshape", self, lambda x: x.reshape(asked), self._array.reshape(asked).shape)

    def transpose(self, *axes: int) -> TrackedArray:
        """The axes in another order, reversed if none are given; the elements are copied."""
        order = axes or tuple(range(self.ndim))[::-1]
        return _moved("transpose", self, lambda x: x.transpose(order), tuple(self.shape[one] for one in order))

    @property
    def T(self) -> TrackedArray:
        """The axes reversed."""
        return self.transpose()

    def __getitem__(self, key: Any) -> TrackedArray:
        """Integers, slices, ... and None; the elements are copied, and the gradient of all others is 0."""
        keys = key if isinstance(key, tuple) else (key,)
        if not all(part is None or part is ... or isinstance(part, int | slice | np.integer) for part in keys):
            raise TypeError(f"a tracked array is indexed by integers, slices, ... and None, found {key!r}; rows of a "
                            "table are embedding(tokens, w)")
        keys = keys if ... in keys else (*keys, ...)
        return _moved("slice", self, lambda x: x[keys], self._array[keys].shape)

    def detach(self) -> TrackedArray:
        """The same values as a constant, through which no gradient goes; of a weight, a copy."""
        copy = self.graph.context.empty(self.shape, dtype=self.dtype, name="autodiff.detached")
        copy_elements(self._array, copy)
        return self.graph.tracked(copy, constant=True)

    # Refusals.
    __setitem__ = _refused("be written into, since backward may need what it was",
                           "build the result from parts, by concatenate() or a sum with masks")
    __bool__ = _refused("decide a branch: which way it went has no gradient", "compute both, and mix them by a mask")
    __float__ = __int__ = _refused("become a number, which would be a constant", "go on with the array itself")
    __array__ = _refused("become a NumPy array, of which nothing would be tracked",
                         "compute by its methods, or take detach() for a constant")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None,
                        **options: Any) -> TrackedArray:
        """An elementwise function or product of NumPy that is tracked; TypeError for any other, by its name."""
        kind, name = ufunc.__name__, f"np.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}")
        if kind in COMPARISONS:
            raise _refusal("be compared: a comparison has no gradient",
                           "use maximum(x, y), relu(), or a constant array as a mask to multiply by")
        if out is not None and isinstance(out[0], TrackedArray) and kind in SIGNS:
            raise _refusal(f"be changed in place by {SIGNS[kind]}=, since backward may need what it was",
                           f"write y = y {SIGNS[kind]} x, which makes another array")
        if out is not None:
            raise TypeError(f"{name} was asked to write into an array; results of tracked operations are arrays of "
                            "their own, so leave out= away (y += x of a NumPy array y is one, too)")
        if method != "__call__" or options or kind not in UFUNCS:
            raise _untracked(name)
        if ufunc is np.matmul:
            return _product(*[self.graph.operand(x, name) for x in inputs])
        if ufunc is np.power and not (isinstance(inputs[0], TrackedArray) and is_number(inputs[1])):
            raise TypeError("a power, np.power too, is tracked where the exponent is a number; write "
                            "(np.log(x) * y).exp() for x to the power y")
        return _elementwise(kind, *inputs)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> NoReturn:
        """TypeError, by the function's name."""
        raise _untracked(f"np.{function.__name__}")


def _untracked(name: str) -> TypeError:
    known = ", ".join(f"np.{one}" for one in sorted(UFUNCS))
    return TypeError(f"{name} is not tracked, so its result would have no gradient; tracked are {known}, a tracked "
                     "array's methods (sum, mean, reshape, transpose, relu, gelu, ...) and the functions of "
                     "zerosim.models.autodiff; or write the unit's backward by hand")


# -- Elementwise operations --------------------------------------------------------------------------------------------
# A formula writes its last argument; the others are blocks (n,) of one type. It is called by the kernels, in fp32.


def _power_gradient(dy: Array, x: Array, exponent: Array, result: Array) -> None:
    np.power(x, exponent - 1, out=result)
    result *= exponent
    result *= dy


def _through_root(dy: Array, y: Array, result: Array) -> None:
    np.divide(dy, y, out=result)
    result *= 0.5


def _through_tanh(dy: Array, y: Array, result: Array) -> None:
    np.multiply(y, y, out=result)
    np.subtract(1, result, out=result)
    result *= dy


def _through_divisor(dy: Array, y: Array, divisor: Array, result: Array) -> None:
    np.multiply(dy, y, out=result)
    np.divide(result, divisor, out=result)
    np.negative(result, out=result)


def _larger(x: Array, y: Array, result: Array) -> None:
    np.maximum(x, y, out=result)  # which takes no result by position


def _where_larger(dy: Array, x: Array, y: Array, result: Array) -> None:
    result[...] = np.where(x >= y, dy, 0)


def _where_smaller(dy: Array, x: Array, y: Array, result: Array) -> None:
    result[...] = np.where(x >= y, 0, dy)


def _same(dy: Array, result: Array) -> None:
    np.copyto(result, dy)


@dataclass(frozen=True, slots=True)
class Derivative:
    """The gradient of one operand: ``formula(dy, *needs, result)``; ``needs`` are operands by place, or "y"."""

    formula: Callable[..., object]
    needs: tuple[int | str, ...] = ()


@dataclass(frozen=True, slots=True)
class ElementwiseRule:
    """An operation on elements, and its derivative by each operand, None where it has none."""

    forward: Callable[..., object]
    derivatives: tuple[Derivative | None, ...]


ELEMENTWISE: Mapping[str, ElementwiseRule] = {
    "add": ElementwiseRule(np.add, (Derivative(_same), Derivative(_same))),
    "subtract": ElementwiseRule(np.subtract, (Derivative(_same), Derivative(np.negative))),
    "multiply": ElementwiseRule(np.multiply, (Derivative(np.multiply, (1,)), Derivative(np.multiply, (0,)))),
    "divide": ElementwiseRule(np.divide, (Derivative(np.divide, (1,)), Derivative(_through_divisor, ("y", 1)))),
    "negative": ElementwiseRule(np.negative, (Derivative(np.negative),)),
    "power": ElementwiseRule(np.power, (Derivative(_power_gradient, (0, 1)), None)),
    "exp": ElementwiseRule(np.exp, (Derivative(np.multiply, ("y",)),)),
    "log": ElementwiseRule(np.log, (Derivative(np.divide, (0,)),)),
    "sqrt": ElementwiseRule(np.sqrt, (Derivative(_through_root, ("y",)),)),
    "tanh": ElementwiseRule(np.tanh, (Derivative(_through_tanh, ("y",)),)),
    "maximum": ElementwiseRule(_larger, (Derivative(_where_larger, (0, 1)), Derivative(_where_smaller, (0, 1)))),
}
UFUNCS = frozenset({*ELEMENTWISE, "matmul"})  # of NumPy, by name


def _elementwise(name: str, *values: Any) -> TrackedArray:
    """The operation of this name on operands that are broadcast to one shape."""
    graph = next(value.graph for value in values if isinstance(value, TrackedArray))
    ctx, rule = graph.context, ELEMENTWISE[name]
    operands = [graph.operand(value, name) for value in values]
    try:
        shape = np.broadcast_shapes(*[x.shape for x in operands])
    except ValueError:
        raise ValueError(f"{name} was given operands of shapes {' and '.join(str(x.shape) for x in operands)}, which "
                         "cannot be broadcast to one; axes of length 1 are, and axes that are missing on the left"
                         ) from None
    y = ctx.empty(shape, name=f"autodiff.{name}")
    _compute(ctx, rule.forward, [x._array for x in operands], y)
    result = NotedValue(y.shape, y.dtype, None, array=y)
    asked = [(x.value.outline, derivative, [result if place == "y" else operands[int(place)].value
                                            for place in derivative.needs])
             if x.value.number is not None and derivative is not None else None
             for x, derivative in zip(operands, rule.derivatives, strict=True)]

    def backward(graph: Graph, dy: Array) -> list[Array | None]:
        return [None if one is None else _elementwise_gradient(graph, dy, *one) for one in asked]

    return graph.result(y, operands, backward)


def _elementwise_gradient(graph: Graph, dy: Array, x: NotedValue, derivative: Derivative,
                          needs: list[NotedValue]) -> Array:
    if derivative.formula is _same and x.shape == dy.shape:
        return dy
    inputs = [dy, *map(graph.elements, needs)]
    return _reduced(graph, x, dy.shape, partial(_compute, graph.context, derivative.formula, inputs))


def _compute(ctx: Context, formula: Callable[..., object], inputs: Sequence[Array], out: Array) -> None:
    """out = formula of the inputs, broadcast to its shape, and the note of what that cost."""
    ctx.note(flops=out.size, nbytes=sum(x.nbytes for x in inputs) + out.nbytes)
    if has_data(out):
        inputs = [x if x.shape == out.shape else ctx.xp.broadcast_to(x, out.shape) for x in inputs]
    ctx.kernels.elementwise(formula, *inputs, out=out)


def _reduced(graph: Graph, x: NotedValue, shape: tuple[int, ...], compute: Callable[[Array], None]) -> Array:
    """The gradient of an operand that was broadcast to ``shape``: computed there, in fp32, and added up along the axes
    of broadcasting, one after the other; rounded once."""
    found = graph.gradient_room(x)
    if x.shape == shape:
        compute(found)
        return found
    wide = graph.context.empty(shape, "workspace", graph.context.wide_dtype, "autodiff.broadcast gradient")
    compute(wide)
    missing = len(shape) - len(x.shape)
    axes = tuple(range(missing)) + tuple(missing + place for place, length in enumerate(x.shape)
                                         if length == 1 and shape[missing + place] != 1)
    _add_up(graph.context, wide, axes, found)
    return found


# -- Sums --------------------------------------------------------------------------------------------------------------


def _add_up(ctx: Context, x: Array, axes: tuple[int, ...], out: Array) -> None:
    """out = the sum of x over axes, in the order of its elements, in fp32, rounded once."""
    rest = tuple(axis for axis in range(len(x.shape)) if axis not in axes)
    count = math.prod(x.shape[axis] for axis in axes)
    if axes != tuple(range(len(axes))):
        moved = ctx.empty(tuple(x.shape[axis] for axis in (*axes, *rest)), "workspace", x.dtype, "autodiff.axes")
        if has_data(x):
            copy_elements(x.transpose(*axes, *rest), moved)
        x = moved
    ctx.kernels.column_sum(x.reshape(count, out.size), out.reshape(-1))
    ctx.note(flops=x.size, nbytes=x.nbytes + out.nbytes)


def _axes(x: TrackedArray, axis: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The axes that are meant, rising. Raises ValueError for one that there is not, or that is named twice."""
    asked = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    found = tuple(sorted({one + x.ndim if one < 0 else one for one in asked}))
    if len(found) != len(asked) or any(not 0 <= one < x.ndim for one in found):
        raise ValueError(f"a sum or mean over axis={axis} was asked of an array of shape {x.shape}; name each of its "
                         f"{x.ndim} axes once, or none for all")
    return found


def _summed(x: TrackedArray, axes: tuple[int, ...], divisor: int, *, keepdims: bool) -> TrackedArray:
    """The sum over axes, divided in fp32, rounded once."""
    ctx, of_x = x.graph.context, x.value.outline
    kept = tuple(1 if axis in axes else length for axis, length in enumerate(x.shape))
    y = ctx.empty(kept if keepdims else tuple(n for axis, n in enumerate(x.shape) if axis not in axes),
                  name="autodiff.sum")
    total = ctx.empty(y.shape, "workspace", ctx.wide_dtype, "autodiff.total")
    _add_up(ctx, x._array, axes, total)
    ctx.kernels.divide_rounded(total, divisor, y)

    def backward(graph: Graph, dy: Array) -> list[Array | None]:
        dx = graph.gradient_room(of_x)
        _compute(graph.context, partial(_quotient, divisor), [dy.reshape(kept)], dx)
        return [dx]

    return x.graph.result(y, [x], backward)


def _quotient(divisor: int, dy: Array, result: Array) -> None:
    np.divide(dy, divisor, out=result)


# -- Products, and the layers that are pairs of functions by hand ------------------------------------------------------


def linear(x: TrackedArray, w: TrackedArray, b: TrackedArray | None = None) -> TrackedArray:
    """x @ w + b, rounded once: x (..., I), w (I, O), b (O,) -> (..., O); see `layers.linear_forward`."""
    y, _ = layers.linear_forward(x.graph.context, rows_of(x._array), w._array, None if b is None else b._array)
    of_x, of_w, of_b = x.value, w.value, None if b is None else b.value.outline

    def backward(graph: Graph, dy: Array) -> list[Array | None]:
        dw, db = graph.gradient_room(of_w), None if of_b is None else graph.gradient_room(of_b)
        dx = layers.linear_backward(graph.context, graph.elements(of_w), rows_of(graph.elements(of_x)), rows_of(dy), dw,
                                    db, input_gradient=of_x.number is not None)
        return [None if dx is None else dx.reshape(of_x.shape), dw] + ([] if of_b is None else [db])

    return x.graph.result(y.reshape(*x.shape[:-1], w.shape[1]), [x, w] if b is None else [x, w, b], backward)


def _product(a: TrackedArray, b: TrackedArray) -> TrackedArray:
    """a (..., I) @ b (I, O), or stacks a (..., M, I) @ b (..., I, O) of the same shape; constants are rounded to the
    compute format, as all that enters a product of matrices."""
    ctx = a.graph.context
    a, b = (x if x.value.number is not None or x.dtype == ctx.dtype else
            x.graph.tracked(ctx.cast(x._array, "activation", "autodiff.constant"), constant=True) for x in (a, b))
    if b.ndim == 2 and a.ndim >= 2:
        return linear(a, b)
    if a.ndim < 3 or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"@ was given operands of shapes {a.shape} and {b.shape}; it takes (..., I) @ (I, O), or "
                         "stacks (..., M, I) @ (..., I, O) of the same shape")
    of_a, of_b, stack = a.value, b.value, list(np.ndindex(*a.shape[:-2]))
    y = a.graph.context.empty((*a.shape[:-1], b.shape[-1]), name="autodiff.matmul")
    for here in stack:
        layers.linear_forward(a.graph.context, a._array[here], b._array[here], out=y[here])

    def backward(graph: Graph, dy: Array) -> list[Array | None]:
        da, db = graph.gradient_room(of_a), graph.gradient_room(of_b)
        for here in stack:
            part = layers.linear_backward(graph.context, graph.elements(of_b)[here], graph.elements(of_a)[here],
                                          dy[here], db[here])
            copy_elements(part, da[here])
        return [da, db]

    return a.graph.result(y, [a, b], backward)


def _by_layer(forward: Callable[..., Any], backward: Callable[..., Array | None], x: TrackedArray,
              *weights: TrackedArray) -> TrackedArray:
    """The result of a layer: forward(ctx, x, *weights) -> (y, saved), backward(ctx, saved, dy, *room for the weights'
    gradients) -> dx, in which no weight is read."""
    x, outlines = _unless_weight(x), [w.value.outline for w in weights]
    y, saved = forward(x.graph.context, x._array, *(w._array for w in weights))

    def backward_here(graph: Graph, dy: Array) -> list[Array | None]:
        of_weights = [graph.gradient_room(outline) for outline in outlines]
        return [backward(graph.context, saved, dy, *of_weights), *of_weights]

    return x.graph.result(y, [x, *weights], backward_here)


def _unless_weight(x: TrackedArray) -> TrackedArray:
    """x, or its copy where it is a weight, which no layer may save."""
    return x if x.value.name is None else _moved("copy", x, lambda array: array, x.shape)


def layernorm(x: TrackedArray, w: TrackedArray, b: TrackedArray, epsilon: float = layers.EPSILON) -> TrackedArray:
    """LayerNorm over the last axis: x (..., C), w and b (C,); see `layers.norm_forward`."""
    x, of_w, of_b = _unless_weight(x), w.value, b.value.outline
    y, saved = layers.norm_forward(x.graph.context, rows_of(x._array), w._array, b._array, epsilon=epsilon)

    def backward(graph: Graph, dy: Array) -> list[Array | None]:
        dw, db = graph.gradient_room(of_w), graph.gradient_room(of_b)
        dx = layers.norm_backward(graph.context, graph.elements(of_w), saved, rows_of(dy), dw, db)
        return [dx.reshape(dy.shape), dw, db]

    return x.graph.result(y.reshape(x.shape), [x, w, b], backward)


def attention(qkv: TrackedArray, heads: int, key_value_heads: int | None = None) -> TrackedArray:
    """Causal attention of (B, T, C + 2K) -> (B, T, C), which keeps its probabilities; see `layers.attention_forward`.
    """
    def forward(ctx: Context, qkv: Array) -> tuple[Array, Any]:
        return layers.attention_forward(replace(ctx, keep=layers.ALL), qkv, heads, key_value_heads)

    return _by_layer(forward, layers.attention_backward, qkv)


def dropout(x: TrackedArray, rate: float, name: str) -> TrackedArray:
    """Dropout whose mask, of this name, is drawn again by backward and recomputation; see `layers.dropout_forward`."""
    return _by_layer(partial(layers.dropout_forward, rate=rate, name=name),
                     partial(layers.dropout_backward, rate=rate), x)


def embedding(tokens: TrackedArray, w: TrackedArray) -> TrackedArray:
    """w[tokens]: tokens (B, T) of integers, the input of a `TokenUnit`, w (V, C) -> (B, T, C)."""
    return _by_layer(layers.embedding_forward, layers.embedding_backward, tokens, w)


def softmax(x: TrackedArray) -> TrackedArray:
    """exp(x - max)/Σ exp(x - max) over the last axis: x and the result (..., V). Each operation rounds."""
    maxima = x.graph.context.empty((*x.shape[:-1], 1), dtype=x.dtype, name="autodiff.maxima")
    if has_data(maxima):
        kernels = x.graph.context.kernels
        rows = kernels.wide("rows", x._array, x.graph.context.wide_dtype)
        kernels.round_into(kernels.row_maxima(rows), maxima[..., 0])
    exponentials = _elementwise("subtract", x, x.graph.tracked(maxima, constant=True)).exp()
    return _elementwise("divide", exponentials, exponentials.sum(-1, keepdims=True))


def maximum(x: TrackedArray, y: Any) -> TrackedArray:
    """The larger of two, element by element; where they are equal the gradient is the first one's."""
    return _elementwise("maximum", x, y)


# -- Elements that are moved -------------------------------------------------------------------------------------------


def _moved(name: str, x: TrackedArray, view: Callable[[Array], Array], shape: tuple[int, ...]) -> TrackedArray:
    """A copy, of this shape, of the elements of x that the view shows; the gradient is written through the same view,
    and that of all others is 0."""
    of_x = x.value.outline
    y = x.graph.context.empty(shape, dtype=x.dtype, name=f"autodiff.{name}")
    if has_data(y):
        copy_elements(view(x._array), y)
    x.graph.context.note(nbytes=x._array.nbytes + y.nbytes)

    def backward(graph: Graph, dy: Array) -> list[Array | None]:
        dx = graph.gradient_room(of_x)
        if dx.size != dy.size:
            dx.fill(0)
        if has_data(dx):
            copy_elements(dy, view(dx))
        graph.context.note(nbytes=2 * dy.nbytes)
        return [dx]

    return x.graph.result(y, [x], backward)


def _copy(ctx: Context, source: Array, out: Array) -> None:
    ctx.note(nbytes=source.nbytes + out.nbytes)
    copy_elements(source, out)


def concatenate(parts: Sequence[TrackedArray], axis: int = -1) -> TrackedArray:
    """The parts one after the other along an axis, copied."""
    if not parts or len({x.ndim for x in parts}) != 1 or not -parts[0].ndim <= axis < parts[0].ndim:
        raise ValueError(f"concatenate was given parts of shapes {[x.shape for x in parts]} and axis={axis}; it takes "
                         "one part or more, of as many axes, and one of these")
    graph, axis = parts[0].graph, axis % parts[0].ndim
    outlines, ends = [x.value.outline for x in parts], np.cumsum([0, *(x.shape[axis] for x in parts)]).tolist()
    places = [(*[slice(None)] * axis, slice(start, stop)) for start, stop in pairwise(ends)]
    y = graph.context.empty((*parts[0].shape[:axis], ends[-1], *parts[0].shape[axis + 1:]), dtype=parts[0].dtype,
                            name="autodiff.concatenate")
    for x, place in zip(parts, places, strict=True):
        require_shape("concatenate", "a part", x, y[place].shape, "parts differ along their axis alone")
        _copy(graph.context, x._array, y[place])

    def backward(graph: Graph, dy: Array) -> list[Array | None]:
        found: list[Array | None] = []
        for outline, place in zip(outlines, places, strict=True):
            dx = graph.gradient_room(outline)
            _copy(graph.context, dy[place], dx)
            found.append(dx)
        return found

    return graph.result(y, parts, backward)


# -- Units -------------------------------------------------------------------------------------------------------------

Function = Callable[[Mapping[str, TrackedArray], TrackedArray], TrackedArray]


class _Named(dict[str, TrackedArray]):
    """Tracked weights by name, which list the names that there are where another one is asked for."""

    def __missing__(self, name: object) -> NoReturn:
        raise unknown_name(f"the function of a unit asked for w[{name!r}]", name, self, "there are")


@dataclass(frozen=True, eq=False)
class AutodiffUnit(Unit):
    """A unit whose backward is found: ``function(w, x)`` computes the output from tracked arrays.

    ``parameters`` has the shape of each by its local name, under which ``w`` has it; its full name is
    ``name.local``. ``ties`` are parameters of earlier units, by full name, with the unit that each belongs to.
    ``initializers`` makes first values, by local name: by default Normal(seed, 1/sqrt(first length)) for two dimensions
    or more, else Filled(0). The ``first`` unit of a model computes no gradient of its input.

    The function must be pure, and run no other way the next time: recomputation calls it again.
    """

    name: str
    parameters: Mapping[str, tuple[int, ...]]
    function: Function
    initializers: Mapping[str, Initializer] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    first: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for what is no function or no shape, and for an initializer of no parameter."""
        shapes: Any = self.parameters
        if not isinstance(shapes, Mapping) or not callable(self.function):
            raise ValueError(f"AutodiffUnit({self.name!r}) takes shapes by name and a function of w and x, found "
                             f"{shapes!r} and {self.function!r}; write AutodiffUnit('unit', {{'w': (3, 4)}}, function)")
        for local, shape in shapes.items():
            if not isinstance(shape, tuple) or not all(is_count(length) and length >= 0 for length in shape):
                raise ValueError(f"AutodiffUnit({self.name!r}) was given {shape!r} for the shape of {local}; a shape "
                                 "is a tuple of lengths, as (3,) or (3, 4)")
        if unknown := sorted(self.initializers.keys() - self.parameters.keys()):
            raise ValueError(f"AutodiffUnit({self.name!r}) was given initializers for {', '.join(unknown)}; its "
                             f"parameters are {', '.join(self.parameters)}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters by full name."""
        return {f"{self.name}.{local}": shape for local, shape in self.parameters.items()}

    @property
    def tied_weights(self) -> Mapping[str, str]:
        """Parameters of earlier units that this one uses too."""
        return self.ties

    def initializer(self, name: str) -> Initializer:
        """The initializer of one parameter, which makes its first values."""
        local = name.removeprefix(f"{self.name}.")
        shape = self.parameters[local]
        default = Normal(self.seed, 1 / math.sqrt(max(1, shape[0]))) if len(shape) > 1 else Filled(0)
        return self.initializers.get(local, default)

    def forward(self, ctx: Context, w: Weights, x: Array) -> tuple[Array, Any]:
        """The function's output; saves the graph."""
        graph = Graph()
        with graph.running(ctx, w):
            given = graph.tracked(x, constant=self.first or self.integer_inputs)
            tracked = _Named({name.removeprefix(f"{self.name}."): graph.weight(name)
                              for name in (*self.shapes, *self.ties)})
            y: Any = self.function(tracked, given)
            if not isinstance(y, TrackedArray) or y.graph is not graph:
                raise TypeError(f"the function of unit {self.name!r} must return a tracked array that it has computed "
                                f"from w and x, found {type(y).__name__}")
            if y.value.name is not None:
                y = y.reshape(y.shape)  # a weight itself is not kept
            return y._array, (graph, y.value.number, given.value.outline)

    def backward(self, ctx: Context, w: Weights, saved: Any, dy: Array) -> tuple[Array | None, Gradients]:
        """The gradients of the input and of each parameter."""
        graph, last, given = saved
        with graph.running(ctx, w):
            dx, gradients = graph.backward(self, dy, last, given.number)
            if dx is None and given.number is not None:  # the output does not depend on the input
                dx = graph.gradient_room(given)
                dx.fill(0)
            return dx, gradients


class TokenUnit(AutodiffUnit):
    """The same for a first unit whose input are tokens: integers, from which `embedding` takes rows."""

    integer_inputs: ClassVar[bool] = True
