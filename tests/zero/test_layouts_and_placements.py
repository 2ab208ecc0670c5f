"""Layouts give every element one owner; a change of placement is one collective, a slice, or nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from zerosim.models import LinearUnit, Model, first_weights
from zerosim.zero import PARTIAL, REPLICATED, SHARDED, lay_out, layout, layout_of

NAMES = ["per_unit", "contiguous", "whole_matrices"]
MODEL = Model([LinearUnit("a", 3, 5), LinearUnit("b", 5, 1, bias=False), LinearUnit("c", 1, 2)])


def test_redistribute_is_an_all_reduce_a_reduce_scatter_an_all_gather_a_slice_or_nothing():
    cut = (0, 2, 3, 3)

    def program(rank):
        mine = np.arange(3, dtype=np.float32) + 10 * rank.index
        own, out = slice(cut[rank.index], cut[rank.index + 1]), np.zeros(3, np.float32)
        changes = [(mine, PARTIAL, REPLICATED), (mine, PARTIAL, SHARDED), (mine[own], SHARDED, REPLICATED),
                   (mine, REPLICATED, SHARDED), (mine, PARTIAL, PARTIAL)]
        found = [zs.redistribute(rank, x, have, want, cut, policy=zs.Policy()) for x, have, want in changes]
        assert zs.redistribute(rank, mine, REPLICATED, REPLICATED, cut, policy=zs.Policy(), out=out) is out
        assert found[-1] is mine
        return [x.tolist() for x in (*found, out)]

    cluster = zs.Cluster(3)
    for index, (total, shard, gathered, sliced, nothing, out) in enumerate(cluster.run(program)):
        own = slice(cut[index], cut[index + 1])
        assert (total, shard, gathered) == ([30, 33, 36], total[own], [0, 1, 12])
        assert (sliced, nothing) == ((np.arange(3) + 10 * index)[own].tolist(), out)
    assert [row.call.operation for row in cluster.trace[0].collectives()] == [
        "all_reduce", "reduce_scatter", "all_gather"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 40])
def test_every_element_has_exactly_one_owner_and_equal_shards_or_whole_parameters(ranks, name):
    laid = layout_of(MODEL, ranks, name)
    owners, valid = np.zeros((2, laid.length), int)
    for rank in range(ranks):
        for piece in laid.valid(rank):
            owners[piece.vector] += 1
        assert name == "whole_matrices" or laid.shard_length(rank) == laid.length // ranks
    for entry in laid.entries:
        valid[entry.low:entry.high] += 1
    assert (owners == valid).all()
    assert valid.sum() == MODEL.parameter_count == laid.valid_length
    assert sum(map(laid.shard_length, range(ranks))) == laid.length
    if name == "whole_matrices":
        assert laid.length == laid.valid_length
        pieces = [piece for rank in range(ranks) for piece in laid.parameter_pieces(rank)]
        assert [piece.entry.name for piece in pieces] == list(MODEL.shapes)
    for unit, span in laid.units.items():
        cut, owned = laid.cut(span.start, span.stop), [laid.owned(r, span.start, span.stop) for r in range(ranks)]
        assert (cut[0], cut[-1], len(cut)) == (0, span.stop - span.start, ranks + 1)
        assert [own.stop - own.start for own in owned] == list(np.diff(cut)), unit


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_values_laid_out_by_hand_come_back_as_views_and_shards_are_what_an_engine_holds(ranks, name):
    laid, first = layout_of(MODEL, ranks, name), first_weights(MODEL)
    vector = laid.flattened(first)
    masters = zs.Cluster(ranks).run(lambda rank: zs.Engine(
        rank, MODEL, zs.optim.SGD(lr=0.1), stage=1, layout=name, policy=zs.Policy("bf16")).param_group.master)
    assert [laid.shard(rank, vector).tobytes() for rank in range(ranks)] == [master.tobytes() for master in masters]
    views = laid.views(vector)
    assert {key: view.tobytes() for key, view in views.items()} == {key: w.tobytes() for key, w in first.items()}
    views["b.weight"][...] = 7
    assert (vector == 7).sum() == 5


def test_a_layout_prints_who_owns_what():
    laid = lay_out("contiguous", {"a": {"a.w": (3,)}, "b": {"b.w": (2,)}}, 2)
    assert str(laid) == ("contiguous: 5 parameters, 1 padding, 2 ranks\n"
                         "  rank 0: a.w[0:3]\n  rank 1: b.w[0:2], 1 padding")


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), ranks=st.integers(1, 5),
       limit=st.none() | st.integers(1, 40), name=st.sampled_from(NAMES))
def test_a_bucket_packs_every_element_once_and_owner_by_owner(lengths, ranks, limit, name):
    """Without a limit every range is a bucket of its own, even an empty one."""
    laid = lay_out(name, {f"u{i}": {f"u{i}.w": (n,)} for i, n in enumerate(lengths)}, ranks)
    ranges, seen, vector = [slice(region.low, region.high) for region in laid.regions], [], np.arange(laid.length)

    def joined(parts):
        assert [at for here, _ in parts for at in range(here.start, here.stop)] == list(
            range(sum(len(elements) for _, elements in parts)))
        return [int(element) for _, elements in parts for element in elements]

    found = layout.buckets(laid, ranges, limit)
    assert limit is not None or [bucket.ranges for bucket in found] == [(span,) for span in ranges]
    for bucket in found:
        assert limit is None or 0 < bucket.length <= limit
        packed = joined(bucket.in_vector(vector))
        assert len(packed) == bucket.length
        seen += packed
        for rank in range(ranks):
            own = packed[bucket.cut[rank]:bucket.cut[rank + 1]]
            assert own == joined(bucket.own_in_vector(rank, vector))
            assert own == joined(bucket.own_in_shard(rank, laid.shard(rank, vector)))
    assert sorted(seen) == list(range(laid.length))
