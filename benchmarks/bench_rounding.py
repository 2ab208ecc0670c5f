"""The speed of rounding and packing, each beside an fp32 operation of the same run and beside NumPy's own.

Gel/s are 1e9 elements per second, the best of some repetitions; they are this machine's and this minute's: trust the
ratios. "gradients" are numbers of all magnitudes from 1e-10 to 1e-3, most of them subnormal or zero in fp16.
"""

import numpy as np
from rich.console import Console
from rich.table import Table
from timing import best_seconds

from zerosim.numerics.formats import FORMATS, Format
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.rounding import round_to

COUNT = 1 << 22  # elements: too many for most caches, as a model's are


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


@np.errstate(all="ignore")  # NumPy's own casts warn of underflow and overflow; here they are measured only
def main() -> None:
    """Prints the tables."""
    kernels, console = NumpyKernels(), Console()
    for name, x in inputs().items():
        console.print(rounding_table(kernels, name, x))


if __name__ == "__main__":
    main()
