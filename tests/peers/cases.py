"""Runs of real peers, each with the settings that zerosim's engine has from it, and a change of them that must show."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import zerosim as zs
from tests.peers.launcher import launch
from tests.zero.training import batches
from zerosim.models import model_types

MODEL = zs.models.MLP((12, 16, 6), activation="relu", seed=5)
OPTIMIZERS = {"AdamW": zs.optim.AdamW(lr=0.01, weight_decay=0.01), "SGD": zs.optim.SGD(lr=0.5),
              "AdamW of a large epsilon": zs.optim.AdamW(lr=0.01, weight_decay=0.01, epsilon=1e-3)}
WEIGHTS = {name: unit.initial(name, 0, int(np.prod(shape))).reshape(shape)
           for unit in MODEL.units for name, shape in unit.shapes.items()}
NORM = 0.5
CONFIGS = {  # of models that `transformers` makes, with weights of its own seed
    "GPT-2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 31,
              "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3},
    "Llama": {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 31, "max_position_embeddings": 8,
              "initializer_range": 0.3},
}


@cache
def made_there(name: str) -> tuple[TemporaryDirectory, Any]:
    """A folder into which `transformers` has saved its model of CONFIGS, and the model that zerosim reads from it."""
    folder = TemporaryDirectory()
    launch("tests.peers.jobs:made", 1, folder.name, CONFIGS[name])
    return folder, zs.models.from_hugging_face(folder.name)


def data_of(ranks: int, spoiled: bool = False, model: Any = MODEL) -> list:
    """data[step][rank][micro-batch]: different everywhere; ``spoiled``: rank 1 overflows fp16 in the second step."""
    data = batches(model, ranks, 2, 4, rows=4)
    if spoiled:
        data[1][1][0] = (data[1][1][0][0], np.full_like(data[1][1][0][1], 6e4))
    return data


VERDICTS = {  # how a run is judged, and what docs/peers.md says of it
    "equal": "equal in every bit, four steps",
    "bound": "within 1e-6, four steps",
    "order": "each weight is of some order of additions",
    "rounding": "some weights differ in a last bit; as near to float64",
    "refused": "does not run here",
}


@dataclass(frozen=True)
class Case:
    """One run of a peer: on so many ranks, what the job is told, and the engine's arguments beside it.

    ``verdict`` is a key of VERDICTS, and ``why`` the reason of it; ``wrong`` are engine's arguments of which one is not
    the peer's; ``spoiled`` says that a gradient overflows; ``made`` is a key of CONFIGS where the model is of those.
    """

    name: str
    ranks: int
    job: dict[str, Any]
    arguments: dict[str, Any]
    wrong: dict[str, Any]
    verdict: str
    why: str
    spoiled: bool = False
    made: str = ""

    @property
    def model(self) -> Any:
        """The model that zerosim trains."""
        return made_there(self.made)[1] if self.made else MODEL

    @property
    def told(self) -> dict[str, Any]:
        """What the ranks are told; where orders are sought, one step of SGD, in which each gradient's bits show."""
        if self.made:
            folder, _ = made_there(self.made)
            return self.job | {"optimizer": "AdamW of a large epsilon", "steps": 4, "made": folder.name}
        return self.job | ({"optimizer": "SGD", "steps": 1} if self.verdict == "order" else
                           {"optimizer": "AdamW", "steps": 4})


FP32 = "matrix products and Adam's expression add and round in another order, some 6e-8 of a weight a step"
ZERO = f"{FP32}; epsilon is 1e-3, since AdamW makes a step of what rounding leaves of a gradient that is 0"
BF16 = "both round the same fp32 sums to bf16, and each sum over ranks has two addends"
GLOO = "gloo's ring adds g[c-1] + g[c-2] + ... + g[c] where zerosim's adds g[c+1] + g[c+2] + ... + g[c]"
CUT = "the flat vector is cut elsewhere, so that other ranks own a weight and begin its sum"
NARROWED = "DeepSpeed rounds the fp32 mean to bf16 before it updates; zerosim updates from the fp32 mean at stage 1"
ONLY_CUDA = "quantizes by CUDA kernels alone"
NO_LIBAIO = "its asynchronous files are compiled when first used, with libaio's headers, which are not here"


