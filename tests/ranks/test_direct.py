"""The ring written for speed equals the ring written hop by hop: in bits, in bytes, and in every row of the trace."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import chosen, covering
from tests.ranks.asking import WORLDS, ask, bits, cuts_of
from tests.ranks.data import FLOATS, INTEGERS, any_bits, normals
from zerosim.numerics.arrays import BLOCK
from zerosim.ranks import fast_ring as direct

RINGS = ["reduce_scatter", "all_gather", "all_reduce"]
TYPES = {**FLOATS, **INTEGERS}


def numbers(array: np.ndarray) -> bytes:
    """The bits, with all NaNs alike: which of two NaNs a sum passes on, NumPy's own vector loop and its tail decide
    differently, so sign and payload of a NaN are promised nowhere."""
    if array.dtype.kind not in "fV":
        return bits(array)
    with np.errstate(invalid="ignore"):
        return bits(np.where(np.isnan(array), np.array(np.nan, array.dtype), array))


def both(ranks: int, program) -> list[zs.Cluster]:
    """Runs the program on a cluster that makes no hop of it, and on one that makes every hop."""
    fast, slow = zs.Cluster(ranks), zs.Cluster(ranks)
    assert list(fast.events(program)) == []
    hops = list(slow.events(program, hop_by_hop=True))
    assert len(hops) == sum(len(row.hops()) for row in slow.trace[0].collectives())
    return [fast, slow]


def assert_equal(clusters: list[zs.Cluster]) -> None:
    """Results in bits, the trace in every row, and so the bytes sent and the ledgers' whole histories."""
    fast, slow = (cluster.runs[-1] for cluster in clusters)
    for found, wanted in zip(fast.results, slow.results, strict=True):
        assert [numbers(x) for x in found] == [numbers(x) for x in wanted]
    for found, wanted in zip(fast.trace, slow.trace, strict=True):
        assert found.rows == wanted.rows
    assert fast.trace.sent_nbytes() == slow.trace.sent_nbytes()
    assert clusters[0].memory.peak_nbytes == clusters[1].memory.peak_nbytes


def compare(ranks: int, vectors: list[np.ndarray], cut=None, **options) -> None:
    """All rings on these vectors, out of place and in place."""
    own = cut or tuple(min(len(vectors[0]), i * -(-len(vectors[0]) // ranks)) for i in range(ranks + 1))

    def program(rank: zs.Rank) -> list[np.ndarray]:
        x = vectors[rank.index]
        results = [ask(rank, operation, "ring", x, cut, **(options if "reduce" in operation else {}))
                   for operation in RINGS]
        for operation in RINGS:
            copy = x.copy()
            out = copy[own[rank.index]:own[rank.index + 1]] if operation == "reduce_scatter" else copy
            results.append(ask(rank, operation, "ring", copy, cut, out=out,
                               **(options if "reduce" in operation else {})))
        return results

    assert_equal(both(ranks, program))


@given(chunks=st.lists(st.integers(0, 12), min_size=1, max_size=9), dtype=st.sampled_from(list(TYPES.values())),
       seed=st.integers(0, 999), wild=st.booleans())
def test_short_rings_are_equal(chunks: list[int], dtype: np.dtype, seed: int, wild: bool) -> None:
    """Wild: any bits at all, so that infinities meet and each kind of NaN passes through every addition."""
    ranks, cut = len(chunks), (0, *np.cumsum(chunks).tolist())
    make = any_bits if wild or dtype.kind in "iu" else normals
    compare(ranks, make(ranks, cut[-1], dtype, seed), cut)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_every_world_is_equal(dtype: np.dtype) -> None:
    worlds = chosen(WORLDS[list(TYPES.values()).index(dtype) % 2::2], WORLDS)
    for ranks in worlds:
        for length in (1, 3 * ranks + 1):
            vectors, cuts = any_bits(ranks, length, dtype), [None, *cuts_of(length, ranks)]
            for cut in chosen([None, cuts[-1]] if length > 1 else cuts[1:2], cuts):
                compare(ranks, vectors, cut)
    compare(16, any_bits(16, 45, dtype))


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("average", [None, "split", "premultiply", "divide_then_sum"])
def test_means_are_equal(op: str, average: str | None) -> None:
    if op == "mean" or average is None:
        for dtype in FLOATS.values():
            compare(3, normals(3, 50, dtype), op=op, average=average)


# A chunk that is stacked ends at STACK_CHUNK; the sum that is not goes block by block; kernels change paths at 4096.
CHUNKS = [4095, 4097, direct.STACK_CHUNK, direct.STACK_CHUNK + 1, BLOCK - 1, BLOCK, BLOCK + 1]


@pytest.mark.parametrize(("chunk", "name"), [
    *covering(CHUNKS, ["fp32", "fp16", "bf16", "fp8_e4m3"]), *covering(CHUNKS, ["bf16", "fp8_e4m3", "fp32", "fp16"])])
def test_long_chunks_are_equal_on_both_sides_of_every_threshold(name: str, chunk: int) -> None:
    ranks = 3
    make = any_bits if chunk < BLOCK else normals
    compare(ranks, make(ranks, ranks * chunk - 2, FLOATS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [BLOCK - 1, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 7])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_chunks_of_several_blocks_are_equal_for_any_bits(dtype: np.dtype, chunk: int) -> None:
    for ranks in (2, 3, 5):
        compare(ranks, any_bits(ranks, ranks * chunk - 1, dtype))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int64"])
def test_stacking_or_not_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, found = any_bits(8, 100, TYPES[name]), []
    for stacked_elements in (1 << 23, 13 * 64, 13 * 64 - 1, 0):
        monkeypatch.setattr(direct, "STACK_ELEMENTS", stacked_elements)
        assert direct.worth_stacking((0, *range(9, 100, 13), 100), 8) == (stacked_elements >= 13 * 64)
        compare(8, vectors, (0, *range(9, 100, 13), 100))
        cluster = zs.Cluster(8)
        found.append([numbers(x) for x in cluster.run(lambda rank: rank.all_reduce(vectors[rank.index]))])
    assert found == [found[0]] * 4


def test_what_is_no_plain_ring_is_made_hop_by_hop_in_an_ordinary_run() -> None:
    for options in ({"algorithm": "naive"}, {"op": "max"}, {"wire": "fp32"}):
        cluster = zs.Cluster(3)
        events = list(cluster.events(lambda rank, o=options: rank.all_reduce(np.ones(5, np.float16), **o)))
        assert [event.hop for event in events] == cluster.trace[0].collectives()[0].hops()
        assert events
