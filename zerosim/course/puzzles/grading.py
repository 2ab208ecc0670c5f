"""Grades the three functions that courses on distributed training ask for, written in NumPy for a rank.

    get_ddp(rank, module)                                 -> .forward_backward(x, target) -> (loss, mean gradients)
    get_sharded_optimizer(rank, parameters, optimizer)    -> .step(gradients)
    get_fsdp(rank, module, optimizer)                     -> .step(x, target) -> loss;  .gathered(name) -> array

Each is run on 1, 2, 3, 4, 5 and 8 ranks with different data on every rank, and must equal the package's engine (the
sharded optimizer: the unsharded one) bit for bit. Legend: N ranks, P parameters; B rows of the batch, I and O widths of
a layer.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from zerosim.course.puzzles.compare import CLOSE
from zerosim.course.puzzles.expected import traffic
from zerosim.course.puzzles.judging import judged
from zerosim.course.puzzles.puzzle import Answer, held_copy
from zerosim.course.puzzles.score import Measured, Measures, Refused, Score
from zerosim.course.puzzles.watching import SilencedRank, measured, measures, refuse_few_bytes, refuse_unheard, run
from zerosim.models.layers import Context, Gradients
from zerosim.models.passes import first_weights, one_pass
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

WORLDS = (4, 1, 2, 3, 5, 8)  # the one first that has most to see
STEPS, ROWS = 3, 2
WIDTHS = (6, 7, 5, 8, 6, 7, 1)  # of layers that N does not divide, the last of fewer elements than 8 ranks
LENGTHS = [inputs * outputs for inputs, outputs in pairwise(WIDTHS)]
LARGEST = max(LENGTHS)
TITLE = f"P={sum(LENGTHS)}"
OPTIMIZER: Optimizer = Adam(lr=0.05)
FP32 = Policy("fp32")


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
    gradients are those of the mean already. The state belongs into the rank's memory as "optimizer_state", and all
    ranks together may hold one copy of it. Raises ValueError for what is no function.
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
    worlds = ", ".join(map(str, sorted(WORLDS)))
    return judged(name, _attempts(factory, on_world),
                  lambda rows: f"Equal to the engine on N = {worlds}, bit for bit, in {STEPS} steps.")


def _attempts(factory: Answer, on_world: Callable[[Answer, int], Measured]) -> Iterator[Measured]:
    for ranks in WORLDS:
        yield on_world(factory, ranks)
    refuse_unheard(f"N={WORLDS[0]}", lambda: on_world(
        lambda rank, *given: factory(SilencedRank.of(rank), *given), WORLDS[0]))


class Module:
    """One rank's model in fp32. What it makes is in the rank's memory until no name holds it.

    ``names`` are the parameters, one for each layer, first to last; ``shapes`` their shapes (I, O). ``parameters`` are
    the arrays by name, where the module was made whole, else an empty dict.
    """

    def __init__(self, rank: Rank, seed: int, *, whole: bool) -> None:
        self._rank, self._model = rank, model(seed)
        self.shapes = dict(self._model.shapes)
        self.names = tuple(self.shapes)
        self._units = dict(zip(self.names, self._model.units, strict=True))
        self._context = Context(rank.xp, FP32, rank.kernels, rank.memory, rank.trace.compute, self._fresh)
        self.parameters = {name: self.initial(name) for name in self.names} if whole else {}

    def _fresh(self, unit: Unit) -> Gradients:
        return {name: self._rank.memory.alloc(shape, np.float32, "unit_gradient", name)
                for name, shape in unit.shapes.items()}

    def initial(self, name: str) -> Array:
        """A parameter's first values, (I, O) fp32, in a new array."""
        shape = self.shapes[name]
        first = self._units[name].initial(name, 0, math.prod(shape))
        return held_copy(self._rank, first.reshape(shape), "parameter", name)

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


def model(seed: int) -> MLP:
    """The same model for the engine: ReLU between linear layers without biases, half the squared error."""
    return MLP(WIDTHS, bias=False, seed=seed)


def batch(rank: int, step: int) -> tuple[Array, Array]:
    """x (B, I) and target (B, O) of one rank in one step: other data everywhere."""
    rng = np.random.default_rng([rank, step])
    return (rng.standard_normal((ROWS, WIDTHS[0]), np.float32), rng.standard_normal((ROWS, WIDTHS[-1]), np.float32))


