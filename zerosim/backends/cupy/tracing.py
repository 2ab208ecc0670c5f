"""From functions of NumPy's operations to kernels on a GPU: formats as CUDA text, tracing, and launches.

In order: the text that all kernels begin with, which moves formats in and out and rounds every operation; symbols, with
which a function that NumPy's kernels call block by block is run once and written as C; the kernel that reads each
operand once and writes each result once; and which functions are traced once and not at every call.

p mantissa bits, emin the smallest normal exponent, as in `formats`; n elements.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache, partial
from hashlib import blake2b
from importlib.resources import files
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from zerosim.numerics.arrays import contiguous, is_same_memory, may_share_memory, start, words
from zerosim.numerics.formats import FORMATS, Format

# -- The text that all kernels begin with: prelude.cu, and casts by formulas where a GPU has no instruction ------------

# No fused multiply-add, no flushing of subnormals, divisions and roots rounded correctly: NVRTC's defaults but the
# first, and written down all the same.
OPTIONS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++14")


def cast_formulas(fmt: Format) -> str:
    """The two casts of a format by formulas: a line that calls ZS_BF16, or ZS_FORMAT with the format's constants."""
    if fmt.exponent_bits == FORMATS["fp32"].exponent_bits:
        return f"ZS_BF16({fmt.name})\n"
    p, bits = fmt.mantissa_bits, fmt.bits
    magnitude = (1 << (bits - 1)) - 1
    infinity = ((1 << fmt.exponent_bits) - 1) << p
    largest = infinity if fmt.has_infinity else magnitude
    scale = 2.0 ** (127 - ((1 << (fmt.exponent_bits - 1)) - 1))
    constants = (
        fmt.name, f"u{bits}", f"{magnitude}u", f"{1 << (bits - 1)}u", 32 - bits, 23 - p, f"{scale:.1f}f", f"{largest}u",
        "0x7f800000u" if fmt.has_infinity else "0x7fc00000u",
        f"{infinity | 1 << (p - 1) if fmt.has_infinity else magnitude}u", ">=" if fmt.has_infinity else ">",
        f"{np.float32(fmt.overflow_from).view(np.uint32)}u", f"{np.float32(fmt.smallest_normal).view(np.uint32)}u",
        f"{(23 - p) << 23}u", f"{(23 - p + 127 + fmt.min_exponent) << p}u")
    return f"ZS_FORMAT({', '.join(map(str, constants))})\n"


# The least __CUDA_ARCH__ for which prelude.cu has a cast's instructions. A CPU's compiler, which does not define it,
# takes it for 0; from 1 on it is a GPU's.
INSTRUCTIONS_FROM = {"bf16": 800, "fp16": 1, "fp8_e4m3": 890, "fp8_e5m2": 890}
PRELUDE = "".join([
    files("zerosim.backends.cupy").joinpath("prelude.cu").read_text("utf-8"),
    *(f"#if __CUDA_ARCH__ < {least}\n{cast_formulas(FORMATS[name])}#endif\n"
      for name, least in INSTRUCTIONS_FROM.items())])

_INTEGERS = {f"{kind}{8 * nbytes}": c_type for nbytes, c_type in ((1, "char"), (2, "short"), (4, "int"),
                                                                  (8, "long long")) for kind in ("int", "uint")}
_NAMES = {fmt.dtype: name for name, fmt in FORMATS.items()}


@cache
def storage_of(dtype: np.dtype[Any]) -> str:
    """The C type in which an element lies in memory."""
    if dtype.name in _INTEGERS:
        return ("unsigned " if dtype.kind == "u" else "signed ") + _INTEGERS[dtype.name]
    if dtype == np.bool_:
        return "u8"
    return {"float64": "double", "float32": "float"}.get(dtype.name, f"u{8 * dtype.itemsize}")


FP16 = FORMATS["fp16"].dtype


@cache
def computed_in(work: np.dtype[Any]) -> str:
    """The C type of values that are computed with; fp16 is for two elements of fp8 at once, whose codes are one u16."""
    return "Half2" if work == FP16 else storage_of(work)


@cache
def widened(expression: str, dtype: np.dtype[Any], work: np.dtype[Any]) -> str:
    """An element at rest as a C expression of the type that is computed in."""
    if work == FP16:
        return f"zs_widen2_{_NAMES[dtype]}({expression})"
    if dtype == work or dtype not in _NAMES:
        return f"({storage_of(work)}){expression}"
    return f"({storage_of(work)})zs_widen_{_NAMES[dtype]}({expression})"


