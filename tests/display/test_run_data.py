"""A run as plain data says what the traces, the memories and the replay say; nothing of it is lost."""

from itertools import accumulate

import numpy as np
import pytest

import zerosim as zs
from zerosim.display import chrome_trace, replayed, run_data
from zerosim.planning import recording, streams, timeline


def program(rank, **options):
    data = np.random.default_rng(rank.index)
    engine = zs.Engine(rank, zs.models.MLP([6, 5, 7]), zs.optim.Adam(), policy="bf16", **options)
    engine.step([(data.normal(size=(2 + rank.index, 6)), data.normal(size=(2 + rank.index, 7))) for _ in range(2)])
    return engine


def ran(**options):
    cluster = zs.Cluster(3)
    kept = cluster.run(program, **options) if not options else cluster.run(lambda rank: program(rank, **options))
    replay = timeline.replay(recording.record(cluster.trace), replayed.MACHINE)
    pool = run_data.Pool()
    return cluster, kept, replay, pool, run_data.run_data(replay, pool)


OPTIONS = [{"stage": 0}, {"stage": 3, "overlap": True, "prefetch": 1}, {"stage": 2, "offload": "optimizer=host"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_runs_data_has_the_bytes_of_the_traces_and_the_clock_of_the_replay(options):
    cluster, kept, replay, pool, run = ran(**options)
    words, columns = list(pool.words), list(pool.columns)
    assert run["end"] == chrome_trace.nanoseconds(replay.step_seconds)
    for rank, found in enumerate(run["ranks"]):
        trace, usage = cluster.trace[rank], replay.usage[rank]
        assert found["sent"] == {p: n for p in ("parameters", "gradients", "control") if (n := trace.sent_nbytes(p))}
        assert (found["peak"], found["waiting"]) == (cluster.memory[rank].peak_nbytes,
                                                     chrome_trace.nanoseconds(usage.exposed_seconds))
        _, kinds, names, changes = ([*columns[place]] for place in found["held"])
        assert max(accumulate(changes)) == found["peak"]
        assert [(words[kind], words[name], n) for kind, name, n in zip(kinds, names, changes, strict=True)] == [
            (row.kind, row.name, row.nbytes) for row in trace.rows if type(row).__name__ == "Held" and row.nbytes]
        before, inside, _, flops = (columns[place] for place in found["compute"])
        assert sum(flops) == sum(row.flops for row in trace.rows if type(row).__name__ == "Compute")
        assert sum(before) + sum(inside) <= run["end"]
        assert sum(inside) == pytest.approx(chrome_trace.nanoseconds(usage.compute_seconds), abs=len(inside))
        gaps, waited, parts = (columns[place] for place in found["waits"])
        assert sum(waited) == pytest.approx(found["waiting"] + found["waiting_for_host"], abs=len(waited))
        of_streams = [words[stream] for stream in columns[found["parts"][0]]]
        assert len(of_streams) == len(replay.lanes[rank].all_parts)
        assert len(gaps) == len(parts)
    assert len(kept) == 3


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_messages_of_a_call_have_the_steps_seconds_and_bytes_of_the_replay_and_the_addends_of_a_run(options):
    *_, replay, pool, run = ran(**options)
    columns, messages = list(pool.columns), list(pool.messages)
    priced = streams.Collectives(replay.machine)
    for place, call in enumerate(replay.parts_of_call):
        recorded, found = replay.recording.calls[call], messages[columns[run["calls"][7]][place]]
        levels = priced.priced(recorded)
        assert len(found) == sum(level.times for level in levels)
        arrivals = [part.begun for part in replay.parts_of_call[call]]
        steps = [streams.PricedLevel(*(np.array([one[at] for one in step]) for at in (0, 1)),
                                     np.array([one[2] for one in step]) * 1e-9, 1) for step in found]
        assert streams.meet(arrivals, steps) == pytest.approx(
            [part.ended for part in replay.parts_of_call[call]], abs=len(found) * 1e-9)
        held = [[1 << rank if recorded.shape.operation != "all_gather" or rank == chunk else 0 for chunk in range(3)]
                for rank in range(3)]
        for step in found:
            before = [of_rank.copy() for of_rank in held]
            for source, destination, _, _, chunks, addends in step:
                assert tuple(before[source][chunk] for chunk in chunks) == addends
                for chunk, mask in zip(chunks, addends, strict=True):
                    held[destination][chunk] |= mask
        own = [[mask for chunk, mask in enumerate(of_rank)
                if recorded.shape.operation != "reduce_scatter" or chunk == rank] for rank, of_rank in enumerate(held)]
        everything = [1, 2, 4] if recorded.shape.operation == "all_gather" else [7] * len(own[0])
        assert own == [everything] * 3


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_algorithm_that_adds_or_copies_shows_whose_addends_move(ranks):
    for operation, algorithm in zs.planning.ALGORITHMS:
        hops = run_data.ring_hops(operation, algorithm, ranks)
        known = operation in run_data.PROGRAMS and not algorithm.startswith("hierarchical")
        assert bool(hops) == (known and ranks > 1)
        for source, destination, chunks, addends in hops:
            assert source != destination
            assert len(chunks) == len(addends) > 0
            assert all(0 < mask < 1 << ranks for mask in addends)
