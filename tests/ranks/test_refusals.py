"""What ranks and clusters refuse: with what was asked, what was found and what to do."""

import re
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import ROOTED, ROWS, TABLE, TAKES_SPLITS, ask
from tests.support import assert_refused, literally
from zerosim.ranks import trace

X = np.arange(12, dtype=np.float32)
READ_ONLY = np.zeros(6, np.float32)
READ_ONLY.flags.writeable = False
SUMMING = [row for row in ROWS if row[0] in ("reduce_scatter", "all_reduce")]
NO_KIND = f"no kind of memory is called '{{}}'; the kinds are {', '.join(trace.KINDS)}"


def x(rank: zs.Rank, count: int = 6, dtype: type = np.float32) -> np.ndarray:
    """Numbers that differ from rank to rank."""
    return (np.arange(count) + rank.index).astype(dtype)


def of_every_collective(operation: str) -> Iterator[tuple[Callable[[zs.Rank], object], str]]:
    """What no collective takes: inputs, outputs, roots, algorithms and purposes, and how the refusal begins."""
    def row(text: str, given: object = None, **options: object) -> tuple[Callable[[zs.Rank], object], str]:
        return lambda r: getattr(r, operation)(x(r) if given is None else given, **options), text

    what, of_6 = f"the input of {operation}", {"reduce_scatter": 2, "all_gather": 18, "gather": 18}.get(operation, 6)
    for given, text in [
            ([1.0, 2.0], "must be a NumPy array, found list; wrap numbers as np.array([...], np.float32)"),
            (np.float32(1), "must be a NumPy array, found float32;"),
            (X[::2], "of shape (6,) is not contiguous, and a collective makes no hidden copies; pass "
                     "np.ascontiguousarray(...)"),
            (np.zeros(2, ">f4"), "is in >f4, whose byte order is not this machine's; pass "),
            (np.array([1, None]), "holds Python objects (object); only numbers travel")]:
        yield row(f"{what} {text}", given)
    if operation in TAKES_SPLITS:
        yield row(f"{what} is cut among ranks and must have one dimension, found shape (2, 3); pass x.reshape(-1)",
                  X[:6].reshape(2, 3))
    misfit = (f"but the result has ({of_6},) and float32; pass an array of that shape and dtype, or none")
    for out, text in [
            (np.empty(of_6), f"has shape ({of_6},) and dtype float64, {misfit}"),
            (np.empty(2 * of_6, np.float32)[::2], f"of shape ({of_6},) is not contiguous"),
            ([0.0] * of_6, "must be a NumPy array, found list"),
            (np.frombuffer(bytes(4 * of_6), np.float32), "is read-only; pass a writable array")]:
        yield row(f"out= {text}", out=out)
    out = np.empty(5, np.float32)
    yield row("rank 0 brings 6 elements to all_gather, but its chunk of the cut (0, 2, 4, 5) has 2; pass the chunk, an "
              "out= for all chunks, or the splits= of the cut" if operation == "all_gather" else
              f"out= has shape (5,) and dtype float32, {misfit}", out=out)
    for root in (3, -1, True, 1.0, "0") if operation in ROOTED else ():
        yield row(f"root={root!r}, but the group has the ranks 0 to 2", root=root)
    for algorithm in ("halve", ["ring"], None):
        yield row(f"{operation} has no algorithm {algorithm!r}; choose one of {', '.join(TABLE[operation])}",
                  algorithm=algorithm)
    yield row("no purpose 'gradient'; choose one of parameters, gradients, state, control, unspecified; did you mean "
              "'gradients'?", purpose="gradient")