def torch_case(name: str, way: str, stage: int, ranks: int = 2, clip: float | None = None) -> Case:
    """DDP's and ZeRO-1's: gradients add up on a rank, times 1/N, and are all-reduced once."""
    arguments = {"stage": stage, "policy": zs.Policy(average="premultiply"), "clip_norm": clip}
    return Case(name, ranks, {"way": way, "clip": clip}, arguments,
                arguments | {"clip_norm": None if clip else NORM}, "bound", FP32)


def fsdp_case(name: str, ranks: int = 2, verdict: str = "bound", why: str = FP32, clip: float | None = None,
              all_reduce: str = "last", made: str = "", **options: Any) -> Case:
    """``fully_shard``'s: each micro-batch is reduced, in the format that the policy says; gloo divides the sum."""
    given = {"mesh": (ranks,), **options}
    settings = zs.from_fsdp(**given, root_units=("layer1",) if "reshard_after_forward" not in options else ())
    policy = replace(settings.policy, average="sum_then_divide")
    arguments = settings.engine_arguments() | {"policy": policy, "clip_norm": clip}
    wrong = {"clip_norm": None if clip else NORM} if policy.compute == "fp32" or verdict == "rounding" else {
        "policy": replace(policy, reduce="fp32" if policy.reduce is None else None)}
    job = {"way": "FSDP2", "options": given, "clip": clip, "all_reduce": all_reduce}
    return Case(name, ranks, job, arguments, arguments | wrong, verdict, why, made=made)


def deepspeed_case(name: str, stage: int, compute: str = "fp32", ranks: int = 2, verdict: str = "",
                   why: str = "", zero: dict | None = None, per_node: int | None = None, made: str = "",
                   **config: Any) -> Case:
    """A configuration's: two micro-batches, clipped; in fp16 a gradient overflows in the second step."""
    found = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
             "gradient_clipping": 0.0 if verdict == "order" else NORM,
             "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
             "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})}, **config}
    if compute != "fp32":
        found[compute] = {"enabled": True, **({"initial_scale_power": 8, "hysteresis": 1} if compute == "fp16" else {})}
    model = zs.models.from_hugging_face(CONFIGS[made]) if made else MODEL
    settings = zs.from_deepspeed(found, model=model, ranks=ranks, ranks_per_node=per_node or ranks)
    arguments = settings.engine_arguments()
    wrong = {"clip_norm": None} if compute == "fp32" else {
        "policy": replace(settings.policy, master_from="first_values")}
    job = {"way": "DeepSpeed", "config": found, "lift_fp16": compute == "fp16", "per_node": per_node or ranks}
    return Case(name, ranks, job, arguments, arguments | wrong, verdict or ("bound" if compute == "fp32" else "equal"),
                why or (FP32 if compute == "fp32" else BF16.replace("bf16", compute)), compute == "fp16", made)


