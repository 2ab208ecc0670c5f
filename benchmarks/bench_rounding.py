"""The speed of rounding, packing and adding, each beside an fp32 operation of the same run and beside NumPy's own.

Gel/s are 1e9 elements per second, the best of some repetitions; they are this machine's and this minute's: trust the
ratios. "gradients" are numbers of all magnitudes from 1e-10 to 1e-3, most of them subnormal or zero in fp16.
"""

from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table
from timing import best_seconds

from zerosim.numerics.formats import FORMATS, Format
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.rounding import round_to
from zerosim.optim import Adam

COUNT = 1 << 22  # elements: too many for most caches, as a model's are
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}


def inputs() -> dict[str, np.ndarray]:
    """float32 (COUNT,) by name."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(COUNT)
    return {
        "normal": normal.astype(np.float32),
        "gradients": (normal * 10.0 ** rng.uniform(-10, -3, COUNT)).astype(np.float32),
    }


def table_of(title: str, columns: list[str]) -> Table:
    table = Table(title=title)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    return table


def rate(seconds: float, floor_seconds: float) -> str:
    """Gel/s, and how many times as long as the floor it took."""
    return f"{COUNT / seconds / 1e9:.2f} ({seconds / floor_seconds:.1f}x)"


def rounding_table(kernels: NumpyKernels, name: str, x: np.ndarray) -> Table:
    """round_to, and packing and unpacking beside astype, for each format."""
    wide = kernels.empty(COUNT, np.float32)
    copy_seconds = best_seconds(lambda: np.copyto(wide, x))
    title = f"{name}: Gel/s, and times an fp32 copy's {COUNT / copy_seconds / 1e9:.2f} Gel/s"
    table = table_of(title, ["format", "round_to", "cast_pack", "astype to", "unpack", "astype from"])
    for fmt in FORMATS.values():
        seconds = casting_seconds(kernels, fmt, x, wide)
        table.add_row(fmt.name, *(rate(one, copy_seconds) for one in seconds))
    return table


def casting_seconds(kernels: NumpyKernels, fmt: Format, x: np.ndarray, wide: np.ndarray) -> list[float]:
    low = kernels.empty(COUNT, fmt.dtype)
    return [
        best_seconds(lambda: round_to(x, fmt, out=wide)),
        best_seconds(lambda: kernels.cast_pack(x, low)),
        best_seconds(lambda: np.copyto(low, x, casting="unsafe")),
        best_seconds(lambda: kernels.cast_pack(low, wide)),
        best_seconds(lambda: np.copyto(wide, low, casting="unsafe")),
    ]


def adding_table(kernels: NumpyKernels, name: str, x: np.ndarray) -> Table:
    """add_rounded beside the array type's own addition, for each format."""
    wide = kernels.empty(COUNT, np.float32)
    add_seconds = best_seconds(lambda: np.add(x, x, out=wide))
    title = f"{name}: Gel/s, and times an fp32 addition's {COUNT / add_seconds / 1e9:.2f} Gel/s"
    table = table_of(title, ["format", "add_rounded", "np.add"])
    for fmt in FORMATS.values():
        table.add_row(fmt.name, *(rate(seconds, add_seconds) for seconds in adding_seconds(kernels, fmt, x)))
    return table


def adding_seconds(kernels: NumpyKernels, fmt: Format, x: np.ndarray) -> list[float]:
    a, out = kernels.empty(COUNT, fmt.dtype), kernels.empty(COUNT, fmt.dtype)
    kernels.cast_pack(x, a)
    return [
        best_seconds(lambda: kernels.add_rounded(a, a, out)),
        best_seconds(lambda: np.add(a, a, out=out)),
    ]


def adam_table(kernels: NumpyKernels, g: np.ndarray) -> Table:
    """A step of Adam beside the formula as one writes it, and beside reading and writing as many bytes."""
    w, m, v = (np.abs(g) for _ in range(3))
    target = kernels.empty(COUNT, np.float32)

    def step() -> None:
        kernels.step_blocks(partial(Adam(**HYPER).update_block, 10), w, m, v, g, scratch=2)

    def naive() -> object:
        m_new = 0.9 * m + (1 - 0.9) * g
        v_new = 0.999 * v + (1 - 0.999) * (g * g)
        return w - 1e-3 * (m_new / (1 - 0.9**10)) / (np.sqrt(v_new / (1 - 0.999**10)) + 1e-8)

    def floor() -> None:  # a step reads four arrays and writes three
        for _ in range(3):
            np.copyto(target, g)

    floor_seconds = best_seconds(floor)
    table = table_of(f"Adam, {COUNT / 2**20:.0f} Mi parameters", ["", "ms", "times the floor"])
    for name, action in [("three copies (floor)", floor), ("Adam", step), ("naive expression", naive)]:
        seconds = best_seconds(action)
        table.add_row(name, f"{1e3 * seconds:.1f}", f"{seconds / floor_seconds:.1f}")
    return table


@np.errstate(all="ignore")  # NumPy's own casts and sums warn of underflow and overflow; here they are measured only
def main() -> None:
    """Prints the tables."""
    kernels, console = NumpyKernels(), Console()
    numbers = inputs()
    for name, x in numbers.items():
        console.print(rounding_table(kernels, name, x))
        console.print(adding_table(kernels, name, x))
    console.print(adam_table(kernels, numbers["normal"]))


if __name__ == "__main__":
    main()