@cache
def narrowed(expression: str, work: np.dtype[Any], dtype: np.dtype[Any]) -> str:
    """A computed value as a C expression of what is to rest: rounded once."""
    if work == FP16:
        return f"zs_narrow2_{_NAMES[dtype]}({expression})"
    if dtype == work or dtype not in _NAMES:
        return f"({storage_of(dtype)}){expression}"
    if work == np.float64:
        expression = f"(float){expression}" if dtype == np.float32 else f"zs_odd({expression})"
    return f"zs_narrow_{_NAMES[dtype]}({expression})"


# -- One kernel from one function --------------------------------------------------------------------------------------
# The function that NumPy's kernels call block by block is the one source of the arithmetic. Called with a `Symbol` for
# each array it leaves its operations on a tape, one statement for each, in its order; every one of them rounds, as it
# does in NumPy. Python's numbers become arguments of the kernel, so that the text does not change with a learning rate.


OPERATIONS = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "sqrt", "square", "exp", "log", "tanh",
              "absolute", "sign", "negative")  # fmt: skip
COMPARISONS = {"greater": ">", "greater_equal": ">=", "less": "<", "less_equal": "<="}


class TracingTape:
    """The statements of one element, and the numbers that they are given."""

    def __init__(self, work: np.dtype[Any]) -> None:
        self.work, self.lines = work, list[str]()
        self.numbers: list[np.generic] = []
        self.read, self.assigned = set[str](), set[str]()  # names; read is what was not assigned before

    def fresh(self) -> Symbol:
        """A new variable."""
        name = f"t{len(self.lines)}"
        self.lines.append(f"{computed_in(self.work)} {name};")
        return Symbol(self, name)

    def assign(self, target: Symbol, expression: str) -> Symbol:
        """target = expression."""
        self.lines.append(f"{target.name} = {expression};")
        self.assigned.add(target.name)
        return target

    def operation(self, name: str, operands: tuple[Any, ...], target: Symbol | None) -> Symbol:
        """target, or a new variable, = one rounded operation."""
        wide = any(map(self.widens, operands))
        if wide and target is None:
            raise ValueError(f"np.{name} of a block of {self.work.name} and a NumPy scalar of a wider type needs out=: "
                             "NumPy would make a block of float64, and a CUDA kernel computes in one type; name "
                             "one, or take float(scalar)")
        written = ", ".join(f"(double){self.operand(x, wide)}" if wide else self.operand(x, wide) for x in operands)
        cast = f"({storage_of(self.work)})" if wide else ""
        return self.assign(self.fresh() if target is None else target, f"{cast}zs_{name}({written})")

    def widens(self, operand: Any) -> bool:
        """True where NumPy would compute in float64 for this number's sake, as it does for its own float64 scalars."""
        return isinstance(operand, np.generic | np.ndarray) and np.result_type(self.work, operand.dtype) != self.work

    def operand(self, value: Any, wide: bool = False) -> str:
        """A variable's name; a number becomes an argument, in the type that is computed in."""
        if isinstance(value, Symbol):
            if value.name not in self.assigned:
                self.read.add(value.name)
            return value.name
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError(f"a function of elements was given an array {value.shape} beside its blocks, which lies "
                             "in another memory; hand the array to the kernel among its inputs")
        with np.errstate(all="ignore"):
            number = np.asarray(value, np.float64 if wide else self.work)
        self.numbers.append(number.dtype.type(number))
        return f"p{len(self.numbers) - 1}"

    def rounded(self, x: Symbol, dtype: np.dtype[Any]) -> None:
        """x becomes the nearest number of a narrower format."""
        name = self.operand(x)
        self.assign(x, f"zs_round2_{_NAMES[dtype]}({name})" if self.work == FP16 else
                    widened(narrowed(name, self.work, dtype), dtype, self.work))


class Mask:
    """The answer to a comparison, which a function may choose by and not ask."""

    def __init__(self, expression: str) -> None:
        self.expression = expression

    def __bool__(self) -> NoReturn:
        raise ValueError("a function of elements asked whether a comparison of blocks is true, but it is written into "
                         "one kernel before there are numbers; choose by np.copyto(out, x, where=...)")


