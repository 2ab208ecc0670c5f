"""The arguments of PyTorch's FSDP, ``fully_shard``'s and a sharding strategy's, as those of an engine and of a plan.

Sources: PyTorch 2.13, ``torch.distributed.fsdp``: documentation and source of ``fully_shard``, ``MixedPrecisionPolicy``
and ``CPUOffloadPolicy``, of ``ShardingStrategy`` and ``MixedPrecision``, and of ``_get_gradient_divide_factors`` (where
the mean over ranks divides). Torch's own objects are read by their fields, so that none needs to be installed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerosim.frameworks.settings import Findings, FrameworkSettings, Section, count, flag, format_or_none
from zerosim.numerics.checks import is_count, unknown_name
from zerosim.numerics.places import HOST, NOTHING, Offload, offload_of
from zerosim.numerics.policy import Policy
from zerosim.numerics.quantization import ZeroPlusPlus
from zerosim.numerics.units import counted
from zerosim.options import StepOptions
from zerosim.ranks.mesh import Mesh

# By strategy: whether parameters are resharded after forward, and whether nodes replicate; NO_SHARD shards nothing.
STRATEGIES: Mapping[str, tuple[bool, bool]] = {
    "FULL_SHARD": (True, False), "SHARD_GRAD_OP": (False, False), "HYBRID_SHARD": (True, True),
    "_HYBRID_SHARD_ZERO2": (False, True), "NO_SHARD": (True, False)}
ALL_SHARDED = "every parameter is sharded here; a Group with frozen=True freezes some"
NO_EQUIVALENT = {
    "shard_placement_fn": "a unit is cut in N equal parts of one flat vector, and along no dimension",
    "ignored_params": ALL_SHARDED, "ignored_modules": ALL_SHARDED, "ignored_states": ALL_SHARDED,
    "dp_mesh_dims": "a mesh has replicas and shards here; pass mesh=(2, 4)",
    "backward_prefetch": "write prefetch=, the number of units that are gathered ahead",
    "forward_prefetch": "write prefetch=, the number of units that are gathered ahead",
    "mixed_precision": "write it as mp_policy=, whose fields are the same",
    "cpu_offload": "write it as offload_policy=\"cpu\"",
}
NO_EFFECT = ("device_id", "sync_module_states", "use_orig_params", "limit_all_gathers", "param_init_fn",
             "auto_wrap_policy")


def from_fsdp(*, mesh: Any = None, reshard_after_forward: bool | int | None = None, mp_policy: Any = None,
              offload_policy: Any = None, sharding_strategy: Any = None, root_units: Sequence[str] = (),
              prefetch: int = 1, **others: Any) -> FrameworkSettings:
    """The arguments of ``fully_shard``, by its own names, in zerosim's terms.

    ``mesh`` is a DeviceMesh or its shape, ``(8,)`` or replicas and shards as ``(2, 4)``; ``mp_policy`` a
    MixedPrecisionPolicy or a mapping of its fields, of a model in fp32; ``offload_policy`` a CPUOffloadPolicy or "cpu".
    ``sharding_strategy``, FSDP1's, takes the place of reshard_after_forward, and the mean is then divided as there.

    ``root_units`` are the units whose parameters the call on the whole model shards, as ("embed", "head"): with
    ``reshard_after_forward=None`` they stay gathered. ``prefetch`` is how many modules are gathered ahead: 1, unless
    ``set_modules_to_forward_prefetch`` and its like for backward say more. Raises ValueError that names every argument
    that is unknown or has no equivalent here.

    >>> found = from_fsdp(mesh=(2, 4), mp_policy={"param_dtype": "bfloat16", "reduce_dtype": "float32"})
    >>> found.stage, str(found.options.mesh), found.policy.compute, found.policy.reduce
    (3, '2x4', 'bf16', 'fp32')
    """
    if not isinstance(root_units, tuple | list) or not all(isinstance(name, str) for name in root_units):
        raise ValueError(f"root_units={root_units!r} must be names of units, as (\"embed\", \"head\")")
    findings, strategy = Findings(), getattr(sharding_strategy, "name", sharding_strategy)
    given = Section({"mesh": mesh, "reshard_after_forward": reshard_after_forward, "sharding_strategy": strategy,
                     "offload_policy": offload_policy, "prefetch": prefetch, **others}, "", findings)
    shape = given.take("mesh", (), _shape)
    reshard = given.take("reshard_after_forward", None, _reshard)
    if given.take("sharding_strategy", None, _strategy) is not None:
        if reshard is not None:
            findings.refuse(f"sharding_strategy={strategy!r} says what is resharded; leave reshard_after_forward out")
        reshard, replicates = STRATEGIES[strategy]
        if shape and replicates != (len(shape) == 2):
            findings.refuse(f"sharding_strategy={strategy!r} goes with a mesh of "
                            f"{counted(1 + replicates, 'dimension')}, found mesh={shape!r}")
        if replicates and not shape:
            findings.refuse(f"sharding_strategy={strategy!r} needs to know the nodes; pass mesh=, as (2, 4)")
    ahead, offload = given.take("prefetch", 1, count()), given.take("offload_policy", NOTHING, _offload)
    given.close(NO_EFFECT, NO_EQUIVALENT)
    policy = _policy(mp_policy, strategy, findings)
    smaller, zeropp = _resharded_to(reshard, shape, findings)
    findings.raise_refusals("this configuration of FSDP")
    settings = FrameworkSettings("FSDP", 0, policy, math.prod(shape) if shape else None,
                                 options=StepOptions(overlap=True, offload=offload))
    if strategy == "NO_SHARD":
        return findings.noted(settings)
    findings.differ("a unit is cut here as one flat vector, in N equal parts; there each parameter is, along its first "
                    "dimension, and the modules that one call names are gathered at once")
    if policy.compute != "fp32":
        findings.differ(f"mp_policy.param_dtype: fp32 shards are cast there before each gather; here a shard in "
                        f"{policy.compute} rests beside them")
    if len(shape) == 2:
        findings.differ("mesh: replicas add up micro-batches here, and all-reduce once a step; there after each one, "
                        "unless set_requires_all_reduce(False) is called before")
    if reshard is False:
        findings.differ("reshard_after_forward=False: a plan counts stage 2, whose parameters rest gathered")
    elif reshard is None and root_units:
        findings.differ("root_units: a plan gathers them again in backward")
    kept = "all" if reshard is False else tuple(root_units) if reshard is None and root_units else None
    options = replace(settings.options, prefetch=ahead, zeropp=zeropp,
                      mesh=Mesh(*shape) if len(shape) == 2 else smaller)
    return findings.noted(replace(settings, stage=3, keep_gathered=kept, options=options))


def _shape(mesh: Any) -> tuple[int, ...]:
    """The sizes of a mesh's dimensions, one or two; none where there is no mesh."""
    if mesh is None:
        return ()
    sizes = mesh if isinstance(mesh, tuple | list) else getattr(mesh, "shape", None)
    if sizes is None or not 1 <= len(sizes) <= 2 or not all(is_count(size) and size > 0 for size in sizes):
        raise ValueError("must be a mesh's shape: (8,) for 8 ranks, or (2, 4) for 2 replicas of 4 shards")
    return tuple(sizes)


