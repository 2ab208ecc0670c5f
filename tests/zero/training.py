"""What the tests of the engine share: models, different data on every rank, a run that shows all, and its twin."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

import zerosim as zs
from tests.ranks.asking import bits
from tests.twin import Rule, Twin
from tests.zero.units import differentiated, gained, own_gradients, thrice_used, tied
from zerosim.models import GPT, MLP, PRESETS, Decoder, Llama, LlamaConfig, Model, Recompute
from zerosim.optim import Optimizer
from zerosim.options import StepOptions
from zerosim.planning import closed_forms, step_folds
from zerosim.zero import PARTIAL

ONE_BLOCK = replace(PRESETS["gpt-nano"], layers=1)
MODELS = {
    "odd": lambda: MLP((3, 5, 2), activation="gelu", seed=1),
    "deep": lambda: MLP((2, 3, 3, 1), activation="relu", seed=2),
    "wide": lambda: MLP((3, 7, 5, 2), activation="gelu", seed=4),
    "fewer_than_ranks": lambda: MLP((1, 1), seed=3),
    "tied": tied, "thrice": thrice_used, "scalars": lambda: gained(()), "gained": gained,
    "unused": lambda: gained(used=False), "own gradients": own_gradients,
    "autodiff": differentiated,
    "gpt": lambda: GPT("gpt-nano"), "untied": lambda: GPT(ONE_BLOCK, tied=False),
    "dropout": lambda: GPT(replace(ONE_BLOCK, dropout=0.25)),
    "sub-blocks": lambda: GPT(ONE_BLOCK, units="sub_block"),
    "global": lambda: GPT("gpt-nano", units=2, normalization="global"),
    "llama": lambda: Llama("llama-nano"),
    "qwen": lambda: Llama(LlamaConfig(2, 8, 4, 6, 11, key_value_heads=2, head_channels=4, feed_forward=6,
                                      biases=("qkv",), head_norms=True), tied=True, units="sub_block"),
}
ODD = MODELS["odd"]()
SGD, ADAM, BF16 = zs.optim.SGD(lr=0.1), zs.optim.Adam(lr=0.01), zs.Policy("bf16")
HUGE = (np.full((2, 3), 6e4, np.float32), np.full((2, 2), -6e4, np.float32))  # its gradient overflows fp16
GRADIENTS = ("gradient", "unit_gradient")


def batches(model: Model, ranks: int, micro_batches: int, steps: int, rows: int = 2, seed: int = 0) -> list:
    """batches[step][rank][j] = (x, target), different everywhere; for a decoder tokens, some without a target."""
    rng = np.random.default_rng(seed)

    def one() -> tuple[np.ndarray, np.ndarray]:
        if isinstance(model, Decoder):
            x, target = rng.integers(0, model.config.vocabulary, (2, rows, model.config.context))
            target[rng.random(target.shape) < rng.random()] = -1
            target[0, 0] = 1
            return x, target
        widths = model.units[0].inputs, model.units[-1].outputs
        return tuple(rng.standard_normal((rows, width)).astype(np.float32) for width in widths)

    return [[[one() for _ in range(micro_batches)] for _ in range(ranks)] for _ in range(steps)]


def flat_state(engine: zs.Engine) -> dict[str, np.ndarray]:
    """Every kind of state that all parameters have, as flat vectors without padding."""
    states = [engine.state(name) for name in engine.model.shapes]
    common = [key for key in states[0] if all(state.get(key) is not None for state in states)]
    return {key: np.concatenate([state[key].reshape(-1) for state in states]) for key in common}


def train(rank: zs.Rank, model: Model, data: list, optimizer: Optimizer = ADAM, **options: object) -> dict:
    """Trains on data[step][rank] and returns losses, norms, skips, what is held at rest, and the final state."""
    engine = zs.Engine(rank, model, optimizer, **options)
    results = [engine.step(step[rank.index]) for step in data]
    return {
        "losses": [r.losses for r in results],
        "norms": [r.norm for r in results],
        "skipped": [r.skipped for r in results],
        "scales": [*(r.scale for r in results), engine.loss_scale.scale],
        "taken": engine.steps_taken,
        "held": held_anywhere(rank),
        **flat_state(engine),
    }


def finish(engine: zs.Engine) -> zs.StepResult:
    """The end of a step by hand, behind its last backward."""
    engine.reduce()
    result = engine.update()
    engine.all_gather_parameters()
    return result


def held_anywhere(rank: zs.Rank) -> dict[str, int]:
    """Bytes by kind on the device, the host and the disk of a rank together."""
    places = (rank.memory, rank.memory.host, rank.memory.disk)
    return {kind: sum(place.now_nbytes_by_kind.get(kind, 0) for place in places)
            for kind in {kind for place in places for kind in place.now_nbytes_by_kind}}


def run(model: Model, data: list, cluster: zs.Cluster | None = None, **options: object) -> list[dict]:
    """The results of all ranks of one training run."""
    return (cluster or zs.Cluster(len(data[0]))).run(lambda rank: train(rank, model, data, **options))


def master_of(engine: zs.Engine) -> bytes:
    """The whole master, as bits."""
    return bits(flat_state(engine)["master"])


def masters(model: Model, data: list, cluster: zs.Cluster | None = None, **options: object) -> list[bytes]:
    """The whole masters of one training run, by rank, as bits."""
    return [bits(result["master"]) for result in run(model, data, cluster, **options)]


def outcome(model: Model, data: list, cluster: zs.Cluster | None = None, **options: object) -> list[dict]:
    """All of a run that may not depend on an option, by rank: arrays as bits."""
    return [{key: bits(value) if isinstance(value, np.ndarray) else str(value) for key, value in result.items()}
            for result in run(model, data, cluster, **options)]


class Kept:
    """A cluster and its engines, which live through several runs; ``of_rank`` gives the options of some ranks alone."""

    def __init__(self, model: Model, data: list, optimizer: Optimizer = ADAM, *, of_rank=lambda index: {}, **options):
        self.data, self.cluster = data, zs.Cluster(len(data[0]))
        self.make = lambda rank: zs.Engine(rank, model, optimizer, **options | of_rank(rank.index))
        self.engines = self.cluster.run(self.make)

    def all(self, do) -> list:
        """The results of what every engine does."""
        return list(self.cluster.run(lambda rank: do(self.engines[rank.index])))

    def step(self, *numbers: int) -> list[zs.StepResult]:
        """Takes these steps; what the last of them came to on each rank."""
        for number in numbers:
            found = self.all(lambda engine, number=number: engine.step(self.data[number][engine.rank.index]))
        return found

    @property
    def masters(self) -> list[bytes]:
        """Every rank's whole masters, as bits."""
        return self.all(master_of)


