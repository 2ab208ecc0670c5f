"""Grades the three functions that courses on distributed training ask for, written in NumPy for a rank.

    get_ddp(rank, module)                                 -> .forward_backward(x, target) -> (loss, mean gradients)
    get_sharded_optimizer(rank, parameters, optimizer)    -> .step(gradients)
    get_fsdp(rank, module, optimizer)                     -> .step(x, target) -> loss;  .gathered(name) -> array

Each is run on 1, 2, 3, 4, 5 and 8 ranks with different data on every rank, and must equal the package's engine (the
sharded optimizer: the unsharded one) bit for bit. Legend: N ranks, P parameters; B rows of the batch, I and O widths of
a layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from zerosim.course.puzzles.compare import CLOSE
from zerosim.course.puzzles.expected import in_sequence, ring_wire, tree_wire
from zerosim.course.puzzles.puzzle import Answer, held_copy
from zerosim.course.puzzles.score import Measured, Refused, Score, Target, judged
from zerosim.course.puzzles.steps import steps_in_sequence
from zerosim.course.puzzles.watching import measured, run
from zerosim.models.layers import Context, Gradients
from zerosim.models.small import MLP
from zerosim.models.units import Unit
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer, UpdateContext
from zerosim.optim.elementwise import Adam
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine

Array = np.ndarray
Arrays = dict[str, Array]

WORLDS = (1, 2, 3, 4, 5, 8)
STEPS, ROWS = 3, 2
WIDTHS = (6, 7, 5, 8, 6, 7, 1)  # of layers that N does not divide, the last of fewer elements than 8 ranks
LENGTHS = [inputs * outputs for inputs, outputs in pairwise(WIDTHS)]
LARGEST = max(LENGTHS)
TITLE = f"P={sum(LENGTHS)}"
OPTIMIZER: Optimizer = Adam(lr=0.05)


def grade_ddp(get_ddp: Answer) -> Score:
    """Data parallel: ``get_ddp(rank, module)`` makes the replicas equal to rank 0's and averages gradients.

    ``module.parameters`` differ from rank to rank and must become rank 0's, in place. ``forward_backward(x (B, I),
    target (B, O))`` returns the loss and the mean over ranks of every parameter's gradient, by name; each is to be
    reduced by a ring of its own, and divided by N once. Raises ValueError for what is no function.
    """
    return _graded("get_ddp", get_ddp, _ddp_on)


def grade_sharded_optimizer(get_sharded_optimizer: Answer) -> Score:
    """ZeRO-1's half: ``get_sharded_optimizer(rank, parameters, optimizer)`` updates what it owns, and shows it to all.

    ``parameters`` are arrays by name, the same on all ranks, to be updated in place by ``step(gradients)``; the
    gradients are those of the mean already. The state belongs into the ledger as "optimizer_state", and all ranks
    together may hold one copy of it. Raises ValueError for what is no function.
    """
    return _graded("get_sharded_optimizer", get_sharded_optimizer, _sharded_on)


def grade_fsdp(get_fsdp: Answer) -> Score:
    """Fully sharded: ``get_fsdp(rank, module, optimizer)`` keeps shards, gathers a layer when it is used, and frees it.

    ``module.parameters`` is empty: ``module.initial(name)`` makes one parameter at a time. ``step(x (B, I), target
    (B, O))`` trains one step and returns this rank's loss; ``gathered(name)`` returns a whole parameter. Raises
    ValueError for what is no function.
    """
    return _graded("get_fsdp", get_fsdp, _fsdp_on)


GRADERS: Mapping[str, Callable[[Answer], Score]] = {
    "get_ddp": grade_ddp, "get_sharded_optimizer": grade_sharded_optimizer, "get_fsdp": grade_fsdp}


def _graded(name: str, factory: Answer, on_world: Callable[[Answer, int], Measured]) -> Score:
    if not callable(factory):
        raise ValueError(f"{name} must be a function, found {factory!r}; hand it over without calling it")
    worlds = ", ".join(map(str, WORLDS))
    return judged(name, (on_world(factory, ranks) for ranks in WORLDS),
                  lambda rows: f"Equal to the engine on N = {worlds}, bit for bit, in {STEPS} steps.")


def _run(ranks: int, program: Callable[..., Any], *args: Any) -> tuple[Sequence[Any], Cluster]:
    cluster = Cluster(ranks)
    return run(cluster, f"N={ranks}", program, *args), cluster


def _made(factory: Answer, name: str, methods: Sequence[str], *args: Any) -> Any:
    found = factory(*args)
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if missing:
        raise Refused(f"{name} returned {type(found).__name__}, which has no method {' and no method '.join(missing)}")
    return found


def _refuse_silence(ranks: int, cluster: Cluster, copies: int) -> None:
    """So many copies of P values have to reach, or come together from, each of the N-1 other ranks."""
    sent, least = sum(cluster.trace.sent_nbytes()), copies * (ranks - 1) * 4 * sum(LENGTHS)
    if sent < least:
        raise Refused(f"On N={ranks} the ranks sent {sent:,} bytes in all where {least:,} have to travel: what one "
                      "rank knows of another's data must come in a message, and be updated by its owner alone")


def model(seed: int) -> MLP:
    """The same model for the engine: ReLU between linear layers without biases, half the squared error."""
    return MLP(WIDTHS, bias=False, seed=seed)


class Module:
    """One rank's model in fp32. What it makes is in the rank's ledger until no name holds it.

    ``names`` are the parameters, one for each layer, first to last; ``shapes`` their shapes (I, O). ``parameters`` are
    the arrays by name, where the module was made whole, else an empty dict.
    """

    def __init__(self, rank: Rank, seed: int, *, whole: bool) -> None:
        self._rank, self._model = rank, model(seed)
        self.shapes = dict(self._model.shapes)
        self.names = tuple(self.shapes)
        self._units = dict(zip(self.names, self._model.units, strict=True))
        self._context = Context(rank.xp, Policy("fp32"), rank.kernels, rank.memory, rank.trace.compute, self._fresh)
        self.parameters = {name: self.initial(name) for name in self.names} if whole else {}

    def _fresh(self, unit: Unit) -> Gradients:
        return {name: self._rank.memory.alloc(shape, np.float32, "unit_gradient", name)
                for name, shape in unit.shapes.items()}

    def initial(self, name: str) -> Array:
        """A parameter's first values, (I, O) fp32, in a new array."""
        shape = self.shapes[name]
        found = self._rank.memory.alloc(shape, np.float32, "parameter", name)
        found[...] = self._units[name].initial(name, 0, math.prod(shape)).reshape(shape)
        return found

    def forward(self, name: str, weight: Array, x: Array) -> tuple[Array, Any]:
        """A layer: weight (I, O), x (B, I) -> y (B, O), and what its backward needs, in which no weight is."""
        return self._units[name].forward(self._context, {name: weight}, x)

    def backward(self, name: str, weight: Array, kept: Any, dy: Array) -> tuple[Array | None, Array]:
        """A layer: dy (B, O) -> dx (B, I), None for the first layer, and the gradient of its weight, (I, O)."""
        dx, gradients = self._units[name].backward(self._context, {name: weight}, kept, dy)
        return dx, gradients[name]

    def loss(self, y: Array, target: Array) -> tuple[float, Array]:
        """y and target (B, O) -> the mean loss of the batch, and its gradient dy (B, O)."""
        loss, kept = self._model.loss.forward(self._context, y, target)
        return loss, self._model.loss.backward(self._context, kept, 1.0)

    def forward_backward(self, x: Array, target: Array) -> tuple[float, dict[str, Array]]:
        """x (B, I), target (B, O) -> the loss, and the gradient of every parameter by name, this rank's own."""
        tape = []
        for name in self.names:
            x, kept = self.forward(name, self.parameters[name], x)
            tape.append(kept)
        loss, dy = self.loss(x, target)
        gradients: dict[str, Array] = {}
        for name in reversed(self.names):
            before, gradients[name] = self.backward(name, self.parameters[name], tape.pop(), dy)
            dy = dy if before is None else before
        return loss, gradients


