"""Hybrid sharding and ZeRO++: what differs from one ring over all ranks, what does not, and what they are for."""

from functools import partial

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.zero.drawn import ON_DISK
from tests.zero.training import ADAM, BF16, MODELS, ODD, Kept, batches, bits, job_of, masters, outcome, run
from zerosim.models import MLP
from zerosim.numerics import quantization
from zerosim.planning import closed_forms
from zerosim.zero import PARTIAL, SHARDED

WIDE = MODELS["wide"]()
HPZ, QWZ = zs.ZeroPlusPlus(hpz=True), zs.ZeroPlusPlus(quantized_weights="int8")
QGZ, ALL = zs.ZeroPlusPlus(quantized_gradients="int4"), zs.ZeroPlusPlus(True, "int8", "int4")
STATE = ("parameter", "master", "m", "v")


# -- hybrid sharding: that its bits are those of the two rings, every drawn run shows ---------------------------------


@pytest.mark.parametrize(("nodes", "each", "same"), [
    (1, 4, True), (4, 1, True), (2, 1, True), (2, 2, False), (3, 2, False)])
def test_a_mesh_changes_bits_where_it_changes_the_order_of_additions_and_only_there(nodes, each, same):
    data = batches(WIDE, nodes * each, 1, 1)
    moments = [run(WIDE, data, stage=2, policy=BF16, mesh=mesh)[0]["m"] for mesh in (None, (nodes, each))]
    assert (bits(moments[0]) == bits(moments[1])) == same


def test_states_are_held_once_in_each_node_and_nodes_hear_of_each_other_once_a_step():
    """Three micro-batches: between nodes goes one all-reduce of shards, 2·s·(M-1)/M elements from each rank."""
    data, mesh = batches(WIDE, 6, 3, 1), zs.Mesh(3, 2)
    held, across = {}, {}
    for name, options in {"flat": {}, "hybrid": {"mesh": mesh}, "overlap": {"mesh": mesh, "overlap": True}}.items():
        cluster = zs.Cluster(6)
        held[name] = run(WIDE, data, cluster, stage=3, policy=BF16, **options)[0]["held"]
        across[name] = [sum(mesh.sent_nbytes_across(cluster.trace, purpose)) for purpose in ("gradients", "parameters")]
    assert held["hybrid"] == {kind: 3 * nbytes for kind, nbytes in held["flat"].items()}
    assert across["hybrid"] == across["overlap"] == [2 * 2 * held["hybrid"]["parameter"] * 2, 0]
    assert across["flat"][1] == 2 * 3 * (5 * held["flat"]["parameter"]) * 3, "forward and backward, three times"


def test_a_checkpoint_of_a_mesh_is_loaded_on_any_other(tmp_path):
    data = batches(WIDE, 6, 1, 2)
    first = Kept(WIDE, data, stage=3, mesh=(3, 2))
    first.step(0)
    first.all(lambda engine: engine.save(tmp_path / "a"))
    first.step(1)

    def then(ranks, mesh):
        kept = Kept(WIDE, [step[:ranks] for step in data], stage=2, mesh=mesh)
        differences = kept.all(lambda engine: engine.load(tmp_path / "a").differences)
        kept.step(1)
        return kept.masters[0], differences[ranks - 1]

    sizes = [file.stat().st_size for file in sorted(tmp_path.glob("a/shard*"))]
    assert min(sizes[:2]) > 2 * max(sizes[2:]), "the first node writes; the others have the same"
    found, differences = then(6, (3, 2))
    assert found == first.masters[0]
    assert "on a mesh of 3x2, here" in differences[0]
    assert then(6, (2, 3))[0] != found, "another order of additions"
    assert then(3, None)[1]


# -- ZeRO++ -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "stage", "prefetch", "recompute", "keep", "buckets", "layout", "k"), covering(
    ((2, 2), (3, 2), (1, 3), (3, 1)), (3, zs.Stage(SHARDED, PARTIAL, SHARDED)), (0, 1, 3),
    ("none", "block", "segment(2)"), (None, "all", ()), (None, 20), ("per_unit", "contiguous"), (1, 2), count=4))