@contextmanager
def ctrl_c_before(place: tuple[str, int, int] | None, folder: str, times: Counter) -> Iterator[None]:
    """Counts how often each line of a folder's files runs; before a place, a file, a line and the number of the time
    that it runs, Ctrl-C comes."""
    def before_line(frame, event, _):
        line = frame.f_code.co_filename, frame.f_lineno
        if folder not in line[0]:
            return None
        if event == "line":
            times[line] += 1
            if place == (*line, times[line]):
                raise KeyboardInterrupt
        return before_line

    sys.settrace(before_line)
    try:
        yield
    finally:
        sys.settrace(None)


def alone(program, *args):
    """Runs a program on one rank."""
    return zs.Cluster(1).run(program, *args)[0]


def rules_of(groups: Sequence[zs.Group], model: Model, optimizer: Optimizer, policy: zs.Policy) -> dict[str, Rule]:
    """What holds for the parameters of groups, by name: the first group that matches decides."""
    return {name: Rule(None if group.frozen else (group.optimizer or optimizer).for_group(group.hyperparameters),
                       group.compute or policy.compute)
            for group in reversed(groups) for name in model.shapes if group.matches(name)}


def twin_of(model: Model, data: list, optimizer: Optimizer = ADAM, *, order: str = "local_first",
            policy: zs.Policy | None = None, layout: str = "per_unit", groups: Sequence[zs.Group] = (),
            clip_norm: float | None = None, schedule: object = None, mesh: object = None) -> tuple[Twin, list]:
    """The twin after these steps, and what each step said."""
    policy = policy or zs.Policy()
    twin = Twin(model, optimizer, len(data[0]), policy, layout, order, rules_of(groups, model, optimizer, policy),
                schedule=schedule, nodes=mesh[0] if mesh else 1)
    return twin, [twin.step(step, clip_norm) for step in data]


def assert_equals_twin(results: list[dict], twin: Twin, said: list) -> None:
    """Every rank's whole state, losses, norms and skips equal the twin's in bits."""
    for rank, result in enumerate(results):
        for name, expected in {"master": twin.master, "parameter": twin.compute, **twin.slots}.items():
            assert bits(result[name]) == bits(expected), name
        assert np.array_equal(result["losses"], [step["losses"][rank] for step in said], equal_nan=True)
        assert np.array_equal(result["norms"], [step["norm"] for step in said], equal_nan=True)
        assert result["skipped"] == [step["skipped"] for step in said]
        assert result["scales"] == [*(step["scale"] for step in said), twin.scaler.scale]
        assert result["taken"] == twin.taken


