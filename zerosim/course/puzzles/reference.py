"""What the package's own engine does with a grader's job: the values to be met bit for bit, the bytes as targets.

Legend: N ranks, P parameters.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.course.puzzles.module import WIDTHS, Array, model
from zerosim.course.puzzles.puzzle import Target
from zerosim.course.puzzles.steps import steps_in_sequence
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer, UpdateContext
from zerosim.optim.elementwise import Adam
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine

STEPS, ROWS = 3, 2
OPTIMIZER: Optimizer = Adam(lr=0.05)
Arrays = dict[str, Array]


def batch(rank: int, step: int) -> tuple[Array, Array]:
    """x (B, I) and target (B, O) of one rank in one step: other data everywhere."""
    rng = np.random.default_rng([rank, step])
    return (rng.standard_normal((ROWS, WIDTHS[0]), np.float32), rng.standard_normal((ROWS, WIDTHS[-1]), np.float32))


def gradients(step: int) -> Arrays:
    """A gradient for every parameter, the same on all ranks: what an optimizer is handed after the mean."""
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in model(0).shapes.items()}


def first_values() -> Arrays:
    """The parameters that rank 0 begins with."""
    return {name: unit.initial(name, 0, unit.parameter_count).reshape(unit.shapes[name])
            for unit in model(0).units for name in unit.names}


@dataclass(frozen=True, slots=True)
class Reference:
    """A run of the engine: by step the mean gradients and the parameters after it, by step and rank the losses."""

    gradients: list[Arrays]
    parameters: list[Arrays]
    losses: list[list[float]]
    target: Target


def engine_run(ranks: int, stage: int) -> Reference:
    """STEPS steps on N ranks under a ZeRO stage, in fp32, every layer cut by itself."""
    told = Cluster(ranks).run(_told, stage)
    losses = [[rank[step][0] for rank in told] for step in range(STEPS)]
    measured = Cluster(ranks)
    measured.run(_measured, stage)
    return Reference([step[1] for step in told[0]], [step[2] for step in told[0]], losses,
                     Target(max(measured.memory.peak_nbytes), max(measured.trace.sent_nbytes()),
                            steps_in_sequence(measured.trace)))


def _engine(rank: Rank, stage: int) -> Engine:
    return Engine(rank, model(0), OPTIMIZER, stage=stage, policy=Policy("fp32"))


def _measured(rank: Rank, stage: int) -> None:
    engine = _engine(rank, stage)
    for step in range(STEPS):
        engine.step([batch(rank.index, step)])


def _told(rank: Rank, stage: int) -> list[tuple[float, Arrays, Arrays]]:
    """The same steps, with a look at everything in between."""
    engine, found = _engine(rank, stage), []
    for step in range(STEPS):
        tape = engine.forward(*batch(rank.index, step))
        loss = tape.loss
        engine.backward(tape)
        engine.reduce()
        mean = _states(engine, "gradient")
        engine.update()
        engine.all_gather_parameters()
        found.append((loss, mean, _states(engine, "parameter")))
    return found


def _states(engine: Engine, what: str) -> Arrays:
    found: dict[str, Any] = {name: engine.state(name)[what] for name in engine.model.shapes}
    return found


def unsharded_run() -> list[Arrays]:
    """The parameters after each step of the optimizer on one device, fed with ``gradients(step)``."""
    weights, found = first_values(), []
    context = UpdateContext(Cluster(1).kernels)
    state = {name: new_state(OPTIMIZER, w.size) for name, w in weights.items()}
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            OPTIMIZER.update(context, weights[name].reshape(-1), gradient.reshape(-1), state[name], step + 1)
        found.append({name: w.copy() for name, w in weights.items()})
    return found


def new_state(optimizer: Optimizer, length: int) -> Arrays:
    """The optimizer's slots for so many elements, as zeros, in nobody's ledger."""
    return {name: np.zeros(slot.shape, np.float32) for name, slot in optimizer.slots((length,)).items()}
