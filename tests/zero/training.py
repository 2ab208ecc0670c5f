"""What the tests of the engine share: models of odd sizes, different data on every rank, and a run that shows all."""

import numpy as np

import zerosim as zs
from tests.twin import Twin
from zerosim.models import MLP
from zerosim.models.units import Model
from zerosim.zero import PARTIAL

MODELS = {
    "odd": lambda: MLP((3, 5, 2), activation="gelu", seed=1),
    "deep": lambda: MLP((2, 3, 3, 1), activation="relu", seed=2),
    "fewer_than_ranks": lambda: MLP((1, 1), seed=3),
}


def batches(model: Model, ranks: int, micro_batches: int, steps: int, rows: int = 2, seed: int = 0) -> list:
    """batches[step][rank][j] = (x, target), different everywhere."""
    rng = np.random.default_rng(seed)
    inputs, outputs = model.units[0].inputs, model.units[-1].outputs

    def one() -> tuple[np.ndarray, np.ndarray]:
        return (
            rng.standard_normal((rows, inputs)).astype(np.float32),
            rng.standard_normal((rows, outputs)).astype(np.float32),
        )

    return [[[one() for _ in range(micro_batches)] for _ in range(ranks)] for _ in range(steps)]


def flat_state(engine: zs.Engine) -> dict[str, np.ndarray]:
    """Every kind of state that all parameters have, as flat vectors without padding."""
    states = [engine.state(name) for name in engine.model.shapes]
    common = [key for key in states[0] if all(state.get(key) is not None for state in states)]
    return {key: np.concatenate([state[key].reshape(-1) for state in states]) for key in common}


def train(rank: zs.Rank, model: Model, data: list, **options: object) -> dict:
    """Trains on data[step][rank] and returns losses, norms, skips and the final state of this rank."""
    optimizer = options.pop("optimizer", None) or zs.optim.Adam(lr=0.01)
    engine = zs.Engine(rank, model, optimizer, **options)
    results = [engine.step(step[rank.index]) for step in data]
    return {
        "losses": [r.losses for r in results],
        "norms": [r.norm for r in results],
        "skipped": [r.skipped for r in results],
        **flat_state(engine),
    }


def bits(array: np.ndarray) -> bytes:
    """The array's bytes: equal means equal bits."""
    return np.ascontiguousarray(array).tobytes()


def run(model: Model, data: list, cluster: zs.Cluster | None = None, **options: object) -> list[dict]:
    """The results of all ranks of one training run."""
    return (cluster or zs.Cluster(len(data[0]))).run(lambda rank: train(rank, model, data, **options))


def alone(program, *args):
    """Runs a program on one rank."""
    return zs.Cluster(1).run(program, *args)[0]


def twin_of(model: Model, data: list, optimizer: object = None, *, order: str = "local_first", policy: object = None,
            layout: str = "per_unit", rules: dict | None = None, clip_norm: float | None = None,
            schedule: object = None) -> tuple[Twin, list]:
    """The twin after these steps, and what each step said."""
    twin = Twin(model, optimizer or zs.optim.Adam(lr=0.01), len(data[0]), policy or zs.Policy(), layout, order,
                rules or {}, schedule=schedule)
    return twin, [twin.step(step, clip_norm) for step in data]


def assert_equals_twin(results: list[dict], twin: Twin, said: list) -> None:
    """Every rank's whole state, losses, norms and skips equal the twin's in bits."""
    for rank, result in enumerate(results):
        for name, expected in {"master": twin.master, "parameter": twin.compute, **twin.slots}.items():
            assert bits(result[name]) == bits(expected), name
        assert np.array_equal(result["losses"], [step["losses"][rank] for step in said], equal_nan=True)
        assert np.array_equal(result["norms"], [step["norm"] for step in said], equal_nan=True)
        assert result["skipped"] == [step["skipped"] for step in said]


def assert_stages_equal_the_twin(model: Model, data: list, optimizer: object = None, *, runs: list | None = None,
                                 policy: object = None, rules: dict | None = None, layout: str = "per_unit",
                                 clip_norm: float | None = None, schedule: object = None,
                                 **options: object) -> tuple[Twin, list]:
    """Every stage, or these runs of (stage, options), equals the twin of its order; returns the last twin and its say.

    Where gradients rest PARTIAL, micro-batches are added before ranks, else after; with one there is one order.
    """
    common = {"policy": policy or zs.Policy(), "layout": layout, "clip_norm": clip_norm, "schedule": schedule}
    runs = runs or [(stage, {}) for stage in zs.STAGES]
    several = any(len(mine) > 1 for step in data for mine in step)
    by_order: dict[str, list] = {}
    for stage, own in runs:
        row = stage if isinstance(stage, zs.Stage) else zs.STAGES[stage]
        order = "reduce_first" if several and row.gradients is not PARTIAL else "local_first"
        by_order.setdefault(order, []).append((stage, own))
    for order, of_order in by_order.items():
        twin, said = twin_of(model, data, optimizer, order=order, rules=rules, **common)
        for stage, own in of_order:
            results = run(model, data, optimizer=optimizer, stage=stage, **common, **options, **own)
            assert_equals_twin(results, twin, said)
    return twin, said
