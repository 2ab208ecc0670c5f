"""A search takes what trying everything takes, says what is next and why, and writes what the program has words for."""

import json
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import product

import numpy as np
import pytest

import zerosim as zs
from tests.support import assert_refused, literally
from zerosim.course import measured
from zerosim.models import decoder
from zerosim.numerics import places as places_module
from zerosim.planning import STAGES, Transformer, hardware, model_of, plan_config

SMALL = model_of("small", Transformer(24, 2, 2, 50, positions=16, tied=True))
LLAMA = model_of("llama", Transformer(24, 2, 2, 50, gated=True, layer_norm=False, feed_forward=40, key_value_heads=1))
ENGINE = {"runtime": "zerosim", "offload": "none"}
NO_OVERHEADS = dict.fromkeys(hardware.OVERHEADS, 0)


def leaving(nbytes):
    """Overheads of zerosim's engine that leave so many bytes of a device, and no margin."""
    free = plan_config(SMALL, runtime="zerosim").device.usable_nbytes
    return {"overheads": NO_OVERHEADS | {"runtime context": free - nbytes}, "margin": 0.0}


@pytest.mark.parametrize(("model", "options"), [
    ("gpt2-large", {"device": "rtx-4090", "global_batch": 64}),
    ("llama-3-8b", {"sequence": 4096, "global_batch": 32, "prefetch": "0,1,2", "runtime": "zerosim"}),
    ("llama-3.2-1b", {"sequence": 8192, "global_batch": 128, "runtime": "deepspeed", "nodes": 2, "ranks": 16,
                      "prefetch": 1}),
    ("qwen2-0.5b", {"device": "a100-40", "sequence": 2048, "global_batch": 64, "runtime": "megatron",
                     "margin": 0.3}),
    (LLAMA, {"overlap": False, "compute": "fp32", "sequence": 7, "global_batch": 16, "prefetch": 0,
             "runtime": "zerosim"}),
    (SMALL, {"global_batch": 16, "ranks": 1})], ids=str)
def test_of_all_that_leave_the_margin_it_takes_the_one_with_the_most_room_within_two_percent_of_the_fastest(
        model, options):
    """Without offload, so that rows of the runtime's own plans are all there is, each with the fewest parts of the loss
    that leave the margin; the runner-up is the next one."""
    found = zs.tune(model, **options, offload="none")
    asked = {name: value for name, value in options.items() if name not in ("prefetch", "global_batch")}
    share, rows = options["global_batch"] // asked.get("ranks", 8), []
    ahead = [int(one) for one in str(options.get("prefetch", "1,2")).split(",")]
    for batch, prefetch in product(range(1, share + 1), ahead):
        if share % batch == 0:
            stages = [stage for stage in STAGES if (stage == 3 or prefetch == ahead[0])
                      and not (asked.get("runtime") == "megatron" and stage > 1)]
            taken = {}
            for chunks in (1, 2, 4, 8, 16, 32) if asked.get("runtime") in (None, "deepspeed") else (1,):
                for row in stages and zs.plan(model, **asked, recompute=",".join(found.config.recompute),
                                              prefetch=prefetch, batch=batch, micro_batches=share // batch,
                                              loss_chunks=chunks, stage=",".join(map(str, stages))).rows:
                    if chunks == 1 or row.has_margin > taken[row.stage, row.recompute].has_margin:
                        taken[row.stage, row.recompute] = row
                stages = sorted({stage for (stage, _), row in taken.items() if not row.has_margin})
            rows += [(row, batch, prefetch) for row in taken.values()]
    fewer = {(row.stage, row.recompute, batch, prefetch): row.step_seconds for row, batch, prefetch in rows}
    leaving_margin = [row for row, batch, prefetch in rows if row.has_margin and all(
        row.step_seconds < fewer.get((row.stage, row.recompute, batch, less), np.inf) for less in range(prefetch))]
    assert sorted(one.row.step_seconds for one in found.tried) == sorted(row.step_seconds for row in leaving_margin)
    assert found.too_large == sum(not row.has_margin for row, _, _ in rows)
    near = [row for row in leaving_margin
            if row.step_seconds <= 1.02 * min(one.step_seconds for one in leaving_margin)]
    assert found.best.row in near
    assert found.best.row.spare_nbytes == max(row.spare_nbytes for row in near)
    for one in found.tried:
        assert one.row.spare_nbytes >= found.config.margin * found.config.device.usable_nbytes - 1
        assert one.row == one.config.row(one.row.stage, one.row.recompute)
    best, other = found.best, found.runner_up
    others = [one for one in found.tried if one.kind != best.kind]
    assert others[0] is other
    assert other.title in found.verdict
    near_other = other.row in near
    assert (found.decides == "seconds") == (not near_other)
    assert (found.decides == "room") == (near_other and other.row.spare_nbytes < best.row.spare_nbytes)
    assert f"{found.decides} decide" in found.verdict


