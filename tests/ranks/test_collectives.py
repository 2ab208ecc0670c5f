"""Every collective by every algorithm, in every form, world, type and schedule: results, bytes, hops and what is held.

Results are held against the plain oracles, bytes against the planner's closed forms; those against the messages that
ranks make, of barriers too, in `tests/planning/test_collectives.py`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import THOROUGH, covering
from tests.ranks import oracles
from tests.ranks.asking import KINDS, ROOTED, ROWS, TABLE, allowed, ask, ceil_cut, same, takes_splits
from tests.ranks.data import FLOATS, INTEGERS, OTHERS, any_bits, anything, normals, whole_numbers
from zerosim.numerics import arrays
from zerosim.planning import collectives as closed_forms
from zerosim.ranks import collectives

WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)
WHOLE = ("all_reduce", "broadcast", "reduce")  # of vectors that are not cut, and keep their shape
FORMS = ("new", "out", "in place", "async", "async out", "async in place")
AVERAGES = ("sum_then_divide", "divide_then_sum", "split", "premultiply")
WAYS = (*KINDS, "hop by hop", "stepped", "in a group")
OPTIONS: list[dict[str, Any]] = [
    {}, {"op": "max"}, {"op": "min"}, {"op": "mean"}, *({"op": "mean", "average": rule} for rule in AVERAGES),
    {"wire": "fp32"}, {"wire": "bf16"}, {"accumulate": "fp32"}, {"wire": "fp32", "op": "mean", "average": "split"}]


def fits(operation: str, algorithm: str, dtype: np.dtype, options: dict[str, Any]) -> bool:
    """Whether the options make sense."""
    return (not options or "reduce" in operation) and (
        dtype in FLOATS.values() or options.get("op") in ("max", "min") or not options) and (
        "wire" not in options or (algorithm == "ring" and dtype != FLOATS["fp64"])) and (
        "accumulate" not in options or (algorithm in ("pairwise", "everyone") and dtype != FLOATS["fp64"]))


def same_numbers(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal bits, with all NaNs alike: which of two NaNs a sum passes on, NumPy's own vector loop and its tail decide
    differently, so sign and payload of a NaN are promised nowhere."""
    numbers = ~np.isnan(wanted)
    return np.array_equal(~np.isnan(found), numbers) and same(found[numbers], wanted[numbers])


Late = list[list[int]]


@dataclass
class Asked:
    """One call that all ranks make: on their vectors (n,), by a cut, in one of the forms."""

    operation: str
    algorithm: str
    vectors: list[np.ndarray]
    cut: tuple[int, ...] | None = None
    root: int = 0
    form: str = "new"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def bounds(self) -> tuple[int, ...]:
        return self.cut or ceil_cut(len(self.vectors[0]), len(self.vectors))

    def wanted(self) -> list[np.ndarray | None]:
        return oracles.results(self.operation, self.algorithm, self.vectors, self.bounds, self.root, **self.options)

    def issue(self, rank: zs.Rank, right: np.ndarray | None) -> Callable[[], None]:
        """Makes the call on this rank; what is returned waits for it and looks whether its result is ``right``."""
        vector, options, out = self.vectors[rank.index].copy(), dict(self.options), None
        shape = (-1,)
        if self.operation in WHOLE:
            shape = ((-1,), (1, -1, 1))[len(vector) % 2] if len(vector) != 1 else ()
        if "out" in self.form and right is not None:
            out = np.zeros_like(right).reshape(shape)
        elif "in place" in self.form and self.operation != "all_to_all" and right is not None:
            own = slice(*self.bounds[rank.index:rank.index + 2])
            out = vector[own] if self.operation == "reduce_scatter" else vector.reshape(shape)
        if out is not None:
            options["out"] = out
        if "async" in self.form:
            options["async_op"] = True
        x = vector.reshape(shape)
        answer = ask(rank, self.operation, self.algorithm, x, self.cut, root=self.root, **options)

        def look() -> None:
            result = answer.wait() if "async" in self.form else answer
            assert out is None or result is out, "the result is where it was asked for"
            assert "place" in self.form or same(vector, self.vectors[rank.index]), "the input is left as it was"
            assert (result is None) == (right is None), "only the root of a reduction receives a result"
            if result is not None:
                equal = same_numbers if "reduce" in self.operation else same
                assert equal(result.reshape(-1), right), (self, rank.index, result)
                assert self.operation not in WHOLE or result.shape == x.shape

        return look


