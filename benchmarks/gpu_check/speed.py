"""The speed of every kernel beside the card's own copy, and of products in floating-point operations per second.

One table has all kernels, each with the bytes that it must move at least (every operand once in, every result once
out): timed here on arrays that no cache holds, run on small ones under compute-sanitizer. The best of several runs
counts: what is asked is what a kernel can do. The device still copies while Python launches the kernel, so that the
time of the launch is not counted.

Legend: n elements, M rows, C columns, V classes; B texts of T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import numpy as np

from benchmarks.gpu_check.report import Machine, Writer, Wrong
from zerosim.backends.cupy.kernels import CupyKernels
from zerosim.models.rotary import frequencies
from zerosim.numerics.arrays import words
from zerosim.numerics.formats import FORMATS
from zerosim.optim import AdamW

ELEMENTS = 1 << 27  # 512 MiB of float32: no cache holds it
NBYTES_EACH = 104   # of a card's memory for each element: the largest of the table, and 8 of the copy
SMALLEST_SHARE = 0.85  # of the copy's bandwidth
COMPUTE = ("fp32", "bf16", "fp16")
COLUMNS, LONGEST = 1024, 512  # of rows; tokens of a text


def check_speed(report: Writer, machine: Machine) -> None:
    """Every kernel beside the card's copy; products."""
    def measured() -> dict[str, Any]:
        import cupy

        free, _ = cupy.cuda.runtime.memGetInfo()
        return all_kernels(CupyKernels(), elements_for(free))

    report.check("kernels beside the card's copy", measured, remark=remark)


@dataclass(frozen=True)
class Call:
    """A kernel, ready to be called, and the bytes and floating-point operations that it takes at least.

    ``streams``: every element is read and written once, and a few operations are made of it, so that nothing but the
    memory should take time.
    """

    name: str
    run: Callable[[], Any]
    nbytes: int = 0
    flops: int = 0
    streams: bool = False


def calls(kernels: CupyKernels, n: int) -> Iterator[Call]:
    """Every kernel, on about n elements. The arrays of some kernels are gone when the next ones are asked for."""
    for group in (_steps, _casts, _sums, _scalings, _activations, _tests, _rows, _normalizations, _losses, _attention,
                  _products, _matrices):
        yield from group(kernels, n)


def called(k: CupyKernels, name: str, *arguments: Any, of: str = "", nbytes: int | None = None, flops: int = 0,
           streams: bool = False, **options: Any) -> Call:
    """A kernel of this name; it moves each array among its arguments once, unless ``nbytes`` says how much it moves."""
    moved = sum(x.nbytes for x in arguments if isinstance(x, k.xp.ndarray)) if nbytes is None else nbytes
    return Call(f"{name} {of}".strip(), partial(getattr(k, name), *arguments, **options), moved, flops, streams)


def filled(k: CupyKernels, shape: Any, name: str = "fp32", value: float = 0.5) -> Any:
    """An array of one number."""
    out = k.empty(shape, FORMATS[name].dtype)
    code = np.array(value, np.float32).astype(out.dtype).view(f"u{out.itemsize}")
    words(out).fill(int(code))
    return out


def _steps(k: CupyKernels, n: int) -> Iterator[Call]:
    w, m, v, g = (filled(k, n, value=value) for value in (0.5, 0.0, 0.0, 1e-3))
    adam = partial(AdamW(lr=1e-3, weight_decay=0.01).update_block, 3)
    yield called(k, "step_blocks", adam, w, m, v, g, of="of Adam", nbytes=28 * n, streams=True, scratch=2)
    yield called(k, "gradient_block", g, 3.0, 0.37, m, streams=True)
    yield called(k, "elementwise", np.sqrt, w, nbytes=8 * n, streams=True, out=m)
    yield called(k, "run_blocks", np.square, [w], m, nbytes=8 * n, streams=True)