def own_gradients(rank: int, step: int, parameters: Arrays) -> Arrays:
    """The gradient of every parameter on the batch of one rank alone."""
    return one_pass(model(0), parameters, FP32, *batch(rank, step)).gradients


def mean_gradients(step: int) -> Arrays:
    """A gradient for every parameter, the same on all ranks: what an optimizer is handed after the mean."""
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in model(0).shapes.items()}


# Data parallel.


def _ddp_on(factory: Answer, ranks: int) -> Measured:
    found, cluster = _run(ranks, _ddp_program, factory)
    first = first_weights(model(0))
    for rank, (begun, _) in enumerate(found):
        refuse_difference(f"N={ranks} after get_ddp rank {rank}", begun, first,
                          "did not take rank 0's first values", {})
    for rank, (_, steps) in enumerate(found):
        for step, (loss, mean) in enumerate(steps):
            where, expected = f"N={ranks} in step {step} rank {rank}", engine_run(ranks)[rank][step]
            refuse_gradients(where, mean, expected.mean, partial(own_gradients, rank, step, expected.before), ranks)
            refuse_loss(where, loss, expected.loss)
    refuse_few_copies(ranks, cluster, 1 + 2 * STEPS)
    engine = engine_measures(ranks, 0)
    broadcasts = Measures.of(0, [traffic("broadcast", length, ranks) for length in LENGTHS])
    return measured(cluster, TITLE, Measures(engine.peak_nbytes, engine.sent_nbytes + broadcasts.sent_nbytes,
                                             engine.steps + broadcasts.steps))


def _ddp_program(rank: Rank, factory: Answer) -> Any:
    module = Module(rank, rank.index, whole=True)
    ddp = _made(factory, "get_ddp", ["forward_backward"], rank, module)
    begun = copied(module.parameters, "module.parameters", module.shapes)
    optimizer, steps = UnshardedOptimizer(rank, module.parameters, OPTIMIZER), []
    for step in range(STEPS):
        x, target = (held_copy(rank, one) for one in batch(rank.index, step))
        before = {name: w.copy() for name, w in module.parameters.items()}
        found = ddp.forward_backward(x, target)
        if not isinstance(found, tuple) or len(found) != 2:
            raise Refused(f"forward_backward must return (loss, gradients), found {type(found).__name__}")
        loss, mean = found
        if not _same(module.parameters, before):
            raise Refused("forward_backward changed module.parameters; return the mean gradients, with which the "
                          "grader makes the update")
        steps.append((loss, copied(mean, "the mean gradients", module.shapes)))
        optimizer.step(mean)
        del x, target, mean, found
    return begun, steps


# The sharded optimizer.


class UnshardedOptimizer:
    """An optimizer on whole parameters, which `step` updates in place; its state is in the rank's memory."""

    def __init__(self, rank: Rank, parameters: Arrays, optimizer: Optimizer) -> None:
        self._context, self._steps = UpdateContext(rank.kernels), 0
        self._parameters, self._optimizer = parameters, optimizer
        self._state = {name: {slot: held_copy(rank, np.zeros(like.shape, np.float32), "optimizer_state", slot)
                              for slot, like in optimizer.slots((w.size,)).items()} for name, w in parameters.items()}

    def step(self, gradients: Arrays) -> None:
        """One step, with mean gradients."""
        self._steps += 1
        for name, w in self._parameters.items():
            self._optimizer.update(self._context, w.reshape(-1), gradients[name].reshape(-1), self._state[name],
                                   self._steps)