def run(way: str, asked: list[Asked], late: Late | None = None, **options: Any) -> tuple[zs.Cluster, list[int]]:
    """Makes the calls one after another on the members of a cluster; the cluster and the members, in their order.

    ``late[r][i]``: the call after which rank r waits for its call i and looks at its result; else at once.
    """
    ranks, wanted = len(asked[0].vectors), [one.wanted() for one in asked]
    members = list(range(ranks))
    cluster = zs.Cluster(ranks, **KINDS.get(way, {}), **options)

    def program(rank: zs.Rank) -> None:
        group = rank
        if way == "in a group":  # in the reverse order, beside two ranks that are in none
            group = rank.split(0 if rank.index in members else None, key=-rank.index)
        due: dict[int, list[Callable[[], None]]] = defaultdict(list)
        for turn, (one, right) in enumerate(zip(asked, wanted, strict=True) if group else ()):
            due[late[group.index][turn] if late else turn].append(one.issue(group, right[group.index]))
            for look in due[turn]:
                look()

    match way:
        case "hop by hop":
            made = defaultdict(list)
            for event in cluster.events(program, hop_by_hop=True):
                made[event.call.number].append(event.hop)
            for row in cluster.trace[-1].collectives():
                assert row.hops() == made[row.call.number]
        case "stepped":
            steps = list(zs.step_through(program, cluster=cluster, by="collective"))
            rows = cluster.trace[0].collectives()
            assert [(step.number, step.call, step.hops) for step in steps] == [
                (number, row.call, row.hops()) for number, row in enumerate(rows, 1)]
            for step, one, right in zip(steps, asked, wanted, strict=True):
                if "mean" not in one.options.values():  # whose last division comes later
                    assert all(result is None or same(now.out, result)
                               for now, result in zip(step.ranks, right, strict=True))
        case "in a group":
            cluster, members = zs.Cluster(ranks + 2), list(range(ranks, 0, -1))
            cluster.run(program)
        case _:
            cluster.run(program)
    return cluster, members


def check(way: str, asked: list[Asked], late: Late | None = None) -> None:
    """Results, bytes and hops of the calls, and that nothing is held afterwards."""
    cluster, members = run(way, asked, late)
    assert cluster.memory.now_nbytes == [0] * len(cluster.ranks)
    of_ranks = [cluster.trace[index].collectives()[-len(asked):] for index in members]
    for position, one in enumerate(asked):
        rows = [rows[position] for rows in of_ranks]
        assert len({row.call for row in rows}) == 1
        itemsize, wire = one.vectors[0].itemsize, one.options.get("wire")
        shape = closed_forms.CollectiveShape(one.operation, one.algorithm, one.bounds, itemsize,
                                             FLOATS[wire].itemsize if wire else itemsize, one.root)
        sent = tuple(row.sent_nbytes for row in rows)
        assert sent == closed_forms.sent_of(shape).nbytes
        by_hops = Counter()
        for hop in rows[0].hops():
            by_hops[hop.source] += hop.nbytes
            if one.cut is not None and wire is None:
                assert hop.nbytes == itemsize * sum(one.bounds[chunk + 1] - one.bounds[chunk] for chunk in hop.chunks)
        assert sent == tuple(by_hops[index] for index in range(len(members)))


def test_the_table_has_the_promised_rows_and_no_others() -> None:
    found = {operation: tuple(rows) for operation, rows in collectives.ALGORITHMS.items()}
    assert found == TABLE | {"barrier": ("dissemination",)}


