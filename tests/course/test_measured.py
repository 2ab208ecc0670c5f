"""Estimates equal measurements to the byte, part by part, and to the second, on models that run."""

from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import THOROUGH, chosen, covering
from tests.support import assert_refused
from zerosim.course import measured
from zerosim.options import StepOptions
from zerosim.planning import (
    PRESETS,
    PlanConfig,
    Transformer,
    hardware,
    model_of,
    model_shape,
    plan_config,
    recording,
    timeline,
)

decoder_of, measured_row, measured_step = measured.decoder_of, measured.measured_row, measured.measured_step
PLAIN, OVERLAPPED = {"overlap": False, "prefetch": 0}, {"overlap": True, "prefetch": 1}
OPTIONS = [PLAIN, {"overlap": True, "prefetch": 0}, {"overlap": False, "prefetch": 1}, OVERLAPPED,
           {"overlap": True, "prefetch": 2}]

engine_config = partial(plan_config, runtime="zerosim")


@settings(max_examples=2000 if THOROUGH else 50)
@given(blocks=st.integers(1, 4), heads=st.integers(1, 3), width=st.integers(1, 6), tokens=st.integers(1, 9),
       vocabulary=st.integers(2, 40), tied=st.booleans(), kind=st.sampled_from(["GPT", "Llama", "Qwen 2", "Qwen 3"]),
       ranks=st.integers(1, 9), batch=st.integers(1, 3),
       k=st.integers(1, 3), stage=st.sampled_from([0, 1, 2, 3]), compute=st.sampled_from(["fp32", "bf16", "fp16"]),
       policy=st.sampled_from(["none", "block", "segment(2)", "segment(3)", "sub_block", "selective", "tiled"]),
       optimizer=st.sampled_from([zs.optim.AdamW(), zs.optim.SGD(lr=0.1), zs.optim.Adan(), zs.optim.Lion(),
                                  zs.optim.LAMB(), zs.optim.LARS()]),
       overlap=st.booleans(), prefetch=st.integers(0, 2), offload=st.sampled_from([
           zs.Offload(), zs.Offload(), *(zs.Offload(*places) for places in (
               ("host",), ("host", "host", "host"), ("disk", "disk", "disk"), ("host", "host"),
               ("disk", "host", "host"), ("disk", "disk"), ("host", "device", "host")))]),
       wider=st.sampled_from([None, "accumulate", "reduce", "wire"]),
       nodes=st.sampled_from([None, None, 1, 2, 3]),
       zeropp=st.sampled_from(["none", "flat", "hpz", "qwz", "hpz+qwz+qgz"]), by_micro_batch=st.booleans())
@example(blocks=1, heads=1, width=1, tokens=1, vocabulary=2, tied=False, kind="GPT", ranks=1, batch=1, k=1, stage=2,
         compute="bf16", policy="none", optimizer=zs.optim.SGD(lr=0.1), overlap=False, prefetch=0, wider="accumulate",
         offload=zs.Offload("host", "host"), nodes=2, zeropp="none", by_micro_batch=False)
def test_an_estimate_is_the_measurement_to_the_byte_for_any_decoder_stage_policy_and_option(
        blocks, heads, width, tokens, vocabulary, tied, kind, ranks, batch, k, stage, compute, policy, optimizer,
        overlap, prefetch, offload, wider, nodes, zeropp, by_micro_batch):
    """The peak too: not the sum of parts at their fullest, but what is held at the fullest moment."""
    formats = {wider: "fp32"} if wider and compute != "fp32" else {}
    of = {"positions": 9} if kind == "GPT" else {
        "gated": True, "layer_norm": False, "feed_forward": 3 * width + 1, "head_channels": 2 * width,
        "key_value_heads": 1 if ranks % 2 else heads, "biases": ("qkv",) if kind == "Qwen 2" else (),
        "head_norms": kind == "Qwen 3"}
    model = model_of("any", Transformer(heads * width, blocks, heads, vocabulary, tied=tied, fused=k == 2, **of))
    base = plan_config("gpt2", ranks=1)
    asked = PlanConfig(model, ranks * (nodes or 1), base.device, base.network, zs.Policy(compute, **formats),
                       batch=batch, sequence=tokens, micro_batches=k, optimizer=optimizer, options=StepOptions.of(
                           ranks * (nodes or 1), overlap=overlap, prefetch=prefetch, offload=offload,
                           mesh=nodes and zs.Mesh(nodes, ranks),
                           zeropp=zeropp if nodes and stage == 3 and wider != "wire" else None,
                           reduction="micro_batch" if by_micro_batch and stage > 1 and not nodes and wider != "wire"
                           else "rank"),
                       host_link=None if offload.is_none else hardware.link("pcie4"),
                       disk_link=hardware.link("nvme-pcie4") if offload.uses_disk else None)
    lines = measured_row(asked, stage, policy)
    assert {line.name: line.difference_nbytes for line in lines} == {line.name: 0 for line in lines}
    assert lines[-1].name == "peak"
    assert lines[-1].measured_nbytes > 0