def _casts(k: CupyKernels, n: int) -> Iterator[Call]:
    wide = filled(k, n)
    for name in FORMATS:
        if name != "fp32":
            narrow = filled(k, n, name)
            yield called(k, "cast_pack", wide, narrow, of=f"fp32 to {name}", streams=True)
            yield called(k, "cast_pack", narrow, wide, of=f"{name} to fp32", streams=True)


def _sums(k: CupyKernels, n: int) -> Iterator[Call]:
    """A hop of a ring, a + b rounded, and a chunk of a ring of eight ranks at once; each array of 2n bytes."""
    for name, fmt in FORMATS.items():
        rows = [filled(k, 2 * n // fmt.dtype.itemsize + 1, name) for _ in range(9)]
        for call in ("add_rounded", "maximum_rounded", "minimum_rounded"):
            yield called(k, call, *rows[:3], of=name, streams=True)
        yield called(k, "sum_rounded", rows[:8], rows[8], of=f"of 8 {name}", nbytes=9 * rows[8].nbytes, streams=True)


def _scalings(k: CupyKernels, n: int) -> Iterator[Call]:
    x, out = filled(k, n, "bf16"), filled(k, n)
    yield called(k, "multiply_rounded", x, 3.0, out, of="bf16", streams=True)
    yield called(k, "divide_rounded", x, 3.0, out, of="bf16", streams=True)
    yield called(k, "quantized", out, "fp8_e4m3", nbytes=2 * out.nbytes)


def _activations(k: CupyKernels, n: int) -> Iterator[Call]:
    x, dy, out = (filled(k, n, "bf16") for _ in range(3))
    bits, drawn = k.empty(-(-n // 8), np.uint8), k.empty(n, np.uint32)
    drawn.fill(0)
    yield called(k, "relu", x, out, bits, of="bf16")
    yield called(k, "relu_gradient", bits, dy, out, of="bf16")
    for exact in (False, True):
        said = "bf16, exact" if exact else "bf16"
        yield called(k, "gelu", x, out, of=said, exact=exact)
        yield called(k, "gelu_gradient", x, dy, out, of=said, exact=exact)
    yield called(k, "drop", x, lambda span: drawn[span], 1 << 30, 1 / 0.75, out, of="bf16", nbytes=8 * n)
    rows, columns = _shape(n)
    (h, dh), (y, dy) = ([filled(k, (rows, width), "bf16") for _ in range(2)] for width in (2 * columns, columns))
    yield called(k, "swiglu", h, y, of="bf16")
    yield called(k, "swiglu_gradient", h, dy, dh, of="bf16")


def _tests(k: CupyKernels, n: int) -> Iterator[Call]:
    for name in ("fp32", "bf16"):
        x = filled(k, n, name)
        for call in ("all_finite", "count_nan", "sum_of_squares"):
            yield called(k, call, x, of=name)


def _shape(n: int) -> tuple[int, int]:
    """(M, C)"""
    columns = min(COLUMNS, max(3, isqrt(n) // 8))
    return max(1, n // columns), columns


def _rows(k: CupyKernels, n: int) -> Iterator[Call]:
    """Rows (M, C) of a table (V, C) that has a quarter as many, in no order."""
    rows, columns = _shape(n)
    asked = k.uploaded(np.random.default_rng(0).integers(0, max(1, rows // 4), rows))
    for name in ("fp32", "bf16"):
        x, table, total = (filled(k, s, name) for s in ((rows, columns), (max(1, rows // 4), columns), columns))
        yield called(k, "column_sum", x, total, of=name)
        yield called(k, "take_rows", table, asked, x, of=name, nbytes=2 * x.nbytes)
        yield called(k, "add_rows", x, asked, table, of=name)
    wide, out, means, others = (filled(k, shape) for shape in ((rows, columns), (rows, columns), rows, columns))
    yield called(k, "mean_squares", wide, means, others)
    yield called(k, "divide_by_roots", wide, means, others, out)


def _normalizations(k: CupyKernels, n: int) -> Iterator[Call]:
    rows, columns = _shape(n)
    for name in ("fp32", "bf16"):
        x, dy, y = (filled(k, (rows, columns), name) for _ in range(3))
        w, b, dw, db = (filled(k, columns, name) for _ in range(4))
        mean, rstd = filled(k, rows), filled(k, rows)
        yield called(k, "normalize_rows", x, w, b, 1e-5, mean, rstd, y, of=name)
        yield called(k, "scale_rows", x, w, b, mean, rstd, y, of=name)
        yield called(k, "normalize_rows_gradient", x, w, mean, rstd, dy, y, dw, db, of=name)


def _losses(k: CupyKernels, n: int) -> Iterator[Call]:
    rows, classes = (n // 65536, 65536) if n >= 1 << 20 else (max(1, n // 64), 64)
    targets = k.uploaded(np.arange(rows) % classes)
    for name in ("fp32", "bf16"):
        logits, sums = filled(k, (rows, classes), name), filled(k, rows)
        yield called(k, "softmax_loss", logits, targets, sums, of=name)
        yield called(k, "softmax_loss_gradient", logits, targets, sums, 0.5, logits, of=name)


def _attention(k: CupyKernels, n: int) -> Iterator[Call]:
    """Operations are counted over all pairs of tokens, masked ones too."""
    tokens = min(LONGEST, max(5, isqrt(n) // 8))
    heads, width = (8, 64) if tokens == LONGEST else (2, 5)
    batch = max(1, n // (tokens * 3 * heads * width))
    qkv, dqkv = (filled(k, (batch, tokens, 3 * heads * width), "bf16") for _ in range(2))
    o, do = (filled(k, (batch, tokens, heads * width), "bf16") for _ in range(2))
    p, sums = filled(k, (batch, heads, tokens, tokens), "bf16"), filled(k, (batch, heads, tokens))
    pairs = 2 * width * p.size  # operations of one product of tokens with tokens
    turned = filled(k, (batch, tokens, heads * 64), "bf16")
    yield called(k, "rotate", turned, heads, frequencies(64, 1e4, None), of="bf16", nbytes=2 * turned.nbytes)
    yield called(k, "attend", qkv, heads, p, o, of="bf16", flops=2 * pairs)
    yield called(k, "attend_gradient", qkv, heads, p, do, dqkv, of="bf16", flops=4 * pairs)
    yield called(k, "attend_tiled", qkv, heads, sums, o, of="bf16", flops=2 * pairs)
    yield called(k, "attend_tiled_gradient", qkv, heads, sums, o, do, dqkv, of="bf16", flops=5 * pairs)


def _products(k: CupyKernels, n: int) -> Iterator[Call]:
    """Square matrices whose sides are a power of two; fp8 is widened to fp16, which has all its values."""
    side = 1 << (isqrt(n).bit_length() - 1)
    for name in (*COMPUTE, "fp8_e4m3"):
        a, b, out = (filled(k, (side, side), name) for _ in range(3))
        yield called(k, "matmul", a, b, of=name, nbytes=3 * out.nbytes, flops=2 * side**3, out=out)


def _matrices(k: CupyKernels, n: int) -> Iterator[Call]:
    """What is done to one matrix at a time, of at most COLUMNS columns; of decompositions the seconds alone."""
    side = min(COLUMNS, isqrt(n))
    x = np.random.default_rng(0).standard_normal((side, side)).astype(np.float32)
    a, out = k.uploaded(x @ x.T), filled(k, (side, side))
    yield called(k, "trace", a, nbytes=0)
    yield called(k, "symmetric_power", a, -0.25, 1e-4, out, nbytes=0)
    yield called(k, "eigenvectors", a, out, nbytes=0)
    yield called(k, "orthogonal_factor", a, out, nbytes=0)


# -- time ------------------------------------------------------------------------------------------------------------

REPEATS, MOST_SECONDS = 20, 2.0
AHEAD = 4  # copies of ELEMENTS float32, a millisecond and more: longer than Python takes to launch a kernel


def seconds_of(call: Callable[[], object], copy: Callable[[], object]) -> float:
    """The shortest time of a call on the current stream, each behind AHEAD copies: of REPEATS, or as many as
    MOST_SECONDS are enough for, after two that are not counted."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    stream, found = cupy.cuda.get_current_stream(), list[float]()
    for turn in range(REPEATS + 2):
        for _ in range(AHEAD):
            copy()
        begin.record(stream)
        call()
        end.record(stream)
        end.synchronize()
        if turn >= 2:
            found.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        if sum(found) > MOST_SECONDS:
            break
    return min(found)


def copy_of(n: int) -> Callable[[], object]:
    """CUDA's own copy of n float32 from device memory to device memory, ready to be called."""
    import cupy

    x, y = (cupy.zeros(n, np.float32) for _ in range(2))
    return lambda: y.data.copy_from_device_async(x.data, x.nbytes)


def elements_for(free_nbytes: int) -> int:
    """As many elements as there is room for, at most ELEMENTS; a power of two."""
    room = free_nbytes // NBYTES_EACH
    if room < 1 << 20:
        raise ValueError(f"{free_nbytes:,} bytes of the card are free, and the measurements need "
                         f"{NBYTES_EACH << 20:,}; end what else runs on it")
    return min(ELEMENTS, 1 << (room.bit_length() - 1))


def all_kernels(kernels: CupyKernels, n: int) -> dict[str, Any]:
    """The copy, and every kernel beside it: what is moved and computed, how fast, and what fraction of the copy's
    bandwidth that is. Each is printed when it is known."""
    copy = copy_of(n)
    copied = {"nbytes": 8 * n, "seconds": seconds_of(copy, copy)}
    copied["bytes_per_second"] = copied["nbytes"] / copied["seconds"]
    rows = []
    for call in calls(kernels, n):
        seconds = seconds_of(call.run, copy)
        rate, flops_per_second = call.nbytes / seconds, call.flops / seconds
        share = rate / copied["bytes_per_second"] if call.nbytes else None
        rows.append({"name": call.name, "nbytes": call.nbytes, "flops": call.flops, "seconds": seconds,
                     "bytes_per_second": rate, "flops_per_second": flops_per_second, "share_of_copy": share,
                     "streams": call.streams})
        said = f"    {call.name}: {1e3 * seconds:.3f} ms"
        said += f", {rate / 1e9:.0f} GB/s, {share:.0%} of the copy" if share is not None else ""
        print(said + f", {flops_per_second / 1e12:.1f} TFLOP/s" * bool(call.flops), flush=True)
    return {"elements": n, "copy": copied, "kernels": rows, "smallest_share": SMALLEST_SHARE}


def remark(found: dict[str, Any]) -> str:
    """The copy's bandwidth, the slowest of the others beside it, and the products; Wrong where kernels only stream, and
    are slower than they should be beside the copy."""
    least, copy = found["smallest_share"], f"the copy moves {found['copy']['bytes_per_second'] / 1e9:.0f} GB/s"
    slow = [row for row in found["kernels"] if row["share_of_copy"] is not None and row["share_of_copy"] < least]
    if streaming := [f"{row['name']} {row['share_of_copy']:.0%}" for row in slow if row["streams"]]:
        raise Wrong(f"{copy}; below {least:.0%} of it: {', '.join(streaming)}")
    others = sorted((row["share_of_copy"], row["name"]) for row in slow if not row["flops"])
    said = ", ".join(f"{name} {share:.0%}" for share, name in others) or "none"
    products = ", ".join(f"{row['name']} {row['flops_per_second'] / 1e12:.0f} TFLOP/s" for row in found["kernels"]
                         if row["name"].startswith("matmul"))
    return f"{copy}; all that streams at {least:.0%} of it or more; of the others below: {said}; {products}"