# Where the ring written for speed goes another way: vectors of up to 4096 elements are added as they are, and longer
# ones block by block, where a block may end in a chunk. Three ranks take three chunks, the last one 2 elements shorter.
CHUNKS = [1366, 1367, 4095, arrays.BLOCK, arrays.BLOCK + 1, arrays.WIDE_BLOCK // 3 + 2]


@pytest.mark.parametrize(("chunk", "name", "form"), covering(
    CHUNKS, ["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"], ["new", "in place"]))
def test_rings_give_the_oracle_s_bits_on_both_sides_of_every_threshold(chunk: int, name: str, form: str) -> None:
    """Of any bits at all, written for speed and hop by hop: infinities meet, and NaN of each kind is added to."""
    asked = [Asked(operation, "ring", (any_bits if turn else normals)(3, 3 * chunk - 2, FLOATS[name]), form=form)
             for operation in ("reduce_scatter", "all_gather", "all_reduce") for turn in (0, 1)]
    for way in ("plain", "hop by hop") if chunk < arrays.BLOCK else ("plain",):
        check(way, asked)


def test_only_a_plain_ring_is_written_for_speed_and_makes_no_hops() -> None:
    for options in ({}, {"algorithm": "naive"}, {"op": "max"}, {"wire": "fp32"}):
        cluster = zs.Cluster(3)
        events = list(cluster.events(lambda rank, o=options: rank.all_reduce(np.ones(5, np.float16), **o)))
        assert [event.hop for event in events] == (cluster.trace[0].collectives()[0].hops() if options else [])


@st.composite
def scripts(draw: st.DrawFn, row: tuple[str, str]) -> tuple[str, list[Asked], Late]:
    """A way, some calls of one length, of which the first is of this row, and where each rank waits for which."""
    ranks = draw(st.sampled_from([ranks for ranks in WORLDS if allowed(*row, ranks)]))
    cut = (0, *np.cumsum(draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks))).tolist())
    others, asked = st.sampled_from([other for other in ROWS if allowed(*other, ranks)]), []
    for one in [row, *draw(st.lists(others, max_size=3))]:
        adds = "reduce" in one[0]
        dtype = draw(st.sampled_from([*FLOATS.values(), *INTEGERS.values(), *(() if adds else OTHERS.values())]))
        make = anything if not adds else normals if dtype in FLOATS.values() else whole_numbers
        splits = cut if takes_splits(*one, ranks) and draw(st.booleans()) else None
        options = draw(st.sampled_from([each for each in OPTIONS if fits(*one, dtype, each)]))
        root = draw(st.integers(0, ranks - 1)) if one[0] in ROOTED else 0
        asked.append(Asked(*one, make(ranks, cut[-1], dtype), splits, root, draw(st.sampled_from(FORMS)), options))
    late = [[draw(st.integers(turn, len(asked) - 1)) for turn in range(len(asked))] for _ in range(ranks)]
    return draw(st.sampled_from(WAYS)), asked, late


@pytest.mark.parametrize("row", ROWS, ids=" by ".join)
@settings(max_examples=150 if THOROUGH else 7)
@given(data=st.data(), seed=st.integers(1, 1000), debug=st.booleans())
def test_any_script_of_calls_gives_the_oracle_s_bits_the_closed_form_s_bytes_and_one_trace_whatever_the_schedule(
        row: tuple[str, str], data: st.DataObject, seed: int, debug: bool) -> None:
    script = data.draw(scripts(row))
    check(*script)
    plain, other = (run("plain", *script[1:], seed=seed, debug=debug)[0] for seed in (0, seed))
    assert [trace.rows for trace in other.trace] == [trace.rows for trace in plain.trace]
    assert other.memory.peak_nbytes == plain.memory.peak_nbytes
    assert other.memory.now_nbytes == [0] * len(other.ranks)


@pytest.mark.parametrize("row", ROWS, ids=" by ".join)
def test_64_ranks_give_the_right_result(row: tuple[str, str]) -> None:
    check("plain", [Asked(*row, whole_numbers(64, 65))])


@pytest.mark.parametrize("row", ROWS, ids=" by ".join)
def test_without_data_ranks_hold_and_send_what_they_do_with_data_and_one_may_stand_for_all(row) -> None:
    """Where every rank brings and sends as much as it does; elsewhere it is refused."""
    worlds = [ranks for ranks in (1, 2, 3, 4, 8) if allowed(*row, ranks)]
    for ranks, asynchronous, extra in covering(worlds, (False, True), (0, 1), turn=ROWS.index(row)):
        def program(rank: zs.Rank, length=2 * ranks + extra, asynchronous=asynchronous) -> None:
            answer = ask(rank, *row, rank.xp.zeros(length, "float32"), async_op=asynchronous)
            if asynchronous:
                answer.wait()

        real, null = zs.Cluster(ranks), zs.NullCluster(ranks)
        for cluster in (real, null):
            cluster.run(program)
        assert [trace.rows for trace in null.trace] == [trace.rows for trace in real.trace]
        assert null.memory.peak_nbytes == real.memory.peak_nbytes
        alone = zs.NullCluster(ranks, representative=ranks - 1)
        if len(set(real.trace.sent_nbytes())) == 1 and (extra == 0 or ranks == 1):
            alone.run(program)
            assert alone.trace[0].rows == real.trace[ranks - 1].rows
        else:
            with pytest.raises(zs.AsymmetryError, match=rf"rank {ranks - 1} stands for all ranks and was asked for .*"
                                                        "do not all bring, or not all send, the same number of bytes"):
                alone.run(program)
        made, first = real.trace[0].collectives()[0].call, next(iter(collectives.ALGORITHMS[row[0]]))
        if row[1] == first:  # what a library's own sends is counted as the first algorithm would send
            native = made._replace(algorithm="native")
            assert [collectives.sent_by(native, index) for index in range(ranks)] == real.trace.sent_nbytes()


