"""The GPU kernels' speed as a fraction of the card's own copy, by CUDA events: Adam, casts, additions.

Each function returns a plain dict; `gpu_check.py` prints and keeps them. Bytes are those that a kernel must move: every
operand once in, every result once out. The best of several runs counts: what is asked is what the kernel can do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from zerosim.backends.cupy.kernels import CupyKernels
from zerosim.numerics.formats import FORMATS
from zerosim.optim import AdamW

ELEMENTS = 1 << 27  # 512 MiB of float32: no cache holds it
SMALLEST_SHARE = 0.85  # of the copy's bandwidth


def seconds_of(call: Callable[[], object], repeats: int = 20) -> float:
    """The shortest time of a call on the current stream, after two calls that are not counted."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    found = []
    for turn in range(repeats + 2):
        begin.record()
        call()
        end.record()
        end.synchronize()
        if turn >= 2:
            found.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return float(min(found))


def measured(name: str, nbytes: int, call: Callable[[], object], copy_bytes_per_second: float | None) -> dict[str, Any]:
    """One row: what was moved, how fast, and what fraction of the copy's bandwidth that is."""
    seconds = seconds_of(call)
    rate = nbytes / seconds
    row: dict[str, Any] = {"name": name, "nbytes": nbytes, "seconds": seconds, "bytes_per_second": rate}
    if copy_bytes_per_second is not None:
        share = rate / copy_bytes_per_second
        row |= {"share_of_copy": share, "is_fast_enough": share >= SMALLEST_SHARE}
    return row


def copy_bandwidth(elements: int = ELEMENTS) -> dict[str, Any]:
    """CUDA's own copy from device memory to device memory, read and written bytes together."""
    import cupy

    x, y = (cupy.zeros(elements, np.float32) for _ in range(2))
    return measured("copy", x.nbytes + y.nbytes, lambda: y.data.copy_from_device_async(x.data, x.nbytes), None)


def adam_step(copy_bytes_per_second: float, elements: int = ELEMENTS) -> dict[str, Any]:
    """w, m, v read and written, g read: 28 bytes for each element."""
    import cupy

    kernels = CupyKernels()
    w, m, v = (cupy.zeros(elements, np.float32) for _ in range(3))
    g = cupy.full(elements, 1e-3, np.float32)
    block = partial(AdamW(lr=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01).update_block, 3)
    return measured("adam_step", 28 * elements, lambda: kernels.step_blocks(block, w, m, v, g, scratch=2),
                    copy_bytes_per_second)


def casts(copy_bytes_per_second: float, elements: int = ELEMENTS) -> list[dict[str, Any]]:
    """float32 to each format of fewer bits, and back."""
    import cupy

    kernels, rows = CupyKernels(), []
    wide = cupy.full(elements, 0.1, np.float32)
    for name, fmt in FORMATS.items():
        if fmt.nbytes == 4:
            continue
        narrow = kernels.empty(elements, fmt.dtype)
        for title, x, out in ((f"fp32 to {name}", wide, narrow), (f"{name} to fp32", narrow, wide)):
            rows.append(measured(title, (4 + fmt.nbytes) * elements, lambda x=x, out=out: kernels.cast_pack(x, out),
                                 copy_bytes_per_second))
    return rows


def additions(copy_bytes_per_second: float, elements: int = ELEMENTS) -> list[dict[str, Any]]:
    """One hop of a ring, a + b rounded, and a chunk of a ring of eight ranks at once, in 16 bits and more."""
    import cupy

    kernels, rows = CupyKernels(), []
    for name in ("fp32", "bf16", "fp16"):
        dtype = FORMATS[name].dtype
        addends = [cupy.zeros(elements // 8, f"u{dtype.itemsize}").view(dtype) for _ in range(8)]
        out = kernels.empty(elements // 8, dtype)
        rows.append(measured(f"add {name}", 3 * out.nbytes, lambda a=addends, o=out: kernels.add_rounded(*a[:2], o),
                             copy_bytes_per_second))
        rows.append(measured(f"sum of 8 {name}", 9 * out.nbytes, lambda a=addends, o=out: kernels.sum_rounded(a, o),
                             copy_bytes_per_second))
    return rows


def all_kernels(elements: int = ELEMENTS) -> dict[str, Any]:
    """Everything above: the copy, and each kernel beside it."""
    copy = copy_bandwidth(elements)
    rate = copy["bytes_per_second"]
    rows = [adam_step(rate, elements), *casts(rate, elements), *additions(rate, elements)]
    return {"copy": copy, "kernels": rows, "smallest_share": SMALLEST_SHARE}
