"""DeepSpeed's and FSDP's settings give engines and plans: each key changes what it names, or is refused by its name."""

import json
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

import zerosim as zs
from tests.support import assert_refused, literally
from tests.zero.training import batches
from zerosim.course import measured, tuned_settings
from zerosim.numerics import loss_scale
from zerosim.planning import Transformer, model_of, plan_config

SMALL = model_of("small", Transformer(8, 2, 2, 11, positions=4, tied=False))
LARGEST = SMALL.largest_unit.parameters
BATCH = {"train_micro_batch_size_per_gpu": 2}
DIVIDED = zs.Policy(average="divide_then_sum")


def of(*path_and_value, stage=3, **more):
    """A configuration of this stage with one more value, at a path of keys."""
    *path, value = path_and_value or ("steps_per_print", 1)
    found = BATCH | {"zero_optimization": {"stage": stage}} | more
    at = found
    for key in path[:-1]:
        at = at.setdefault(key, {})
    at[path[-1]] = value
    return found


def read(config, **options):
    return zs.from_deepspeed(config, **{"ranks": 4, "model": SMALL} | options)


def changed(found, base):
    """The fields of the settings, apart from what is said about them, that are not as in ``base``."""
    before, after = ({field.name: getattr(one, field.name) for field in fields(one)} | one.options.arguments()
                     for one in (base, found))
    return {name: value for name, value in after.items()
            if name not in ("ignored", "differences", "options") and value != before[name]}


ZERO, ADAM = "zero_optimization", zs.optim.Adam()
BF16 = zs.Policy("bf16", average="divide_then_sum", master_from="compute")
FP16 = replace(BF16, compute="fp16", loss_scale=loss_scale.Dynamic("deepspeed", 2.0**16, 1000, 2))
HALF = {"fp16": {"enabled": True}}
KEYS = [  # a configuration, another one, and the arguments in which they differ
    (of(), of(stage=0), {"stage": 0, "policy": zs.Policy(average="sum_then_divide"), "overlap": False, "prefetch": 0,
                         "keep_gathered": None}),
    (of(), of(stage=1), {"stage": 1, "overlap": False, "prefetch": 0, "keep_gathered": None}),
    (of(stage=1), of(stage=2), {"stage": 2}),
    (of(stage=2), of(ZERO, "overlap_comm", True, stage=2), {"overlap": True}),
    (of(stage=2), of(ZERO, "reduce_scatter", False, stage=2), {"policy": zs.Policy(average="sum_then_divide")}),
    (of(stage=0), of("prescale_gradients", True, stage=0), {"policy": DIVIDED}),
    (of(), of("train_micro_batch_size_per_gpu", 3), {"batch": 3}),
    (of(), of("gradient_accumulation_steps", 5), {"micro_batches": 5}),
    (of(), of("train_batch_size", 24), {"micro_batches": 3}),
    (of(), of("gradient_clipping", 0.5), {"clip_norm": 0.5}),
    (of(), of("bf16", "enabled", True), {"policy": BF16, "bucket_nbytes": 10**9}),
    (of("bf16", {"enabled": True}), of("bf16", {"enabled": True, "bf16_master_weights_and_grads": True}),
     {"policy": replace(BF16, master="bf16", master_from="first_values")}),
    (of("bf16", {"enabled": True}), of("bf16", {"enabled": True, "bf16_master_weights_and_grads": True,
                                                "bf16_optimizer_states": True}),
     {"policy": replace(BF16, master="bf16", master_from="first_values", state="bf16")}),
    (of("bf16", {"enabled": True}, stage=1), of("bf16", {"enabled": True}, stage=0),
     {"stage": 0, "policy": replace(BF16, average="sum_then_divide")}),
    (of("bf16", {"enabled": True}), of("communication_data_type", "fp32", bf16={"enabled": True}),
     {"policy": replace(BF16, reduce="fp32"), "bucket_nbytes": 2 * 10**9}),
    (of("bf16", {"enabled": True}), of("data_types", "grad_accum_dtype", "fp32", bf16={"enabled": True}),
     {"policy": replace(BF16, accumulate="fp32")}),
    (of(), of(**HALF), {"policy": FP16, "bucket_nbytes": 10**9}),
    (of(**HALF), of("fp16", {"enabled": True, "loss_scale": 128}),
     {"policy": replace(FP16, loss_scale=loss_scale.Static(128.0))}),
    (of(**HALF), of("fp16", {"enabled": True, "initial_scale_power": 9, "loss_scale_window": 7, "hysteresis": 3,
                             "min_loss_scale": 4}),
     {"policy": replace(FP16, loss_scale=loss_scale.Dynamic("deepspeed", 512.0, 7, 3, smallest=4))}),
    (of(**HALF), of("fp16", {"enabled": True, "fp16_master_weights_and_grads": True}),
     {"policy": replace(FP16, master="fp16", master_from="first_values")}),
    (of(), of(ZERO, "reduce_bucket_size", 5e5), {"bucket_nbytes": 2 * 10**6}),
    (of(), of(ZERO, "stage3_prefetch_bucket_size", 0), {"prefetch": 0}),
    (of(), of(ZERO, "stage3_prefetch_bucket_size", 10), {"prefetch": 1}),
    (of(), of(ZERO, "stage3_prefetch_bucket_size", 2 * LARGEST + 9), {"prefetch": 2}),
    (of(), of(ZERO, "stage3_max_reuse_distance", 0), {"keep_gathered": None}),
    (of(), of(ZERO, "stage3_max_reuse_distance", 2 * SMALL.unit_lengths[-1] + 1),
     {"keep_gathered": ("block1", "head")}),
    (of(), of(ZERO, "offload_optimizer", "device", "cpu"), {"offload": zs.Offload("host")}),
    (of(), of(ZERO, "offload_param", "device", "cpu"), {"offload": zs.Offload(parameters="host")}),
    (of(), of(ZERO, {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"},
                     "offload_param": {"device": "nvme"}}),
     {"offload": zs.Offload("disk", parameters="disk", directory="/scratch")}),
    (of(), of(ZERO, "mics_shard_size", 2), {"mesh": zs.Mesh(2, 2)}),
    (of(), of(ZERO, "zero_hpz_partition_size", 2), {"mesh": zs.Mesh(2, 2), "zeropp": zs.ZeroPlusPlus(hpz=True)}),
    (of(), of("optimizer", {"type": "Adam"}), {"optimizer": ADAM}),
    (of(), of("optimizer", {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.8, 0.9], "eps": 1e-6,
                                                        "weight_decay": 0.1}}),
     {"optimizer": zs.optim.AdamW(2e-3, 0.8, 0.9, 1e-6, 0.1)}),
    (of(), of("optimizer", {"type": "Adam", "params": {"weight_decay": 0.1}}),  # adam_w_mode is the default there
     {"optimizer": zs.optim.AdamW(weight_decay=0.1)}),
    (of(), of("optimizer", {"type": "SGD", "params": {"lr": 0.1}}), {"optimizer": zs.optim.SGD(0.1)}),
    (of(), of("optimizer", {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.8, "nesterov": True}}),
     {"optimizer": zs.optim.Momentum(0.1, 0.8, nesterov=True)}),
    (of(), of("optimizer", {"type": "Lion", "params": {"weight_decay": 0.1}}),
     {"optimizer": zs.optim.Lion(weight_decay=0.1)}),
    (of(), of("optimizer", {"type": "Adagrad"}), {"optimizer": zs.optim.AdaGrad()}),
]