def test_each_candidate_takes_the_first_places_under_which_device_host_and_disk_hold_it():
    """Of all the places, at sizes of a device from which more and more has to go, and of a small host."""
    asked = {"global_batch": 2, "ranks": 2, "batch": 1, "recompute": "none", "prefetch": 1, "stage": "1,3",
             "runtime": "zerosim"}
    texts = ("none", "optimizer=host", "optimizer=host+gradients=host", "host",
             "optimizer=disk+gradients=host+parameters=host", "disk")

    def row(stage, of):
        return zs.plan(SMALL, ranks=2, recompute="none", runtime="zerosim", stage=stage, offload=of,
                       overheads=NO_OVERHEADS).rows[0]

    taken = set()
    for capacities in ({}, {"host_capacity_nbytes": 20_000}):
        for spare in sorted({row(3, of).total_nbytes for of in texts}):
            found = zs.tune(SMALL, **asked, **capacities, **leaving(spare))
            for stage in (1, 3):
                fits = [of for of in texts if (one := row(stage, of)).total_nbytes <= spare
                        and one.host_nbytes <= capacities.get("host_capacity_nbytes", 250e9)]
                found_places = [one.config.options.offload for one in found.tried if one.row.stage == stage]
                assert found_places == [places_module.offload_of(of) for of in fits[:1]]
                taken |= {*fits[:1]}
            assert len(found.tried) + found.too_large == 2
    assert taken > {"none", "optimizer=host", "host", "disk"}


def test_a_title_says_what_is_chosen_one_thing_after_the_other():
    best = zs.tune("llama-3-8b", device="rtx-4090", global_batch=64).best
    assert best.title == ("ZeRO-3 with block recomputation, all state on the host, the loss in 2 parts, in "
                          "2 micro-batches of 4 sequences")


@pytest.mark.parametrize(("runtime", "said"), [
    ("fsdp2", 'mesh_dim_names=("replicate", "shard")'), ("megatron", "--num-distributed-optimizer-instances 4"),
    ("zerosim", 'mesh="4x8"')])
def test_on_several_nodes_shards_inside_nodes_are_searched_beside_those_over_all_ranks(runtime, said):
    asked = {"ranks": 32, "nodes": 4, "between": "ethernet-100g", "runtime": runtime, "sequence": 256,
             "recompute": "none"}
    found = zs.tune("gpt2-xl", global_batch=64, batch=1, offload="none", **asked)
    rows = {(one.row.stage, bool(one.config.options.mesh)): one.row for one in found.tried}
    both = {stage for stage, on_mesh in rows if on_mesh}
    assert both == {"fsdp2": {2, 3}, "megatron": {1}, "zerosim": {0, 1, 2, 3}}[runtime]
    for stage in both:
        (planned,) = zs.plan("gpt2-xl", stage=stage, micro_batches=2, mesh="4x8", **asked).rows
        assert rows[stage, True] == planned
        assert planned.states_nbytes >= rows[stage, False].states_nbytes
    alone = zs.tune("gpt2-xl", global_batch=64, batch=1, offload="none", mesh="4x8", **asked)
    assert "sharded inside nodes (4x8)" in alone.verdict
    assert [one.row for one in found.tried if one.config.options.mesh] == [one.row for one in alone.tried]
    assert said in alone.pasted.code