DECODERS = [name for name in PRESETS if name.startswith(("gpt2", "gpt3", "llama-2", "llama-3", "mistral", "qwen"))
            and PRESETS[name].experts is None]


@pytest.mark.parametrize(("name", "stage", "policy"), covering(
    DECODERS, zs.STAGES, ["none", "tiled", "selective", "sub_block", "block", "segment(3)"]))
def test_the_estimate_of_every_decoder_among_the_presets_is_the_measurement_to_the_byte(name, stage, policy):
    """With a few of its blocks, which differ in nothing; thorough: with all."""
    few = chosen([replace(PRESETS[name], blocks=3)], [PRESETS[name]])[0]
    asked = replace(engine_config("gpt2", ranks=64, batch=2, micro_batches=2), model=model_of(name, few), sequence=1024)
    lines = measured_row(asked, stage, policy)
    assert {line.name: line.difference_nbytes for line in lines} == {line.name: 0 for line in lines}
    assert lines[-1].measured_nbytes > 2 * asked.model.parameters // 64


@pytest.mark.parametrize(("row", "ranks"), covering(product(zs.STAGES, [PLAIN, *OPTIONS[3:]]), [3, 2, 6, 1]), ids=str)
def test_a_run_with_data_peaks_on_every_rank_where_its_plan_says(row, ranks):
    (stage, options), policy = row, zs.Policy("bf16")
    model = model_of("small", Transformer(12, 3, 3, 19, positions=8, tied=True, fused=True))
    base = plan_config("gpt2", ranks=1)
    asked = PlanConfig(model, ranks, base.device, base.network, policy, (stage,), ("block",), batch=2, sequence=8,
                       micro_batches=2, optimizer=zs.optim.AdamW(), convention=policy,
                       options=StepOptions(**options))
    (row,), gpt = asked.plan().rows, decoder_of(asked.model)

    def program(rank):
        engine = zs.Engine(rank, gpt, asked.optimizer, stage=stage, policy=policy, recompute="block", **options)
        tokens = (np.arange(16).reshape(2, 8) + rank.index) % 19
        engine.step([(tokens, tokens)] * 2)

    cluster = zs.Cluster(ranks)
    cluster.run(program)
    assert cluster.memory.peak_nbytes == [row.total_nbytes - row.overhead_nbytes] * ranks


OPTIMIZERS = [zs.optim.Adam(), zs.optim.AdaGrad(), zs.optim.Adan(), zs.optim.LAMB(), zs.optim.LARS(), zs.optim.Lion(),
              zs.optim.Momentum(lr=0.1), zs.optim.RMSprop(), zs.optim.SGD(lr=0.1)]
POLICIES = [zs.Policy("bf16"), zs.Policy("fp32"), zs.Policy("fp16", accumulate="fp32"), zs.Policy("bf16", state="bf16")]
ADAN_NBYTES = 4 + 4 + 4 + 2  # m, v, n in fp32; the gradient before in bf16


