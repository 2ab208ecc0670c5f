"""A search finds what trying everything finds, and says what it leaves out; its settings are those that were run."""

import json
from dataclasses import asdict, replace
from functools import partial
from inspect import signature
from itertools import product

import numpy as np
import pytest

import zerosim as zs
from tests.cases import chosen
from tests.support import assert_refused, literally
from zerosim.course import measured, tuning
from zerosim.models import decoder
from zerosim.numerics import places as places_module
from zerosim.planning import STAGES, Transformer, conventions, hardware, model_of, plan_config, recording, timeline

SMALL = model_of("small", Transformer(24, 2, 2, 50, positions=16, tied=True))
LLAMA = model_of("llama", Transformer(24, 2, 2, 50, gated=True, layer_norm=False, feed_forward=40, key_value_heads=1))
tuned = partial(zs.tune, SMALL, bucket_nbytes="unit")


def run_whole(config, settings):
    """The seconds and the bytes of all micro-batches of a step, on every rank, with nothing inferred."""
    config = replace(config, batch=settings["batch"], micro_batches=settings["micro_batches"],
                     options=replace(config.options, prefetch=settings["prefetch"]))
    cluster = zs.NullCluster(config.ranks)
    measured.run_planned(cluster, config, settings["stage"], settings["recompute"],
                         bucket_nbytes=settings["bucket_nbytes"])
    machine = hardware.Machine(config.device, config.network, config.policy.compute, config.utilization)
    found = timeline.replay(recording.record(cluster.trace).inside("step"), machine)
    return found.step_seconds, found.exposed_seconds, max(memory.peak_nbytes for memory in cluster.memory)


@pytest.mark.parametrize(("model", "policies", "options"), [
    (SMALL, ("none", "block"), {"nodes": 2, "link": "pcie4", "attention": "unfused",
                                **chosen([{"stage": "0,3"}], [{}])[0]}),
    (LLAMA, ("tiled",), {"overlap": False, "compute": "fp32", "sequence": 7}),
    (SMALL, ("tiled",), {"reduction": "micro_batch"})], ids=["GPT", "Llama", "by micro-batch"])
def test_the_fastest_is_that_of_running_everything_and_every_plan_says_the_seconds_of_its_replay(
        model, policies, options):
    found = zs.tune(model, global_batch=4 * 4, ranks=4, prefetch="0,2", batch="1,4", recompute=policies,
                    offload="none", bucket_nbytes="unit", **options)
    config, seconds = plan_config(model, ranks=4, runtime="zerosim", **options), {}
    for stage, recompute, batch, ahead in product(config.stages, policies, (1, 4), (0, 2)):
        if ahead and not STAGES[stage].parameters_sharded:
            continue
        settings = {"stage": stage, "recompute": recompute, "batch": batch, "micro_batches": 4 // batch,
                    "prefetch": ahead, "bucket_nbytes": None}
        whole = seconds[stage, recompute, batch, ahead] = run_whole(config, settings)
        row = replace(config, batch=batch, micro_batches=4 // batch,
                      options=replace(config.options, prefetch=ahead)).row(stage, recompute)
        assert row.step_seconds == pytest.approx(whole[0], rel=1e-9), settings
    assert found.best.step_seconds == pytest.approx(min(seconds.values())[0], rel=1e-9)
    for one in found.tried:
        of = one.settings
        whole = seconds[of.stage, of.recompute, of.batch, of.options.prefetch]
        overhead = found.config.resting_nbytes(of.stage)["overhead_nbytes"]
        assert one.step_seconds == pytest.approx(whole[0], rel=1e-9)
        assert one.exposed_seconds == pytest.approx(whole[1], rel=1e-9, abs=1e-12)
        assert one.held_nbytes == whole[2] + overhead
    for some in (found.tried, found.shown):
        assert {one.settings.stage for one in some} == set(config.stages)
    assert config.stages == ((2, 3) if "reduction" in options else (0, 3) if "stage" in options else tuple(STAGES))
    assert (len(found.tried), found.slower, found.too_large) == (len(seconds), 0, 0)
    assert {one.replayed for one in found.tried} == {False}
    assert ("base and epsilon are not among" in " ".join(found.pasted[0].notes)) == (model is LLAMA)


