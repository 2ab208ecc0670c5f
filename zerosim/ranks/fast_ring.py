"""The ring without hops: the same additions in the same order, written for speed where no one watches the hops.

Every result is bit-equal to the generators', which property tests show; bytes sent are the ring's, by its closed form.
Legend: n elements, N ranks, B elements of a cache block.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from operator import setitem
from typing import Any

import numpy as np

from zerosim.numerics.arrays import WIDE_BLOCK, copy_elements, has_data, on_host, start
from zerosim.numerics.checks import FP32, FP64
from zerosim.ranks.call import Call, Cut, Kernels, PendingCall, chunk_lengths, largest_chunk
from zerosim.ranks.workers import Workers

# Sums of these types are made in longer blocks, on threads too. Rounding to 16 bits takes a dozen short calls a block,
# and two threads that hand Python's lock to and fro after each are slower than one.
WIDE = (FP32, FP64)
STACK_NBYTES = 4096       # of chunks up to so long a NumPy call costs more than its additions: add all chunks at once
STACK_ELEMENTS = 1 << 25  # the most elements that stacking may copy


def serves(call: Call) -> bool:
    """True for rings that add, or only pass on, in the vector's own format."""
    return call.algorithm == "ring" and call.op in ("sum", "mean") and call.wire is None


def sent_nbytes(call: Call) -> list[int]:
    """Bytes that each rank sends on the ring: reduce-scatter n - |chunk r|, all-gather n - |chunk r+1|.

    Source: Patarasuk & Yuan 2009, section 3.
    """
    return _sent_nbytes(call.operation, call.cut, call.dtype.itemsize)


@lru_cache(maxsize=256)
def _sent_nbytes(operation: str, cut: Cut, itemsize: int) -> list[int]:
    scattered = itemsize * (cut[-1] - chunk_lengths(cut))
    gathered = np.roll(scattered, -1)
    found: dict[str, list[int]] = {"reduce_scatter": scattered.tolist(), "all_gather": gathered.tolist(),
                                   "all_reduce": (scattered + gathered).tolist()}
    return found[operation]


def run(calls: Sequence[PendingCall], workers: Workers | None) -> None:
    """Carries out a ring collective on the arrays of all ranks, on threads where there are workers; without data there
    is nothing to carry."""
    call, kernels = calls[0].call, calls[0].kernels
    inputs, outs = [me.x for me in calls], [me.out for me in calls]
    if not has_data(inputs[0]):
        return
    if call.operation == "all_gather":
        all_gather(call.cut, inputs, outs, workers)
    else:
        reduce(call.cut, kernels, inputs, outs, workers, scatters=call.operation == "reduce_scatter")


def reduce(cut: Cut, kernels: Kernels, inputs: list[np.ndarray], outs: list[np.ndarray], workers: Workers | None, *,
           scatters: bool) -> None:
    """inputs N x (n,): the sum of chunk c is x[c+1] + x[c+2] + ... + x[c], rounded after each addition. It is all of
    outs[c] (len(chunk c),) where the sum is scattered, else chunk c of every out (n,), which may be x itself."""
    if on_host(inputs[0]) and worth_stacking(cut, len(inputs), inputs[0].itemsize):
        chunks = [slice(low, high) for low, high in pairwise(cut)]
        sums = [total[:own.stop - own.start]
                for total, own in zip(stacked_sums(cut, kernels, inputs), chunks, strict=True)]
        whole = None if scatters else np.concatenate(sums)
        for c, out in enumerate(outs):
            out[:] = sums[c] if whole is None else whole
        return

    put: Any = setitem if on_host(inputs[0]) else lambda out, here, x: copy_elements(x, out[here])

    def sum_window(window: list[tuple[int, slice]]) -> None:
        for c, here in window:
            addends = [x[here] for x in (*inputs[c + 1:], *inputs[:c + 1])]
            total = outs[c][here.start - cut[c]:here.stop - cut[c]] if scatters else outs[0][here]
            kernels.sum_rounded(addends, total)
        here = slice(window[0][1].start, window[-1][1].stop)
        for out in () if scatters else outs[1:]:
            put(out, here, outs[0][here])

    block = max(WIDE_BLOCK, kernels.BLOCK) if inputs[0].dtype in WIDE else kernels.BLOCK
    if workers and inputs[0].dtype in WIDE:
        share = -(-cut[-1] // (2 * workers.count))  # short vectors are shared too
        workers.each(sum_window, windows(cut, max(min(block, share), kernels.BLOCK)))
    else:
        for window in windows(cut, block):
            sum_window(window)


def windows(cut: Cut, block: int) -> Iterator[list[tuple[int, slice]]]:
    """Parts of the vector that stay in cache while they are summed and copied: whole short chunks, or blocks of a long
    one, each with the chunk that it is of."""
    window: list[tuple[int, slice]] = []
    for c, (low, high) in enumerate(pairwise(cut)):
        for at in range(low, high, block):
            if window and min(at + block, high) - window[0][1].start > block:
                yield window
                window = []
            window.append((c, slice(at, min(at + block, high))))
    if window:
        yield window


def all_gather(cut: Cut, inputs: list[np.ndarray], outs: list[np.ndarray], workers: Workers | None) -> None:
    """inputs[c] (len(chunk c),), outs N x (n,); inputs[c] may be the own chunk of outs[c].

    The first is put together, and the others are copies of it: 2N copies, where every chunk to every rank takes N²; or
    N, of chunks, where all have the same array in common.
    """
    for own, x in zip(pairwise(cut), inputs, strict=True):
        copy_elements(x, outs[0][slice(*own)])
    first = start(outs[0])
    others = [out for out in outs[1:] if start(out) != first]
    if workers:
        workers.each(partial(copy_elements, outs[0]), others)
    else:
        for out in others:
            copy_elements(outs[0], out)


def worth_stacking(cut: Cut, ranks: int, itemsize: int) -> bool:
    """True for many short chunks, all as long as the first but for the last ones."""
    longest = largest_chunk(cut)
    return (ranks > 2 and longest * itemsize <= STACK_NBYTES and longest * ranks * ranks <= STACK_ELEMENTS
            and all(at == min(c * longest, cut[-1]) for c, at in enumerate(cut)))


def stacked_sums(cut: Cut, kernels: Kernels, inputs: list[np.ndarray]) -> np.ndarray:
    """(N, longest chunk): row c begins with the ring sum of chunk c. One addition adds one hop of all ranks.

    In a hop chunk c comes from rank c + step: every (N + 1)th chunk of the stacked vectors, from two places on. What
    fills up the last chunks nobody reads.
    """
    ranks, longest = len(inputs), largest_chunk(cut)
    stack = np.zeros((ranks, ranks * longest), inputs[0].dtype)
    for row, x in zip(stack, inputs, strict=True):
        row[:x.size] = x
    chunks, totals, addends = stack.reshape(ranks * ranks, longest), *np.empty((2, ranks, longest), stack.dtype)
    for step in range(1, ranks + 1):
        before_the_end, hop = ranks - step, addends if step > 1 else totals
        hop[:before_the_end] = chunks[step * ranks::ranks + 1][:before_the_end]
        hop[before_the_end:] = chunks[before_the_end::ranks + 1][:step]
        if step > 1:
            kernels.add_rounded(totals.reshape(-1), addends.reshape(-1), totals.reshape(-1))
    return totals
