"""One way to ask for any collective, so that a test can go through the whole table.

Legend: n elements, N ranks, chunk i = vector[cut[i]:cut[i + 1]]. A rank's *vector* (n,) is its input, or the vector
whose own chunk is its input where chunks are gathered.
"""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import zerosim as zs
from tests.ranks.oracles import ceil_cut

WORLDS = (1, 2, 3, 4, 5, 8)
# What the project promises to have; the package's own table must say the same.
TABLE = {
    "reduce_scatter": ("ring", "pairwise", "halving"),
    "all_gather": ("ring", "doubling", "bruck"),
    "all_reduce": ("ring", "doubling", "rabenseifner", "tree", "naive", "everyone"),
    "broadcast": ("tree", "naive"),
    "reduce": ("tree", "naive"),
    "gather": ("pairwise",),
    "all_to_all": ("pairwise",),
}
ROWS = [(operation, algorithm) for operation, algorithms in TABLE.items() for algorithm in algorithms]
REDUCTIONS = [row for row in ROWS if "reduce" in row[0]]
ROOTED = ("broadcast", "reduce", "gather")
GATHERS = ("all_gather", "gather")
POWERS_ONLY = {("reduce_scatter", "halving"), ("all_gather", "doubling")}
TAKES_SPLITS = ("reduce_scatter", "all_gather", "gather", "all_to_all")
# Ordinary; every collective hop by hop, with memory full of NaN; ranks in other legal orders.
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "debug": {"debug": True}, "seeded": {"seed": 7},
                                    "seeded debug": {"seed": 12, "debug": True}}


def allowed(operation: str, algorithm: str, ranks: int) -> bool:
    """Whether this many ranks can be served."""
    return (operation, algorithm) not in POWERS_ONLY or ranks & (ranks - 1) == 0


def takes_splits(operation: str, algorithm: str, ranks: int) -> bool:
    """Whether a cut of one's own makes sense."""
    cuts = algorithm == "ring" or (algorithm == "rabenseifner" and ranks & (ranks - 1) == 0)
    return operation in TAKES_SPLITS or (operation == "all_reduce" and cuts)


def ask(rank: zs.Rank, operation: str, algorithm: str, vector: np.ndarray, cut: tuple[int, ...] | None = None, *,
        root: int = 0, **options: Any) -> Any:
    """Calls the collective on this rank's vector (n,); with a cut, by its splits."""
    if operation in ROOTED:
        options["root"] = root
    mine = vector
    if operation in GATHERS:
        bounds = cut or ceil_cut(len(vector), rank.size)
        mine = vector[bounds[rank.index]:bounds[rank.index + 1]]
        options |= {"length": len(vector)} if cut is None else {"splits": cut}
    elif cut is not None:
        options["splits"] = cut
    return getattr(rank, operation)(mine, algorithm=algorithm, **options)


def cuts_of(length: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Uneven cuts: all on one rank, empty chunks in between, and one that rises at random."""
    rng = np.random.default_rng(1000 * length + ranks)
    for owner in {0, ranks // 2, ranks - 1}:
        yield tuple(0 if index <= owner else length for index in range(ranks + 1))
    inner = np.sort(rng.integers(0, length + 1, ranks - 1))
    yield (0, *(int(boundary) for boundary in inner), length)


def same(found: Any, wanted: np.ndarray | None) -> bool:
    """Equal bits, equal shape, equal dtype; or None for None."""
    if found is None or wanted is None:
        return found is wanted
    return found.dtype == wanted.dtype and found.shape == wanted.shape and bits(found) == bits(wanted)


def bits(array: np.ndarray) -> bytes:
    """The array's bytes: equal means equal bits."""
    return np.ascontiguousarray(array).tobytes()


def works(cluster: zs.Cluster) -> bool:
    """True where an ordinary collective gives the ordinary result, and what it takes is given back."""
    before = cluster.memory.now_nbytes
    ranks = len(cluster.ranks)
    results = cluster.run(lambda rank: rank.all_reduce(np.array([rank.index + 1])).tolist())
    return list(results) == [[sum(range(ranks + 1))]] * ranks and cluster.memory.now_nbytes == before


def assert_ends(cluster: zs.Cluster, program: Callable[..., Any], error: type[BaseException], words: str = "",
                *notes: str) -> BaseException:
    """The run ends by this error, with text that the words (a pattern) match, and with these notes; what it took is
    given back, and the cluster works again. Returns the error."""
    import pytest  # not above: the processes of a job import this module, and need none

    before = cluster.memory.now_nbytes, len(cluster.runs)
    with pytest.raises(error) as caught:
        cluster.run(program)
    assert re.search(words, str(caught.value)), caught.value
    assert not notes or caught.value.__notes__ == [*notes]
    assert (cluster.memory.now_nbytes, len(cluster.runs)) == before
    assert works(cluster)
    return caught.value


def in_another_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Starts the function in a thread, and gives what waits for its result and raises its error."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future.result