@pytest.mark.parametrize("stage", zs.STAGES)
def test_steps_with_and_without_data_hold_and_send_the_same_and_no_less_than_the_formula(stage):
    for optimizer, policy in covering(OPTIMIZERS, POLICIES, turn=stage):
        real, null = (measured_step((5, 7, 3), optimizer, ranks=3, stage=stage, policy=policy, rows=2, with_data=data)
                      for data in (True, False))
        for name in ("resting_nbytes", "peak_nbytes", "sent_nbytes"):
            assert getattr(null, name) == getattr(real, name)[:1], (name, optimizer, policy)
        assert len(real.resting_nbytes) == 3
        assert real.parameter_count == 5 * 7 + 7 + 7 * 3 + 3
        assert sum(null.resting_nbytes[0].values()) >= real.formula_nbytes * real.parameter_count  # padding is more


def test_a_slot_in_bf16_is_counted_as_two_bytes():
    stages = {stage: measured_step((4, 4), zs.optim.Adan(), ranks=5, stage=stage, policy=zs.Policy("bf16"), rows=1)
              for stage in zs.STAGES}
    assert [one.formula for one in stages.values()] == ["22", "4 + 18/N", "2 + 20/N", "22/N"]
    assert stages[1].resting_nbytes[0]["optimizer_state"] == ADAN_NBYTES * 4  # 4·4 + 4 parameters over 5 ranks
    assert stages[3].formula_nbytes == Fraction(22, 5)
    half = measured_step((4, 4), zs.optim.Adan(), ranks=5, stage=0, policy=zs.Policy("bf16", state="bf16"), rows=1)
    assert half.formula == "16"


def test_a_decoder_on_paper_becomes_the_packages_own_and_what_cannot_be_measured_is_refused():
    for name in ("gpt2", "llama-3-8b", "qwen2-0.5b"):
        assert decoder_of(model_shape(name)).parameter_count == model_shape(name).parameters
    for model in (model_shape("bloom-560m"), model_shape("t5-base")):
        assert_refused(lambda model=model: decoder_of(model), "cannot be measured: zerosim's layers make")
    assert_refused(lambda: decoder_of(zs.planning.model_of_parameters(10**9)), "of it a number of parameters is known")
    asked = {"widths": (4, 4), "optimizer": zs.optim.Muon(), "ranks": 3, "stage": 2, "policy": zs.Policy("bf16")}
    assert_refused(lambda: measured_step(**asked), "what Muon keeps depends on the shapes of tensors, and is no number")


# A plan's seconds beside the replay of the engine's own trace on the same machine, with the same options.


@pytest.mark.parametrize(("row", "link", "policy", "micro_batches", "model", "others"), covering(
    product(zs.STAGES, OPTIONS), ["nvlink4", "pcie3"], ["none", "block", "segment(4)", "tiled"], [1, 2, 3, 5],
    ["gpt2", "qwen2-0.5b"], [{}, {"optimizer": zs.optim.LAMB()}, {"compute": zs.Policy("bf16", accumulate="fp32")},
                             {"compute": "fp32"}, {"reduction": "micro_batch"}]), ids=str)
def test_a_plan_lasts_as_long_as_the_replay_of_the_engine_without_data(
        row, link, policy, micro_batches, model, others):
    stage, options = row
    if others.get("reduction") and stage < 2:
        others = {}
    few = replace(PRESETS[model], blocks=3, fused=True)
    asked = engine_config(model_of(model, few), ranks=8, link=link, batch=4, sequence=512, stage=stage,
                          recompute=policy,
                        attention="unfused", micro_batches=micro_batches, **options, **others)
    cluster = zs.NullCluster(asked.ranks, representative=0)
    measured.run_planned(cluster, asked, stage, policy)
    assert_lasts_as_long(asked, recording.record(cluster.trace).inside("step").on_ranks(asked.ranks))


@pytest.mark.parametrize(("stage", "options", "mesh"), covering(
    [*zs.STAGES, "hpz", "flat", "hpz+qwz+qgz"], [PLAIN, OVERLAPPED], ["2x2", "3x1", "2x3"]), ids=str)