def job_of(model: Model, ranks: int, stage: int, micro_batches: int, *, optimizer: Optimizer = ADAM,
           policy: zs.Policy | None = None, layout: str = "per_unit", recompute: str = "none",
           keep_gathered: object = None, mesh: object = None, zeropp: zs.ZeroPlusPlus | None = None,
           overlap: bool = False, offload: object = None, reduction: str = "rank", **_: object) -> closed_forms.Job:
    """One step of this engine on paper."""
    place = {unit.name: index for index, unit in enumerate(model.units)}
    ties = tuple((index, place[owner]) for index, unit in enumerate(model.units)
                 for owner in unit.tied_weights.values())
    kept = {None: tuple({owner for _, owner in ties}), "all": tuple(place.values())}.get(
        keep_gathered if isinstance(keep_gathered, str | None) else "units")
    return closed_forms.Job(
        tuple(unit.parameter_count for unit in model.units), ranks, closed_forms.STAGES[stage], layout=layout,
        policy=policy or zs.Policy(), slots=len(optimizer.slots((1,))), micro_batches=micro_batches,
        recompute_units=Recompute.parse(recompute).units_per_segment, tied=ties,
        kept_gathered=tuple(map(place.get, keep_gathered)) if kept is None else kept,
        normed_tensors=len(model.shapes) * ("tensor_norm" in optimizer.needs),
        options=StepOptions.of(ranks, overlap=overlap, offload=offload, mesh=mesh, zeropp=zeropp, reduction=reduction))


def assert_bytes_are_the_closed_forms(cluster: zs.Cluster, results: list[dict], model: Model, data: list, stage: int,
                                      **options: object) -> None:
    """What rests by kind, what was sent by purpose, and, where no bucket is on its way, the peak of gradients."""
    job, steps = job_of(model, len(data[0]), stage, len(data[0][0]), **options), len(data)
    assert [result["held"] for result in results] == closed_forms.resting_nbytes(job)
    for purpose, nbytes in closed_forms.sent_nbytes(job).items():
        assert cluster.trace.sent_nbytes(purpose) == [steps * n for n in nbytes], purpose
    if job.options.nodes > 1:
        for purpose, nbytes in closed_forms.crossing_nbytes(job).items():
            mesh = zs.Mesh(*options["mesh"])
            assert mesh.sent_nbytes_across(cluster.trace, purpose) == [steps * n for n in nbytes], purpose
    buckets = options.get("bucket_nbytes") is not None
    if not (job.tied or buckets or job.layout != "per_unit" or job.options.offload.gradients != "device"):
        most = step_folds.transient_memory(job).gradients_nbytes
        assert [memory.peak_nbytes_of(GRADIENTS) for memory in cluster.memory] == [
            most + of_rank.get("gradient", 0) for of_rank in closed_forms.resting_nbytes(job)]
    if stage == 3:
        gathers = cluster.trace[0].collectives("all_gather", "parameters")
        assert buckets or len(gathers) == steps * job.micro_batches * sum(job.gathers)


def assert_runs_equal_the_twin(model: Model, data: list, optimizer: Optimizer = ADAM, *, runs: list | None = None,
                               policy: zs.Policy | None = None, groups: Sequence[zs.Group] = (),
                               layout: str = "per_unit", clip_norm: float | None = None, schedule: object = None,
                               debug: bool = False, seed: int = 0, mesh: object = None,
                               **options: object) -> tuple[Twin, list]:
    """Every stage, or these runs of (stage, options), equals the twin of its order, and its bytes the closed forms.

    Where gradients rest PARTIAL, micro-batches are added before ranks, else after; with one micro-batch and one format
    there is one order. Returns the last twin and what it said.
    """
    policy = policy or zs.Policy()
    common = {"policy": policy, "groups": groups, "layout": layout, "clip_norm": clip_norm, "schedule": schedule,
              "mesh": mesh}
    policies = [policy, *(replace(policy, compute=group.compute) for group in groups if group.compute)]
    ordered = len(data[0][0]) > 1 or any(each.accumulate_dtype != each.reduce_dtype for each in policies)
    twins = {}
    for stage, own in runs or [(stage, {}) for stage in zs.STAGES]:
        row = stage if isinstance(stage, zs.Stage) else zs.STAGES[stage]
        order = "reduce_first" if ordered and row.gradients is not PARTIAL else "local_first"
        twins[order] = twins.get(order) or twin_of(model, data, optimizer, order=order, **common)
        cluster = zs.Cluster(len(data[0]), debug=debug, seed=seed)
        every = {"optimizer": optimizer, **common, **options, **own}
        results = run(model, data, cluster, stage=stage, **every)
        assert_equals_twin(results, *twins[order])
        on_paper = optimizer.cut == "anywhere" and {slot.format for slot in optimizer.slots((1,)).values()} <= {"fp32"}
        on_paper &= layout != "whole_matrices" and not (groups or model.loss.is_global)
        if on_paper and stage in closed_forms.STAGES and not any(results[0]["skipped"]):
            assert_bytes_are_the_closed_forms(cluster, results, model, data, stage, **every)
    return twins[order]