def test_what_does_not_fit_is_counted_and_never_in_the_answer():
    asked = {"global_batch": 8, "ranks": 2, "recompute": "none", "prefetch": 1}
    free, none = plan_config(SMALL).device.reported_nbytes, dict.fromkeys(hardware.OVERHEADS, 0)
    asked["offload"] = "none"
    everything, count = tuned(**asked, overheads=none), 4 * 3  # stages, micro-batches
    held = sorted(one.held_nbytes for one in everything.tried)
    for most in (held[len(held) // 2], held[0] - 1000):
        found = tuned(**asked, overheads=none | {"runtime context": free - most})
        rows = [replace(found.config, batch=size, micro_batches=4 // size).row(stage, "tiled")
                for stage in STAGES for size in (1, 2, 4)]
        assert found.too_large == sum(not row.fits for row in rows) > 0
        assert len(found.tried) + found.slower + found.too_large == count
        assert max((found.spare_nbytes(one) for one in found.tried), default=0) >= 0
        assert {one.held_nbytes for one in found.tried} <= {row.total_nbytes for row in rows}
    nothing = tuned(**asked, overheads={"runtime context": free})
    assert (nothing.best, nothing.pasted, nothing.too_large) == (None, (), count)
    assert nothing.verdict.startswith("Nothing fits: the smallest of 12 candidates misses by")


def test_each_candidate_takes_the_first_places_under_which_device_host_and_disk_hold_it():
    """Of all the places, at four sizes of a device from which more and more has to go, and of a small host."""
    asked = {"global_batch": 2, "ranks": 2, "batch": 1, "recompute": "none", "prefetch": 1, "stage": "1,3"}
    free, none = plan_config(SMALL).device.reported_nbytes, dict.fromkeys(hardware.OVERHEADS, 0)
    places = [zs.Offload(), *map(places_module.offload_of, tuning.ALL_OFFLOADS[1:])]

    def row(stage, of):
        return zs.plan(SMALL, ranks=2, recompute="none", runtime="zerosim", stage=stage, offload=of,
                       overheads=none).rows[0]

    taken = set()
    for capacities in ({}, {"host_capacity_nbytes": 20_000}):
        for spare in sorted({row(3, of).total_nbytes for of in places}):
            found = tuned(**asked, overheads=none | {"runtime context": free - spare}, **capacities)
            of_stage = {one.settings.stage: one for one in found.tried}
            for stage in (1, 3):
                rows = [(of, row(stage, of)) for of in places]
                fits = [of for of, one in rows if one.total_nbytes <= spare
                        and one.host_nbytes <= capacities.get("host_capacity_nbytes", 250e9)]
                taken.add((stage, fits[0].text if fits else None))
                found_places = of_stage[stage].settings.options.offload if stage in of_stage else None
                assert found_places == (fits[0] if fits else None)
                if fits:
                    one = of_stage[stage]
                    planned = dict(rows)[fits[0]]
                    assert (one.host_nbytes, one.disk_nbytes) == (planned.host_nbytes, planned.disk_nbytes)
                    assert planned.least_seconds <= one.step_seconds * (1 + 1e-12)
            assert found.farther == sum(len(places) - 1 - places.index(one.settings.options.offload)
                                        for one in found.tried)
    assert {text for _, text in taken} > {"none", "optimizer=host", "host", "disk"}


def test_a_bucket_that_takes_more_than_the_estimate_of_units_is_dropped_by_what_was_measured():
    asked = {"global_batch": 2, "ranks": 2, "sequence": 1, "stage": 2, "recompute": "block", "offload": "none"}
    free, none = plan_config(SMALL).device.reported_nbytes, dict.fromkeys(hardware.OVERHEADS, 0)
    tried = zs.tune(SMALL, **asked, overheads=none).tried
    held = {one.settings.options.bucket_nbytes: one.held_nbytes for one in tried}
    most = max(held.values())
    assert most > held[None]
    for spare, buckets, too_large in ((0, [*held], 0), (-1, [None], 1)):
        found = zs.tune(SMALL, **asked, overheads=none | {"runtime context": free - most - spare})
        assert {one.settings.options.bucket_nbytes for one in found.tried} == set(buckets)
        assert found.too_large == too_large


def test_what_is_offloaded_lies_on_the_host_and_takes_no_less_seconds_than_the_plan_adds():
    """The plan has one message each way, the engine one for each tensor."""
    asked = {"global_batch": 4, "ranks": 2, "batch": 2, "recompute": "none", "stage": "1,3", "prefetch": 1}
    here, there = ({one.settings.stage: one for one in tuned(**asked, offload=offload).tried}
                   for offload in ("none", "optimizer=host"))
    for stage, one in there.items():
        resting = conventions.states_nbytes(SMALL, 2, STAGES[stage], zs.Policy("bf16"), optimizer=zs.optim.AdamW())
        assert one.host_nbytes == resting["master"] + resting["optimizer_state"] > 0
        assert one.held_nbytes + one.host_nbytes == here[stage].held_nbytes
        more, planned = (getattr(one, name) - getattr(here[stage], name)
                         for name in ("step_seconds", "estimated_seconds"))
        assert 2 * 14 * planned > more > planned > 0


def test_a_bucket_that_cuts_units_is_run_on_every_rank_and_takes_other_seconds():
    found = zs.tune(SMALL, global_batch=8, ranks=4, stage=2, recompute="none", batch=1, offload="none",
                    bucket_nbytes=["unit", 5000, "model", 1e9])
    config, by_bucket = found.config, {one.settings.options.bucket_nbytes: one for one in found.tried}
    whole_nbytes = 4 * sum(config.job(2).padded_lengths)
    assert by_bucket.keys() == {None, 5000, whole_nbytes}
    for one in found.tried:
        settings = asdict(one.settings) | one.settings.options.arguments()
        assert one.step_seconds == pytest.approx(run_whole(config, settings)[0], rel=1e-9)
    assert len({round(one.step_seconds, 9) for one in found.tried}) == 3
    only = zs.tune(SMALL, global_batch=8, ranks=4, stage=2, recompute="none", batch=1, offload="none",
                   bucket_nbytes="model")
    assert [one.settings.options.bucket_nbytes for one in only.tried] == [whole_nbytes]


def test_by_real_seconds_every_candidate_that_fits_takes_steps_here_and_holds_what_it_holds_without_data():
    asked = {"global_batch": 4, "ranks": 2, "batch": 2, "stage": "0,3", "recompute": "none", "offload": "none",
             "bucket_nbytes": "unit,model", "sequence": 4, "compute": "fp32"}
    found, replayed = (zs.tune(SMALL, **asked, seconds=seconds) for seconds in ("real", "replayed"))
    held = {one.settings: one.held_nbytes for one in replayed.tried}
    assert (len(found.tried), found.slower, found.refused) == (6, 0, {})  # 1 and 3 prefetches, and a bucket for each
    for one in found.tried:
        assert (one.exposed_seconds, one.replayed) == (None, False)
        assert 0 < one.step_seconds != one.estimated_seconds
        assert one.held_nbytes == held.get(one.settings, one.held_nbytes)
    assert len(held.keys() & {one.settings for one in found.tried}) > 2
    assert [one.step_seconds for one in found.tried] == sorted(one.step_seconds for one in found.tried)
    assert "took steps with data on as many ranks in this process" in " ".join(str(found).split())
    assert "were replayed" not in str(found)
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["rows"][0]["exposed_seconds"] is None


def test_the_engine_takes_the_pasted_settings_and_does_what_was_measured():
    found = zs.tune(SMALL, global_batch=12, ranks=3, stage="2,3", prefetch=2, recompute="block", batch=2,
                    reduction="micro_batch")
    best, (engine, *_) = found.best, found.pasted
    gpt = measured.decoder_of(SMALL)

    def program(rank):
        names = {"zs": zs, "rank": rank}
        exec(engine.code, names)
        assert (names["model"].config, names["optimizer"]) == (gpt.config, found.config.optimizer)
        assert names["model"].shapes == gpt.shapes
        tokens = rank.xp.zeros((best.settings.batch, 16), "int64")
        names["engine"].step([(tokens, tokens)] * best.settings.micro_batches)

    cluster = zs.NullCluster(3, representative=0)
    cluster.run(program)
    overhead = found.config.resting_nbytes(best.settings.stage)["overhead_nbytes"]
    assert cluster.memory[0].peak_nbytes + overhead == best.held_nbytes


SAID = {  # of each program: what is asked, lines of its settings, and of what they leave out
    "FSDP2": [
        ({"stage": 0}, [], ["stage 0 is DistributedDataParallel"]),
        ({"stage": 1}, ["reshard_after_forward=False", "set_requires_gradient_sync(number == 2)", "torch.bfloat16"],
         ["Parameters rest sharded there", "Make the model in fp32"]),
        ({"stage": 2, "compute": "fp16"}, ["param_dtype=torch.float16, reduce_dtype=torch.float16"],
         ["a gradient scaler"]),
        ({"stage": 2, "reduction": "micro_batch"}, ["reshard_after_forward=False"], ["added by rank there"]),
        ({"stage": 3, "prefetch": 2, "recompute": "selective"}, [
            "reshard_after_forward=True", "set_modules_to_forward_prefetch(blocks[i + 1:i + 3])"], ["fused attention"]),
        ({"stage": 3, "prefetch": 0, "recompute": "block", "offload": "optimizer=host", "overlap": False,
          "bucket_nbytes": "model"}, ["offload_policy=CPUOffloadPolicy()"], [
            "torch.utils.checkpoint", "which no argument turns off", "always run beside", "cannot be said",
            "none of them alone"]),
        ({"stage": 3, "offload": "host"}, ["offload_policy=CPUOffloadPolicy()"], []),
        ({"stage": 2, "offload": "disk"}, ["offload_policy=CPUOffloadPolicy()"], ["Offload to disk: FSDP has none"])],
    "DeepSpeed": [
        ({"stage": 0, "offload": "optimizer=host"}, ['"stage": 0'], ["offloads from stage 1 on"]),
        ({"stage": 1, "offload": "optimizer=host"}, [
            '"allgather_bucket_size"', '"offload_optimizer"', '"device": "cpu"'], ["Gradients have no place of"]),
        ({"stage": 2, "offload": "disk"}, ['"offload_optimizer"', '"device": "cpu"'], [
            "offload_param is of stage 3", "nvme is of stage 3"]),
        ({"stage": 3, "offload": "host"}, ['"offload_optimizer"', '"offload_param"', '"device": "cpu"'], []),
        ({"stage": 3, "offload": "disk"}, ['"offload_param"', '"device": "nvme"', '"nvme_path"'], ["of one's own"]),
        ({"stage": 3, "prefetch": 0, "overlap": False, "compute": "fp16"}, [
            '"stage3_prefetch_bucket_size": 0', '"stage3_param_persistence_threshold": 0}', '"overlap_comm": false',
            '"fp16"'], [
                "module by module", "scales the loss dynamically"]),
        ({"stage": 3, "reduction": "micro_batch"}, ['"stage": 3'], ["added by rank there"])],
    "zerosim": [({"stage": 3, "reduction": "micro_batch"}, ['reduction="micro_batch")'], []), ({
        "stage": 2, "offload": "optimizer=host", "compute": "fp16"}, [
        "stage=2", 'offload="optimizer=host"'], ["give the policy loss_scale=zs.numerics.loss_scale.Dynamic()"])]}


@pytest.mark.parametrize("program", SAID)
def test_settings_say_what_the_program_has_a_word_for_and_notes_say_the_rest(program):
    for asked, lines, notes in SAID[program]:
        found = zs.tune(SMALL, **{"global_batch": 8, "ranks": 2, "batch": 2, "recompute": "none", "prefetch": 1,
                                  "bucket_nbytes": "unit", "offload": "none"} | asked)
        (pasted,) = (one for one in found.pasted if one.program == program)
        assert [line for line in lines if line not in pasted.code] == [], asked
        assert [note for note in notes if note not in " ".join(pasted.notes)] == [], asked
        assert bool(pasted.code) == bool(lines)


def test_deepspeed_is_told_a_batch_that_is_the_product_of_its_parts():
    found = zs.tune(SMALL, global_batch=24, ranks=2, batch=3, stage=3, prefetch=2, compute="fp32", offload="none")
    config = json.loads(found.pasted[2].code)
    sizes = [config[name] for name in ("train_batch_size", "train_micro_batch_size_per_gpu",
                                       "gradient_accumulation_steps")]
    assert sizes == [24, 3, 4]
    assert not {"bf16", "fp16"} & config.keys()
    assert config["zero_optimization"]["stage3_prefetch_bucket_size"] == 2 * max(found.config.job(3).padded_lengths)


def test_a_model_that_the_engine_lacks_is_answered_by_the_plan_which_is_said():
    found = zs.tune("bloom-176b", global_batch=128, ranks=128, nodes=16, stage="2,3", recompute="block",
                    offload="none")
    row = replace(found.config, options=found.best.settings.options).row(3, "block+tiled")
    assert {one.replayed for one in found.tried} == {False}
    assert (found.best.step_seconds, found.best.held_nbytes) == (row.step_seconds, row.total_nbytes)
    assert "zerosim's layers do not make bloom-176b" in " ".join(str(found).split())


def test_an_optimizer_that_the_engine_refuses_is_named_with_its_reason():
    found = tuned(global_batch=2, ranks=2, stage="0,1", recompute="none", offload="none", optimizer=zs.optim.Muon())
    assert [one.settings.stage for one in found.tried] == [0]
    assert "ZeRO-1 without recomputation" in found.refused
    assert "ZeRO-1 without recomputation was not run: " in " ".join(str(found).split())
    nothing = tuned(global_batch=2, ranks=2, stage=1, recompute="none", offload="none", optimizer=zs.optim.Muon())
    assert nothing.verdict == "Nothing was run: the engine refused every candidate that fits."


def test_no_step_is_timed_that_this_machine_has_no_memory_for(monkeypatch):
    monkeypatch.setattr(tuning, "_memory_nbytes", lambda: 10**9)
    found = zs.tune("gpt2-xl", seconds="real", offload="none", global_batch=2, ranks=2, stage="1,3", recompute="none",
                    prefetch=0)
    assert found.refused.keys() == {"ZeRO-1 without recomputation", "ZeRO-3 without recomputation"}
    assert "hold" in found.refused["ZeRO-1 without recomputation"]
    assert "in this process, on a machine with 1.00 GB" in " ".join(str(found).split())


@pytest.mark.parametrize("name", ["gpt-nano", "gpt-micro", "llama-nano", "llama-micro"])
def test_a_preset_of_training_has_the_shape_of_the_model_that_is_trained(name):
    trained = decoder(replace(decoder(name).config, vocabulary=256))
    made = measured.decoder_of(measured.preset_shape(name))
    assert (made.shapes, made.config) == (trained.shapes, trained.config)


def test_what_cannot_be_searched_is_refused():
    small = partial(partial, zs.tune, SMALL)
    for call, text in [
        (small(global_batch=7, ranks=2), "global_batch=7 cannot be shared equally by 2 ranks; take 8, a multiple of 2"),
        (small(global_batch=0), "global_batch=0 must be a whole number, from 1"),
        (small(global_batch=12, ranks=2, batch=4), "batch=4 does not divide the 6 sequences of each rank, and micro-ba"
                                                   "tches are equal; take some of 1, 2, 3, 6"),
        (small(global_batch=8, batch="one"), "batch='one' must be numbers, as in 1,2"),
        (small(global_batch=8, prefetch=()), "prefetch=() leaves nothing to search"),
        (small(global_batch=8, prefetch=-1), "prefetch must be at least 0"),
        (small(global_batch=8, bucket_nbytes=[]), "bucket_nbytes=[] leaves nothing to search; name unit, model, or"),
        (small(global_batch=8, bucket_nbytes="25 MX"), "bucket_nbytes='25 MX' is no number"),
        (small(global_batch=8, offload=True), "offload=True must be 'host' or 'disk'"),
        (small(global_batch=8, offload="none,nvme"), "offload='nvme' must be 'host' or 'disk'"),
        (small(global_batch=8, offload=()), "offload=() leaves nothing to search; name one place at least"),
        (small(global_batch=8, offload="none", host_link="pcie5"), "host_link='pcie5' is of offload, which was not"),
        (small(global_batch=2**40, ranks=2), "gives each rank 549,755,813,888 sequences a step; take one"),
        (small(global_batch=8, convention="fp32"), "convention= is no option of tune: bytes are counted as the engine"),
        (small(global_batch=8, parameters=10**9), "parameters= is no option of tune: a search needs a model's shape"),
        (small(global_batch=8, micro_batches=2), "micro_batches= is no option of tune: global_batch, ranks and batc"),
        (small(global_batch=8, mesh="2x4"), "mesh= is no option of tune: the settings to paste are of one group"),
        (small(global_batch=8, seconds="soon"), "seconds='soon' must be replayed or real"),
        (small(global_batch=8, seconds="real", offload="host"), "device and host are one memory; say offload='none'"),
        (partial(zs.tune, "bloom-560m", global_batch=8, stage=3, batch=1, recompute="block", offload="none",
                 seconds="real"), "bloom-560m cannot be measured"),
        (partial(zs.tune, "t5-small", global_batch=8), "the activations of t5-small are not known"),
    ]:
        assert_refused(call, literally(text))


def test_the_options_are_those_of_a_plan_beside_its_own_and_data_are_plain():
    own, plans = signature(zs.tune).parameters, signature(plan_config).parameters
    assert own.keys() - plans.keys() == {"global_batch", "bucket_nbytes", "seconds"}
    assert plans.keys() - own.keys() == {"parameters", "largest_layer", "micro_batches", "convention", "mesh", "zeropp"}
    found = tuned(global_batch=4, ranks=2, batch=1)
    data = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert [row["step_seconds"] for row in data["rows"]] == [one.step_seconds for one in found.tried]
    assert [one["program"] for one in data["settings"]] == ["zerosim", "FSDP2", "DeepSpeed"]
    assert found._repr_html_().count("<table") == 1
    assert np.isfinite([row["tokens_per_second"] for row in data["rows"]]).all()
