"""The ring without hops: the same additions in the same order, written for speed where no one watches the hops.

Every result is bit-equal to the generators', which property tests show; bytes sent are the ring's, by its closed form.
Legend: n elements, N ranks, B elements of a cache block.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise, starmap
from typing import Any, cast

import numpy as np

from zerosim.numerics.arrays import BLOCK, WIDE_BLOCK, Scratch, copy_elements, has_data, on_host, spans, start
from zerosim.numerics.blockwise import quiet
from zerosim.numerics.checks import FP32, FP64, is_floating, work_type
from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import SMALL_SUM
from zerosim.numerics.rounding import round_sums
from zerosim.ranks.call import Call, Cut, Kernels, PendingCall, chunk_lengths
from zerosim.ranks.workers import Workers

# Sums of these types are made on threads too. Rounding to 16 bits takes short calls, and two threads that hand Python's
# lock to and fro after each are slower than one.
WIDE = (FP32, FP64)


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
    if not on_host(inputs[0]):
        for c, own in enumerate(starmap(slice, pairwise(cut))):
            total = outs[c] if scatters else outs[0][own]
            kernels.sum_rounded([x[own] for x in (*inputs[c + 1:], *inputs[:c + 1])], total)
            for out in () if scatters else outs[1:]:
                copy_elements(total, out[own])
        return

    def sum_window(here: slice) -> None:
        n = here.stop - here.start
        bounds = [min(max(at - here.start, 0), n) for at in cut]
        total: Any = kernels.scratch("ring sums", n, inputs[0].dtype) if scatters else outs[0][here]
        add_up(kernels, [x[here] for x in inputs], bounds, total)
        if scatters:
            for out, first, own in zip(outs, cut, pairwise(bounds), strict=False):
                at = max(here.start - first, 0)
                out[at:at + own[1] - own[0]] = total[slice(*own)]
        else:
            for out in outs[1:]:
                out[here] = total

    if workers and inputs[0].dtype in WIDE:
        share = -(-cut[-1] // workers.count)  # short vectors are shared too
        workers.each(sum_window, spans(cut[-1], max(min(WIDE_BLOCK, share), BLOCK)))
    else:
        for window in spans(cut[-1], WIDE_BLOCK):
            sum_window(window)


@quiet
def add_up(kernels: Kernels, addends: list[np.ndarray], cut: Sequence[int], out: np.ndarray) -> None:
    """Chunk c of out (n,), cut[c] to cut[c + 1], becomes x[c+1] + x[c+2] + ... + x[c] of N addends x (n,), rounded
    after each addition; out among them or not.

    Addend after addend, twice around, each for all the chunks whose turn it is, which lie side by side. Many short
    chunks so take 4(N-1) additions, not N(N-1), and every addend is read from memory once.
    """
    ranks, n = len(addends), out.size
    if ranks == 1:
        copy_elements(addends[0], out)
        return
    # In low precision the partial sum stays in float32 and on the format's grid: to round it there takes half the time
    # of packing and unpacking it.
    work = work_type(out) if n > SMALL_SUM and is_floating(out.dtype) else out.dtype
    narrow = work != out.dtype
    total: Any = kernels.scratch("total", n, work)  # not `out`, which may be an addend that is still to be read
    sums, scratch = total if narrow else out, cast(Scratch, kernels.scratch_memory)

    def addend(name: str, rank: int, low: int, high: int) -> Any:
        x = addends[rank % ranks][low:high]
        return kernels.wide(name, x, work) if narrow else x

    edges = (*[0] * ranks, *cut, *[n] * ranks)  # turn c + 1 is the first of chunk c, and turn c + N the last
    for turn in range(2, 2 * ranks):
        # Complete with this addend; with others to come; begun with it and the one before.
        done, more, begun, end = edges[turn], edges[turn + 1], edges[ranks + turn - 2], edges[ranks + turn - 1]
        x = addend("addend", turn, done, end)
        if done < min(more, begun):
            np.add(total[done:more], x[:more - done], out=sums[done:more])
        if more < begun:
            np.add(total[more:begun], x[more - done:begun - done], out=total[more:begun])
        if begun < end:
            target = sums if ranks == 2 else total
            np.add(addend("first", turn - 1, begun, end), x[begun - done:], out=target[begun:end])
        for here in spans(end - more) if narrow else ():
            round_sums(total[more:end][here], format_of(out.dtype), scratch)
    if narrow:
        kernels.round_into(sums, out)


def all_gather(cut: Cut, inputs: list[np.ndarray], outs: list[np.ndarray], workers: Workers | None) -> None:
    """inputs[c] (len(chunk c),), outs N x (n,); inputs[c] may be the own chunk of outs[c].

    The first is put together, and the others are copies of it: 2N copies, where every chunk to every rank takes N²; or
    N, of chunks, where all have the same array in common.
    """
    for own, x in zip(pairwise(cut), inputs, strict=True):
        copy_elements(x, outs[0][slice(*own)])
    first = start(outs[0])
    others = [out for out in outs[1:] if out is not outs[0] and start(out) != first]
    if workers:
        workers.each(partial(copy_elements, outs[0]), others)
    else:
        for out in others:
            copy_elements(outs[0], out)
