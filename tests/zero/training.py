"""What the tests of the engine share: models of odd sizes, different data on every rank, and a run that shows all."""

import numpy as np

import zerosim as zs
from zerosim.models import MLP
from zerosim.models.units import Model

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