class Symbol(NDArrayOperatorsMixin):
    """Stands for a block in a function that is traced; one element of it, in C. Python's operators are NumPy's."""

    size, ndim, shape = 1, 1, (1,)

    def __init__(self, tape: TracingTape, name: str) -> None:
        self.tape, self.name = tape, name

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tape.work

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple[Any, ...] = (None,),
                        **options: Any) -> Symbol | Mask:  # fmt: skip
        name = ufunc.__name__
        if method != "__call__" or options or name not in (*OPERATIONS, *COMPARISONS):
            _refuse(f"np.{name}" + ("" if method == "__call__" else f".{method}"))
        if name in OPERATIONS:
            return self.tape.operation(name, inputs, out[0])
        answer, wide = self.tape.fresh(), any(map(self.tape.widens, inputs))
        left, right = (self.tape.operand(x, wide) for x in inputs)
        self.tape.assign(answer, f"{left} {COMPARISONS[name]} {right}")
        return Mask(f"({answer.name} != 0)")

    def __array_function__(self, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...],
                           options: dict[str, Any]) -> Any:  # fmt: skip
        if function is np.copyto:
            return self.tape_copy(*arguments, **options)
        if function is np.clip:
            x, low, high = arguments
            lowest = self.tape.operation("maximum", (x, low), options.get("out"))
            return self.tape.operation("minimum", (lowest, high), lowest)
        return _refuse(f"np.{function.__name__}")

    def tape_copy(self, out: Symbol, x: Any, where: Mask | bool = True) -> None:
        """out = x where the mask says so."""
        if isinstance(where, Mask):
            self.tape.assign(out, f"{where.expression} ? {self.tape.operand(x)} : {self.tape.operand(out)}")
        elif where:
            self.tape.assign(out, self.tape.operand(x))

    def __setitem__(self, key: object, value: Any) -> None:
        if key not in (..., slice(None)):
            _refuse(f"the place [{key!r}] of a block")
        self.tape_copy(self, value)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a block that is written into one kernel has no {name}: {_SPEAKS}")

    def __bool__(self) -> NoReturn:
        raise ValueError("a function of elements asked whether a block is true, but it is written into one kernel "
                         "before there are numbers; choose by np.copyto(out, x, where=...)")


class TracedScratch:
    """Scratch memory for traced functions: each piece is a variable."""

    def __init__(self, tape: TracingTape) -> None:
        self._tape = tape

    def array(self, name: str, shape: Any, dtype: Any) -> Symbol:
        """A new variable, whatever the name: nothing is handed on from one call to the next."""
        return self._tape.fresh()


_SPEAKS = f"it knows {', '.join(f'np.{name}' for name in OPERATIONS)}, np.clip and np.copyto"


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"a function of elements was asked for {what}, which cannot be written into one CUDA kernel: "
                     f"{_SPEAKS}, and Python's + - * /; write it with these, element by element")


# -- Launches: each operand read once, each result written once --------------------------------------------------------
# A thread takes neighboring elements of every array, as many as make 16 bytes of the widest type (or half as many,
# where the arrays are many), in one access of each, so that a kernel is as fast as the memory: what it computes between
# a load and a store costs nothing beside them.
#
# An operand's elements are taken in one of four patterns. They lie in one "row", or in "lines" of `period` elements,
# `step` from one to the next (halves of rows). Or they are fewer than n, and *spread*: each stands for "every" `period`
# elements (a number per row), or all come again in a "cycle" of `period` elements (a number per column). In which
# period a thread begins is found by one division for all of its elements.


Array = Any  # cupy.ndarray
THREADS = 256  # of a block
ACCESS_NBYTES = 16  # that one instruction loads or stores at most (PTX ISA, "ld": v4.b32)
HELD_NBYTES = 160  # 40 registers for more than 4 elements of each array: enough for 16 bytes of each of 9, not of 17
SHORT = 2**31  # elements up to which an index has 32 bits
Pattern = Literal["row", "lines", "every", "cycle"]
SPREAD = ("every", "cycle")


@dataclass(frozen=True, slots=True)
class Operand:
    """An array of a fused kernel, and which of its elements belongs to each one that is computed."""

    array: Array
    pattern: Pattern = "row"
    period: int = 0
    step: int = 0

    def fits(self, each: int) -> bool:
        """True where a thread may take so many elements at once: in one access, or of two periods at most."""
        if self.pattern in SPREAD:
            return self.period >= each
        return not start(self.array) % (each * self.array.dtype.itemsize)