# Calls that rank 0 of three refuses, and how the refusal begins; parts ... may be anything (`tests.support.literally`).
OF_A_RANK_OF_THREE: list[tuple[Callable[[zs.Rank], object], str]] = [
    *chain.from_iterable(map(of_every_collective, TABLE)),
    (lambda r: r.all_reduce(np.ones(3, bool)), "bool cannot be reduced; cast to an integer or a float first"),
    (lambda r: r.all_reduce(np.zeros(3, "M8[s]")), "datetime64[s] cannot be reduced;"),
    (lambda r: r.recv(READ_ONLY, 0), "out= is read-only; pass a writable array"),
    (lambda r: r.reduce(x(r), 2, out=np.empty(6, np.float32)),
     "out= was given to reduce on rank 0, but only the root, rank 2, receives a result; pass out= there alone"),
    (lambda r: r.send(x(r), 3), "to=3, but the group has the ranks 0 to 2"),
    (lambda r: r.recv(x(r), "0"), "source='0', but the group has the ranks 0 to 2"),
    (lambda r: r.all_reduce(x(r), op="prod"), "no reduction op='prod'; choose one of sum, mean, max, min"),
    (lambda r: r.send(x(r), 1, purpose="?"), "no purpose '?'; choose one of parameters,"),
    (lambda r: r.reduce_scatter(x(r), splits=(0, 6)), "splits=(0, 6) ...pass 4 rising boundaries from 0 to 6, e.g."),
    (lambda r: r.all_to_all(x(r), splits=(0, 4, 3, 6)), "splits=(0, 4, 3, 6) does not cut 6 elements"),
    (lambda r: r.all_reduce(x(r), splits=(0, 2, 4, 7)), "splits=(0, 2, 4, 7) does not cut 6"),
    (lambda r: r.gather(x(r, 2), splits=(1, 2, 4, 6)), "splits=(1, 2, 4, 6) does not cut 6"),
    (lambda r: r.reduce_scatter(x(r), splits=(0, 2.0, 4, 6)), "splits= ...found (0, 2.0, 4, 6); pass N+1 boundaries"),
    (lambda r: r.all_gather(x(r, 2), splits=3), "splits= must hold integers, found 3; pass N+1"),
    (lambda r: r.all_gather(x(r, 2), splits=()), "splits=() does not cut 0 elements among 3 ranks"),
    (lambda r: r.all_gather(x(r, 2), splits=(0, 2, 4, 6), length=7), "splits=(0, 2, 4, 6) does not cut 7 elements"),
    (lambda r: r.all_gather(x(r, 5), length=6), "rank 0 brings 5 ...has 2; pass the chunk, ...or the splits= of"),
    (lambda r: r.all_gather(x(r), length=-1), "length=-1 must be the number of elements of the whole vector, 0 or"),
    (lambda r: r.gather(x(r), length="6"), "length='6' must be the number of elements"),
    (lambda r: r.all_reduce(x(r), algorithm="tree", splits=(0, 2, 4, 6)), "splits= ...by 'tree', ...leave it out"),
    (lambda r: r.all_reduce(x(r), algorithm="rabenseifner", splits=(0, 2, 4, 6)), "splits= ...or take 'ring'"),
    *((wrong, "exchange(send, to, out, source), send(x, to) and recv(out, source) take for each half an array and then "
       f"a rank's index, or None for both; found ({found})") for wrong, found in (
           (lambda r: r.exchange(x(r), None, None, None), "array, None, None, None"),
           (lambda r: r.recv(1, x(r)), "None, None, 1, array"))),
    (lambda r: r.exchange(X[:6], 1, X[:6], 2), "out= overlaps send, ...pass memory of its own"),
    (lambda r: r.split(1.5), "color=1.5 must be a whole number from 0 on; pass None to join no group"),
    (lambda r: r.split(-1), "color=-1 must be a whole number from 0 on"),
    (lambda r: r.split(0, key="a"), "key='a' must be a whole number; ranks of a group are ordered by it"),
    (lambda r: r.split(2**63), "color=9223372036854775808 must be a whole number from 0 on"),
    (lambda r: r.all_reduce(x(r), wire="fp31"), "no number format is named 'fp31'; there are"),
    (lambda r: r.all_reduce(x(r, 3, np.int64), wire="fp32"), "wire= and accumulate= ...found op='sum' of int64"),
    (lambda r: r.all_reduce(x(r), wire="fp32", op="max"), "wire= and accumulate= ...found op='max' of float32"),
    (lambda r: r.reduce_scatter(x(r, 6, np.int64), op="mean"), "op='mean' of int64 ...sum, or cast to a float"),
    (lambda r: r.all_reduce(x(r), op="mean", average="splt"),
     "no averaging rule 'splt'; choose one of sum_then_divide, divide_then_sum, split, premultiply; did you mean "
     "'split'?"),
    (lambda r: r.all_reduce(x(r), average="split"), "average='split' ...op='sum'; pass op='mean'"),
    (lambda r: r.all_reduce(x(r), average=""), "average='' says how to take a mean, but op='sum'; pass op='mean'"),
    (lambda r: r.all_reduce(x(r), algorithm="native"),
     "all_reduce by 'native' asks MPI or NCCL for its own, but the ranks of one process have no such library; "),
    (lambda r: r.all_to_all(X[:6], out=X[:6]),
     "out= overlaps the input, which is still sent from when the first elements arrive; pass memory of its own"),
    *[(lambda r, overlap=overlap: overlap(r, np.arange(20.0) + r.index),
       "out= overlaps the input without being the same elements; pass the input itself (or, where one of them is the "
       "rank's chunk of the other, a view of that chunk), or memory of its own") for overlap in (
        lambda r, memory: r.all_reduce(memory[:12], out=memory[1:13]),
        lambda r, memory: r.broadcast(memory[:12], out=memory[4:16]),
        lambda r, memory: r.reduce(memory[:12], out=None if r.index else memory[1:13]),
        lambda r, memory: r.reduce_scatter(memory[:12], out=memory[1:5]),
        lambda r, memory: r.all_gather(memory[1:5], out=memory[:12]),
        lambda r, memory: r.gather(memory[1:5], out=None if r.index else memory[:12]),
        # A chunk as long as the vector must be the same elements all the same.
        lambda r, memory: r.all_gather(memory[:0 if r.index else 12], splits=(0, 12, 12, 12), out=memory[1:13]))],
    *[(lambda r, o=operation, a=algorithm: ask(r, o, a, x(r)),
       f"{operation} by {algorithm} needs a power of two of ranks, because partners at distance 1, 2, 4, ... must all "
       f"exist; this group has 3. Use ring, {other}.")
      for operation, algorithm, other in [("reduce_scatter", "halving", "pairwise"),
                                          ("all_gather", "doubling", "bruck")]],
    (lambda r: r.trace.sent_nbytes("params"),
     "no purpose 'params'; choose one of parameters, gradients, state, control, unspecified; did you mean "
     "'parameters'?"),
    (lambda r: r.trace.lifetimes(["gradient", "activations"]), NO_KIND.format("activations")),
    *[(name_it, NO_KIND.format("gradients")) for name_it in (
        lambda r: r.memory.alloc(1, "f4", "gradients"), lambda r: r.memory.hold(np.zeros(1), "gradients"),
        lambda r: r.memory.reclassify(np.zeros(1), "gradients"), lambda r: r.memory.peak_nbytes_of("gradients"),
        lambda r: r.memory.peak_nbytes_of(["input", "gradients"]))],
    (lambda r: r.memory.hold([1.0], "input"), "a memory holds NumPy arrays, found list; wrap it with np.array first"),
    (lambda r: r.memory.free([1.0]), "a memory holds NumPy arrays, found list; wrap it"),
    (lambda r: r.memory.kind_of(None), "a memory holds NumPy arrays, found NoneType;"),
    (lambda r: r.memory.free(np.zeros(3)),
     "rank 0 asked to free an array of 24 bytes that its memory does not hold; only what alloc() or hold() charged "
     "is there, and only until free() or its death"),
    (lambda r: r.memory.alloc(3, object, "workspace"),
     "rank 0 asked for an array of type object, whose elements lie where no memory counts their bytes; take a type of"),
    *[(lambda r, shape=shape: r.memory.alloc(shape, "f4", "input"),
       f"rank 0 asked for an array of shape {shape}, but no length can be negative") for shape in (-1, [3, -2])],
    *[(
        lambda r, o=operation, a=algorithm, w=wire: ask(r, o, a, x(r), wire=w),
        f"wire={wire!r} is served by algorithm='ring' of reduce_scatter and all_reduce, where partial sums travel; "
        f"found {operation} by {algorithm!r}")
      for operation, algorithm in SUMMING if algorithm not in ("ring", "halving") for wire in ("fp32", "fp16")],
    *[(
        lambda r, o=operation, a=algorithm: ask(r, o, a, x(r, 6, np.float16), accumulate="fp32"),
        f"accumulate='fp32' would change nothing in {operation} by {algorithm!r}: it makes one addition per hop, and "
        "one addition rounded to the wire's format is the addition in fp32, rounded. Use wire='fp32', or "
        "algorithm='pairwise' (reduce_scatter) or 'everyone' (all_reduce)")
      for operation, algorithm in SUMMING if algorithm not in ("pairwise", "everyone", "halving")],
]