BOTH, REDUCED = {"param_dtype": "bf16"}, {"param_dtype": "bf16", "reduce_dtype": "fp32"}
HOST = {"offload_optimizer": {"device": "cpu"}}
CASES = [
    torch_case("DDP", "DDP", 0),
    torch_case("DDP, clipped", "DDP", 0, clip=NORM),
    torch_case("DDP, 3 ranks", "DDP", 0, 3),
    torch_case("ZeroRedundancyOptimizer", "ZeroRedundancyOptimizer", 1),
    *(fsdp_case(f"fully_shard, fp32, reshard_after_forward={reshard}", reshard_after_forward=reshard)
      for reshard in (True, False)),
    fsdp_case("fully_shard, fp32, clipped", clip=NORM),
    fsdp_case("fully_shard, fp32, CPUOffloadPolicy", offload_policy="cpu"),
    fsdp_case("fully_shard, bf16, reduced in fp32", 2, "equal", BF16, mp_policy=REDUCED),
    fsdp_case("fully_shard, bf16", 2, "equal", BF16, mp_policy=BOTH),
    *(fsdp_case(f"fully_shard, bf16, reshard_after_forward={reshard}", 2, "equal", BF16, mp_policy=BOTH,
                reshard_after_forward=reshard) for reshard in (True, False)),
    fsdp_case("fully_shard, bf16, 4 ranks", 4, "order", GLOO, mp_policy=BOTH),
    fsdp_case("HSDP on 2x2, fp32", 4, mesh=(2, 2)),
    fsdp_case("HSDP on 2x2, bf16, reduced in fp32", 4, "equal", BF16, mesh=(2, 2), mp_policy=REDUCED),
    fsdp_case("HSDP on 2x2, bf16, replicas all-reduce once a step", 4, "equal", BF16, mesh=(2, 2), mp_policy=BOTH),
    fsdp_case("HSDP on 2x2, bf16, replicas all-reduce each micro-batch", 4, "rounding",
              "replicas of zerosim add up micro-batches first; set_requires_all_reduce(False) does so there",
              mesh=(2, 2), mp_policy=BOTH, all_reduce="each"),
    *(deepspeed_case(f"DeepSpeed, stage {stage}, {compute}" + (", a skipped step" if compute == "fp16" else ""), stage,
                     compute) for compute in ("fp32", "bf16", "fp16") for stage in (1, 2, 3)),
    *(deepspeed_case(f"DeepSpeed, stage {stage}, bf16, gradients add up in fp32", stage, "bf16",
                     data_types={"grad_accum_dtype": "fp32"}) for stage in (1, 2, 3)),
    deepspeed_case("DeepSpeed, stage 1, bf16, reduced in fp32", 1, "bf16", verdict="rounding", why=NARROWED,
                   communication_data_type="fp32"),
    *(deepspeed_case(f"DeepSpeed, stage {stage}, bf16, reduced in fp32", stage, "bf16",
                     communication_data_type="fp32") for stage in (2, 3)),
    *(deepspeed_case(f"DeepSpeed, stage {stage}, bf16, optimizer on the host", stage, "bf16", zero=HOST)
      for stage in (1, 2, 3)),
    deepspeed_case("DeepSpeed, stage 3, bf16, all on the host", 3, "bf16",
                   zero=HOST | {"offload_param": {"device": "cpu"}}),
    *(deepspeed_case(f"DeepSpeed, stage {stage}, bf16, 3 ranks", stage, "bf16", 3, "order", CUT)
      for stage in (1, 2, 3)),
    deepspeed_case("DeepSpeed, stage 3, bf16, 4 ranks", 3, "bf16", 4, "order", GLOO),
    deepspeed_case("DeepSpeed, hpZ, 2 of 4 ranks, bf16", 3, "bf16", 4, "order", GLOO, {"zero_hpz_partition_size": 2}),
    deepspeed_case("DeepSpeed, MiCS, 2 of 4 ranks", 3, "bf16", 4, "refused", "version 0.19.7 took MiCS out",
                   {"mics_shard_size": 2}),
    deepspeed_case("DeepSpeed, quantized weights", 3, "bf16", 4, "refused", ONLY_CUDA,
                   {"zero_quantized_weights": True}, per_node=2),
    deepspeed_case("DeepSpeed, quantized gradients, 2 nodes", 3, "bf16", 4, "refused", ONLY_CUDA,
                   {"zero_quantized_gradients": True}, per_node=2),
    deepspeed_case("DeepSpeed, stage 3, bf16, optimizer on NVMe", 3, "bf16", 2, "refused", NO_LIBAIO,
                   {"offload_optimizer": {"device": "nvme", "nvme_path": "."}}),
    *(fsdp_case(f"transformers' {name}, fully_shard, fp32", why=ZERO, clip=NORM, made=name, reshard_after_forward=True)
      for name in CONFIGS),
    *(deepspeed_case(f"transformers' {name}, DeepSpeed, stage 3, fp32", 3, why=ZERO, made=name) for name in CONFIGS),
]


