"""Buckets, overlap, prefetch, keeping gathered: they change the trace and the memory, and no bit and no byte sent."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import chosen, covering
from tests.zero.training import batches, bits, train
from zerosim.models import MLP
from zerosim.ranks.trace import Issue, Wait
from zerosim.zero import lay_out, layout_of
from zerosim.zero.layout import Bucket, buckets

DEEP = MLP((3, 7, 5, 4, 2), activation="gelu", seed=4)
WIDE = 4 * DEEP.parameter_count  # bytes: more than the whole model has in any format of these tests


def outcome(cluster, model, data, **options):
    """Everything of a run that no option may change, in bits."""
    results = cluster.run(lambda rank: train(rank, model, data, **options))
    return [{key: bits(np.asarray(value)) for key, value in result.items()} for result in results]


def sent(cluster):
    return {purpose: cluster.trace.sent_nbytes(purpose) for purpose in ("parameters", "gradients", "control")}


@pytest.mark.parametrize(("row", "ranks"), covering(
    product(zs.STAGES, ["per_unit", "contiguous", "whole_matrices"]), [3, 4, 1]), ids=str)
def test_options_change_neither_bits_nor_bytes(row, ranks):
    stage, layout = row
    data, policy = batches(DEEP, ranks, 2, 1), zs.Policy("bf16", reduce="fp16", accumulate="fp32")
    plain, common = zs.Cluster(ranks), {"stage": stage, "layout": layout, "policy": policy, "recompute": "segment(2)"}
    expected = outcome(plain, DEEP, data, **common)
    every = [{"bucket_nbytes": 1}, {"overlap": True}, {"bucket_nbytes": 14}, {"prefetch": 1}, {"bucket_nbytes": WIDE},
             {"prefetch": 3}, {"bucket_nbytes": 64}, {"bucket_nbytes": 50, "overlap": True, "prefetch": 2}]
    for options in chosen(every[ranks % 2::2], every):
        pulled = zs.Cluster(ranks)
        assert outcome(pulled, DEEP, data, **common, **options) == expected, options
        assert sent(pulled) == sent(plain), options


@given(widths=st.lists(st.integers(1, 6), min_size=2, max_size=5), ranks=st.integers(1, 6),

       stage=st.sampled_from([0, 1, 2, 3]), bucket=st.integers(1, 200), overlap=st.booleans(),
       prefetch=st.integers(0, 2),
       micro_batches=st.integers(1, 2), layout=st.sampled_from(["per_unit", "contiguous"]), debug=st.booleans())
def test_any_options_on_any_model_change_no_bit(
        widths, ranks, stage, bucket, overlap, prefetch, micro_batches, layout, debug):
    model = MLP(widths, seed=1)
    data, common = batches(model, ranks, micro_batches, 1), {"stage": stage, "layout": layout}
    expected = outcome(zs.Cluster(ranks), model, data, **common)
    assert outcome(zs.Cluster(ranks, debug=debug), model, data, **common, bucket_nbytes=bucket, overlap=overlap,
                   prefetch=prefetch) == expected


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), ranks=st.integers(1, 5), limit=st.integers(1, 40),
       layout=st.sampled_from(["per_unit", "contiguous", "whole_matrices"]))
def test_a_bucket_packs_every_element_once_and_owner_by_owner(lengths, ranks, limit, layout):
    cut = lay_out(layout, {f"u{i}": {f"u{i}.w": (n,)} for i, n in enumerate(lengths)}, ranks)
    ranges, seen, vector = [slice(region.low, region.high) for region in cut.regions], [], np.arange(cut.length)

    def joined(parts):
        assert [at for here, _ in parts for at in range(here.start, here.stop)] == list(range(sum(map(len_of, parts))))
        return [int(element) for _, elements in parts for element in elements]

    def len_of(part):
        return len(part[1])

    for bucket in buckets(cut, ranges, limit):
        assert 0 < bucket.length <= limit
        packed = joined(bucket.in_vector(vector))
        assert len(packed) == bucket.length
        seen += packed
        for rank in range(ranks):
            own = packed[bucket.cut[rank]:bucket.cut[rank + 1]]
            assert own == joined(bucket.own_in_vector(rank, vector))
            assert own == joined(bucket.own_in_shard(rank, cut.shard(rank, vector)))
    assert sorted(seen) == list(range(cut.length))


def test_without_a_limit_every_range_is_a_bucket_of_its_own_even_an_empty_one():
    layout = lay_out("per_unit", {"a": {"a.w": (0,)}, "b": {"b.w": (3,)}}, 2)
    ranges = [slice(region.low, region.high) for region in layout.regions]
    assert buckets(layout, ranges, None) == [Bucket(layout, (lies,)) for lies in ranges]


@pytest.mark.parametrize("bucket_nbytes", [None, 1, 2 * 28, 2 * 42, 2 * 44, WIDE])
def test_a_bucket_decides_how_many_reductions_there_are(bucket_nbytes):
    """One element, less than a unit, equal to one (layer1 has 42 with its padding), more, and more than the model."""
    model, cluster = DEEP, zs.Cluster(3)
    lengths = [layout.stop - layout.start
               for layout in layout_of(model, 3).units.values()]
    cluster.run(lambda rank: train(rank, model, batches(model, 3, 1, 1), stage=2, policy=zs.Policy("bf16"),
                                   bucket_nbytes=bucket_nbytes))
    found = cluster.trace[0].collectives("reduce_scatter", "gradients")
    expected = len(lengths) if bucket_nbytes is None else -(-sum(lengths) // max(1, bucket_nbytes // 2))
    assert len(found) == expected
    assert all(row.call.cut[-1] <= max(1, (bucket_nbytes or WIDE) // 2) for row in found)


def rows_between(trace, issued, kinds):
    """The rows between an asynchronous collective's issue and its wait."""
    start = next(i for i, row in enumerate(trace.rows) if isinstance(row, Issue) and row.call is issued)
    stop = next(i for i, row in enumerate(trace.rows) if isinstance(row, Wait) and row.call is issued)
    return [row for row in trace.rows[start:stop] if isinstance(row, kinds)]