async def coroutine(rank: zs.Rank) -> None:
    rank.barrier()


# What is refused outside a program of three ranks: the call, the exception, its text.
ELSEWHERE: list[tuple[Callable[[], object], type[Exception], str]] = [
    *[(lambda ranks=ranks: zs.Cluster(ranks), ValueError,
       f"a cluster needs at least one rank, found ranks={ranks}; pass a whole number from 1 on")
      for ranks in (0, 2.0, True)],
    *[(lambda capacity=capacity: zs.Cluster(2, capacity_nbytes=capacity), ValueError,
       f"capacity_nbytes={capacity!r} must be a number of bytes, 0 or more; pass None for no limit")
      for capacity in (-1, "1MB", float("nan"))],
    (lambda: zs.Cluster(2, seed=[1]), ValueError, "seed=[1] must be a whole number; 0 runs the ranks in their order"),
    *[(lambda one=one: zs.NullCluster(2, representative=one), ValueError,
       f"representative={one!r} is none of the ranks 0 to 1; name one of them, or pass None to run all")
      for one in (2, -1, True)],
    *[(lambda threads=threads: zs.Cluster(2, blas_threads=threads).run(lambda rank: None), ValueError,
       f"blas_threads={threads!r}, but arithmetic needs a whole number of threads, at least one")
      for threads in (0, "1")],
    *[(lambda program=program: zs.Cluster(3).run(program), ValueError,
       f"run() takes a function of a rank, found {program!r}; write run(program), not run(program())")
      for program in (None, 3, "train")],
    (lambda: zs.Cluster(2).run(lambda rank: (yield rank.barrier())), ValueError,
     "the program made a generator and ran nothing; a rank program is plain blocking code, without yield or async"),
    (lambda: zs.Cluster(2).run(coroutine), ValueError, "the program made a coroutine and ran nothing;"),
    *[(lambda by=by: zs.step_through(lambda rank: rank.barrier(), by=by), ValueError,
       f"step_through walks by={by!r}? It stops after each hop or each collective; pass one of them")
      for by in ("step", "", None, "hops", 3)],
    (lambda: zs.step_through(lambda rank: rank.barrier(), ranks=5, cluster=zs.Cluster(3)), ValueError,
     "step_through was asked for ranks=5 on a cluster of 3; leave one of the two out"),
    # A shape too large to count in 64 bits is out of memory, and not a small number.
    (lambda: zs.Cluster(1, capacity_nbytes=10**15).memory[0].alloc((1 << 46, 1 << 46), "f4", "parameter"),
     zs.OutOfMemoryError,
     "rank 0 asked for 19,807,040,628,566,084,398,385,987,584 bytes (parameter) and has 1,000,000,000,000,000 left"),
]