def _ddp_on(factory: Answer, ranks: int) -> Measured:
    expected = engine_run(ranks, 0)
    found, cluster = _run(ranks, _ddp_program, factory)
    first = first_values()
    for rank, (begun, _) in enumerate(found):
        check(ranks, rank, "after get_ddp", begun, first, "did not take rank 0's first values")
    for rank, (_, steps) in enumerate(found):
        for step, (loss, own, mean) in enumerate(steps):
            check_gradients(ranks, rank, f"in step {step}", mean, expected.gradients[step], own)
            check_loss(ranks, rank, step, loss, expected.losses[step][rank])
    _refuse_silence(ranks, cluster, 1 + 2 * STEPS)
    broadcasts = in_sequence(*(tree_wire("broadcast", length, ranks) for length in LENGTHS))
    at = expected.target
    return measured(cluster, TITLE, Target(at.peak_nbytes, at.sent_nbytes + broadcasts.most_nbytes,
                                     at.steps + broadcasts.steps))


def _ddp_program(rank: Rank, factory: Answer) -> Any:
    module = Module(rank, rank.index, whole=True)
    ddp = _made(factory, "get_ddp", ["forward_backward"], rank, module)
    begun = copied(module.parameters, "module.parameters", module.shapes)
    state = {name: _charged(rank, new_state(OPTIMIZER, w.size)) for name, w in module.parameters.items()}
    context, steps = UpdateContext(rank.kernels), []
    for step in range(STEPS):
        x, target = (held_copy(rank, one) for one in batch(rank.index, step))
        own = _own_gradients(rank.index, step, module.parameters)
        before = {name: w.copy() for name, w in module.parameters.items()}
        loss, mean = pair(ddp.forward_backward(x, target), "forward_backward")
        if any((module.parameters[name] != w).any() for name, w in before.items()):
            raise Refused("forward_backward changed module.parameters; return the mean gradients, with which the "
                          "grader makes the update")
        steps.append((loss, own, copied(mean, "the mean gradients", module.shapes)))
        for name, w in module.parameters.items():
            OPTIMIZER.update(context, w.reshape(-1), mean[name].reshape(-1), state[name], step + 1)
        del x, target, mean
    return begun, steps