def asynchronous(trace, operation, purpose, span):
    return [row.call for row in trace.collectives(operation, purpose) if row.asynchronous and span in row.span]


def test_overlap_shows_in_the_trace():
    from zerosim.ranks.trace import Compute

    cluster = zs.Cluster(3)
    cluster.run(lambda rank: train(rank, DEEP, batches(DEEP, 3, 1, 1), stage=2, overlap=True))
    trace = cluster.trace[0]
    reductions = asynchronous(trace, "reduce_scatter", "gradients", "backward")
    assert len(reductions) == 4
    assert all(rows_between(trace, call, Compute) for call in reductions[:-1])  # the first unit's is the last of all
    all_gathers = asynchronous(trace, "all_gather", "parameters", "update")
    assert len(all_gathers) == 4
    first, last = (next(i for i, row in enumerate(trace.rows) if isinstance(row, kind) and row.call is call)
                   for kind, call in ((Issue, all_gathers[-1]), (Wait, all_gathers[0])))
    assert first < last  # the last region was updated while the first was on its way


def test_prefetch_gathers_the_next_unit_while_one_computes_in_both_directions():
    from zerosim.ranks.trace import Compute

    cluster = zs.Cluster(3)
    cluster.run(lambda rank: train(rank, DEEP, batches(DEEP, 3, 1, 1), stage=3, prefetch=1))
    trace = cluster.trace[0]
    for span in ("forward", "backward"):
        calls = asynchronous(trace, "all_gather", "parameters", span)
        assert len(calls) == 3  # all but the first of each direction
        assert all(rows_between(trace, call, Compute) for call in calls)
    plain = zs.Cluster(3)
    plain.run(lambda rank: train(rank, DEEP, batches(DEEP, 3, 1, 1), stage=3))
    assert asynchronous(plain.trace[0], "all_gather", "parameters", "forward") == []
    assert (cluster.memory[0].peak_nbytes_of(["gathered_parameter"])
            > plain.memory[0].peak_nbytes_of(["gathered_parameter"]))


@pytest.mark.parametrize(("keep", "gathers"), [((), 8), (None, 8), ("all", 4), (("layer1",), 7), ("layer3", 7)])
def test_units_that_stay_gathered_are_gathered_once_and_held_longer(keep, gathers):
    data, clusters = batches(DEEP, 3, 1, 1), (zs.Cluster(3), zs.Cluster(3))
    expected = outcome(clusters[0], DEEP, data, stage=3)
    assert outcome(clusters[1], DEEP, data, stage=3, keep_gathered=keep) == expected
    assert len(clusters[1].trace[0].collectives("all_gather", "parameters")) == gathers
    now = [cluster.memory[0].peak_nbytes_of(["gathered_parameter"]) for cluster in clusters]
    assert (now[1] > now[0]) == (gathers < 8)
    assert clusters[0].memory.now_nbytes == clusters[1].memory.now_nbytes


def test_a_rank_that_overlaps_and_one_that_does_not_still_agree_on_what_they_reduce():
    """The option is each rank's own affair: no collective differs."""
    data = batches(DEEP, 2, 1, 2)
    expected = outcome(zs.Cluster(2), DEEP, data, stage=2)
    results = zs.Cluster(2).run(lambda rank: train(rank, DEEP, data, stage=2, overlap=rank.index == 0))
    assert [{key: bits(np.asarray(value)) for key, value in result.items()} for result in results] == expected


@pytest.mark.parametrize("options", [{"overlap": True}, {"prefetch": 2}, {"bucket_nbytes": 64}], ids=str)
def test_a_step_that_fails_and_is_abandoned_leaves_nothing_behind(options):
    data = batches(DEEP, 2, 1, 1)[0]

    def program(rank):
        engine = zs.Engine(rank, DEEP, zs.optim.SGD(lr=0.1), stage=3, **options)
        before = rank.memory.now_nbytes
        with pytest.raises(ValueError, match="shape"):
            engine.step([*data[rank.index], (np.zeros((2, 3)), np.zeros((2, 9)))])
        assert rank.memory.now_nbytes == before
        return engine.step(data[rank.index]).losses

    assert list(zs.Cluster(2).run(program)) == [
        r["losses"][0] for r in zs.Cluster(2).run(lambda rank: train(rank, DEEP, [data], stage=3,
                                                                     optimizer=zs.optim.SGD(lr=0.1)))]