def _reshard(asked: Any) -> bool | int | None:
    if asked is None or isinstance(asked, bool):
        return asked
    if not is_count(asked):
        raise ValueError("must be True, False, None or a number of ranks")
    return int(asked)


def _strategy(asked: Any) -> str | None:
    if asked is not None and asked not in [*STRATEGIES]:
        raise unknown_name("is no sharding strategy", asked, STRATEGIES)
    return None if asked is None else str(asked)


def _offload(asked: Any) -> Offload:
    """The host for all state, or nothing: of a policy the class alone counts."""
    name = asked if asked is None or isinstance(asked, str) else type(asked).__name__
    if name in (None, "OffloadPolicy"):
        return NOTHING
    if name not in ("cpu", "CPUOffloadPolicy"):
        raise ValueError("must be a CPUOffloadPolicy, as CPUOffloadPolicy(), or \"cpu\"")
    return offload_of(HOST)


def _policy(asked: Any, strategy: str | None, findings: Findings) -> Policy:
    """The formats, and the rule of the mean: NCCL's for fp32 and bf16, a split one for fp16 and in FSDP1."""
    fields = asked if asked is None or isinstance(asked, Mapping) else getattr(asked, "__dict__", None)
    if isinstance(asked, type) or (fields is None and asked is not None):
        what = f"{asked.__name__} is a class" if isinstance(asked, type) else f"{asked!r} has no fields"
        findings.refuse(f"mp_policy={what}; write MixedPrecisionPolicy(param_dtype=torch.bfloat16), or "
                        "{\"param_dtype\": \"bf16\"}")
        fields = None
    given = Section(fields, "mp_policy", findings)
    compute, reduce, output = (given.take(name, None, format_or_none)
                               for name in ("param_dtype", "reduce_dtype", "output_dtype"))
    if not given.take("cast_forward_inputs", True, flag) and compute is not None and strategy is None:
        findings.refuse("mp_policy.cast_forward_inputs=False: inputs are rounded to the format of compute here")
    is_narrow = given.take("keep_low_precision_grads", False, flag)
    given.close(("buffer_dtype", "cast_root_forward_inputs", "_module_classes_to_ignore"))
    moving = reduce or compute or "fp32"
    return Policy(compute or "fp32", reduce, accumulate=moving if is_narrow else "fp32", output=output,
                  average="split" if strategy is not None or moving == "fp16" else "premultiply")


def _resharded_to(reshard: bool | int | None, shape: tuple[int, ...],
                  findings: Findings) -> tuple[Mesh | None, ZeroPlusPlus | None]:
    """Of parameters that rest, after forward, in shards of fewer ranks: nodes of so many, and ZeRO++'s hpZ."""
    if reshard is None or isinstance(reshard, bool):
        return None, None
    if len(shape) != 1 or not 1 < reshard < shape[0] or shape[0] % reshard:
        findings.refuse(f"reshard_after_forward={reshard} must divide the ranks of a mesh of one dimension, and be "
                        f"neither 1 nor all; found mesh={shape or None}")
        return None, None
    findings.differ(f"reshard_after_forward={reshard}: hpZ here, which gathers from all ranks once after each update, "
                    "and not in every forward")
    return Mesh(shape[0] // reshard, reshard), ZeroPlusPlus(hpz=True)
