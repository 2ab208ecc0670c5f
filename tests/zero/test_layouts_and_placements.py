"""Layouts give every element one owner; a change of placement is one collective, a slice, or nothing."""

import numpy as np
import pytest

import zerosim as zs
from zerosim.models.units import LinearUnit, Model
from zerosim.zero import PARTIAL, REPLICATED, SHARDED, layout_of
from zerosim.zero.layout import lay_out


def test_redistribute_is_an_all_reduce_a_reduce_scatter_an_all_gather_a_slice_or_nothing():
    cut = (0, 2, 3, 3)

    def program(rank):
        mine = np.arange(3, dtype=np.float32) + 10 * rank.index
        own = slice(cut[rank.index], cut[rank.index + 1])
        policy = zs.Policy()
        return (zs.redistribute(rank, mine, PARTIAL, REPLICATED, cut, policy=policy),
                zs.redistribute(rank, mine, PARTIAL, SHARDED, cut, policy=policy),
                zs.redistribute(rank, mine[own], SHARDED, REPLICATED, cut, policy=policy),
                zs.redistribute(rank, mine, REPLICATED, SHARDED, cut, policy=policy),
                zs.redistribute(rank, mine, PARTIAL, PARTIAL, cut, policy=policy) is mine)

    cluster = zs.Cluster(3)
    for index, (total, shard, gathered, sliced, nothing) in enumerate(cluster.run(program)):
        own = slice(cut[index], cut[index + 1])
        assert total.tolist() == [30, 33, 36]
        assert shard.tolist() == total[own].tolist()
        assert gathered.tolist() == [0, 1, 12]
        assert sliced.tolist() == (np.arange(3) + 10 * index)[own].tolist()
        assert nothing
    assert [row.call.operation for row in cluster.trace[0].collectives()] == [
        "all_reduce",
        "reduce_scatter",
        "all_gather",
    ]


@pytest.mark.parametrize("name", ["per_unit", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 40])
def test_every_element_has_exactly_one_owner(ranks, name):
    model = Model([LinearUnit("a", 3, 5), LinearUnit("b", 5, 1, bias=False), LinearUnit("c", 1, 2)])
    layout = layout_of(model, ranks, name)
    owners = np.zeros(layout.length, int)
    for rank in range(ranks):
        pieces = layout.valid(rank)
        for piece in pieces:
            owners[piece.vector] += 1
            assert piece.vector.stop - piece.vector.start == piece.shard.stop - piece.shard.start
        assert layout.shard_length(rank) == layout.length // ranks
    valid = np.zeros(layout.length, int)
    for entry in layout.entries:
        valid[entry.low:entry.high] += 1
    assert (owners == valid).all()
    assert valid.sum() == model.parameter_count == layout.valid_length
    for unit, lies in layout.units.items():
        cut = layout.cut(lies.start, lies.stop)
        assert (cut[0], cut[-1], len(cut)) == (0, lies.stop - lies.start, ranks + 1)
        assert [layout.owned(r, lies.start, lies.stop).stop - layout.owned(r, lies.start, lies.stop).start
                for r in range(ranks)] == list(np.diff(cut)), unit


@pytest.mark.parametrize("name", ["per_unit", "contiguous", "whole_matrices"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_views_are_of_the_vector_and_shards_are_what_an_engine_holds(ranks, name):
    model = Model([LinearUnit("a", 3, 5), LinearUnit("b", 5, 1, bias=False), LinearUnit("c", 1, 2)])
    layout, first = layout_of(model, ranks, name), zs.models.first_weights(model)
    vector = layout.flattened(first)
    assert vector.shape == (layout.length,)
    assert np.count_nonzero(vector) == sum(np.count_nonzero(values) for values in first.values())
    views = layout.views(vector)
    assert {key: view.tobytes() for key, view in views.items()} == {key: w.tobytes() for key, w in first.items()}
    views["b.weight"][...] = 7
    assert (vector == 7).sum() == 5

    def held(rank):
        engine = zs.Engine(rank, model, zs.optim.SGD(lr=0.1), stage=1, layout=name, policy=zs.Policy("bf16"))
        return engine.param_group.master

    masters = zs.Cluster(ranks).run(held)
    for index, master in enumerate(masters):
        assert layout.shard(index, layout.flattened(first)).tobytes() == master.tobytes()


def test_a_layout_prints_who_owns_what():
    layout = lay_out("contiguous", {"a": {"a.w": (3,)}, "b": {"b.w": (2,)}}, 2)
    assert str(layout) == ("contiguous: 5 parameters, 1 padding, 2 ranks\n"
                           "  rank 0: a.w[0:3]\n  rank 1: b.w[0:2], 1 padding")


# -- by hand --

HAND = zs.models.MLP([3, 4, 2])


@pytest.mark.parametrize("name", ["per_unit", "contiguous", "whole_matrices"])
@pytest.mark.parametrize("ranks", [1, 3, 5, 40])
def test_values_laid_out_by_hand_come_back_as_views_and_the_shards_make_up_the_vector(ranks, name):
    layout = zs.layout_of(HAND, ranks, name)
    values = {key: value + 1 for key, value in zs.models.first_weights(HAND).items()}
    vector = layout.flattened(values)
    assert all(np.array_equal(view, values[key]) for key, view in layout.views(vector).items())
    shards = [layout.shard(rank, vector) for rank in range(ranks)]
    assert [len(shard) for shard in shards] == [layout.shard_length(rank) for rank in range(ranks)]
    rest = [list(shard) for shard in shards]
    for region in layout.regions:
        for rank in range(ranks):
            length = region.bounds[rank + 1] - region.bounds[rank]
            own, rest[rank] = rest[rank][:length], rest[rank][length:]
            assert own == vector[region.bounds[rank]:region.bounds[rank + 1]].tolist()
    assert not any(rest)
