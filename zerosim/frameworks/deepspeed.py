"""DeepSpeed's configuration, ds_config.json, as arguments of an engine and of a plan.

What a key does there, and its default, is as DeepSpeed's documentation "DeepSpeed Configuration JSON" and its source
have it (``deepspeed/runtime/config.py``, ``constants.py``, ``engine.py``, ``precision_config.py``, ``zero/config.py``,
``zero/offload_config.py``, ``zero/stage_1_and_2.py``, ``comm/coalesced_collectives.py``, ``lr_schedules.py``; version
0.19.8, 2026). MiCS's keys are those of versions up to 0.19.6. What is not taken, and why, stands in ``deepspeed.toml``.

Legend: N ranks, B samples of a rank's micro-batch, k micro-batches of a step; sizes of buckets there are numbers of
elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerosim.frameworks.settings import (
    MASTER_FROM,
    Findings,
    FrameworkSettings,
    Section,
    choice,
    count,
    flag,
    format_or_none,
    number,
    text_or_none,
)
from zerosim.models.units import Model
from zerosim.numerics.checks import is_count, is_number, require_count
from zerosim.numerics.files import facts, json_of
from zerosim.numerics.loss_scale import Dynamic, Static
from zerosim.numerics.places import DEVICE, DISK, HOST, NOTHING, Offload
from zerosim.numerics.policy import FIRST_VALUES, Policy
from zerosim.numerics.quantization import ZeroPlusPlus
from zerosim.optim import SGD, AdaGrad, Adam, AdamW, Lion, Momentum, Optimizer
from zerosim.options import StepOptions
from zerosim.planning.closed_forms import STAGES, ShardedStates
from zerosim.planning.runtimes import PERSISTENCE_THRESHOLD, PREFETCH_BUCKET, REDUCE_BUCKET
from zerosim.planning.shapes import ModelShape, model_shape
from zerosim.ranks.mesh import Mesh

Sized = Model | ModelShape | str

ON_DISK_ONLY = ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write",
                "fast_init", "convert_grad_on_cpu", "cpuadam_cores_perc")
PLACES = {"none": DEVICE, "cpu": HOST, "nvme": DISK}


def from_deepspeed(config: str | Path | Mapping[str, Any], *, model: Sized | None = None, ranks: int | None = None,
                   ranks_per_node: int | None = None) -> FrameworkSettings:
    """The settings of a ds_config, a dict or the path of its JSON file, in zerosim's terms.

    ``model``, an engine's or a plan's, turns numbers of elements into units; ``ranks`` is N, where the three batch
    sizes do not say it, and ``ranks_per_node`` those that are near each other, for ZeRO++. Raises ValueError that names
    every key with an unknown name, a value that cannot be, "auto", or no equivalent here.

    >>> found = from_deepspeed({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}, ranks=8)
    >>> found.stage, found.batch, found.micro_batches, found.policy.average
    (2, 2, 1, 'divide_then_sum')
    """
    for argument, value in {"ranks": ranks, "ranks_per_node": ranks_per_node}.items():
        require_count(argument, value, 1, none="where the configuration says it")
    given, name = _read(config)
    findings = Findings()
    top = Section(given, "", findings)
    zero = top.section("zero_optimization")
    states = STAGES[stage := zero.take("stage", 0, _stage)]
    n, batch, micro_batches = _batch_sizes(top, ranks, findings)
    mesh, zeropp = _mesh(zero, states, n, ranks_per_node, findings)
    policy = _policy(top, zero, states, zeropp, findings)
    optimizer = _optimizer(top.section("optimizer"), findings)
    schedule = _schedule(top.section("scheduler"), optimizer, findings)
    clip_norm = top.take("gradient_clipping", 0.0, number) or None
    if clip_norm:
        findings.differ("gradient_clipping: the norm is enlarged by 1e-6 there before the gradient is divided by it")
    overlap, places = zero.take("overlap_comm", states.parameters_sharded, flag), _offload(zero, states, findings)
    bucket, ahead, kept = _sizes(zero, model, states, findings)
    settings = FrameworkSettings(
        "DeepSpeed", stage, policy, n, batch, micro_batches, optimizer, schedule, clip_norm, kept, StepOptions(
            bucket_nbytes=bucket * policy.reduce_dtype.itemsize, overlap=overlap, prefetch=ahead, offload=places,
            mesh=mesh, zeropp=zeropp))
    top.take("gradient_allreduce_op", "mean", _only("mean", "a step takes the mean gradient"))
    top.take("sequence_parallel_size", 1, _only(1, "sequences are not cut here"))
    others = facts(__package__, "deepspeed")
    zero.close(**others["zero_optimization"])
    top.close(**others["top"])
    findings.raise_refusals(name)
    return findings.noted(settings)


def _read(config: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The configuration and its name in errors; ValueError for a file that holds no configuration, or a key twice."""
    if isinstance(config, Mapping):
        return config, "this configuration of DeepSpeed"
    if not isinstance(config, str | Path):
        raise ValueError(f"a configuration of DeepSpeed is a dict or the path of a JSON file, found {config!r}")
    try:
        given = json_of(Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"no configuration can be read from {str(config)!r}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{str(config)!r} is no JSON file of a configuration: {error}") from None
    if not isinstance(given, Mapping):
        raise ValueError(f"{str(config)!r} holds {type(given).__name__}, and a configuration is an object with keys")
    return given, str(config)