@pytest.mark.parametrize(("base", "config", "expected"), KEYS)
def test_a_key_changes_the_arguments_that_it_names_and_no_others(base, config, expected):
    assert changed(read(config), read(base)) == expected


def test_quantized_collectives_know_the_nodes_by_what_is_passed():
    found = read(of(ZERO, {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}),
                 ranks_per_node=2)
    assert (found.options.mesh, found.options.zeropp) == (zs.Mesh(2, 2), zs.ZeroPlusPlus(False, "int8", "int4"))
    assert found.policy.average == "cast_then_divide"  # owners add in fp32


@pytest.mark.parametrize(("sizes", "ranks", "expected"), [
    ((24, 2, 3), None, (4, 2, 3)), ((24, 2, 3), 4, (4, 2, 3)), ((24, 2, None), 4, (4, 2, 3)),
    ((24, None, 3), 4, (4, 2, 3)), ((24, None, None), 4, (4, 6, 1)), ((None, 2, 3), None, (None, 2, 3)),
    ((None, 2, None), 4, (4, 2, 1))])
def test_ranks_times_micro_batch_times_micro_batches_is_the_batch_and_what_is_missing_follows(sizes, ranks, expected):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = zs.from_deepspeed({name: size for name, size in zip(names, sizes, strict=True) if size}, ranks=ranks)
    assert (found.ranks, found.batch, found.micro_batches) == expected


