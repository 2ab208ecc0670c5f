"""Calls that a rank of three refuses, and how the refusal begins."""

import numpy as np

import zerosim as zs

X = np.arange(12, dtype=np.float32)
READ_ONLY = np.zeros(6, np.float32)
READ_ONLY.flags.writeable = False


def x(rank: zs.Rank, count: int = 6, dtype: type = np.float32) -> np.ndarray:
    return (np.arange(count) + rank.index).astype(dtype)


CASES = {
    "a list": (
        lambda r: r.all_reduce([1.0, 2.0]),
        "the input of all_reduce must be a NumPy array, found list; wrap numbers as np.array([...], np.float32)"),
    "a number": (
        lambda r: r.broadcast(np.float32(r.index)),
        "the input of broadcast must be a NumPy array, found float32;"),
    "strides": (
        lambda r: r.reduce_scatter(X[::2]),
        "the input of reduce_scatter of shape (6,) is not contiguous, and a collective makes no hidden copies; "
        "pass np.ascontiguousarray(...)"),
    "objects": (
        lambda r: r.all_gather(np.array([r, None])),
        "the input of all_gather holds Python objects (object); only numbers travel"),
    "two dimensions": (
        lambda r: r.reduce_scatter(x(r).reshape(2, 3)),
        "the input of reduce_scatter is cut among ranks and must have one dimension, found shape (2, 3); pass "
        "x.reshape(-1)"),
    "two dimensions to all": (
        lambda r: r.all_to_all(x(r).reshape(2, 3)),
        "the input of all_to_all is cut among ranks"),
    "bool sums": (
        lambda r: r.all_reduce(np.ones(3, bool)),
        "bool cannot be reduced; cast to an integer or a float first"),
    "complex sums": (
        lambda r: r.reduce(np.ones(3, complex)),
        "complex128 cannot be reduced;"),
    "dates": (
        lambda r: r.all_reduce(np.zeros(3, "M8[s]")),
        "datetime64[s] cannot be reduced;"),
    "out of another shape": (
        lambda r: r.all_reduce(x(r), out=np.empty(5, np.float32)),
        "out= has shape (5,) and dtype float32, but the result has (6,) and float32; pass an array of that shape "
        "and dtype, or none"),
    "out of another type": (
        lambda r: r.all_gather(x(r), out=np.empty(18)),
        "out= has shape (18,) and dtype float64, but the result has (18,) and float32;"),
    "out with strides": (
        lambda r: r.all_reduce(x(r), out=X.copy()[::2]),
        "out= of shape (6,) is not contiguous"),
    "a list as out": (
        lambda r: r.all_reduce(x(r), out=[0.0] * 6),
        "out= must be a NumPy array, found list"),
    "read-only": (
        lambda r: r.all_reduce(x(r), out=READ_ONLY),
        "out= is read-only; pass a writable array"),
    "read-only, received": (
        lambda r: r.recv(READ_ONLY, 0),
        "out= is read-only; pass a writable array"),
    "out where there is no result": (
        lambda r: r.reduce(x(r), 2, out=np.empty(6, np.float32)),
        "out= was given to reduce on rank 0, but only the root, rank 2, receives a result; pass out= there alone"),
    "no such root": (
        lambda r: r.broadcast(x(r), 3),
        "root=3, but the group has the ranks 0 to 2"),
    "a negative root": (
        lambda r: r.gather(x(r), -1),
        "root=-1, but the group has the ranks 0 to 2"),
    "a root that is true": (
        lambda r: r.reduce(x(r), True),
        "root=True, but the group has the ranks 0 to 2"),
    "a root that is no integer": (
        lambda r: r.reduce(x(r), 1.0),
        "root=1.0, but the group has the ranks 0 to 2"),
    "no such rank": (
        lambda r: r.send(x(r), 3),
        "to=3, but the group has the ranks 0 to 2"),
    "no such source": (
        lambda r: r.recv(x(r), "0"),
        "source='0', but the group has the ranks 0 to 2"),
    "no such op": (
        lambda r: r.all_reduce(x(r), op="prod"),
        "no reduction op='prod'; choose one of sum, mean, max, min"),
    "no such algorithm": (
        lambda r: r.all_reduce(x(r), algorithm="rign"),
        "all_reduce has no algorithm 'rign'; choose one of ring, doubling, rabenseifner, tree, naive, everyone; "
        "did you mean 'ring'?"),
    "another's algorithm": (
        lambda r: r.all_gather(x(r), algorithm="halving"),
        "all_gather has no algorithm 'halving'; choose one of ring, doubling, bruck"),
    "no such purpose": (
        lambda r: r.all_reduce(x(r), purpose="gradient"),
        "no purpose 'gradient'; choose one of parameters, gradients, state, control, unspecified; did you mean "
        "'gradients'?"),
    "no such purpose of a message": (
        lambda r: r.send(x(r), 1, purpose="?"),
        "no purpose '?'; choose one of parameters,"),
    "too few splits": (
        lambda r: r.reduce_scatter(x(r), splits=(0, 6)),
        "splits=(0, 6) does not cut 6 elements among 3 ranks; pass 4 rising boundaries from 0 to 6, e.g. (0, 2, "
        "4, 6)"),
    "splits that fall": (
        lambda r: r.all_to_all(x(r), splits=(0, 4, 3, 6)),
        "splits=(0, 4, 3, 6) does not cut 6 elements"),
    "splits of another length": (
        lambda r: r.all_reduce(x(r), splits=(0, 2, 4, 7)),
        "splits=(0, 2, 4, 7) does not cut 6"),
    "splits that begin late": (
        lambda r: r.gather(x(r, 2), splits=(1, 2, 4, 6)),
        "splits=(1, 2, 4, 6) does not cut 6"),
    "splits that are no integers": (
        lambda r: r.reduce_scatter(x(r), splits=(0, 2.0, 4, 6)),
        "splits= must hold integers, found (0, 2.0, 4, 6); pass N+1 boundaries, e.g. (0, 2, 4, 6)"),
    "splits that are a number": (
        lambda r: r.all_gather(x(r, 2), splits=3),
        "splits= must hold integers, found 3; pass N+1"),
    "no splits at all": (
        lambda r: r.all_gather(x(r, 2), splits=()),
        "splits=() does not cut 0 elements among 3 ranks"),
    "splits against length": (
        lambda r: r.all_gather(x(r, 2), splits=(0, 2, 4, 6), length=7),
        "splits=(0, 2, 4, 6) does not cut 7 elements among 3 ranks"),
    "a chunk of another length": (
        lambda r: r.all_gather(x(r, 5), length=6),
        "rank 0 brings 5 elements to all_gather, but its chunk of the cut (0, 2, 4, 6) has 2; pass the chunk, or "
        "the splits= that it was cut by"),
    "a gathered chunk of another length": (
        lambda r: r.gather(x(r, 1), splits=(0, 2, 4, 6)),
        "rank 0 brings 1 elements to gather, but its chunk of the cut (0, 2, 4, 6) has 2;"),
    "a negative length": (
        lambda r: r.all_gather(x(r), length=-1),
        "length=-1 must be the number of elements of the whole vector, 0 or more"),
    "a length that is no integer": (
        lambda r: r.gather(x(r), length="6"),
        "length='6' must be the number of elements"),
    "splits of what is not cut": (
        lambda r: r.all_reduce(x(r), algorithm="tree", splits=(0, 2, 4, 6)),
        "splits= would change nothing in all_reduce by 'tree', which cuts nothing; leave it out"),
    "splits where ranks sit out": (
        lambda r: r.all_reduce(x(r), algorithm="rabenseifner", splits=(0, 2, 4, 6)),
        "splits= would change nothing in all_reduce by 'rabenseifner' on 3 ranks, of which only a power of two "
        "take chunks, by a cut of their own; leave it out, or take 'ring'"),
    "half an exchange": (
        lambda r: r.exchange(x(r), None, None, None),
        "exchange takes send and to together, and out and source together; pass both or None for both"),
    "the other half": (
        lambda r: r.exchange(None, None, x(r), None),
        "exchange takes send and to together"),
    "an exchange onto itself": (
        lambda r: r.exchange(X[:6], 1, X[:6], 2),
        "out= overlaps send, which may not have left when the first elements arrive; pass memory of its own"),
    "a color that is no integer": (
        lambda r: r.split(1.5),
        "color=1.5 must be a whole number from 0 on; pass None to join no group"),
    "a negative color": (
        lambda r: r.split(-1),
        "color=-1 must be a whole number from 0 on"),
    "a key that is no integer": (
        lambda r: r.split(0, key="a"),
        "key='a' must be a whole number; ranks of a group are ordered by it"),
}
