"""The ring written for speed equals the ring written hop by hop: in bits, in bytes, and in every row of the trace.

That short rings of any cut give the oracle's bits in either way, `test_collectives.py` shows.
"""

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.ranks.asking import ask, bits, ceil_cut
from tests.ranks.data import FLOATS, any_bits, normals
from zerosim.numerics import arrays
from zerosim.ranks import fast_ring


def numbers(array: np.ndarray) -> bytes:
    """The bits, with all NaNs alike: which of two NaNs a sum passes on, NumPy's own vector loop and its tail decide
    differently, so sign and payload of a NaN are promised nowhere."""
    with np.errstate(invalid="ignore"):
        return bits(np.where(np.isnan(array), np.array(np.nan, array.dtype), array))


# A chunk that is stacked ends at STACK_CHUNK; the sum that is not goes block by block; kernels change paths at 4096.
CHUNKS = [5, 4095, 4097, fast_ring.STACK_CHUNK, fast_ring.STACK_CHUNK + 1,
          arrays.BLOCK - 1, arrays.BLOCK, arrays.BLOCK + 1]


@pytest.mark.parametrize(("chunk", "name"), [
    *covering(CHUNKS, ["fp32", "fp16", "bf16", "fp8_e4m3"]), *covering(CHUNKS, ["bf16", "fp8_e5m2", "fp32", "fp16"])])
def test_chunks_are_equal_on_both_sides_of_every_threshold(name: str, chunk: int) -> None:
    """All rings, out of place and in place, of any bits at all: infinities meet, and NaN of each kind is added to."""
    vectors = (any_bits if chunk < arrays.BLOCK else normals)(3, 3 * chunk - 2, FLOATS[name])
    bounds = ceil_cut(len(vectors[0]), 3)

    def program(rank: zs.Rank) -> list[np.ndarray]:
        results = []
        for operation in ("reduce_scatter", "all_gather", "all_reduce"):
            results.append(ask(rank, operation, "ring", vectors[rank.index]))
            copy = vectors[rank.index].copy()
            out = copy[slice(*bounds[rank.index:rank.index + 2])] if operation == "reduce_scatter" else copy
            results.append(ask(rank, operation, "ring", copy, out=out))
        return results

    fast, slow = zs.Cluster(3), zs.Cluster(3)
    assert list(fast.events(program)) == []
    hops = list(slow.events(program, hop_by_hop=True))
    assert len(hops) == sum(len(row.hops()) for row in slow.trace[0].collectives())
    found = [[[numbers(x) for x in results] for results in cluster.runs[-1].results] for cluster in (fast, slow)]
    assert found[0] == found[1]
    assert [trace.rows for trace in fast.trace] == [trace.rows for trace in slow.trace]
    assert fast.memory.peak_nbytes == slow.memory.peak_nbytes


def test_what_is_no_plain_ring_is_made_hop_by_hop_in_an_ordinary_run() -> None:
    for options in ({"algorithm": "naive"}, {"op": "max"}, {"wire": "fp32"}):
        cluster = zs.Cluster(3)
        events = list(cluster.events(lambda rank, o=options: rank.all_reduce(np.ones(5, np.float16), **o)))
        assert [event.hop for event in events] == cluster.trace[0].collectives()[0].hops()
        assert events