def test_hpz_changes_no_bit_and_gathers_across_nodes_once_after_each_update(
        mesh, stage, prefetch, recompute, keep, buckets, layout, k):
    options = {"stage": stage, "prefetch": prefetch, "recompute": recompute, "keep_gathered": keep, "layout": layout,
               "bucket_nbytes": buckets, "overlap": prefetch > 1, "policy": BF16}
    model, ranks = MODELS["tied"](), mesh[0] * mesh[1]
    data = batches(model, ranks, k, 3)
    plain, saving = zs.Cluster(ranks, debug=True), zs.Cluster(ranks, debug=True)
    assert outcome(model, data, saving, mesh=mesh, zeropp=HPZ, **options) == outcome(model, data, plain, **options)
    of_all = [row for row in saving.trace[0].collectives("all_gather", "parameters")
              if row.call.group == tuple(range(ranks)) and row.call.communicator == ()]
    if buckets is None:
        assert len(of_all) == 3 * len(model.units)
    assert all(memory.now_nbytes_by_kind.get("secondary_parameter", 0) == 0 for memory in saving.memory)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_step_that_broke_off_leaves_no_secondary_shard_and_the_next_ones_have_the_bits_of_none(prefetch):
    """One rank does not get beyond a unit; the others have gathered it, or are about to."""
    model = MODELS["deep"]()
    data = batches(model, 4, 1, 3)
    whole = masters(model, data, stage=3, policy=BF16)
    for number in range(len(model.units)):
        kept = Kept(model, data, stage=3, policy=BF16, mesh=(2, 2), zeropp=HPZ, prefetch=prefetch)

        def broken_off(engine, number=number):
            if engine.rank.index < 2:
                engine.step(data[1][engine.rank.index])
            try:
                for unit in model.units[:number]:
                    with engine.weights(unit):
                        pass
                raise RuntimeError("this rank goes no further")
            finally:
                engine.abandon()

        kept.step(0)
        with pytest.raises(RuntimeError, match="no further"):
            kept.all(broken_off)
        kept.step(1, 2)
        assert kept.masters == whole


def test_the_secondary_shard_is_a_share_of_the_node_and_gone_when_weights_change():
    model, data = MLP((8, 16, 8), bias=False, seed=1), batches(MLP((8, 16, 8), bias=False), 4, 2, 1)

    def program(rank):
        engine, seen = zs.Engine(rank, model, ADAM, stage=3, policy=BF16, mesh=(2, 2), zeropp=HPZ), []
        for pair in data[0][rank.index]:
            engine.backward(engine.forward(*pair))
            seen.append(rank.memory.now_nbytes_by_kind.get("secondary_parameter"))
        engine.reduce()
        engine.update()
        return *seen, rank.memory.now_nbytes_by_kind.get("secondary_parameter")

    nbytes = 2 * model.parameter_count // 2
    assert list(zs.Cluster(4).run(program)) == [(nbytes, nbytes, None)] * 4