@cache
def compiled(text: str, name: str, device: int) -> Any:
    """The kernel of that name in a CUDA text without its prelude, for the current device, which has this number.

    Not a cupy.RawKernel: CuPy compiles those with -ftz=true behind all other options (CuPy's issue 9576), and every
    subnormal number would become zero.
    """
    import cupy

    binary, _ = cupy.cuda.compiler.compile_using_nvrtc(PRELUDE + text, OPTIONS, filename=f"{name}.cu")
    module = cupy.cuda.function.Module()
    module.load(binary)
    return module.get_function(name)


def launch(text: str, name: str, threads: int, arguments: Sequence[Any]) -> None:
    """Runs a kernel with at least so many threads; nothing where that is 0. A Python int is passed as a u64.

    Raises ValueError for a NumPy array.
    """
    for x in arguments:
        if isinstance(x, np.ndarray):
            raise ValueError(f"a kernel of the GPU was given a NumPy array {x.shape} of type {x.dtype.name}, which "
                             "lies on the host; bring it over first, with rank.xp.asarray, or by cast_pack into an "
                             "array of rank.memory")
    if threads:
        import cupy

        kernel = compiled(text, name, cupy.cuda.runtime.getDevice())
        passed = tuple(np.uint64(x) if isinstance(x, int) else x for x in arguments)
        kernel((-(-threads // THREADS),), (THREADS,), passed)


def launch_typed(text: str, name: str, threads: int, arguments: Sequence[Any], *, Rest: np.dtype[Any] | None = None,
                 To: np.dtype[Any] | None = None, Work: np.dtype[Any] | None = None, **others: np.dtype[Any]) -> None:
    """Runs a kernel whose text speaks of types by these names, and of wide(Rest) and narrow(Work)."""
    named = {"Rest": Rest, "To": To, "Work": Work, **others}
    types = [f"typedef {storage_of(dtype)} {type_name};" for type_name, dtype in named.items() if dtype is not None]
    if Rest is not None and Work is not None:
        types.append(f"ZS Work wide(Rest x) {{ return {widened('x', Rest, Work)}; }}")
    if To is not None and Work is not None:
        types.append(f"ZS To narrow(Work x) {{ return {narrowed('x', Work, To)}; }}")
    launch("\n".join(types) + text, name, threads, arguments)


def run_fused(function: Callable[..., object], operands: Sequence[Operand], work: np.dtype[Any],
              scratch: int = 0) -> None:  # fmt: skip
    """function(*operands, *scratch) for every element, each of n or spread, with so many scratch variables. What the
    function assigns to is written, and what it takes before it assigns to it is read.

    work: float64, float32, a whole number's type; or float16 for fp8, none spread, of which two elements are computed
    at once.
    """
    count = operands[-1].array.size
    in_lines = [o for o in operands if o.pattern == "lines"]
    short = max([count, *(count // o.period * o.step for o in in_lines)]) < SHORT
    periods = list(dict.fromkeys([0, *(o.period for o in operands)]))
    kinds = tuple(Kind(o.array.dtype, o.pattern, periods.index(o.period)) for o in operands)
    plan = _planned(function, kinds, work, short, scratch)
    index, each = np.uint32 if short else np.uint64, plan.per_thread
    lengths = [*periods[1:], *(o.step - o.period for o in in_lines)]
    arguments = [*(o.array for o in operands), *map(index, lengths), *plan.numbers, index(count),
                 np.int32(all(o.fits(each) for o in operands))]
    launch(plan.text, plan.name, -(-count // each), arguments)


class Kind(NamedTuple):
    """An operand as a kernel's text names it: its period is a number of the launch's, from 1 on, or 0 for none."""

    dtype: np.dtype[Any]
    pattern: Pattern = "row"
    period: int = 0

    @property
    def is_spread(self) -> bool:
        return self.pattern in SPREAD


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A kernel's text and name, the numbers that its function computes with, and the elements of one thread."""

    text: str
    name: str
    numbers: tuple[np.generic, ...]
    per_thread: int


def _plan(function: Callable[..., object], kinds: tuple[Kind, ...], work: np.dtype[Any], short: bool,
          scratch: int) -> LaunchPlan:  # fmt: skip
    """Traces the function; operands and scratch as for `run_fused`."""
    if work == FP16 and any(kind.dtype.itemsize > 1 or kind.is_spread for kind in kinds):
        raise ValueError("float16 computes two neighboring elements of fp8 at once; it was asked for arrays of "
                         f"{', '.join('spread ' * kind.is_spread + kind.dtype.name for kind in kinds)}; compute in "
                         "float32")
    tape = TracingTape(work)
    names, spare = [f"v{i}" for i in range(len(kinds))], [f"s{i}" for i in range(scratch)]
    function(*(Symbol(tape, name) for name in names + spare))
    ways = [(name in tape.read, name in tape.assigned) for name in names]
    each = elements_per_thread(kinds)
    text, name = _text(tape, list(zip(kinds, ways, strict=True)), spare, "u32" if short else "u64", each)
    return LaunchPlan(text, name, tuple(tape.numbers), each)


def elements_per_thread(kinds: Sequence[Kind]) -> int:
    """As many as one access has of the widest type that is not spread; half as many, but no fewer than 4, where
    those of all arrays are more than HELD_NBYTES."""
    sizes = [kind.dtype.itemsize for kind in kinds if not kind.is_spread]
    each = ACCESS_NBYTES // max(sizes)
    return each if each <= 4 or each * sum(sizes) <= HELD_NBYTES else each // 2


def _text(tape: TracingTape, operands: list[tuple[Kind, tuple[bool, bool]]], scratch: list[str],
          index: str, each: int) -> tuple[str, str]:  # fmt: skip
    """The kernel's text, and its name, which says what it does and nothing else of the call.

    In it are, by number: a, arrays; q, periods; h, what lies between lines; p, numbers; g, a thread's group of an array
    that is not spread, e, one element alone; x, what is computed at once, at rest; v, the same as it is computed with;
    s, scratch; t, the tape's variables.
    """
    work, at_once = computed_in(tape.work), 2 if tape.work == FP16 else 1
    parameters, arrays, lines = [], [], []
    texts = {name: list[str]() for name in ("load_g", "load_e", "store_g", "store_e")}
    for i, ((dtype, pattern, q), (read, written)) in enumerate(operands):
        const, rest = "" if written else "const ", storage_of(dtype)
        parameters.append(f"{const}{rest}* a{i}")
        if pattern == "every":
            taken = f"zs_every(a{i}, first, q{q}, j, {each})", f"zs_every(a{i}, at, q{q}, 0, 1)"
        elif pattern == "cycle":
            taken = f"zs_cycle(a{i}, first, q{q}, j)", f"zs_cycle(a{i}, at, q{q}, 0)"
        else:
            taken = f"g{i}.at[j]", f"e{i}"
            rest = rest if at_once == 1 else f"u{8 * at_once * dtype.itemsize}"
            group = f"Group<{rest}, {each // at_once}>"
            begin, one = (f"{at} + {at} / q{q} * h{i}" if pattern == "lines" else at for at in ("first", "at"))
            for name, held, place in (("g", group, f"*reinterpret_cast<{const}{group}*>(a{i} + {begin})"),
                                      ("e", rest, f"a{i}[{one}]")):
                texts[f"load_{name}"].append(f"{held} {name}{i}" + (f" = {place};" if read else ";"))
                texts[f"store_{name}"] += [f"{place} = {name}{i};"] * written
        arrays.append((f"{const}{rest}& x{i}", *taken))
        lines.append(f"{work} v{i}" + (f" = {widened(f'x{i}', dtype, tape.work)};" if read else "{};"))
    lines += [f"{work} {name}{{}};" for name in scratch] + tape.lines
    lines += [f"x{i} = {narrowed(f'v{i}', tape.work, kind.dtype)};" for i, (kind, (_, written)) in enumerate(operands)
              if written]
    parameters += [f"{index} q{q}" for q in range(1, 1 + max(kind.period for kind, _ in operands))]
    parameters += [f"{index} h{i}" for i, (kind, _) in enumerate(operands) if kind.pattern == "lines"]
    parameters += [f"{storage_of(number.dtype)} p{i}" for i, number in enumerate(tape.numbers)]
    elements, grouped, single = (", ".join(words) for words in zip(*arrays, strict=True))
    body = _BODY.format(index=index, each=each, at_once=at_once, elements=elements, grouped=grouped, single=single,
                        lines="\n    ".join(lines), **{name: "\n    ".join(text) for name, text in texts.items()})
    name = f"zs_{blake2b((body + ', '.join(parameters)).encode(), digest_size=8).hexdigest()}"
    return f'extern "C" __global__ void {name}({", ".join([*parameters, f"{index} n", "int grouped"])}){body}', name


# A thread's elements in one access of each array; or one by one, at the end, where an array lies askew, and where
# several periods begin in one group.
_BODY = """
{{
  {index} first = ((({index})blockIdx.x) * blockDim.x + threadIdx.x) * {each};
  if (first >= n) return;
  auto compute = [&]({elements}) {{
    {lines}
  }};
  if (grouped && n - first >= {each}) {{
    {load_g}
    #pragma unroll
    for (int j = 0; j < {each} / {at_once}; ++j) compute({grouped});
    {store_g}
  }} else for ({index} at = first; at < n && at - first < {each}; ++at) {{
    {load_e}
    compute({single});
    {store_e}
  }}
}}
"""


def where_it_lies(x: Array) -> Operand | None:
    """x as an operand without a copy: in one row, or in lines that threads take in whole accesses; None elsewhere."""
    if x.flags.c_contiguous:
        return Operand(x.reshape(-1))
    axes = [(count, stride) for count, stride in zip(x.shape, x.strides, strict=True) if count > 1]
    line_nbytes = x.itemsize
    while axes[-1][1] == line_nbytes:
        line_nbytes *= axes.pop()[0]
    step_nbytes = axes[-1][1]
    even = all(stride == count * inner for (_, stride), (count, inner) in pairwise(axes))
    if not even or step_nbytes < line_nbytes or any(n % ACCESS_NBYTES for n in (start(x), line_nbytes, step_nbytes)):
        return None
    return Operand(x, "lines", line_nbytes // x.itemsize, step_nbytes // x.itemsize)


def row_for(x: Array, out: Array) -> Array:
    """x as one row that may be read while `out` is written by other threads."""
    row = as_row(x)
    return row if may_be_read_beside(row, out) else copied(row)


def may_be_read_beside(x: Array, out: Array) -> bool:
    """True where they share no memory, or are the same elements in the same type."""
    return is_same_memory(x, out) or not may_share_memory(x, out)


def as_row(x: Array) -> Array:
    """The elements in one row: a view where they lie so, else a copy."""
    # Not reshape(-1) alone: every second element of rows of an even length makes one row with gaps, and no copy.
    return contiguous(x).reshape(-1)


def copied(x: Array) -> Array:
    """The same elements, bit for bit, in contiguous memory of their own."""
    return words(x).copy().view(x.dtype)


# -- Which traces are used again ---------------------------------------------------------------------------------------
# To trace a function takes a hundred microseconds, to launch a kernel ten. A step traces each of its functions once,
# and not once for each tensor. What may be another function the next time, as a closure may, is traced at every call.


def _planned(function: Callable[..., object], *rest: Any) -> LaunchPlan:
    try:
        return _remembered(Remembered(key_of(function), function), *rest)
    except Unknown:
        return _plan(function, *rest)


@dataclass(frozen=True, slots=True)
class Remembered:
    """A function that equals any other of the same key."""

    key: Hashable
    function: Callable[..., object] = field(compare=False)


@lru_cache(maxsize=4096)
def _remembered(it: Remembered, *rest: Any) -> LaunchPlan:
    return _plan(it.function, *rest)


class Unknown(Exception):
    """A function, or a constant of it, that may be another the next time."""


def key_of(value: Any) -> Hashable:
    """A key of a function and its constants: equal for what makes the same kernel with the same numbers.

    Functions are those of modules, methods of frozen dataclasses, and ``partial`` of these; constants are numbers, by
    type and bits, names, formats and frozen dataclasses. Raises Unknown for anything else, closures among it.
    """
    match value:
        case partial(keywords={}):
            return key_of(value.func), key_of(value.args)
        case MethodType(__func__=FunctionType() as function) if set(function.__code__.co_freevars) <= {"__class__"}:
            return function, key_of(value.__self__)
        case FunctionType() if "<" not in value.__qualname__:
            return value
        case tuple():
            return tuple(map(key_of, value))
        case np.generic():
            return type(value), value.tobytes()
        case float():
            return float, value.hex()
        case None | int() | str() | np.dtype() | np.ufunc():
            return type(value), value
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise Unknown
    return type(value), tuple(key_of(getattr(value, each.name)) for each in fields(value))