@pytest.mark.parametrize("debug", [False, True])
def test_a_wrong_call_is_refused_by_what_was_asked_and_found_and_the_ranks_can_go_on(debug: bool) -> None:
    """A refused call takes no number and holds nothing: whether it ends the run or is caught."""
    for ask_wrongly, text in OF_A_RANK_OF_THREE:
        def catches(rank: zs.Rank, ask_wrongly=ask_wrongly, text=text) -> list[int]:
            if rank.index == 0:
                assert_refused(lambda: ask_wrongly(rank), literally(f"^{text}"))
            return rank.all_reduce(np.array([rank.index])).tolist()

        cluster = zs.Cluster(3, debug=debug)
        with pytest.raises(ValueError, match=literally(f"^{text}")) as raised:
            cluster.run(ask_wrongly)
        assert raised.value.__notes__ == ["raised by rank 0 of 3"], text
        assert cluster.memory.now_nbytes == [0, 0, 0], text
        assert list(cluster.run(catches)) == [[3]] * 3, text


def test_what_clusters_and_steps_refuse_they_refuse_with_what_to_do() -> None:
    for call, error, text in ELSEWHERE:
        with pytest.raises(error, match=f"^{re.escape(text)}"):
            call()
    assert issubclass(zs.MismatchError, ValueError)
    assert issubclass(zs.OutOfMemoryError, MemoryError)