def _own_gradients(index: int, step: int, parameters: Arrays) -> Arrays:
    """This rank's gradients before any mean, on a rank of the grader's own, whose ledger nobody looks at."""
    def alone(rank: Rank) -> Arrays:
        module = Module(rank, 0, whole=False)
        module.parameters = parameters
        return module.forward_backward(*batch(index, step))[1]

    found: Arrays = Cluster(1).run(alone)[0]
    return found


def _charged(rank: Rank, state: Arrays) -> Arrays:
    return {name: held_copy(rank, slot, "optimizer_state", name) for name, slot in state.items()}


def _sharded_on(factory: Answer, ranks: int) -> Measured:
    expected = unsharded_run()
    found, cluster = _run(ranks, _sharded_program, factory)
    for rank, (steps, _) in enumerate(found):
        for step, parameters in enumerate(steps):
            before = expected[step - 1] if step else first_values()
            check_update(ranks, rank, f"after step {step}", parameters, expected[step], before)
    _refuse_states(ranks, [held for _, held in found])
    _refuse_silence(ranks, cluster, STEPS)
    wire = in_sequence(*(ring_wire("all_gather", length, ranks) for length in LENGTHS))
    shards = sum(-(-length // ranks) for length in LENGTHS)
    return measured(cluster, TITLE, Target(8 * sum(LENGTHS) + 8 * shards, STEPS * wire.most_nbytes, STEPS * wire.steps))


def _sharded_program(rank: Rank, factory: Answer) -> Any:
    module = Module(rank, 0, whole=True)
    sharded = _made(factory, "get_sharded_optimizer", ["step"], rank, module.parameters, OPTIMIZER)
    steps = []
    for step in range(STEPS):
        gradients = {name: held_copy(rank, g, "gradient", name) for name, g in mean_gradients(step).items()}
        sharded.step(gradients)
        steps.append(copied(module.parameters, "the parameters", module.shapes))
        del gradients
    return steps, rank.memory.now_nbytes_by_kind.get("optimizer_state", 0)


def _refuse_states(ranks: int, held_nbytes: Sequence[int]) -> None:
    """One copy of the state in all, spread over the ranks: two slots of 4 bytes for each parameter."""
    whole = 8 * sum(LENGTHS)
    most = 8 * (-(-sum(LENGTHS) // ranks) + LARGEST)
    if sum(held_nbytes) < whole:
        raise Refused(f"On N={ranks} the ledgers know of {sum(held_nbytes):,} bytes of optimizer state where the ranks "
                      f"together need {whole:,}: take it from rank.memory.alloc(shape, dtype, \"optimizer_state\")")
    if max(held_nbytes) > most:
        raise Refused(f"On N={ranks} rank {held_nbytes.index(max(held_nbytes))} holds {max(held_nbytes):,} bytes of "
                      f"optimizer state where {most:,} are enough: it keeps the state of what others update")


def _fsdp_on(factory: Answer, ranks: int) -> Measured:
    expected = engine_run(ranks, 3)
    found, _ = _run(ranks, _fsdp_program, factory, True)
    for rank, steps in enumerate(found):
        for step, (loss, parameters, _) in enumerate(steps):
            check_loss(ranks, rank, step, loss, expected.losses[step][rank])
            before = expected.parameters[step - 1] if step else first_values()
            check_update(ranks, rank, f"after step {step}", parameters, expected.parameters[step], before)
    found, cluster = _run(ranks, _fsdp_program, factory, False)
    rest = 12 * sum(-(-length // ranks) for length in LENGTHS) + 4 * LARGEST
    for rank, steps in enumerate(found):
        if steps[-1][-1] > rest:
            raise Refused(f"On N={ranks} rank {rank} holds {steps[-1][-1]:,} bytes after a step where {rest:,} are "
                          "enough: between steps only shards of weights and state may stay")
    _refuse_silence(ranks, cluster, 2 * STEPS - 1)  # all know the first values
    row, most = measured(cluster, TITLE, expected.target), expected.target.peak_nbytes + 2 * 4 * LARGEST
    if row.peak_nbytes > most:
        raise Refused(f"On N={ranks} a rank holds {row.peak_nbytes:,} bytes at its fullest where {most:,} are "
                      "enough: free each layer's weights and gradient as soon as they are used")
    return row


def _fsdp_program(rank: Rank, factory: Answer, inspect: bool) -> Any:
    module = Module(rank, 0, whole=False)
    fsdp = _made(factory, "get_fsdp", ["step", "gathered"], rank, module, OPTIMIZER)
    steps = []
    for step in range(STEPS):
        x, target = (held_copy(rank, one) for one in batch(rank.index, step))
        loss = fsdp.step(x, target)
        del x, target
        held = rank.memory.now_nbytes
        whole = {name: fsdp.gathered(name) for name in module.names} if inspect else {}
        steps.append((loss, copied(whole, "what gathered() returns", module.shapes) if inspect else {}, held))
        del whole
    return steps


def batch(rank: int, step: int) -> tuple[Array, Array]:
    """x (B, I) and target (B, O) of one rank in one step: other data everywhere."""
    rng = np.random.default_rng([rank, step])
    return (rng.standard_normal((ROWS, WIDTHS[0]), np.float32), rng.standard_normal((ROWS, WIDTHS[-1]), np.float32))


def mean_gradients(step: int) -> Arrays:
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


@cache
def engine_run(ranks: int, stage: int) -> Reference:
    """STEPS steps on N ranks under a ZeRO stage, in fp32, every layer cut by itself."""
    watched = Cluster(ranks).run(_watched_steps, stage)
    losses = [[rank[step][0] for rank in watched] for step in range(STEPS)]
    cluster = Cluster(ranks)
    cluster.run(_engine_measured, stage)
    return Reference([step[1] for step in watched[0]], [step[2] for step in watched[0]], losses,
                     Target(max(cluster.memory.peak_nbytes), max(cluster.trace.sent_nbytes()),
                            steps_in_sequence(cluster.trace)))


def _engine(rank: Rank, stage: int) -> Engine:
    return Engine(rank, model(0), OPTIMIZER, stage=stage, policy=Policy("fp32"))


def _engine_measured(rank: Rank, stage: int) -> None:
    engine = _engine(rank, stage)
    for step in range(STEPS):
        engine.step([batch(rank.index, step)])


def _watched_steps(rank: Rank, stage: int) -> list[tuple[float, Arrays, Arrays]]:
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


@cache
def unsharded_run() -> list[Arrays]:
    """The parameters after each step of the optimizer on one device, fed with ``gradients(step)``."""
    weights, found = first_values(), []
    context = UpdateContext(Cluster(1).kernels)
    state = {name: new_state(OPTIMIZER, w.size) for name, w in weights.items()}
    for step in range(STEPS):
        for name, gradient in mean_gradients(step).items():
            OPTIMIZER.update(context, weights[name].reshape(-1), gradient.reshape(-1), state[name], step + 1)
        found.append({name: w.copy() for name, w in weights.items()})
    return found


def new_state(optimizer: Optimizer, length: int) -> Arrays:
    """The optimizer's slots for so many elements, as zeros, in nobody's ledger."""
    return {name: np.zeros(slot.shape, np.float32) for name, slot in optimizer.slots((length,)).items()}


def copied(found: Any, what: str, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Copies of arrays by name, once they are what they should be: all names, their shapes, fp32."""
    if not isinstance(found, Mapping):
        raise Refused(f"{what} must be a dict of arrays by name, found {type(found).__name__}")
    if set(found) != set(shapes):
        raise Refused(f"{what} must be by the names {', '.join(shapes)}; found {', '.join(map(str, found)) or 'none'}")
    for name, shape in shapes.items():
        one = found[name]
        if not isinstance(one, np.ndarray) or one.shape != shape or one.dtype != np.float32:
            form = f"{one.dtype} of shape {one.shape}" if isinstance(one, np.ndarray) else type(one).__name__
            raise Refused(f"{what}: {name} must be float32 of shape {shape}, found {form}")
    return {name: found[name].copy() for name in shapes}


def pair(found: Any, what: str) -> tuple[Any, Any]:
    """The two things that a method is to return."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise Refused(f"{what} must return (loss, gradients), found {type(found).__name__}")
    return found


def check(ranks: int, rank: int, when: str, found: Arrays, expected: Arrays, otherwise: str) -> None:
    """Raises Refused with ``otherwise`` where a bit differs."""
    place = _first_difference(found, expected)
    if place:
        raise Refused(f"On N={ranks} {when} rank {rank} {otherwise}: {place}")


def check_loss(ranks: int, rank: int, step: int, found: Any, expected: float) -> None:
    """Raises Refused for another loss than the engine's."""
    if not isinstance(found, float | np.floating) or float(found) != expected:
        raise Refused(f"On N={ranks} in step {step} rank {rank} has another loss: {found!r} where {expected!r} is "
                      "expected, that of its own batch")


def check_gradients(ranks: int, rank: int, when: str, found: Arrays, mean: Arrays, own: Arrays) -> None:
    """Raises Refused for gradients that are not the mean over ranks, with what they seem to be."""
    place = _first_difference(found, mean)
    if place is None:
        return
    if _first_difference(found, own) is None:
        known = "has its own gradients; nothing was added"
    elif _close(found, {name: g * ranks for name, g in mean.items()}):
        known = "has the sum over ranks, and not the mean"
    elif _close(found, {name: g / ranks for name, g in own.items()}):
        known = "divided its own gradients; nothing was added"
    elif _close(found, mean):
        known = ("has the mean, added or rounded in another order; reduce each parameter by a ring of its own, and "
                 "divide by N once")
    else:
        known = "has gradients that are not the mean"
    raise Refused(f"On N={ranks} {when} rank {rank} {known}: {place}")


def check_update(ranks: int, rank: int, when: str, found: Arrays, expected: Arrays, before: Arrays) -> None:
    """Raises Refused for parameters that are not the engine's after a step, with what they seem to be."""
    place = _first_difference(found, expected)
    if place is None:
        return
    left = sum(int((found[name] != expected[name]).sum()) for name in found)
    if all((found[name] == before[name]).all() for name in found):
        known = "has all parameters as they were before; nothing was updated"
    elif all(((found[name] == expected[name]) | (found[name] == before[name])).all() for name in found):
        known = f"has {left} parameters as they were before; what other ranks updated did not arrive"
    elif _close(found, expected):
        known = ("has parameters that are right but for their rounding; is the mean missing, which Adam hides, or do "
                 "the additions have another order")
    else:
        known = "has other parameters"
    raise Refused(f"On N={ranks} {when} rank {rank} {known}: {place}")


def _first_difference(found: Arrays, expected: Arrays) -> str | None:
    for name, right in expected.items():
        wrong = np.argwhere(found[name].view(np.uint32) != right.view(np.uint32))
        if wrong.size:
            at = tuple(int(i) for i in wrong[0])
            return f"element {list(at)} of {name} is {found[name][at]} where {right[at]} is expected"
    return None


def _close(found: Arrays, expected: Arrays) -> bool:
    largest = max(float(np.abs(one).max(initial=0)) for one in expected.values())
    return all(float(np.abs(found[name] - one).max(initial=0)) <= CLOSE * largest for name, one in expected.items())