def test_bytes_between_nodes_are_those_of_the_papers_table():
    """In units of Ψ, the 16-bit model, from each node: 3 for ZeRO-3; with ZeRO++ half forward, nothing backward, and a
    quarter of gradients. A flat ring sends (N-1)/N of it, an all-to-all across (M-1)/M; a scale takes 4 bytes.

    Source: Wang et al. 2023, table 1 of section 3.4 (arXiv:2306.10209).
    """
    model, mesh = MLP((256, 1024, 256), bias=False), zs.Mesh(2, 4)
    psi, n, scales = 2 * model.parameter_count, 8, 4 / 256
    ring, exchange, int8, int4 = (n - 1) / n, 1 / 2, (1 + scales) / 2, (0.5 + scales) / 2
    expected = {None: (2 * ring, ring), HPZ: (ring, ring), QWZ: (2 * ring * int8, ring),
                QGZ: (2 * ring, exchange * int4), ALL: (ring * int8, exchange * int4)}
    for asked, (parameters, gradients) in expected.items():
        cluster = zs.NullCluster(8)
        cluster.run(lambda rank, asked=asked: zs.Engine(
            rank, model, ADAM, stage=3, policy=BF16, mesh=mesh if asked else None, zeropp=asked).step(
                [(rank.xp.empty((2, 256), np.float32), rank.xp.empty((2, 256), np.float32))]))
        for purpose, of in (("parameters", parameters), ("gradients", gradients)):
            nbytes = mesh.sent_nbytes_across(cluster.trace, purpose)
            assert sum(nbytes[:4]) == sum(nbytes[4:]) == round(of * psi), (asked, purpose)
    before, after = (sum(expected[asked]) for asked in (None, ALL))
    assert before / after > 4


@pytest.mark.parametrize(("name", "mesh", "asked", "layout", "recompute", "overlap", "k", "offload"), covering(
    ("wide", "tied", "odd"), ((2, 2), (3, 2), (2, 3), (3, 1), (1, 4)),
    ((3, HPZ), (3, QWZ), (2, QGZ), (1, zs.ZeroPlusPlus(quantized_gradients="int8", block=8)), (3, ALL)),
    ("per_unit", "contiguous"), ("none", "segment(2)"), (False, True), (1, 2),
    ("host", ON_DISK, zs.Offload("host"), zs.Offload(parameters="host"), zs.Offload("disk", "disk")), count=5))
def test_bytes_inside_nodes_and_between_them_are_the_closed_forms_and_offload_changes_no_bit(
        name, mesh, asked, layout, recompute, overlap, k, offload):
    model, (stage, zeropp) = MODELS[name](), asked
    data, cluster = batches(model, mesh[0] * mesh[1], k, 2), zs.Cluster(mesh[0] * mesh[1], debug=True)
    options = {"mesh": mesh, "zeropp": zeropp, "layout": layout, "recompute": recompute, "overlap": overlap}
    results = run(model, data, cluster, stage=stage, policy=BF16, offload=offload, **options)
    there = outcome(model, data, stage=stage, policy=BF16, **options)
    assert [{key: bits(result[key]) for key in STATE} for result in results] == [
        {key: one[key] for key in STATE} for one in there]
    job = job_of(model, mesh[0] * mesh[1], stage, k, policy=BF16, offload=offload, **options)
    assert [result["held"] for result in results] == closed_forms.resting_nbytes(job)
    for measured, forms in ((cluster.trace.sent_nbytes, closed_forms.sent_nbytes(job)),
                            (partial(zs.Mesh(*mesh).sent_nbytes_across, cluster.trace),
                             closed_forms.crossing_nbytes(job))):
        assert {purpose: measured(purpose) for purpose in forms} == {
            purpose: [2 * n for n in nbytes] for purpose, nbytes in forms.items()}


@pytest.mark.parametrize(("layout", "k"), [("per_unit", 2), ("contiguous", 1)])
def test_quantized_gradients_have_the_same_bits_whether_buckets_leave_during_backward_or_after_it(layout, k):
    """Blocks are quantized in a bucket, and so buckets are cut in one way."""
    data, options = batches(WIDE, 4, k, 1), {"stage": 1, "mesh": (2, 2), "policy": BF16, "layout": layout}
    found = {nbytes: [bits(run(WIDE, data, zeropp=zs.ZeroPlusPlus(quantized_gradients="int4", block=8),
                               bucket_nbytes=nbytes, **options, **when)[0]["m"])
                      for when in ({}, {"overlap": True}, {"offload": zs.Offload(gradients="host")})]
             for nbytes in (None, 70)}
    assert [len(set(moments)) for moments in found.values()] == [1, 1]
    assert found[None][0] != found[70][0], "bits do depend on buckets"