def by_zerosim(case: Case, arguments: dict[str, Any], order: Sequence[int] | None = None) -> dict[str, Any]:
    """The same steps by the engine, all weights as one vector; in an ``order``, rank i has the data of order[i]."""
    order, told, model = order or range(case.ranks), case.told, case.model
    data = data_of(case.ranks, case.spoiled, model)

    def program(rank: zs.Rank) -> dict[str, Any]:
        engine = zs.Engine(rank, model, OPTIMIZERS[told["optimizer"]], weights=None if case.made else WEIGHTS,
                           **arguments)
        steps = [engine.step(step[order[rank.index]]) for step in data[:told["steps"]]]
        return {"skipped": [step.skipped for step in steps],
                "scales": [*[step.scale for step in steps[1:]], engine.loss_scale.scale],
                "weights": flat({name: engine.state(name)["parameter"] for name in model.shapes})}

    return zs.Cluster(case.ranks).run(program)[0]


def flat(weights: dict[str, np.ndarray]) -> np.ndarray:
    """All weights, in the order of a model's, as one vector, exact."""
    return np.concatenate([np.asarray(weight, np.float64).reshape(-1) for weight in weights.values()])


def as_here(theirs: dict[str, np.ndarray], model: Any) -> dict[str, np.ndarray]:
    """Weights by zerosim's names, in its order: `transformers` has other names, transposes some and cuts others."""
    return {name: np.concatenate([theirs[part].T if there.transposed else theirs[part] for part in there.names], -1)
            for name, there in model_types.stored_names(model.shapes).items()}


def by_peers(cases: Sequence[Case] = CASES) -> dict[str, dict[str, Any]]:
    """What each case comes to there, by name; with the weights in float64, and those of 16 bits as they compute."""
    found = {}
    for kind in sorted({(case.ranks, case.spoiled, case.made) for case in cases}):
        chosen = [case for case in cases if (case.ranks, case.spoiled, case.made) == kind]
        ranks, spoiled, model = *kind[:2], chosen[0].model
        exact = [{"way": "float64", "optimizer": "AdamW", "steps": 4, "clip": clip} for clip in (None, NORM)]
        jobs = [case.told for case in chosen] + (exact if model is MODEL else [])
        results = launch("tests.peers.jobs:trained", ranks, jobs, WEIGHTS, data_of(ranks, spoiled, model))[0]
        for case, result in zip(chosen, results, strict=False):
            if "weights" in result:
                form = case.arguments["policy"].compute
                result["weights"] = flat({name: zs.round_to(w.astype(np.float32), form)
                                          for name, w in as_here(result["weights"], model).items()})
                if model is MODEL:
                    result["float64"] = flat(results[-1 if case.arguments["clip_norm"] else -2]["weights"])
            found[case.name] = result
    return found


def judged(case: Case, there: dict[str, Any], arguments: dict[str, Any]) -> tuple[str, int, float]:
    """The verdict on a run beside the engine of these arguments: a key of VERDICTS, or "other"; how many of the
    weights differ in bits, and by how much."""
    if "refused" in there:
        return "refused", 0, 0.0
    here, theirs = by_zerosim(case, arguments), there["weights"]
    away = np.abs(here["weights"] - theirs)
    differ, largest = int(np.count_nonzero(away)), float(away.max())
    if any(key in there and there[key] != here[key] for key in ("skipped", "scales")):
        return "other", differ, largest
    if differ == 0:
        return "equal", differ, largest
    if case.arguments["policy"].compute == "fp32":
        return ("bound" if largest < 1e-6 else "other"), differ, largest
    if case.verdict == "order":
        orders = [by_zerosim(case, arguments, order)["weights"] for order in permutations(range(case.ranks))]
        return ("order" if (theirs == orders).any(0).all() else "other"), differ, largest
    ours, own = (np.sqrt(np.mean((x - there["float64"]) ** 2)) for x in (here["weights"], theirs))
    near = differ <= MODEL.parameter_count / 10 and ours < 1.1 * own
    return ("rounding" if near else "other"), differ, largest