def _sharded_on(factory: Answer, ranks: int) -> Measured:
    found, cluster = _run(ranks, _sharded_program, factory)
    for rank, (parameters, _) in enumerate(found):
        for step, (before, after) in enumerate(pairwise(unsharded_run())):
            refuse_update(f"N={ranks} after step {step} rank {rank}", parameters[step + 1], before, after)
    refuse_states(ranks, [held for _, held in found])
    refuse_few_copies(ranks, cluster, STEPS)
    shards = sum(-(-length // ranks) for length in LENGTHS)
    return measured(cluster, TITLE, Measures.of(
        8 * sum(LENGTHS) + 8 * shards, [traffic("all_gather", length, ranks) for length in LENGTHS] * STEPS))


@cache
def unsharded_run() -> list[Arrays]:
    """The parameters at first and after each step of the optimizer on one device."""
    parameters: list[Arrays] = Cluster(1).run(_sharded_program, UnshardedOptimizer)[0][0]
    return parameters


def _sharded_program(rank: Rank, factory: Answer) -> Any:
    module = Module(rank, 0, whole=True)
    parameters = [copied(module.parameters, "the parameters", module.shapes)]
    sharded = _made(factory, "get_sharded_optimizer", ["step"], rank, module.parameters, OPTIMIZER)
    for step in range(STEPS):
        gradients = {name: held_copy(rank, g, "gradient", name) for name, g in mean_gradients(step).items()}
        sharded.step(gradients)
        parameters.append(copied(module.parameters, "the parameters", module.shapes))
        del gradients
    return parameters, rank.memory.now_nbytes_by_kind.get("optimizer_state", 0)


def refuse_states(ranks: int, held_nbytes: Sequence[int]) -> None:
    """Raises Refused unless one copy of the state is spread over the ranks: two slots of 4 bytes a parameter."""
    whole, most = 8 * sum(LENGTHS), 8 * (-(-sum(LENGTHS) // ranks) + LARGEST)
    if sum(held_nbytes) < whole:
        raise Refused(f"On N={ranks} memories know of {sum(held_nbytes):,} bytes of optimizer state where the ranks "
                      f"together need {whole:,}: take it from rank.memory.alloc(shape, dtype, \"optimizer_state\")")
    if max(held_nbytes) > most:
        raise Refused(f"On N={ranks} rank {held_nbytes.index(max(held_nbytes))} holds {max(held_nbytes):,} bytes of "
                      f"optimizer state where {most:,} are enough: it keeps the state of what others update")


# Fully sharded.


def _fsdp_on(factory: Answer, ranks: int) -> Measured:
    found, _ = _run(ranks, _fsdp_program, factory, True)
    for rank, (losses, parameters, _) in enumerate(found):
        for step, expected in enumerate(engine_run(ranks)[rank]):
            refuse_loss(f"N={ranks} in step {step} rank {rank}", losses[step], expected.loss)
            refuse_update(f"N={ranks} after step {step} rank {rank}", parameters[step], expected.before, expected.after)
    found, cluster = _run(ranks, _fsdp_program, factory, False)
    rest = 12 * sum(-(-length // ranks) for length in LENGTHS) + 4 * LARGEST
    for rank, (_, _, held) in enumerate(found):
        if held > rest:
            raise Refused(f"On N={ranks} rank {rank} holds {held:,} bytes after a step where {rest:,} are enough: "
                          "between steps only shards of weights and state may stay")
    refuse_few_copies(ranks, cluster, 2 * STEPS - 1)  # all know the first values
    target = engine_measures(ranks, 3)
    row, most = measured(cluster, TITLE, target), target.peak_nbytes + 2 * 4 * LARGEST
    if row.peak_nbytes > most:
        raise Refused(f"On N={ranks} a rank holds {row.peak_nbytes:,} bytes at its fullest where {most:,} are "
                      "enough: free each layer's weights and gradient as soon as they are used")
    return row


def _fsdp_program(rank: Rank, factory: Answer, inspect: bool) -> Any:
    """The losses, the parameters after each step where they are to be inspected, and the bytes held after the last."""
    module = Module(rank, 0, whole=False)
    fsdp = _made(factory, "get_fsdp", ["step", "gathered"], rank, module, OPTIMIZER)
    losses, parameters = [], []
    for step in range(STEPS):
        x, target = (held_copy(rank, one) for one in batch(rank.index, step))
        losses.append(fsdp.step(x, target))
        del x, target
        held = rank.memory.now_nbytes
        if inspect:
            whole = {name: fsdp.gathered(name) for name in module.names}
            parameters.append(copied(whole, "what gathered() returns", module.shapes))
            del whole
    return losses, parameters, held


# The engine's run, with which both are compared.


class EngineStep(NamedTuple):
    """One rank's step: its loss, the mean gradients, and the parameters before and after, all whole and by name."""

    loss: float
    mean: Arrays
    before: Arrays
    after: Arrays


@cache
def engine_run(ranks: int) -> Sequence[Sequence[EngineStep]]:
    """STEPS steps of every rank; their bits are the same under every stage."""
    return Cluster(ranks).run(_watched_steps)


def _watched_steps(rank: Rank) -> list[EngineStep]:
    engine, found = _engine(rank, 3), []
    for step in range(STEPS):
        before = _whole(engine, "parameter")
        tape = engine.forward(*batch(rank.index, step))
        engine.backward(tape)
        engine.reduce()
        mean = _whole(engine, "gradient")
        engine.update()
        engine.all_gather_parameters()
        found.append(EngineStep(tape.loss, mean, before, _whole(engine, "parameter")))
    return found


def _whole(engine: Engine, what: str) -> Arrays:
    found: dict[str, Any] = {name: engine.state(name, only=[what])[what] for name in engine.model.shapes}
    return found


@cache
def engine_measures(ranks: int, stage: int) -> Measures:
    """The measures of the same steps, undisturbed, under a stage."""
    def program(rank: Rank) -> None:
        engine = _engine(rank, stage)
        for step in range(STEPS):
            engine.step([batch(rank.index, step)])

    cluster = Cluster(ranks)
    cluster.run(program)
    return measures(cluster)


def _engine(rank: Rank, stage: int) -> Engine:
    return Engine(rank, model(0), OPTIMIZER, stage=stage, policy=FP32)


# Running a function, and what is said of its results.


def _run(ranks: int, program: Callable[..., Any], *args: Any) -> tuple[Sequence[Any], Cluster]:
    cluster = Cluster(ranks)
    return run(cluster, f"N={ranks}", program, *args), cluster


def _made(factory: Answer, name: str, methods: Sequence[str], *args: Any) -> Any:
    found = factory(*args)
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if missing:
        raise Refused(f"{name} returned {type(found).__name__}, which has no method {' and no method '.join(missing)}")
    return found


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


def refuse_few_copies(ranks: int, cluster: Cluster, copies: int) -> None:
    """Raises Refused unless so many copies of P values reached, or came together from, each of the N-1 other ranks."""
    refuse_few_bytes(f"N={ranks}", cluster, copies * (ranks - 1) * 4 * sum(LENGTHS),
                     ", and be updated by its owner alone")


def refuse_loss(where: str, found: Any, expected: float) -> None:
    """Raises Refused for another loss than the engine's."""
    if not isinstance(found, float | np.floating) or float(found) != expected:
        raise Refused(f"On {where} has another loss: {found!r} where {expected!r} is expected, that of its own batch")


def refuse_gradients(where: str, found: Arrays, mean: Arrays, own: Callable[[], Arrays], ranks: int) -> None:
    """Raises Refused for gradients that are not the mean over ranks, with what they seem to be; ``own()`` are this
    rank's."""
    refuse_difference(where, found, mean, "has gradients that are not the mean", {
        "has its own gradients; nothing was added": lambda: _same(found, own()),
        "has the sum over ranks, and not the mean": lambda: _close(found, mean, ranks),
        "divided its own gradients; nothing was added": lambda: _close(found, own(), 1 / ranks),
        "has the mean, added or rounded in another order; reduce each parameter by a ring of its own, and divide by N "
        "once": lambda: _close(found, mean)})


def refuse_update(where: str, found: Arrays, before: Arrays, after: Arrays) -> None:
    """Raises Refused for parameters that are not those after a step, with what they seem to be."""
    left = sum(int((found[name] != right).sum()) for name, right in after.items())
    refuse_difference(where, found, after, "has other parameters", {
        "has all parameters as they were before; nothing was updated": lambda: _same(found, before),
        f"has {left} parameters as they were before; what other ranks updated did not arrive":
            lambda: all(((one == after[name]) | (one == before[name])).all() for name, one in found.items()),
        "has parameters that are right but for their rounding; is the mean missing, which Adam hides, or do the "
        "additions have another order": lambda: _close(found, after)})


def refuse_difference(where: str, found: Arrays, expected: Arrays, otherwise: str,
                      known: Mapping[str, Callable[[], bool]]) -> None:
    """Raises Refused where a bit differs, with the first of the ``known`` words that apply, else with ``otherwise``."""
    for name, right in expected.items():
        wrong = np.argwhere(found[name].view(np.uint32) != right.view(np.uint32))
        if wrong.size:
            at = tuple(int(i) for i in wrong[0])
            seems = next((words for words, apply in known.items() if apply()), otherwise)
            raise Refused(f"On {where} {seems}: element {list(at)} of {name} is {found[name][at]} where {right[at]} is "
                          "expected")


def _same(found: Arrays, expected: Arrays) -> bool:
    return all((found[name] == one).all() for name, one in expected.items())


def _close(found: Arrays, expected: Arrays, factor: float = 1) -> bool:
    largest = factor * max(float(np.abs(one).max(initial=0)) for one in expected.values())
    return all(float(np.abs(found[name] - factor * one).max(initial=0)) <= CLOSE * largest
               for name, one in expected.items())