REFUSED = [
    (of("train_micro_batch_size_per_gpu", "auto"), 'train_micro_batch_size_per_gpu="auto" is filled in by'),
    (of(ZERO, "reduce_bucket_size", "auto"), 'zero_optimization.reduce_bucket_size="auto"'),
    (of("zero_optimisation", {}), "zero_optimisation={} is no key that is known; did you mean 'zero_optimization'?"),
    (of(ZERO, "stge", 1), "zero_optimization.stge=1 is no key that is known; did you mean 'stage'?"),
    (of(ZERO, True), "zero_optimization=True must be an object with keys and values"),
    (of(ZERO, "stage", 4), "zero_optimization.stage=4 must be one of 0, 1, 2, 3"),
    (of(ZERO, "overlap_comm", 1), "zero_optimization.overlap_comm=1 must be true or false"),
    (of(ZERO, "reduce_bucket_size", 0.5), "zero_optimization.reduce_bucket_size=0.5 must be a whole number, 1 or more"),
    (of(ZERO, "allgather_partitions", False), "allgather_partitions=False must be true: updated parameters"),
    (of("gradient_clipping", -1), "gradient_clipping=-1 must be a number, 0 or more"),
    (of("train_batch_size", 10), "train_batch_size=10 must be ranks times...found 4 x 2 x 1"),
    ({ZERO: {"stage": 1}}, "train_batch_size or train_micro_batch_size_per_gpu must be there"),
    (of("fp16", {"enabled": True}, bf16={"enabled": True}), "fp16.enabled and bf16.enabled are both true"),
    (of("fp16", "consecutive_hysteresis", True), "fp16.consecutive_hysteresis=True refills the count"),
    (of("fp16", "initial_scale_power", 2000), "fp16.initial_scale_power=2000: 2 to that power is no number of fp32"),
    (of("fp16", {"enabled": True, "initial_scale_power": 200}), "fp16: ... initial"),
    (of("bf16", {"enabled": True, "bf16_optimizer_states": True}), "bf16.bf16_optimizer_states=True goes with"),
    (of("communication_data_type", "fp8"), "communication_data_type='fp8' must be one of fp32, fp16, bf16"),
    (of("gradient_predivide_factor", 2.0), "gradient_predivide_factor=2.0 must be 1: gradients are divided by N alone"),
    (of("gradient_allreduce_op", "sum"), 'gradient_allreduce_op=\'sum\' must be "mean": a step takes the mean'),
    (of("amp", {"enabled": True}), "amp={'enabled': True}: a policy has formats"),
    (of("activation_checkpointing", {"cpu_checkpointing": True}), "activation_checkpointing=...recompute="),
    (of(ZERO, "zeropp_loco_param", {"err_beta": 0.8}), "zero_optimization.zeropp_loco_param=...feeds no errors back"),
    (of(ZERO, "offload_optimizer", {"device": "cpu", "ratio": 0.5}), "offload_optimizer.ratio=0.5 must be 1"),
    (of(ZERO, "offload_optimizer", "device", "tape"), "device='tape' must be one of none, cpu, nvme"),
    (of(ZERO, "offload_optimizer", "device", "cpu", stage=0), "offload_optimizer.device is of stages 1, 2 and 3"),
    (of(ZERO, "offload_param", "device", "cpu", stage=2), "zero_optimization.offload_param.device is of stage 3"),
    (of(ZERO, "offload_optimizer", "device", "nvme", stage=2), 'offload_optimizer.device="nvme" is of stage 3'),
    (of(ZERO, "offload_param", "device", "nvme"), 'goes with offload_optimizer.device="nvme"'),
    (of(ZERO, "cpu_offload", True), 'zero_optimization.cpu_offload=True: this key is deprecated; write "offload_opt'),
    (of(ZERO, "mics_shard_size", 2, stage=2), "zero_optimization.mics_shard_size=2 is of sharded parameters, stage 3"),
    (of(ZERO, "mics_shard_size", 3), "zero_optimization.mics_shard_size=3 must divide the 4 ranks"),
    (of(ZERO, {"stage": 3, "mics_shard_size": 2, "zero_quantized_weights": True}), "take one of the two"),
    (of(ZERO, "zero_quantized_weights", True), "ZeRO++ needs to know the nodes; pass ranks_per_node="),
    (of("optimizer", {"type": 5}), "optimizer.type=5 must be a text, or null"),
    (of("optimizer", {"type": "OneBitAdam"}), "optimizer.type='OneBitAdam': those that are read are Adam"),
    (of("optimizer", {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}), "added to the gradient"),
    (of("optimizer", {"type": "SGD", "params": {"weight_decay": 0.1}}), "optimizer.params.weight_decay=0.1 of SGD"),
    (of("optimizer", {"type": "AdamW", "params": {"betas": [0.9]}}), "optimizer.params.betas=[0.9] must be two"),
    (of("optimizer", {"type": "AdamW", "params": {"amsgrad": True}}), "optimizer.params.amsgrad=True: no"),
    (of("scheduler", {"type": "OneCycle"}, optimizer={"type": "Adam"}), "scheduler.type='OneCycle': those that"),
    (of("scheduler", {"type": "WarmupLR"}), "scheduler.type='WarmupLR' is of learning rates...write"),
    (of("scheduler", {"type": "WarmupDecayLR"}, optimizer={"type": "Adam"}), "scheduler.params.total_num_steps must"),
    (of("scheduler", {"type": "WarmupLR", "params": {"last_batch_iteration": 0}}, optimizer={"type": "Adam"}),
     "scheduler.params.last_batch_iteration=0 must be -1: a schedule begins with the run"),
    (of("sequence_parallel_size", 2), "sequence_parallel_size=2 must be 1: sequences are not cut here"),
    (of("optimizer", {"type": "SGD", "params": {"dampening": 0.1}}), "optimizer.params.dampening=0.1: a gradient"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_what_has_no_equivalent_is_refused_by_its_name(config, words):
    assert_refused(lambda: read(config), literally(words))


def test_all_that_is_wrong_is_said_at_once_and_a_file_is_named(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(of(ZERO, {"stage": 7, "zenflow": {"topk": 1}})))
    assert_refused(lambda: zs.from_deepspeed(path), r"ds_config\.json cannot be taken over as it is; change or leave "
                   r"out:\n  zero_optimization.stage=7 must.*\n  zero_optimization.zenflow=.*waits for all gradients")
    for text, words in (("[]", "holds list, and a configuration is an object"), ("{", "is no JSON file"),
                        ('{"fp16": {}, "fp16": {}}', "the key 'fp16' stands there twice")):
        path.write_text(text)
        assert_refused(lambda: zs.from_deepspeed(path), words)
    assert_refused(lambda: zs.from_deepspeed(tmp_path / "none.json"), "no configuration can be read from .*none.json")
    for ranks in (0, -1, 2.5, "8", True):
        assert_refused(lambda ranks=ranks: zs.from_deepspeed(of(), ranks=ranks), literally(
            f"ranks={ranks!r} must be a whole number, 1 or more"))
    assert_refused(lambda: zs.from_deepspeed({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}),
                   "train_batch_size=24 is of all ranks together; pass ranks=, or")
    assert_refused(lambda: zs.from_deepspeed(3), "a dict or the path of a JSON file, found 3")
    assert_refused(lambda: read(of(), model=3), "model=3 must be an engine's model, a plan's, or the name of one")


def test_what_changes_nothing_is_ignored_by_name_and_what_is_not_the_same_is_said_by_name():
    found = read(of("activation_checkpointing", {"cpu_checkpointing": False}, wall_clock_breakdown=True,
                    amp={"enabled": False}, zero_optimization={"stage": 1, "contiguous_gradients": True},
                    tensor_parallel={"autotp_size": 0}, sequence_parallel_size=1,
                    optimizer={"type": "SGD", "params": {"dampening": 0.0}},
                    scheduler={"type": "WarmupLR", "params": {"last_batch_iteration": -1}}))
    assert set(found.ignored) == {"activation_checkpointing", "wall_clock_breakdown", "amp", "tensor_parallel",
                                  "optimizer.params.dampening", "zero_optimization.contiguous_gradients"}
    assert any(line.startswith("zero_optimization.use_multi_rank_bucket_allreduce: ") for line in found.differences)
    for key, stage in (("mics_hierarchical_params_gather", 3), ("stage3_allgather_sequential", 3),
                       ("stage3_use_all_reduce_for_fetch_params", 3), ("allgather_bucket_size", 1)):
        at = f"zero_optimization.{key}"
        assert [any(line.startswith(at) for line in read(config).differences)
                for config in (of(stage=stage), of(ZERO, key, True if stage == 3 else 8, stage=stage))] == [False, True]
    assert any("Pass model= for units" in line for line in zs.from_deepspeed(of()).differences)
    assert f"ignored: {', '.join(found.ignored)} different: " in " ".join(str(found).split())
    assert any("stage3_param_persistence_threshold=100000" in line for line in read(of()).differences)
    assert not any("threshold" in line for line in read(of(ZERO, "stage3_param_persistence_threshold", 0)).differences)
    nodes = {size: zs.from_deepspeed(of(ZERO, "zero_quantized_gradients", True, stage=3), ranks=4, ranks_per_node=size)
             for size in (2, 4)}
    assert [any("on one node nothing is quantized" in line for line in one.differences)
            for one in nodes.values()] == [False, True]
    assert [any(line.startswith("mesh: replicas add up") for line in zs.from_fsdp(mesh=mesh).differences)
            for mesh in ((4,), (2, 2))] == [False, True]
    for stage in zs.STAGES:
        sent = read(of(communication_data_type="fp32", bf16={"enabled": True}, stage=stage)).differences
        assert any("is rounded to bf16 before the update there" in line for line in sent) == (stage == 1)
        wide = read(of("data_types", "grad_accum_dtype", "fp32", bf16={"enabled": True}, stage=stage))
        for words in ("refuses that at stage 0", "first takes a step on zero gradients there"):
            assert any(words in line for line in wide.differences) == (stage == 0)


def test_masters_that_are_not_to_begin_as_in_the_program_are_named_among_the_differences():
    for settings in (read(of("bf16", "enabled", True)), zs.from_fsdp(mp_policy={"param_dtype": "bf16"})):
        there = settings.policy.master_from
        assert there == {"DeepSpeed": "compute", "FSDP": "first_values"}[settings.program]
        here = {"compute": "first_values", "first_values": "compute"}[there]
        otherwise = replace(settings, policy=replace(settings.policy, master_from=here))
        assert otherwise.differences == (*settings.differences, f"policy.master_from='{here}': masters begin as "
                                         f"'{there}' there, and have other bits")
        assert replace(otherwise, policy=settings.policy) == settings
        in_fp32 = replace(settings.policy, compute="fp32", master_from=here)
        assert replace(settings, policy=in_fp32).differences == settings.differences


@pytest.mark.parametrize(("kind", "params", "expected"), [
    # Of DeepSpeed's classes with an lr of 0.01, stepped by hand: their factors in steps 1, 2, 3, 6, 9, 30.
    ("WarmupLR", {"warmup_type": "linear", "warmup_num_steps": 4, "warmup_min_lr": 0.002},
     [0.2, 0.2, 0.4, 1.0, 1.0, 1.0]),
    ("WarmupLR", {"warmup_num_steps": 4}, [0.0, 0.0, 0.5, 1.0, 1.0, 1.0]),
    ("WarmupLR", {"warmup_num_steps": 0}, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]),  # 2 there, too
    ("WarmupDecayLR", {"warmup_type": "linear", "warmup_num_steps": 4, "warmup_max_lr": 0.02, "total_num_steps": 12},
     [0.0, 0.0, 0.5, 2.0, 1.25, 0.0]),
    ("WarmupCosineLR", {"warmup_type": "linear", "warmup_num_steps": 4, "total_num_steps": 12, "cos_min_ratio": 0.5,
                        "warmup_min_ratio": 0.5}, [0.0, 0.5, 0.625, 0.9809698831, 0.75, 0.5])])
def test_a_schedule_has_deepspeeds_factors_step_by_step(kind, params, expected):
    config = of("scheduler", {"type": kind, "params": params}, optimizer={"type": "Adam", "params": {"lr": 0.01}})
    schedule = read(config).schedule
    assert [schedule(step) for step in (1, 2, 3, 6, 9, 30)] == pytest.approx(expected, abs=1e-9)


# -- engines and plans ------------------------------------------------------------------------------------------------


WIDE = zs.models.MLP((3, 7, 5, 2), activation="gelu", seed=4)


def trained(settings, model=WIDE, ranks=4, micro_batches=1):
    """The parameters after two steps of an engine of these settings, and the cluster."""
    data = batches(model, ranks, micro_batches, 2)

    def program(rank):
        engine = zs.Engine(rank, model, settings.optimizer or zs.optim.AdamW(), **settings.engine_arguments())
        skipped = [engine.step(step[rank.index]).skipped for step in data]
        return {name: engine.state(name)["parameter"] for name in model.shapes}, skipped

    cluster = zs.Cluster(ranks)
    found, skipped = cluster.run(program)[0]
    assert skipped == [False, False]
    return found, cluster


VARIANTS = {"stage 0": of(stage=0), "stage 1": of(stage=1), "stage 2": of(stage=2), "stage 3": of(),
            "cpu": of(ZERO, "offload_optimizer", "device", "cpu", stage=2),
            "hpz": of(ZERO, "zero_hpz_partition_size", 2),
            "one unit ahead": of(ZERO, {"stage": 3, "stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0,
                                        "reduce_bucket_size": 9})}


def test_settings_make_an_engine_with_their_optimizer_or_a_given_one_whose_step_has_their_micro_batches():
    own = zs.optim.AdamW(2e-3, weight_decay=0.1)
    config = of("gradient_accumulation_steps", 3, optimizer={
        "type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}})
    settings, rng = read(config, model=WIDE), np.random.default_rng(0)
    x, target = rng.standard_normal((4, 6, 3)), rng.standard_normal((4, 6, 2))

    def program(rank, makes, optimizer, by_hand):
        mine = x[rank.index], target[rank.index]
        engine = makes(rank, optimizer)
        engine.step([tuple(part[i:i + 2] for part in mine) for i in (0, 2, 4)] if by_hand
                    else settings.micro_batches_of(*mine))
        return engine.optimizer, np.concatenate([engine.state(name)["master"].reshape(-1) for name in WIDE.shapes])

    def made(makes, optimizer, *, by_hand=False):
        return zs.Cluster(4).run(program, makes, optimizer, by_hand)[0]

    def plain(rank, optimizer):
        return zs.Engine(rank, WIDE, optimizer, **settings.engine_arguments())

    sgd = zs.optim.SGD(lr=0.1)
    for asked, expected in ((None, own), (sgd, sgd)):
        optimizer, weights = made(lambda rank, optimizer: settings.engine(rank, WIDE, optimizer), asked)
        assert optimizer == expected
        assert np.array_equal(weights, made(plain, expected, by_hand=True)[1])
    unsaid = zs.from_fsdp(mesh=(4,))
    assert [len(x) for x, _ in unsaid.micro_batches_of(x[0], target[0])] == [6]
    for call, words in (
            (lambda: zs.Cluster(2).run(lambda rank: settings.engine(rank, WIDE)), "are of 4 ranks, and the program "
             r"runs on 2; run it on zs.Cluster\(4\), or read the settings for 2"),
            (lambda: zs.Cluster(4).run(lambda rank: unsaid.engine(rank, WIDE)), "of FSDP name no optimizer; pass one"),
            (lambda: zs.Cluster(4).run(lambda rank: settings.engine(rank, WIDE).step(x[0], target[0])), "accumulate gra"
             "dients over 3 micro-batches, and step.. was handed 1; hand it settings.micro_batches_of"),
            (lambda: settings.micro_batches_of(x[0][:5], target[0]), "takes 3 x 2 samples of a rank, found x of 5 and "
             "targets of 6"),
            (lambda: unsaid.micro_batches_of(x[0], target[0][1:]), "found x of 6 and targets of 5")):
        assert_refused(call, words)


def test_the_engines_of_all_configurations_train_to_the_same_bits_in_bf16_if_their_masters_begin_alike():
    """4 ranks: where the mean divides, by a power of two, changes no bit."""
    found = {name: trained(read(config | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
                                model=WIDE))[0] for name, config in VARIANTS.items()}
    fsdp = {"mesh": (4,), "mp_policy": {"param_dtype": "bfloat16"}}
    root, kept = zs.from_fsdp(**fsdp, root_units=("layer2",)), zs.from_fsdp(**fsdp, reshard_after_forward=False)
    found |= {name: trained(replace(one, policy=replace(one.policy, master_from="compute")))[0]
              for name, one in (("FSDP", root), ("kept", kept))}
    first = found["stage 0"]
    for name, weights in found.items():
        assert all(np.array_equal(weights[key], first[key]) for key in first), name
    own = trained(root)[0]
    assert all(np.array_equal(own[key], weights) for key, weights in trained(kept)[0].items())
    assert not any(np.array_equal(own[key], first[key]) for key in first if key.endswith("weight"))


@pytest.mark.parametrize("settings", [
    read(of(ZERO, {"stage": 3, "stage3_max_reuse_distance": 0}, bf16={"enabled": True}, optimizer={"type": "AdamW"})),
    read(of(stage=2, fp16={"enabled": True, "initial_scale_power": 4}, communication_data_type="fp32")),
    read(of(ZERO, "mics_shard_size", 2, zero_optimization={"stage": 3, "stage3_max_reuse_distance": 0})),
    zs.from_fsdp(mesh=(4,), mp_policy={"param_dtype": "bf16", "reduce_dtype": "fp32"}, reshard_after_forward=True),
    zs.from_fsdp(mesh=(4,), sharding_strategy="NO_SHARD")], ids=lambda settings: f"{settings.program} {settings.stage}")
def test_the_plan_of_the_settings_counts_the_bytes_that_their_engine_sends(settings):
    asked = settings.plan_arguments() | {"runtime": "zerosim"}  # FSDP itself does not gather its root again
    (row,) = zs.plan(SMALL, sequence=4, recompute="none", **asked).rows
    _, cluster = trained(settings, measured.decoder_of(SMALL, 4))
    in_two_steps = sum(cluster.trace[0].sent_nbytes(purpose) for purpose in ("parameters", "gradients", "control"))
    assert (row.stage, 2 * row.sent_nbytes_per_step) == (settings.stage, in_two_steps)


# -- FSDP -------------------------------------------------------------------------------------------------------------


def torch_like(name, **values):
    """An object of a class of that name with these fields, as torch's dataclasses are."""
    return type(name, (), {"__init__": lambda self: self.__dict__.update(values)})()


PREMULTIPLIED = zs.Policy(accumulate="fp32", average="premultiply")


@pytest.mark.parametrize(("arguments", "expected"), [
    ({}, {}),
    ({"mesh": (8,)}, {"ranks": 8}),
    ({"mesh": SimpleNamespace(shape=(2, 4))}, {"ranks": 8, "mesh": zs.Mesh(2, 4)}),
    ({"root_units": ("embed", "head")}, {"keep_gathered": ("embed", "head")}),
    ({"root_units": ("embed",), "reshard_after_forward": True}, {}),
    ({"reshard_after_forward": False}, {"keep_gathered": "all"}),
    ({"reshard_after_forward": 4, "mesh": (8,)}, {"ranks": 8, "mesh": zs.Mesh(2, 4),
                                                  "zeropp": zs.ZeroPlusPlus(hpz=True)}),
    ({"prefetch": 3}, {"prefetch": 3}),
    ({"mp_policy": torch_like("MixedPrecisionPolicy", param_dtype="torch.bfloat16", reduce_dtype="torch.float32",
                              output_dtype=None, cast_forward_inputs=True)},
     {"policy": zs.Policy("bf16", "fp32", accumulate="fp32", average="premultiply")}),
    ({"mp_policy": {"param_dtype": "bfloat16", "output_dtype": "float32"}},
     {"policy": zs.Policy("bf16", accumulate="fp32", average="premultiply", output="fp32")}),
    ({"mp_policy": {"param_dtype": "float16"}}, {"policy": zs.Policy("fp16", accumulate="fp32", average="split")}),
    ({"mp_policy": {"param_dtype": "bf16", "keep_low_precision_grads": True}},
     {"policy": zs.Policy("bf16", accumulate="bf16", average="premultiply")}),
    ({"offload_policy": torch_like("CPUOffloadPolicy", pin_memory=True)},
     {"offload": zs.Offload("host", "host", "host")}),
    ({"offload_policy": torch_like("OffloadPolicy")}, {}),
    ({"sharding_strategy": "FULL_SHARD"}, {"policy": zs.Policy(accumulate="fp32", average="split")}),
    ({"sharding_strategy": SimpleNamespace(name="SHARD_GRAD_OP")},
     {"policy": zs.Policy(accumulate="fp32", average="split"), "keep_gathered": "all"}),
    ({"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 4)},
     {"policy": zs.Policy(accumulate="fp32", average="split"), "ranks": 8, "mesh": zs.Mesh(2, 4)}),
    ({"sharding_strategy": "NO_SHARD"},
     {"policy": zs.Policy(accumulate="fp32", average="split"), "stage": 0, "prefetch": 0}),
])
def test_an_argument_of_fully_shard_changes_the_arguments_that_it_names_and_no_others(arguments, expected):
    base = zs.from_fsdp()
    assert (base.stage, base.options.prefetch, base.policy) == (3, 1, PREMULTIPLIED)
    assert changed(zs.from_fsdp(**arguments), base) == expected


@pytest.mark.parametrize(("arguments", "words"), [
    ({"reshard_after_forwards": True}, "reshard_after_forwards=True is no key that is known; did you mean"),
    ({"shard_placement_fn": len}, "shard_placement_fn=...along no dimension"),
    ({"ignored_params": {1}},
     "ignored_params={1}: every parameter is sharded here; a Group with frozen=True freezes some"),
    ({"dp_mesh_dims": "dp"}, "dp_mesh_dims='dp': ...pass mesh=(2, 4)"),
    ({"reshard_after_forward": 3, "mesh": (8,)}, "reshard_after_forward=3 must divide the ranks"),
    ({"reshard_after_forward": "yes"}, "reshard_after_forward='yes' must be True, False, None or a number of ranks"),
    ({"mesh": (2, 2, 2)}, "mesh=(2, 2, 2) must be a mesh's shape"),
    ({"offload_policy": True}, 'offload_policy=True must be a CPUOffloadPolicy, as CPUOffloadPolicy(), or "cpu"'),
    ({"mp_policy": {"param_dtype": "float8_e4m3fn"}}, "mp_policy.param_dtype='float8_e4m3fn' must be one of fp32"),
    ({"mp_policy": {"param_dtyp": "bf16"}}, "mp_policy.param_dtyp='bf16' is no key that is known; did you mean"),
    ({"mp_policy": {"param_dtype": "bf16", "cast_forward_inputs": False}}, "mp_policy.cast_forward_inputs=False"),
    ({"root_units": "head"}, "root_units='head' must be names of units, as (\"embed\", \"head\")"),
    ({"sharding_strategy": []}, "sharding_strategy=[] is no sharding strategy"),
    ({"mp_policy": 3}, "this configuration of FSDP cannot be taken over as it is; change or leave out:\n  mp_policy=3 "
     "has no fields; write MixedPrecisionPolicy(param_dtype=torch.bfloat16), or {\"param_dtype\": \"bf16\"}$"),
    ({"mp_policy": type("MixedPrecisionPolicy", (), {})}, "out:\n  mp_policy=MixedPrecisionPolicy is a class; write "
     "MixedPrecisionPolicy(param_dtype=torch.bfloat16), or {\"param_dtype\": \"bf16\"}$"),
    ({"offload_policy": type("CPUOffloadPolicy", (), {})}, "a CPUOffloadPolicy, as CPUOffloadPolicy(), or \"cpu\""),
    ({"sharding_strategy": "FULL"}, "sharding_strategy='FULL' is no sharding strategy; choose one of FULL_SHARD"),
    ({"sharding_strategy": "HYBRID_SHARD"}, "sharding_strategy='HYBRID_SHARD' needs to know the nodes"),
    ({"sharding_strategy": "FULL_SHARD", "mesh": (2, 4)}, "goes with a mesh of 1 dimension, found mesh=(2, 4)"),
    ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": True}, "leave reshard_after_forward out"),
    ({"backward_prefetch": "BACKWARD_PRE"}, "backward_prefetch='BACKWARD_PRE': write prefetch="),
])
def test_an_argument_without_equivalent_is_refused_by_its_name(arguments, words):
    assert_refused(lambda: zs.from_fsdp(**arguments), literally(words))


# -- there and back ---------------------------------------------------------------------------------------------------


BOTH_ON_HOST = "optimizer=host+parameters=host"
SETTINGS = [(stage, prefetch, offload) for stage, prefetch, offload in (
    (0, 0, "none"), (1, 0, "optimizer=host"), (2, 0, "none"), (2, 0, "host"), (3, 0, BOTH_ON_HOST), (3, 1, "none"),
    (3, 2, "optimizer=disk+parameters=disk"), (3, 2, "host"))]


def planned(runtime, stage, prefetch, offload, compute):
    """A plan's configuration and row, and what is pasted of them; no text where the program has no settings."""
    config = plan_config(SMALL, ranks=4, compute=compute, sequence=4, batch=2, micro_batches=3, stage=stage,
                         recompute="none", runtime=runtime, prefetch=prefetch, offload=offload)
    row = config.plan().rows[0]
    said = tuned_settings.unsaid(config, stage, row.recompute) is None
    return config, row, tuned_settings.pasted(config, row).code if said else ""


def planned_again(config, found):
    """The row of the plan that settings say when they are read back."""
    return zs.plan(SMALL, sequence=4, recompute="none", **{
        "ranks": 4, "batch": 2, "micro_batches": 3, **found.plan_arguments()}).rows[0]


@pytest.mark.parametrize(("stage", "prefetch", "offload"), [one for one in SETTINGS if one[2] != "host"], ids=str)
@pytest.mark.parametrize("compute", ["fp32", "bf16", zs.Policy("bf16", reduce="fp32", accumulate="fp32")], ids=str)
def test_settings_that_were_written_for_deepspeed_read_back_give_the_same_row(stage, prefetch, offload, compute):
    config, row, code = planned("deepspeed", stage, min(1, prefetch), offload, compute)
    found = zs.from_deepspeed(json.loads(code), model=SMALL)
    assert (found.ranks, found.batch, found.micro_batches) == (4, 2, 3)
    assert planned_again(config, found) == row
    assert found.options.offload.text == offload
    zero, itemsize = json.loads(code)["zero_optimization"], config.policy.compute_dtype.itemsize
    held = {one.what: one.nbytes for one in row.held}
    buckets = (0, 2, 2, 1)[stage]  # two where reductions overlap, but for stage 3's
    assert held.get("of gradients to reduce", 0) == buckets * zero["reduce_bucket_size"] * itemsize
    ahead = min(zero.get("stage3_prefetch_bucket_size", 0), SMALL.parameters)
    assert held.get("parameters on their way", 0) == pytest.approx(ahead * itemsize, rel=0.01)  # padded
    if stage == 3:
        most = zero["stage3_param_persistence_threshold"]
        whole = sum(one.parameters for one in SMALL.tensors if one.parameters <= most)
        assert held["small tensors, whole"] == whole * itemsize


@pytest.mark.parametrize(("stage", "prefetch", "offload"), SETTINGS, ids=str)
def test_settings_that_were_written_for_the_engine_are_its_options(stage, prefetch, offload):
    config, _, code = planned("zerosim", stage, prefetch, offload, "bf16")
    seen = {}
    exec(code, {"rank": None, "zs": SimpleNamespace(
        models=zs.models, optim=zs.optim, Policy=zs.Policy, Engine=lambda *_, **options: seen.update(options))})
    options = config.options
    assert seen == {"stage": stage, "policy": config.policy, "recompute": "tiled", "overlap": True,
                    "prefetch": prefetch} | ({} if options.offload.is_none else {"offload": options.offload.text})


@pytest.mark.parametrize(("stage", "prefetch", "offload"), [
    one for one in SETTINGS if one[0] > 1 and one[2] in ("none", "host")], ids=str)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_settings_that_were_written_for_fsdp_read_back_give_the_same_row(stage, prefetch, offload, compute):
    config, row, code = planned("fsdp2", stage, prefetch, offload, compute)
    seen, ahead = [], []
    block = SimpleNamespace(set_modules_to_forward_prefetch=lambda those: ahead.append(len(those)),
                            set_modules_to_backward_prefetch=lambda those: None)
    exec(code, {
        "torch": SimpleNamespace(bfloat16="torch.bfloat16", float32="torch.float32"), "blocks": [block] * 4,
        "model": SimpleNamespace(), "MixedPrecisionPolicy": lambda **fields: fields,
        "CPUOffloadPolicy": lambda: torch_like("CPUOffloadPolicy"),
        "fully_shard": lambda module, **options: seen.append(options)})
    assert len(seen) == 5
    found = zs.from_fsdp(mesh=(4,), prefetch=max(ahead, default=1), **seen[0])
    assert (found.stage, found.keep_gathered) == (3, None if stage == 3 else "all")
    assert planned_again(config, found) == row
