"""In which order an algorithm adds, and where it rounds, decides bits; each equals an oracle of its own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import THOROUGH, covering
from tests.ranks import oracles
from tests.ranks.asking import KINDS, REDUCTIONS, ROOTED, WORLDS, allowed, ask, bits, ceil_cut, cuts_of, takes_splits
from tests.ranks.data import FLOATS, NARROW, normals

ALL_REDUCES = [row for row in REDUCTIONS if row[0] == "all_reduce"]
SCATTERS = [row for row in REDUCTIONS if row[0] == "reduce_scatter"]


def run(operation, algorithm, x, cut=None, *, root=0, kind="plain", **options) -> list:
    cluster = zs.Cluster(len(x), **KINDS[kind])
    return list(cluster.run(lambda rank: ask(rank, operation, algorithm, x[rank.index], cut, root=root, **options)))


def whole(operation: str, results: list, root: int = 0) -> np.ndarray:
    """The sum (n,), wherever it lies."""
    return np.concatenate(results) if operation == "reduce_scatter" else results[root]


@pytest.mark.parametrize("kind", ["plain", "debug", "seeded"])
@pytest.mark.parametrize(("operation", "algorithm"), REDUCTIONS)
def test_every_algorithm_adds_in_its_own_order_and_rounds_after_each_addition(operation, algorithm, kind) -> None:
    worlds = [n for n in (*WORLDS, 16) if allowed(operation, algorithm, n)]
    turn = REDUCTIONS.index((operation, algorithm)) + list(KINDS).index(kind)
    for ranks, dtype in covering(worlds, FLOATS.values(), turn=turn):
        x, root = normals(ranks, 4 * ranks + 3, dtype), ranks // 2 if operation in ROOTED else 0
        cuts = [None, *(cuts_of(len(x[0]), ranks) if takes_splits(operation, algorithm, ranks) else ())]
        for cut in cuts[:3]:
            found = whole(operation, run(operation, algorithm, x, cut, root=root, kind=kind), root)
            oracle = oracles.reduced(operation, algorithm, x, cut or ceil_cut(len(x[0]), ranks), root)
            assert bits(found) == bits(oracle), (ranks, dtype, cut)


@given(ranks=st.integers(1, 9), length=st.integers(0, 40), dtype=st.sampled_from(list(FLOATS.values())),
       seed=st.integers(0, 99), schedule=st.integers(0, 20), debug=st.booleans())
def test_the_ring_adds_from_the_next_rank_to_the_owner(ranks, length, dtype, seed, schedule, debug) -> None:
    x = normals(ranks, length, dtype, seed)
    results = zs.Cluster(ranks, seed=schedule, debug=debug).run(lambda rank: rank.reduce_scatter(x[rank.index]))
    assert bits(np.concatenate(list(results))) == bits(oracles.ring(x, ceil_cut(length, ranks)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"wire": "fp32"}, {"op": "max"}, {"op": "mean"}], ids=str)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_bit_for_bit(kind, options) -> None:
    for ranks, dtype in covering(WORLDS, FLOATS.values(), turn=list(KINDS).index(kind) + len(str(options))):
        x = normals(ranks, 3 * ranks + 1, dtype)

        def program(rank, x=x, options=options):
            shard = rank.reduce_scatter(x[rank.index], **options)
            return rank.all_gather(shard, length=len(x[0])), rank.all_reduce(x[rank.index], **options)

        for gathered, reduced in zs.Cluster(ranks, **KINDS[kind]).run(program):
            assert bits(gathered) == bits(reduced)


@pytest.mark.parametrize(("operation", "algorithm"), ALL_REDUCES)
def test_an_all_reduce_gives_every_rank_the_same_bits(operation: str, algorithm: str) -> None:
    turn = ALL_REDUCES.index((operation, algorithm))
    for ranks, dtype in covering((*WORLDS, 7, 16), FLOATS.values(), turn=turn):
        results = run(operation, algorithm, normals(ranks, 19, dtype))
        assert len({bits(result) for result in results}) == 1


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_pairwise_adds_in_the_ring_s_order(dtype) -> None:
    for ranks in (*WORLDS, *([64] if dtype.itemsize == 2 or THOROUGH else [])):
        x = normals(ranks, 200, dtype)
        ring, pairwise = (whole("reduce_scatter", run("reduce_scatter", a, x)) for a in ("ring", "pairwise"))
        assert bits(ring) == bits(pairwise)


@pytest.mark.parametrize("kind", ["plain", "debug"])
@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_fp32_on_the_wire_or_at_the_owner_is_other_arithmetic_than_the_ring_from_three_ranks_on(dtype, kind) -> None:
    for ranks in (*WORLDS, 16):
        x = normals(ranks, 600, dtype)
        cut = ceil_cut(600, ranks)
        ring = whole("reduce_scatter", run("reduce_scatter", "ring", x, kind=kind))
        wire = whole("reduce_scatter", run("reduce_scatter", "ring", x, kind=kind, wire="fp32"))
        owner = whole("reduce_scatter", run("reduce_scatter", "pairwise", x, kind=kind, accumulate="fp32"))
        everyone = run("all_reduce", "everyone", x, kind=kind, accumulate="fp32")[0]
        assert bits(ring) == bits(oracles.ring(x, cut))
        # The same additions in the same order: partial sums that travel in fp32 or stay with the owner.
        assert bits(wire) == bits(owner) == bits(oracles.ring_in(oracles.F32, x, cut))
        assert bits(everyone) == bits(oracles.rank_order_in(oracles.F32, x))
        assert bits(run("all_reduce", "ring", x, kind=kind, wire="fp32")[-1]) == bits(wire)
        assert (bits(wire) != bits(ring)) == (bits(everyone) != bits(oracles.rank_order(x))) == (ranks >= 3)


@pytest.mark.parametrize("kind", ["plain", "debug"])
def test_partial_sums_may_also_travel_in_a_narrower_format(kind: str) -> None:
    for ranks in WORLDS:
        x, cut = normals(ranks, 40), ceil_cut(40, ranks)
        found = whole("reduce_scatter", run("reduce_scatter", "ring", x, kind=kind, wire="bf16"))
        # A rank that is alone sends nothing, so nothing is rounded.
        assert bits(found) == bits(oracles.ring_in(NARROW["bf16"], x, cut) if ranks > 1 else x[0])


@pytest.mark.parametrize("options", [{"wire": "fp16"}, {}], ids=str)
def test_a_wire_of_the_vector_s_own_format_changes_nothing(options) -> None:
    x = normals(4, 30, np.float16)
    found = whole("reduce_scatter", run("reduce_scatter", "ring", x, **options))
    assert bits(found) == bits(oracles.ring(x, ceil_cut(30, 4)))


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("ranks", "share"), [(2, 0.0), (3, 0.213), (4, 0.320), (8, 0.518), (64, 0.824)])
def test_ring_and_rank_order_differ_in_the_known_share_of_elements(ranks: int, share: float, name: str) -> None:
    """The shares of a million standard normals, the same in every format. Of 24,000 elements a share has a standard
    error below 0.33 %; the band is four of these."""
    x = normals(ranks, 24_000, FLOATS[name], seed=1)
    ring, naive = run("all_reduce", "ring", x)[0], run("all_reduce", "naive", x)[0]
    unequal = float(np.mean(ring.view(f"u{ring.itemsize}") != naive.view(f"u{ring.itemsize}")))
    assert unequal == pytest.approx(share, abs=0.013 if ranks > 2 else 0)


def test_at_two_ranks_no_algorithm_can_be_told_from_another() -> None:
    """One addition, and a + b = b + a: so a test with two ranks proves nothing about order."""
    for dtype in FLOATS.values():
        x = normals(2, 500, dtype)
        sums = {bits(whole(operation, run(operation, algorithm, x))) for operation, algorithm in REDUCTIONS}
        if dtype.itemsize <= 4:
            sums |= {bits(run("all_reduce", "ring", x, wire="fp32")[0])}
            sums |= {bits(run("all_reduce", "everyone", x, accumulate="fp32")[0])}
        assert len(sums) == 1


@pytest.mark.parametrize("ranks", [4, 8])
def test_from_four_ranks_on_every_two_orders_differ(ranks: int) -> None:
    x = normals(ranks, 2000)
    by_algorithm = {algorithm: bits(run("all_reduce", algorithm, x)[0]) for _, algorithm in ALL_REDUCES}
    assert by_algorithm.pop("everyone") == by_algorithm["naive"]
    # The tree adds (0 + 1) + (2 + 3) as doubling does; halving pairs ranks the other way round.
    assert by_algorithm.pop("tree") == by_algorithm["doubling"]
    assert len(set(by_algorithm.values())) == len(by_algorithm) == 4


@pytest.mark.parametrize(("operation", "algorithm"), REDUCTIONS)
def test_sums_of_rank_modulo_8_are_exact_in_fp16_by_every_algorithm(operation: str, algorithm: str) -> None:
    """Every partial sum is a whole number below 2048, which fp16 represents: no order may lose anything."""
    for ranks in (4, 8, 16, 64):
        x = [np.full(17, rank % 8, np.float16) for rank in range(ranks)]
        found = whole(operation, run(operation, algorithm, x))
        assert found.tolist() == [sum(rank % 8 for rank in range(ranks))] * 17


@pytest.mark.parametrize("kind", ["plain", "debug"])
@pytest.mark.parametrize(("op", "zero"), [("max", 0.0), ("min", -0.0)])
@pytest.mark.parametrize(("operation", "algorithm"), REDUCTIONS)
def test_an_extremum_keeps_nan_and_tells_the_zeros_apart(operation, algorithm, op, zero, kind) -> None:
    for dtype in FLOATS.values():
        columns = [[1, 2, 3, -4], [0.0, -0.0, -0.0, 0.0], [1, np.nan, 2, 3], [-2, -2, -2, -2]]
        x = [np.array(row).astype(np.float32).astype(dtype) for row in zip(*columns, strict=True)]
        found = whole(operation, run(operation, algorithm, x, kind=kind, op=op)).astype(np.float64)
        assert found[[0, 3]].tolist() == [3 if op == "max" else -4, -2]
        assert np.isnan(found[2])
        assert np.signbit(found[1]) == np.signbit(zero)