def test_a_rank_whose_arrays_have_no_data_answers_for_the_others_where_it_brings_numbers_of_its_own() -> None:
    """Its memory gives arrays without data; messages, groups and other sums of numbers take all ranks."""
    def held_and_gathered(rank: zs.Rank) -> list[int]:
        assert isinstance(rank.memory.alloc(3, "f4", "gradient"), rank.xp.ndarray)
        rank.barrier()
        return rank.all_gather(np.array([rank.index, 7])).tolist()

    def split(rank: zs.Rank) -> list[int]:
        return rank.split(rank.index % 2).all_gather(np.array([rank.index])).tolist()

    alone = zs.NullCluster(3, representative=2)
    assert list(alone.run(held_and_gathered)) == [[2, 7, 2, 7, 2, 7]]
    assert list(zs.NullCluster(3).run(held_and_gathered)) == [[0, 7, 1, 7, 2, 7]] * 3
    assert list(zs.NullCluster(3).run(split)) == [[0, 2], [1], [0, 2]]
    for program, text in [
            (split, "was asked to split() them, but what color the others choose is not known; run all of them"),
            (lambda rank: rank.send(np.ones(1), 0), "asked for send((1,), float64) to rank 0, but a message has one"),
            (lambda rank: rank.all_reduce(np.ones(3)), "its array has data, and that of the other ranks is not there")]:
        with pytest.raises(zs.AsymmetryError, match=re.escape(text)):
            alone.run(program)


@pytest.mark.parametrize("op", ["max", "min"])
def test_an_extremum_keeps_nan_and_tells_the_zeros_apart(op: str) -> None:
    columns = [[1, 2, 3, -4], [0.0, -0.0, -0.0, 0.0], [1, np.nan, 2, 3], [-2, -2, -2, -2]]
    for operation, algorithm in [row for row in ROWS if "reduce" in row[0]]:
        for dtype in FLOATS.values():
            x = [np.array(row).astype(np.float32).astype(dtype) for row in zip(*columns, strict=True)]
            results = zs.Cluster(4).run(
                lambda rank, row=(operation, algorithm), x=x: ask(rank, *row, x[rank.index], op=op))
            found = np.concatenate([r for r in results if r is not None]).astype(np.float64)
            assert found[[0, 3]].tolist() == [3 if op == "max" else -4, -2], (operation, algorithm, dtype)
            assert np.isnan(found[2])
            assert np.signbit(found[1]) == (op == "min")


def test_splits_may_be_any_integers_that_rise() -> None:
    for make in [lambda: (0, 2, 7), lambda: [0, 2, 7], lambda: np.array([0, 2, 7]), lambda: iter([0, 2, 7])]:
        def program(rank, make=make):
            own = rank.reduce_scatter(np.arange(7) * (rank.index + 1), splits=make())
            return rank.all_gather(own, splits=make())
        assert all(np.array_equal(result, np.arange(7) * 3) for result in zs.Cluster(2).run(program))


def test_the_words_that_people_type_mean_what_they_mean_elsewhere() -> None:
    """torch.distributed's and MPI's: a rank's number and its world's, the mean, an out= that says how long it is."""
    def program(rank):
        x = np.float32([rank.rank, 1, 2])
        own, whole = np.arange(7)[3 * rank.rank:3 * rank.rank + 3], np.empty(7, int)
        assert rank.all_gather(own, out=whole) is whole
        half = rank.split(rank.rank % 2)
        assert half is not None
        return (rank.rank, rank.world_size, half.rank, half.world_size, rank.all_reduce(x, op="avg").tolist(),
                rank.all_reduce(x, op="avg", average="split").tolist(), whole.tolist())

    found = zs.Cluster(3).run(program)
    assert [of_rank[:4] for of_rank in found] == [(0, 3, 0, 2), (1, 3, 0, 1), (2, 3, 1, 2)]
    assert all(of_rank[4:] == ([1, 1, 2], [1, 1, 2], list(range(7))) for of_rank in found)
