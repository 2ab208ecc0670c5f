"""The order in which gloo adds, found by values whose sum tells orders apart, and the same order by zerosim; and which
rows lie where under ``fully_shard``."""

from itertools import permutations

import numpy as np
import pytest

import zerosim as zs
from tests.peers.launcher import launch

pytestmark = [pytest.mark.slow, pytest.mark.peer, pytest.mark.usefixtures("installed")]
LENGTHS = {"reduce_scatter": (48, 240, 12_000), "all_reduce": (310, 12_000)}


def telling(ranks: int, length: int) -> np.ndarray:
    """(N, length) values of many sizes: their sums in fp32 and bf16 tell one order from another."""
    rng = np.random.default_rng(length + ranks)
    values = rng.standard_normal((ranks, length)) * np.exp2(rng.integers(-6, 7, (ranks, length)))
    return values.astype(np.float32)


def by_zerosim(vectors: np.ndarray, form: str, mirrored: bool) -> np.ndarray:
    """The sums by zerosim's ring, g[c+1] + g[c+2] + ... + g[c] for the chunk of rank c; ``mirrored``: rank r has the
    vector of -r, and chunk c is that of -c, so that they are g[c-1] + g[c-2] + ... + g[c]."""
    ranks, length = vectors.shape
    order = [-index % ranks if mirrored else index for index in range(ranks)]
    each = -(-length // ranks)
    padded = np.pad(vectors, ((0, 0), (0, each * ranks - length))).astype(zs.FORMATS[form].dtype)
    chunks = padded.reshape(ranks, ranks, each)[order][:, order].reshape(ranks, -1)
    shards = zs.Cluster(ranks).run(lambda rank: rank.reduce_scatter(chunks[rank.index]))
    return np.concatenate([shards[order.index(index)] for index in range(ranks)])[:length].astype(np.float32)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gloos_ring_runs_against_zerosims_which_shows_from_four_ranks_on(ranks):
    calls = [(telling(ranks, length), collective, form) for form in ("fp32", "bf16")
             for collective, lengths in LENGTHS.items() for length in lengths]
    found = launch("tests.peers.jobs:several", ranks, "reduced", calls)
    for at, (vectors, collective, form) in enumerate(calls):
        of_ranks = [each[at] for each in found]
        there = of_ranks[0] if collective == "all_reduce" else np.concatenate(of_ranks)
        asked = (ranks, collective, vectors.shape, form)
        assert np.array_equal(there, by_zerosim(vectors, form, mirrored=True)), asked
        assert np.array_equal(there, by_zerosim(vectors, form, mirrored=False)) == (ranks < 4), asked
        assert collective == "reduce_scatter" or all(np.array_equal(there, each) for each in of_ranks)


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_short_all_reduce_of_gloo_is_of_some_order_too(ranks):
    vectors = telling(ranks, ranks)
    there = launch("tests.peers.jobs:several", ranks, "reduced", [(vectors, "all_reduce", "fp32")])[0][0]
    fits = np.zeros(ranks, bool)
    for order in permutations(vectors):
        total = order[0]
        for addend in order[1:]:
            total = total + addend
        fits |= total == there
    assert fits.all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_fully_shard_leaves_on_a_rank_the_rows_of_outputs_that_notebook_16_says(ranks):
    shapes = zs.models.MLP([6, 5, 3]).shapes
    weights = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()}
    for rank, found in enumerate(launch("tests.peers.jobs:shards", ranks, weights)):
        for mine, whole in zip(found.values(), weights.values(), strict=True):
            each = -(-whole.shape[-1] // ranks)  # PyTorch's weights are (outputs, inputs)
            assert np.array_equal(mine, whole.T[each * rank:each * (rank + 1)])
