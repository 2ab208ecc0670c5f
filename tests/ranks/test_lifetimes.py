"""When each array lived is read off the trace, one by one, and adds up to the ledger at every row."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

import zerosim as zs
from zerosim.ranks.trace import Held

BF16 = zs.Policy("bf16")


def trained(rank, stage, recompute, steps):
    """A few steps on other data on every rank; the engine, whose arrays live as long as it."""
    engine = zs.Engine(rank, zs.models.MLP([6, 8, 8, 5]), zs.optim.Adam(), stage=stage, policy=BF16,
                       recompute=recompute)
    for step in range(steps):
        random = np.random.default_rng((rank.index, step))
        engine.step([(random.standard_normal((3, 6)).astype("f4"), random.standard_normal((3, 5)).astype("f4"))])
    return engine


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("stage", zs.STAGES)
def test_what_lives_at_a_row_adds_up_to_what_the_ledger_held_there(ranks, stage):
    cluster = zs.Cluster(ranks)
    engines = cluster.run(trained, stage, "block", 2)
    for memory, trace in zip(cluster.memory, cluster.trace, strict=True):
        lives, held = trace.lifetimes(), Counter()
        for place, row in enumerate(trace.rows):
            if isinstance(row, Held):
                held[row.kind] += row.nbytes
                living = Counter()
                for life in lives:
                    living[life.kind] += life.nbytes * life.lives_at(place)
                assert +living == +held
        assert sum(life.nbytes for life in lives if life.died is None) == memory.now_nbytes
        assert {life.kind for life in lives if life.died is None} == set(memory.now_nbytes_by_kind)
    assert len(engines) == ranks


def test_two_arrays_of_one_kind_name_and_length_are_told_apart():
    def program(rank):
        first, second = (rank.memory.alloc(4, np.float32, "activation", "h") for _ in range(2))
        rank.memory.free(second)
        rank.memory.free(first)

    cluster = zs.Cluster(1)
    cluster.run(program)
    assert [(life.born, life.died) for life in cluster.trace[0].lifetimes()] == [(0, 3), (1, 2)]


def test_a_life_says_in_which_spans_it_began_and_ended():
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: trained(rank, 3, "none", 1) and None)
    gathered = cluster.trace[1].lifetimes("gathered_parameter")
    names = ["layer0", "layer1", "layer2"]
    assert [life.name for life in gathered] == [*names, *reversed(names)]
    assert [life.born_in[0] for life in gathered] == ["forward"] * 3 + ["backward"] * 3
    assert all(life.born_in == life.died_in == (life.born_in[0], life.name) for life in gathered)
    assert all(one.died < other.born for one, other in pairwise(gathered))


def test_what_changes_its_kind_has_a_life_in_either_and_kinds_can_be_asked_for():
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: trained(rank, 0, "block", 1) and None)
    trace = cluster.trace[0]
    kept = trace.lifetimes("checkpointed_input")
    assert kept
    for life in kept:
        before, = [one for one in trace.lifetimes(["activation"]) if one.died == life.born - 1]
        assert (before.name, before.nbytes) == (life.name, life.nbytes)
    both = trace.lifetimes(["activation", "checkpointed_input"])
    assert len(both) == len(kept) + len(trace.lifetimes("activation"))
    assert [life.born for life in both] == sorted(life.born for life in both)


def test_what_was_held_before_the_run_has_no_birth_and_what_stays_no_row():
    cluster, kept = zs.Cluster(1), []
    cluster.run(lambda rank: kept.extend(rank.memory.alloc(n, np.float32, "master", "m") for n in (10, 0, 20)))
    cluster.run(lambda rank: kept.pop(0) is None)
    life, = cluster.trace[0].lifetimes()
    assert (life.name, life.nbytes, life.born, life.died) == ("m", 40, None, 0)
    assert life.lives_at(-1)
    assert not life.lives_at(0)


def test_an_unknown_kind_is_refused():
    cluster = zs.Cluster(1)
    cluster.run(lambda rank: None)
    with pytest.raises(ValueError, match="no kind of memory is called 'activations'; the kinds are parameter"):
        cluster.trace[0].lifetimes(["gradient", "activations"])


def test_what_is_born_after_a_span_has_ended_is_born_in_the_one_around_it():
    def program(rank):
        kept = []
        with rank.trace.span("outer"):
            with rank.trace.span("inner"):
                kept.append(rank.memory.alloc(1, np.float32, "workspace", "in both"))
            kept.append(rank.memory.alloc(2, np.float32, "workspace", "in outer"))
        kept.append(rank.memory.alloc(3, np.float32, "workspace", "in none"))
        return kept

    cluster = zs.Cluster(3)
    kept = cluster.run(program)
    assert len(kept) == 3
    for trace in cluster.trace:
        assert [(life.name, life.born_in) for life in trace.lifetimes()] == [
            ("in both", ("outer", "inner")), ("in outer", ("outer",)), ("in none", ())]