@pytest.mark.parametrize(("form", "nodes", "each"), [(form, *mesh) for form, mesh in covering(
    ["int8", "int4"], [(2, 2), (3, 2), (1, 4)])])
def test_quantized_gradients_are_summed_within_the_bound_of_their_two_hops(form, nodes, each):
    """Each addend once, and once more the sum of each node, whose own error adds to its magnitude."""
    model, ranks, form_ = MLP((7, 40, 5), seed=3), nodes * each, quantization.Blockwise(form, 16)
    asked = zs.ZeroPlusPlus(quantized_gradients=form, block=16)
    data = batches(model, ranks, 1, 1)
    exact, own = run(model, data, stage=2, mesh=(nodes, each))[0], [run(model, [[mine]])[0] for mine in data[0]]
    found = [run(model, data, zs.Cluster(ranks, debug=stage > 1), stage=stage, mesh=(nodes, each), zeropp=asked)
             for stage in (1, 2, 3)]  # in debug mode padding is NaN, and no part of a block
    assert len({bits(result["m"]) for results in found for result in results}) == 1, "all stages, all ranks"
    error = np.abs(found[0][0]["m"].astype(np.float64) - exact["m"]) * ranks  # m is a tenth of a gradient, all of them
    most = sum(np.abs(one["m"]).max() for one in own)  # a block's scale is at most the largest of all over L
    bound = most / form_.largest * (1 + 1 / form_.largest)
    assert 0 < error.max() < bound
    assert error.max() > bound / 40, "the bound says something"


def test_weights_that_travel_quantized_are_the_same_on_every_rank_and_within_their_bound():
    model = MLP((3, 4, 1), seed=4)  # with padding beside an element

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=3, mesh=(2, 2), zeropp=zs.ZeroPlusPlus(True, "int4", block=4))
        exact, found = [], []
        for unit in model.units:
            for _ in range(2):  # across nodes, and then from the secondary shards
                with engine.weights(unit) as w:
                    found.append({name: value.copy() for name, value in w.items()})
            exact.append({name: engine.state(name)["parameter"] for name in unit.shapes})
        return exact, found

    results = zs.Cluster(4, debug=True).run(program)  # in debug mode padding is NaN, and no part of a block
    exact, found = results[0]
    errors = []
    for index, unit in enumerate(model.units):
        most = max(np.abs(values).max() for values in exact[index].values())  # no block of the unit has a larger scale
        for name in unit.shapes:
            assert len({bits(result[1][2 * index + i][name]) for result in results for i in (0, 1)}) == 1
            errors.append(np.abs(found[2 * index][name] - exact[index][name]).max())
            assert errors[-1] <= quantization.Blockwise("int4").error_bound(np.array([most]))[0]
    assert max(errors) > 0


@pytest.mark.filterwarnings("ignore::zerosim.SkippedStepWarning")
def test_an_overflow_in_one_ranks_quantized_gradient_is_skipped_by_all():
    model = ODD
    data = batches(model, 4, 1, 2)
    data[0][2][0] = (np.full((2, 3), 6e4, np.float32), np.full((2, 2), -6e4, np.float32))
    results = run(model, data, stage=3, mesh=(2, 2), zeropp=ALL, policy=zs.Policy("fp16", loss_scale=1024.0))
    assert [result["skipped"] for result in results] == [[True, False]] * 4


def test_a_quantized_run_learns_what_the_exact_one_learns():
    model = MLP((6, 24, 4), activation="gelu", seed=2)
    data = batches(model, 4, 1, 1, rows=8) * 14
    losses = [np.mean(run(model, data, stage=3, policy=BF16, mesh=(2, 2) if asked else None, zeropp=asked,
                          optimizer=zs.optim.Adam(lr=0.04))[0]["losses"], axis=1) for asked in (None, ALL)]
    assert losses[0][-1] < 0.6 * losses[0][0]
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.1)
    assert losses[1][-1] != losses[0][-1]