def test_what_leaves_more_on_the_device_comes_before_room_and_a_whole_training_is_that_of_the_best():
    """The host's arithmetic is in no seconds, so that a plan would offload too much."""
    found = zs.tune("llama-3-8b", global_batch=64, sequence=8192, recompute="none", stage="1,2", runtime="zerosim",
                    batch=1, tokens="1B", price=3.0)
    assert [(one.row.stage, one.config.options.offload.text) for one in found.tried] == [
        (2, "none"), (1, "optimizer=host")]
    assert found.runner_up.row.step_seconds <= 1.02 * found.best.row.step_seconds
    assert found.decides == "offload"
    assert f"{found.training.money:,.0f} at 3 each" in " ".join(str(found).split())
    assert found.as_json()["training"]["device_hours"] == found.training.device_hours


def test_where_nothing_leaves_the_margin_the_nearest_is_named_and_nothing_is_pasted():
    asked = {**ENGINE, "global_batch": 8, "ranks": 2, "recompute": "none", "prefetch": 1}
    nothing = zs.tune(SMALL, **asked, **leaving(0))
    rows = [replace(nothing.config, batch=size, micro_batches=4 // size).row(stage, "tiled")
            for stage in STAGES for size in (1, 2, 4)]
    assert (nothing.best, nothing.pasted, nothing.runner_up, nothing.too_large) == (None, None, None, 12)
    assert nothing.nearest.row.missing_nbytes == min(row.missing_nbytes for row in rows)
    assert nothing.verdict == ("Nothing fits with a margin of 0.00 GB: of 12 candidates ZeRO-2 without recomputation "
                               "in 4 micro-batches of 1 sequence comes nearest and misses by 0.00 GB.")
    spare = zs.tune(SMALL, **asked, margin=0.999)
    assert "ZeRO-2 without recomputation in 4 micro-batches of 1 sequence comes nearest and has " in spare.verdict
    assert spare.verdict.endswith("GB to spare, which a smaller margin takes.")
    assert json.loads(json.dumps(spare.as_json(), allow_nan=False))["settings"] is None
    assert "Not in the table: 12 candidates without the margin." in " ".join(str(spare).split())


def test_the_engine_takes_the_pasted_settings_and_holds_what_was_planned():
    found = zs.tune(SMALL, global_batch=12, ranks=3, stage="2,3", prefetch=2, recompute="block", batch=2,
                    reduction="micro_batch", compute=zs.Policy("bf16", accumulate="fp32"), **ENGINE)
    best, gpt = found.best, measured.decoder_of(SMALL)

    def program(rank):
        names = {"zs": zs, "rank": rank}
        exec(found.pasted.code, names)
        assert (names["model"].config, names["optimizer"]) == (gpt.config, found.config.optimizer)
        assert names["model"].shapes == gpt.shapes
        tokens = rank.xp.zeros((best.config.batch, 16), "int64")
        names["engine"].step([(tokens, tokens)] * best.config.micro_batches)

    cluster = zs.NullCluster(3, representative=0)
    cluster.run(program)
    assert cluster.memory[0].peak_nbytes + best.row.overhead_nbytes == best.row.total_nbytes


SAID = {  # of each runtime: what is asked, and lines of its settings and notes
    "fsdp2": [
        ({"stage": 0, "batch": 2}, ["DistributedDataParallel(model,", "torch.autocast(\"cuda\", dtype=torch.bfloat16)",
                                    "the first 1 of 2 micro-batches: with model.no_sync()"]),
        ({"stage": 1, "compute": "fp16"}, ["ZeroRedundancyOptimizer(", "a gradient scaler"]),
        ({"stage": 2, "recompute": "selective"}, [
            "reshard_after_forward=False, mp_policy=precision", "param_dtype=torch.bfloat16, reduce_dtype=torch.fl",
            "Make the model in fp32", "create_selective_checkpoint_contexts", "Each step: 1 micro-batch of 4 sequenc"]),
        ({"stage": 3, "prefetch": 2, "offload": "host", "recompute": "block"}, [
            "fully_shard(module, mp_policy=precision,", "set_modules_to_forward_prefetch(blocks[i + 1:i + 3])",
            "offload_policy=CPUOffloadPolicy()", "torch.utils.checkpoint", "host: pcie5, 63.02 GB a second each way"])],
    "deepspeed": [
        ({"stage": 2, "overlap": False, "compute": "fp16", "offload": "optimizer=host"}, [
            '"reduce_bucket_size": 500000000', '"offload_optimizer"', '"device": "cpu"', '"overlap_comm": false',
            '"fp16"', "scales the loss dynamically"]),
        ({"stage": 3, "prefetch": 0, "offload": "optimizer=disk+parameters=disk"}, [
            '"stage3_prefetch_bucket_size": 0', '"sub_group_size"', '"offload_param"',
            '"device": "nvme"', "of one's own"])],
    "megatron": [
        ({"stage": 1, "recompute": "block"}, [
            "--micro-batch-size 4 --global-batch-size 8 --seq-length 16 --bf16", "--use-distributed-optimizer",
            "--overlap-param-gather", "--recompute-granularity full", "stay 1"]),
        ({"compute": "fp32", "overlap": False}, ["--seq-length 16"])],
    "zerosim": [
        ({"stage": 3, "reduction": "micro_batch"}, [
            'reduction="micro_batch")', 'recompute="tiled" is the table\'s none']),
        ({"stage": 2, "offload": "optimizer=host", "compute": "fp16"}, [
            "stage=2", 'offload="optimizer=host"', "give the policy loss_scale=zs.numerics.loss_scale.Dynamic()"]),
        ({"optimizer": zs.optim.Muon()}, ["stage=0", "Left out: Muon needs whole tensors"])]}


@pytest.mark.parametrize("runtime", SAID)
def test_settings_are_written_for_the_runtimes_program_with_what_else_is_to_do(runtime):
    for asked, words in SAID[runtime]:
        found = zs.tune(SMALL, **{"global_batch": 8, "ranks": 2, "batch": 4, "recompute": "none", "prefetch": 1,
                                  "offload": "none", "runtime": runtime} | asked)
        shown = " ".join(str(found).split())
        assert [word for word in words if word not in shown] == [], asked
        assert found.pasted.code.splitlines()[0] in str(found)
    bloom = zs.tune("bloom-560m", global_batch=8, stage=1, batch=1, recompute="block", runtime=runtime)
    assert ("layers do not make bloom-560m" in " ".join(bloom.pasted.notes)) == (runtime == "zerosim")


@pytest.mark.parametrize("name", ["gpt-nano", "gpt-micro", "llama-nano", "llama-micro"])
def test_a_preset_of_training_has_the_shape_of_the_model_that_is_trained(name):
    trained = decoder(replace(decoder(name).config, vocabulary=256))
    made = measured.decoder_of(measured.preset_shape(name))
    assert (made.shapes, made.config) == (trained.shapes, trained.config)


def test_what_cannot_be_searched_or_said_is_refused():
    small = partial(partial, zs.tune, SMALL)
    for call, text in [
        (small(global_batch=7, ranks=2), "cannot be shared equally by 2 ranks; take 6 or 8, or other ranks"),
        (small(global_batch=0), "global_batch=0 must be a whole number, from 1"),
        (small(global_batch=12, ranks=2, batch=4), "batch=4 does not divide the 6 sequences of each rank, and micro-ba"
                                                   "tches are equal; take some of 1, 2, 3, 6"),
        (small(global_batch=8, batch="one"), "batch='one' must be numbers, as in 1,2"),
        (small(global_batch=8, prefetch=()), "prefetch=() leaves nothing to search"),
        (small(global_batch=8, prefetch=-1), "prefetch must be at least 0"),
        (small(global_batch=8, offload=True), "offload=True must be 'host' or 'disk'"),
        (small(global_batch=8, offload="none,nvme"), "offload='nvme' must be 'host' or 'disk'"),
        (small(global_batch=8, offload=()), "offload=() leaves nothing to search; name one place at least"),
        (small(global_batch=8, offload="none", host_link="pcie5"), "host_link='pcie5' is of offload to host, and not"),
        (small(global_batch=2**40, ranks=2), "gives each rank 549,755,813,888 sequences a step; take one"),
        (small(global_batch=8, convention="fp32"), "convention= is no option of tune: bytes are counted as the progra"),
        (small(global_batch=8, params=10**9), "params= is no option of tune: a search needs a model's shape"),
        (small(global_batch=8, micro_batches=2), "micro_batches= is no option of tune: global_batch, ranks and batc"),
        (small(global_batch=8, zeropp="hpz"), "zeropp= is no option of tune: parts of ZeRO++ are none of the sett"),
        (small(global_batch=8, mesh="2x4", runtime="deepspeed"), "DeepSpeed 0.19 no longer has MiCS, its hybrid sh"),
        (partial(zs.tune, "t5-small", global_batch=8, runtime="zerosim"), "the activations of t5-small are not known"),
        (small(global_batch=8, runtime="fsdp"), "no runtime is called 'fsdp'"),
        (small(global_batch=8, overlap=False), "there are no settings of fsdp2 for what was asked: reductions always"),
        (small(global_batch=8, stage=3, prefetch=0), "one module ahead in backward, which no argument turns off; take"),
        (small(global_batch=8, stage=3, offload="optimizer=host"), "to the host, none of them alone, and none to disk"),
        (small(global_batch=8, stage=1, offload="host"), "offload is fully_shard's, and stages 0 and 1 are Dist"),
        (small(global_batch=8, stage=0, offload="optimizer=host", runtime="deepspeed"), "offloads from stage 1 on"),
        (small(global_batch=8, offload="host", stage=3, runtime="deepspeed"), "gradients have no place of their own"),
        (small(global_batch=8, offload="optimizer=disk", stage=2, runtime="deepspeed"), "nvme are of stage 3; take"),
        (small(global_batch=8, stage=3, runtime="megatron"), "Megatron's distributed optimizer is stage 1; take"),
        (small(global_batch=8, stage=1, recompute="selective", runtime="megatron"), "which a fused one makes again"),
        (small(global_batch=8, stage=1, offload="optimizer=host", runtime="megatron"), "no flags of Megatron's off"),
        (small(global_batch=8, stage=1, optimizer=zs.optim.Muon(), runtime="zerosim"), "Muon needs whole tensors, and"),
    ]:
        assert_refused(call, literally(text))


def test_the_options_are_those_of_a_plan_beside_its_own_and_data_are_plain():
    own, plans = signature(zs.tune).parameters, signature(plan_config).parameters
    assert own.keys() - plans.keys() == set()
    assert plans.keys() - own.keys() == {"params", "largest_layer", "micro_batches", "convention", "zeropp"}
    found = zs.tune(SMALL, global_batch=4, ranks=2, batch=1)
    data = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert [row["step_seconds"] for row in data["rows"]] == [one.row.step_seconds for one in found.tried]
    assert data["settings"]["program"] == "PyTorch"
    assert found._repr_html_().count("<table") == 1
    assert np.isfinite([row["tokens_per_second"] for row in data["rows"]]).all()
