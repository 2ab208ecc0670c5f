"""The ring written for speed equals the ring written hop by hop: in bits, in bytes, and in every row of the trace."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import covering
from tests.ranks.asking import ask, bits, ceil_cut
from tests.ranks.data import FLOATS, INTEGERS, any_bits, normals
from zerosim.numerics import arrays
from zerosim.ranks import fast_ring

RINGS = ["reduce_scatter", "all_gather", "all_reduce"]
TYPES = {**FLOATS, **INTEGERS}
MEANS = [{}, {"op": "mean"}, *({"op": "mean", "average": rule} for rule in ("split", "premultiply", "divide_then_sum"))]


def numbers(array: np.ndarray) -> bytes:
    """The bits, with all NaNs alike: which of two NaNs a sum passes on, NumPy's own vector loop and its tail decide
    differently, so sign and payload of a NaN are promised nowhere."""
    if array.dtype.kind not in "fV":
        return bits(array)
    with np.errstate(invalid="ignore"):
        return bits(np.where(np.isnan(array), np.array(np.nan, array.dtype), array))


def compare(vectors: list[np.ndarray], cut: tuple[int, ...] | None = None, **options) -> list[bytes]:
    """All rings on these vectors, out of place and in place, with and without hops; the results of the first rank.

    Equal are results in bits, the trace in every row, and so the bytes sent and the memories' whole histories.
    """
    ranks = len(vectors)
    bounds = cut or ceil_cut(len(vectors[0]), ranks)

    def program(rank: zs.Rank) -> list[np.ndarray]:
        results = []
        for operation in RINGS:
            rounds = options if "reduce" in operation else {}
            results.append(ask(rank, operation, "ring", vectors[rank.index], cut, **rounds))
            copy = vectors[rank.index].copy()
            out = copy[slice(*bounds[rank.index:rank.index + 2])] if operation == "reduce_scatter" else copy
            results.append(ask(rank, operation, "ring", copy, cut, out=out, **rounds))
        return results

    fast, slow = zs.Cluster(ranks), zs.Cluster(ranks)
    assert list(fast.events(program)) == []
    hops = list(slow.events(program, hop_by_hop=True))
    assert len(hops) == sum(len(row.hops()) for row in slow.trace[0].collectives())
    found = [[[numbers(x) for x in results] for results in cluster.runs[-1].results] for cluster in (fast, slow)]
    assert found[0] == found[1]
    assert [trace.rows for trace in fast.trace] == [trace.rows for trace in slow.trace]
    assert fast.memory.peak_nbytes == slow.memory.peak_nbytes
    return found[0][0]


@given(chunks=st.lists(st.integers(0, 12), min_size=1, max_size=9), dtype=st.sampled_from(list(TYPES.values())),
       seed=st.integers(0, 999), wild=st.booleans(), options=st.sampled_from(MEANS))
def test_short_rings_are_equal(chunks: list[int], dtype: np.dtype, seed: int, wild: bool, options: dict) -> None:
    """Wild: any bits at all, so that infinities meet and each kind of NaN passes through every addition."""
    make = any_bits if wild or dtype.kind in "iu" else normals
    compare(make(len(chunks), sum(chunks), dtype, seed), (0, *np.cumsum(chunks).tolist()),
            **(options if dtype.kind not in "iu" else {}))


# A chunk that is stacked ends at STACK_CHUNK; the sum that is not goes block by block; kernels change paths at 4096.
CHUNKS = [4095, 4097, fast_ring.STACK_CHUNK, fast_ring.STACK_CHUNK + 1,
          arrays.BLOCK - 1, arrays.BLOCK, arrays.BLOCK + 1]


@pytest.mark.parametrize(("chunk", "name"), [
    *covering(CHUNKS, ["fp32", "fp16", "bf16", "fp8_e4m3"]), *covering(CHUNKS, ["bf16", "fp8_e4m3", "fp32", "fp16"])])
def test_long_chunks_are_equal_on_both_sides_of_every_threshold(name: str, chunk: int) -> None:
    make = any_bits if chunk < arrays.BLOCK else normals
    compare(make(3, 3 * chunk - 2, FLOATS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_chunks_of_several_blocks_are_equal_for_any_bits(dtype: np.dtype) -> None:
    for chunk in (arrays.BLOCK - 1, arrays.BLOCK + 1, 2 * arrays.BLOCK, 2 * arrays.BLOCK + 7):
        for ranks in (2, 3, 5):
            compare(any_bits(ranks, ranks * chunk - 1, dtype))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int64"])
def test_stacking_or_not_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, cut, found = any_bits(8, 100, TYPES[name]), (0, *range(9, 100, 13), 100), []
    for stacked_elements in (1 << 23, 13 * 64, 13 * 64 - 1, 0):
        monkeypatch.setattr(fast_ring, "STACK_ELEMENTS", stacked_elements)
        assert fast_ring.worth_stacking(cut, 8) == (stacked_elements >= 13 * 64)
        found.append(compare(vectors, cut))
    assert found == [found[0]] * 4


def test_what_is_no_plain_ring_is_made_hop_by_hop_in_an_ordinary_run() -> None:
    for options in ({"algorithm": "naive"}, {"op": "max"}, {"wire": "fp32"}):
        cluster = zs.Cluster(3)
        events = list(cluster.events(lambda rank, o=options: rank.all_reduce(np.ones(5, np.float16), **o)))
        assert [event.hop for event in events] == cluster.trace[0].collectives()[0].hops()
        assert events