def test_on_a_mesh_too_a_plan_lasts_as_long_as_the_replay_over_links_of_two_speeds(stage, options, mesh):
    ranks = int(mesh[0]) * int(mesh[2])
    if stage not in zs.STAGES:
        stage, options = 3, options | {"zeropp": stage}
    model = model_of("small", Transformer(96, 3, 3, 190, positions=64, tied=True, fused=True))
    asked = engine_config(model, ranks=ranks, mesh=mesh, link="nvlink4", between="ethernet-100g", batch=4, stage=stage,
                        recompute="block", micro_batches=3, **options)
    cluster = zs.NullCluster(ranks)
    measured.run_planned(cluster, asked, stage, "block+tiled")
    assert_lasts_as_long(asked, recording.record(cluster.trace).inside("step"))


@pytest.mark.parametrize(("stage", "places"), covering(
    zs.STAGES, ["optimizer=host", "optimizer=host+gradients=host", "host", "disk"]))
def test_an_offloaded_plan_differs_from_the_replay_by_its_transfers_alone_which_run_beside_nothing(stage, places):
    model = model_of("small", Transformer(96, 3, 3, 190, positions=64, tied=True, fused=True))
    asked = engine_config(model, ranks=4, batch=4, micro_batches=2, stage=stage, recompute="none", offload=places,
                        **PLAIN)
    cluster = zs.NullCluster(asked.ranks, representative=0)
    measured.run_planned(cluster, asked, stage, "tiled")
    recorded = recording.record(cluster.trace).inside("step").on_ranks(asked.ranks)
    replay, (row,) = timeline.replay(recorded, asked.machine), asked.plan().rows
    usage = replay.usage[0]
    assert usage.compute_seconds == pytest.approx(row.compute_seconds + row.update_seconds, rel=1e-9)
    assert usage.communication_seconds == pytest.approx(row.communication_seconds, rel=1e-9)
    moved = row.host_transfer_seconds, row.disk_transfer_seconds
    assert max(row.step_seconds - sum(moved), max(moved) / 2) < replay.step_seconds
    assert replay.step_seconds != pytest.approx(row.step_seconds, rel=1e-3)


@pytest.mark.parametrize("iteration", ["cubic", "quintic"])
def test_the_products_of_muon_that_a_plan_counts_are_those_that_the_engine_makes(iteration):
    model = model_of("small", Transformer(96, 3, 3, 190, positions=64, tied=True, fused=True))
    asked = engine_config(model, ranks=2, stage=0, recompute="none", optimizer=zs.optim.Muon(iteration=iteration))
    cluster = zs.NullCluster(asked.ranks, representative=0)
    measured.run_planned(cluster, asked, 0, "tiled")
    replay = timeline.replay(recording.record(cluster.trace).inside("step").on_ranks(2), asked.machine)
    (row,) = asked.plan().rows
    flops = sum(event.flops for event in replay.computed(0) if event.path[1] == "update")
    assert flops == sum(asked.optimizer.product_flops(tensor.shape) for tensor in model.tensors) > 0
    products = flops / (asked.machine.efficiency * asked.machine.peak_flops_per_second)
    assert asked.product_seconds(asked.job(0)) == pytest.approx(products)
    by_ranks = [replace(asked, ranks=n).product_seconds(replace(asked, ranks=n).job(1)) for n in (1, 2, 1000)]
    assert by_ranks[:2] == pytest.approx([products, products / 2])
    assert by_ranks[2] * 100 > products  # a matrix is one rank's
    adam = replace(asked, optimizer=zs.optim.AdamW()).plan().rows[0]
    assert row.update_seconds - products < adam.update_seconds
    assert zs.optim.Shampoo().product_flops((9, 9)) is zs.optim.SOAP().product_flops((9, 9)) is None


def assert_lasts_as_long(asked, recorded):
    replay, (row,) = timeline.replay(recorded, asked.machine), asked.plan().rows
    usage = replay.usage[0]
    for found, planned in ((usage.compute_seconds, row.compute_seconds + row.update_seconds),
                           (usage.communication_seconds, row.communication_seconds),
                           (usage.exposed_seconds, row.exposed_communication_seconds),
                           (replay.step_seconds, row.step_seconds)):
        assert found == pytest.approx(planned, rel=1e-9)
    if not (asked.options.overlap or asked.options.prefetch):
        assert row.exposed_communication_seconds == pytest.approx(row.communication_seconds, rel=1e-12)