def _stage(value: Any) -> int:
    if not is_count(value) or value not in STAGES:
        raise ValueError(f"must be one of {', '.join(map(str, STAGES))}")
    return int(value)


def _only(usual: Any, reason: str) -> Callable[[Any], Any]:
    """A check for a setting of which one value alone has an equivalent."""
    def check(value: Any) -> Any:
        if value != usual:
            raise ValueError(f"must be {json.dumps(usual)}: {reason}")
        return usual
    return check


# -- the batch --------------------------------------------------------------------------------------------------------


def _batch_sizes(top: Section, ranks: int | None, findings: Findings) -> tuple[int | None, int | None, int | None]:
    """N, B and k: train_batch_size = N·B·k, of which what is missing follows, as in DeepSpeed."""
    total, batch, steps = (top.take(key, None, count(1)) for key in (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    if total is None:
        if batch is None and not findings.refusals:
            findings.refuse("train_batch_size or train_micro_batch_size_per_gpu must be there: a step is of so many "
                            "samples")
        return ranks, batch, steps or 1
    if ranks is None and batch and steps and total % (batch * steps) == 0:
        return total // (batch * steps), batch, steps
    if ranks is None:
        findings.refuse(f"train_batch_size={total} is of all ranks together; pass ranks=, or write the two other sizes "
                        "of the batch, which multiply with the ranks to it")
        return None, batch, steps
    if batch is None:
        steps = steps or 1
        batch = total // (ranks * steps)
    steps = steps or total // (ranks * batch)
    if ranks * batch * steps != total:
        findings.refuse(f"train_batch_size={total} must be ranks times train_micro_batch_size_per_gpu times "
                        f"gradient_accumulation_steps, found {ranks} x {batch} x {steps}")
    return ranks, batch, steps


# -- numbers ----------------------------------------------------------------------------------------------------------


def _policy(top: Section, zero: Section, states: ShardedStates, zeropp: ZeroPlusPlus | None,
            findings: Findings) -> Policy:
    """The formats, the loss scale, and where the mean over ranks divides."""
    fp16, bf16 = top.section("fp16"), top.section("bf16")
    enabled = {"fp16": fp16.take("enabled", False, flag), "bf16": bf16.take("enabled", False, flag)}
    if all(enabled.values()):
        findings.refuse("fp16.enabled and bf16.enabled are both true; a step computes in one format")
    compute = next((name for name, is_on in enabled.items() if is_on), "fp32")
    scaling = _loss_scale(fp16, findings)
    narrow = [fp16.take("fp16_master_weights_and_grads", False, flag) and enabled["fp16"],
              bf16.take("bf16_master_weights_and_grads", False, flag) and enabled["bf16"]]
    narrow_state = bf16.take("bf16_optimizer_states", False, flag) and enabled["bf16"]
    if narrow_state and not any(narrow):
        findings.refuse("bf16.bf16_optimizer_states=True goes with bf16_master_weights_and_grads; set both")
    fp16.close(("auto_cast", "fused_mode"))
    bf16.close(("immediate_grad_update", "check_grad_overflow"))
    types = top.section("data_types")
    accumulate = types.take("grad_accum_dtype", None, format_or_none)
    types.close(no_equivalent={"param_dtype": "parameters rest in the format of compute",
                               "buffer_dtype": "there are no buffers here"})
    if compute == "bf16" and accumulate == "fp32" and not states.optimizer_sharded:
        findings.differ("data_types.grad_accum_dtype='fp32': bf16 gradients add up in fp32 here; DeepSpeed refuses "
                        "that at stage 0 from version 0.17.6 on, and takes it at stages 1 to 3")
    if compute != "fp32" and not states.optimizer_sharded:
        findings.differ("zero_optimization.stage=0: in 16 bits every optimizer but FusedAdam first takes a step on "
                        "zero gradients there, which counts in bias correction and decays weights")
    reduce = top.take("communication_data_type", None, format_or_none)
    if reduce not in (None, compute) and states.optimizer_sharded and not states.gradients_sharded:
        findings.differ(f"communication_data_type={reduce!r}: the reduced gradient is rounded to {compute} before the "
                        f"update there; at stage 1 it stays in {reduce} here")
    master = compute if any(narrow) else "fp32"
    return Policy(compute, reduce=reduce, accumulate=accumulate, average=_average(top, zero, states, zeropp, findings),
                  loss_scale=scaling if enabled["fp16"] else 1.0, master=master,
                  master_from=FIRST_VALUES if compute == master else MASTER_FROM["DeepSpeed"],
                  state="bf16" if narrow_state else "fp32")


def _loss_scale(fp16: Section, findings: Findings) -> Dynamic | Static:
    scale = fp16.take("loss_scale", 0.0, number)
    power, window = fp16.take("initial_scale_power", 16, count()), fp16.take("loss_scale_window", 1000, count(1))
    hysteresis, least = fp16.take("hysteresis", 2, count(1)), fp16.take("min_loss_scale", 1.0, number)
    if fp16.take("consecutive_hysteresis", False, flag):
        findings.refuse("fp16.consecutive_hysteresis=True refills the count of overflows on every good step, and here "
                        "growth alone refills it")
    try:
        return Static(scale) if scale else Dynamic("deepspeed", 2.0**power, window, hysteresis, smallest=least)
    except OverflowError:
        findings.refuse(f"fp16.initial_scale_power={power}: 2 to that power is no number of fp32")
    except ValueError as error:
        findings.refuse(f"fp16: {error}")
    return Static()


def _average(top: Section, zero: Section, states: ShardedStates, zeropp: ZeroPlusPlus | None,
             findings: Findings) -> str:
    """The rule of the mean: ZeRO's stages divide before they add, unless all ranks reduce the whole gradient."""
    scatters = zero.take("reduce_scatter", True, flag)
    multi_rank = zero.take("use_multi_rank_bucket_allreduce", True, flag)
    prescaled = top.take("prescale_gradients", False, flag)
    top.take("gradient_predivide_factor", 1.0, _only(1, "gradients are divided by N alone"))
    if states.optimizer_sharded and not states.parameters_sharded and (multi_rank or not scatters):
        name = "use_multi_rank_bucket_allreduce" if scatters else "reduce_scatter"
        findings.differ(f"zero_optimization.{name}: ranks all-reduce whole buckets of gradients there, and keep their "
                        "part; here they are reduce-scattered, which sends half as much")
    if zeropp is not None and zeropp.quantized_gradients:
        return "cast_then_divide"
    before = states.parameters_sharded or (states.optimizer_sharded and scatters) or prescaled
    return "divide_then_sum" if before else "sum_then_divide"


# -- where state rests ------------------------------------------------------------------------------------------------


def _offload(zero: Section, states: ShardedStates, findings: Findings) -> Offload:
    """The places of the optimizer's state and of parameters."""
    places, folders = {}, {}
    for kind, is_sharded, stages in (("optimizer", states.optimizer_sharded, "stages 1, 2 and 3"),
                                     ("param", states.parameters_sharded, "stage 3")):
        section = zero.section(f"offload_{kind}")
        places[kind] = PLACES[section.take("device", "none", choice(*PLACES))]
        folders[kind] = section.take("nvme_path", None, text_or_none)
        section.take("ratio", 1.0, _only(1, "a rank's optimizer state rests in one place here"))
        section.close(ON_DISK_ONLY, {"super_offload": "there are no superchips here"})
        if places[kind] != DEVICE and not is_sharded:
            findings.refuse(f"{section.prefix}device is of {stages}")
            places[kind] = DEVICE
        elif places[kind] == DISK and not states.parameters_sharded:
            findings.refuse(f"{section.prefix}device=\"nvme\" is of stage 3")
    if places["param"] == DISK and places["optimizer"] != DISK:
        findings.refuse("zero_optimization.offload_param.device=\"nvme\" goes with offload_optimizer.device=\"nvme\" "
                        "here: an update that fails half-way must leave either none or all of it new")
        return NOTHING
    if places["optimizer"] != DEVICE:
        findings.differ("zero_optimization.offload_optimizer: reduced gradients go to the host there as they come, and "
                        "rest on the device here until the update")
    on_disk = DISK in places.values()
    return Offload(places["optimizer"], parameters=places["param"],
                   directory=(folders["optimizer"] or folders["param"]) if on_disk else None)


def _mesh(zero: Section, states: ShardedStates, ranks: int | None, ranks_per_node: int | None,
          findings: Findings) -> tuple[Mesh | None, ZeroPlusPlus | None]:
    """Nodes by ranks of a node, of MiCS (hybrid sharding) or of ZeRO++."""
    mics = zero.take("mics_shard_size", -1, lambda size: -1 if size == -1 else count(1)(size))
    if zero.take("mics_hierarchical_params_gather", False, flag):
        findings.differ("zero_optimization.mics_hierarchical_params_gather: shards are gathered by one ring here")
    hpz = zero.take("zero_hpz_partition_size", 1, count())
    weights = zero.take("zero_quantized_weights", False, flag)
    gradients = zero.take("zero_quantized_gradients", False, flag)
    size, asked = (mics, "mics_shard_size") if mics > 0 else (hpz, "zero_hpz_partition_size") if hpz > 1 else (
        ranks_per_node, "ranks_per_node")
    plus = ZeroPlusPlus(hpz > 1, "int8" if weights else None, "int4" if gradients else None)
    if mics <= 0 and plus == ZeroPlusPlus():
        return None, None
    name = f"zero_optimization.{asked}={size}" if asked != "ranks_per_node" else "ZeRO++"
    if not states.parameters_sharded:
        findings.refuse(f"{name} is of sharded parameters, stage 3")
    elif mics > 0 and plus != ZeroPlusPlus():
        findings.refuse(f"{name}: MiCS replicates shards, and ZeRO++ cuts them among all ranks; take one of the two")
    elif ranks is None or size is None:
        missing = "ranks=" if ranks is None else "ranks_per_node=, the GPUs of a node"
        findings.refuse(f"{name} needs to know the nodes; pass {missing}")
    elif ranks % size:
        findings.refuse(f"{name} must divide the {ranks} ranks")
    else:
        if weights or gradients:
            findings.differ("zero_optimization.zero_quantized_...: 256 elements share a scale here")
        if gradients and ranks == size:
            findings.differ("zero_optimization.zero_quantized_gradients: on one node nothing is quantized there")
        if hpz > 1:
            findings.differ("zero_optimization.zero_hpz_partition_size: units are gathered across nodes once after "
                            "each update here, and in every forward there")
        return Mesh(ranks // size, size), None if mics > 0 else plus
    return None, None


# -- sizes, which are numbers of elements there -----------------------------------------------------------------------


def _sizes(zero: Section, model: Sized | None, states: ShardedStates,
           findings: Findings) -> tuple[int, int, tuple[str, ...] | None]:
    """Elements of a bucket, units ahead, and the units that stay gathered."""
    bucket = zero.take("reduce_bucket_size", REDUCE_BUCKET, count(1))
    findings.differ(f"zero_optimization.reduce_bucket_size={bucket}: a plan sends units, and counts the default")
    all_gather = zero.take("allgather_bucket_size", REDUCE_BUCKET, count(1))
    if states.gathers_after_update and all_gather != bucket:
        findings.differ(f"zero_optimization.allgather_bucket_size={all_gather}: one size is for both here, that of "
                        "reduce_bucket_size")
    zero.take("allgather_partitions", True, _only(True, "updated parameters are all-gathered here"))
    ahead = zero.take("stage3_prefetch_bucket_size", PREFETCH_BUCKET, count())
    reuse = zero.take("stage3_max_reuse_distance", 1_000_000_000, count())
    whole = zero.take("stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD, count())
    for key in ("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"):
        if zero.take(key, False, flag):
            findings.differ(f"zero_optimization.{key}: a unit is gathered by one all-gather here")
    if not states.parameters_sharded:
        return bucket, 0, None
    if whole:
        findings.differ(f"zero_optimization.stage3_param_persistence_threshold={whole}: smaller parameters rest whole "
                        "on every rank there; here all are sharded")
    if model is None:
        findings.differ("zero_optimization.stage3_prefetch_bucket_size: one unit ahead where it is not 0; "
                        "stage3_max_reuse_distance: none stays gathered. Pass model= for units of so many elements")
        return bucket, min(ahead, 1), None
    units = _units(model)
    kept = _kept(units, reuse)
    if kept and not isinstance(model, Model):
        findings.differ(f"zero_optimization.stage3_max_reuse_distance={reuse}: {', '.join(kept)} stay gathered from "
                        "forward to backward; a plan gathers them again")
    nearest = max(1, round(ahead / max(*units.values(), 1)))  # number of largest units
    return bucket, min(len(units) - 1, nearest) if ahead else 0, kept or None


def _units(model: Sized) -> dict[str, int]:
    """Elements of each unit, by name."""
    shape = model_shape(model) if isinstance(model, str) else model
    if isinstance(shape, Model):
        return {unit.name: unit.parameter_count for unit in shape.units}
    if isinstance(shape, ModelShape):
        return {unit.name: unit.parameters for unit in shape.units}
    raise ValueError(f"model={model!r} must be an engine's model, a plan's, or the name of one")


def _kept(units: Mapping[str, int], distance: int) -> tuple[str, ...]:
    """The units that backward uses again before ``distance`` elements of others were used."""
    found, after = [], 0
    for name, elements in reversed(tuple(units.items())):
        if 2 * after < distance:
            found.append(name)
        after += elements
    return tuple(reversed(found))


# -- optimizer and schedule -------------------------------------------------------------------------------------------


def _optimizer(section: Section, findings: Findings) -> Optimizer | None:
    """The optimizer, or None where the program makes one itself."""
    asked = section.take("type", None, text_or_none)
    params = section.section("params")
    section.close(("legacy_fusion",))
    if asked is None:
        params.close()
        return None
    name = asked.lower()
    if name not in ("adam", "adamw", "sgd", "lion", "adagrad"):
        findings.refuse(f"optimizer.type={asked!r}: those that are read are Adam, AdamW, SGD, Lion and Adagrad; leave "
                        "it out and give the engine one of zs.optim's")
        return None
    lr = params.take("lr", 1e-2 if name == "adagrad" else 1e-4 if name == "lion" else 1e-3, number)
    weight_decay = params.take("weight_decay", 0.0, number)
    no_effect = ("torch_adam", "fused", "foreach", "maximize_memory")
    if name in ("adam", "adamw"):
        beta1, beta2 = params.take("betas", (0.9, 0.999), _betas)
        decoupled = params.take("adam_w_mode", True, flag) or name == "adamw"
        epsilon = params.take("eps", 1e-8, number)
        params.take("bias_correction", True, _only(True, "the bias of the moments is corrected here"))
        params.close(no_effect, {"amsgrad": "no largest second moment is kept here"})
        if weight_decay and not decoupled:
            findings.refuse(f"optimizer.params.weight_decay={weight_decay} with adam_w_mode=False is added to the "
                            "gradient; here weights decay apart from it, as AdamW's")
        return AdamW(lr, beta1, beta2, epsilon, weight_decay) if weight_decay else Adam(lr, beta1, beta2, epsilon)
    if name == "lion":
        beta1, beta2 = params.take("betas", (0.9, 0.99), _betas)
        params.close(no_effect)
        return Lion(lr, beta1, beta2, weight_decay)
    if weight_decay:
        findings.refuse(f"optimizer.params.weight_decay={weight_decay} of {asked} is added to the gradient; here it is "
                        "not, so leave it out")
    if name == "adagrad":
        epsilon = params.take("eps", 1e-10, number)
        params.close(no_effect)
        return AdaGrad(lr, epsilon)
    momentum, nesterov = params.take("momentum", 0.0, number), params.take("nesterov", False, flag)
    params.close(no_effect, {"dampening": "a gradient enters the moment whole"})
    return Momentum(lr, momentum, nesterov) if momentum else SGD(lr)


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(is_number(b) and 0 <= b < 1 for b in value):
        raise ValueError("must be two numbers, from 0 to below 1")
    return value[0], value[1]


@dataclass(frozen=True, slots=True)
class WarmupSchedule:
    """DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR as factors of the optimizer's lr.

    The factor rises from ``low`` to ``high`` in ``warmup`` steps, logarithmically or linearly; then it stays, or falls
    until ``total``, linearly to ``low`` or along half a cosine to ``final``. It moves after each step and counts from
    there: step 1 has the factor ``before``, step 2 ``low``.
    """

    warmup: int
    low: float
    high: float
    before: float
    logarithmic: bool = True
    fall: str = "none"
    total: int = 0
    final: float = 0.0

    def __call__(self, step: int) -> float:
        """The factor of a step, counted from 1."""
        moved = step - 2
        if moved < 0:
            return self.before
        if moved < self.warmup:
            risen = math.log(moved + 1) / math.log(self.warmup) if self.logarithmic else moved / self.warmup
            return self.low + (self.high - self.low) * risen
        length = max(1, self.total - self.warmup)
        if self.fall == "linear":
            return self.low + (self.high - self.low) * max(0.0, (self.total - moved) / length)
        if self.fall == "cosine":
            share = min(1.0, (moved - self.warmup + 1) / length)
            return max(0.0, self.final + (1.0 - self.final) * (1 + math.cos(math.pi * share)) / 2)
        return self.high


FALLS = {"WarmupLR": "none", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _schedule(section: Section, optimizer: Optimizer | None, findings: Findings) -> WarmupSchedule | None:
    asked = section.take("type", None, text_or_none)
    params = section.section("params")
    section.close()
    if asked is None:
        params.close()
        return None
    lr = getattr(optimizer, "lr", None)
    if asked not in FALLS or not lr:
        findings.refuse(f"scheduler.type={asked!r}: those that are read are {', '.join(FALLS)}; leave it out and give "
                        "the engine a schedule=" if asked not in FALLS else
                        f"scheduler.type={asked!r} is of learning rates, and here a schedule is a factor of the "
                        "optimizer's; write the optimizer there too, with an lr above 0")
        return None
    fall = FALLS[asked]
    if fall == "cosine":
        low, high, before = params.take("warmup_min_ratio", 0.0, number), 1.0, 0.0
    else:
        low = before = params.take("warmup_min_lr", 0.0, number) / lr
        high = params.take("warmup_max_lr", 1e-3 if fall == "linear" else lr, number) / lr
    found = WarmupSchedule(
        max(2, params.take("warmup_num_steps", 1000, count())), low, high, before,
        params.take("warmup_type", "log", choice("log", "linear")) == "log", fall,
        0 if fall == "none" else params.take("total_num_steps", 0, count(1)),
        params.take("cos_min_ratio", 0.0001, number) if fall == "cosine" else 0.0)
    if fall != "none" and not found.total:
        findings.refuse(f"scheduler.params.total_num_steps must be there: {asked} falls until then")
    params.take("last_batch_iteration", -1, _only(-1, "a schedule begins with the run"))
    params.close()
    return found
