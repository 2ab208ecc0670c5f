"""Grades the three functions that courses on distributed training ask for, written in NumPy for a rank.

    get_ddp(rank, module)                                 -> .forward_backward(x, target) -> (loss, mean gradients)
    get_sharded_optimizer(rank, parameters, optimizer)    -> .step(gradients)
    get_fsdp(rank, module, optimizer)                     -> .step(x, target) -> loss;  .gathered(name) -> array

Each is run on 1, 2, 3, 4, 5 and 8 ranks with other data on every rank, and must equal the package's engine (the sharded
optimizer: the unsharded one) bit for bit. Legend: N ranks, P parameters; B rows, I and O widths of a layer.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from zerosim.course.puzzles import alike, reference, targets
from zerosim.course.puzzles.explaining import explained
from zerosim.course.puzzles.given import lent
from zerosim.course.puzzles.module import WIDTHS, Module
from zerosim.course.puzzles.patience import limited
from zerosim.course.puzzles.puzzle import Answer, Hole, Measured, Refused, Target
from zerosim.course.puzzles.reference import OPTIMIZER, STEPS, Arrays
from zerosim.course.puzzles.score import OPEN, PASSED, REFUSED, Score
from zerosim.course.puzzles.steps import steps_in_sequence
from zerosim.optim.base import UpdateContext
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank

WORLDS = (1, 2, 3, 4, 5, 8)
LENGTHS = [inputs * outputs for inputs, outputs in pairwise(WIDTHS)]
LARGEST = max(LENGTHS)


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
    rows: list[Measured] = []
    try:
        for ranks in WORLDS:
            with np.errstate(all="ignore"):
                rows.append(on_world(factory, ranks))
    except Hole as error:
        return Score(name, OPEN, f"A hole is open: {error}.", tuple(rows))
    except Refused as error:
        return Score(name, REFUSED, f"{error}.", tuple(rows))
    worlds = ", ".join(map(str, WORLDS))
    return Score(name, PASSED, f"Equal to the engine on N = {worlds}, bit for bit, in {STEPS} steps.", tuple(rows))


def _run(ranks: int, program: Callable[..., Any], *args: Any) -> tuple[Sequence[Any], Cluster]:
    cluster = Cluster(ranks)
    with limited(f"N={ranks}"):
        try:
            return cluster.run(program, *args), cluster
        except (Hole, KeyboardInterrupt):
            raise
        except Refused as error:
            raise Refused(f"On N={ranks} {error}") from error
        except BaseException as error:  # sys.exit() too must not end the grading, as if all were well
            raise Refused(explained(f"N={ranks}", error)) from error


def _measured(cluster: Cluster, target: Target) -> Measured:
    return Measured(len(cluster.ranks), f"P={sum(LENGTHS)}", max(cluster.memory.peak_nbytes),
                    max(cluster.trace.sent_nbytes()), steps_in_sequence(cluster.trace), target)


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


# -- data parallel ----------------------------------------------------------------------------------------------------


def _ddp_on(factory: Answer, ranks: int) -> Measured:
    expected = reference.engine_run(ranks, 0)
    found, cluster = _run(ranks, _ddp_program, factory)
    first = reference.first_values()
    for rank, (begun, _) in enumerate(found):
        alike.check(ranks, rank, "after get_ddp", begun, first, "did not take rank 0's first values")
    for rank, (_, steps) in enumerate(found):
        for step, (loss, own, mean) in enumerate(steps):
            alike.check_gradients(ranks, rank, f"in step {step}", mean, expected.gradients[step], own)
            alike.check_loss(ranks, rank, step, loss, expected.losses[step][rank])
    _refuse_silence(ranks, cluster, 1 + 2 * STEPS)
    broadcasts = targets.in_sequence(*(targets.tree("broadcast", length, ranks) for length in LENGTHS))
    at = expected.target
    return _measured(cluster, Target(at.peak_nbytes, at.sent_nbytes + broadcasts.most_nbytes,
                                     at.steps + broadcasts.steps))


def _ddp_program(rank: Rank, factory: Answer) -> Any:
    module = Module(rank, rank.index, whole=True)
    ddp = _made(factory, "get_ddp", ["forward_backward"], rank, module)
    begun = alike.copied(module.parameters, "module.parameters", module.shapes)
    state = {name: _charged(rank, reference.new_state(OPTIMIZER, w.size)) for name, w in module.parameters.items()}
    context, steps = UpdateContext(rank.kernels), []
    for step in range(STEPS):
        x, target = (lent(rank, one) for one in reference.batch(rank.index, step))
        own = _own_gradients(rank.index, step, module.parameters)
        before = {name: w.copy() for name, w in module.parameters.items()}
        loss, mean = alike.pair(ddp.forward_backward(x, target), "forward_backward")
        if any((module.parameters[name] != w).any() for name, w in before.items()):
            raise Refused("forward_backward changed module.parameters; return the mean gradients, with which the "
                          "grader makes the update")
        steps.append((loss, own, alike.copied(mean, "the mean gradients", module.shapes)))
        for name, w in module.parameters.items():
            OPTIMIZER.update(context, w.reshape(-1), mean[name].reshape(-1), state[name], step + 1)
        del x, target, mean
    return begun, steps


def _own_gradients(index: int, step: int, parameters: Arrays) -> Arrays:
    """This rank's gradients before any mean, on a rank of the grader's own, whose ledger nobody looks at."""
    def alone(rank: Rank) -> Arrays:
        module = Module(rank, 0, whole=False)
        module.parameters = parameters
        return module.forward_backward(*reference.batch(index, step))[1]

    found: Arrays = Cluster(1).run(alone)[0]
    return found


def _charged(rank: Rank, state: Arrays) -> Arrays:
    return {name: lent(rank, slot, "optimizer_state", name) for name, slot in state.items()}


# -- the sharded optimizer --------------------------------------------------------------------------------------------


def _sharded_on(factory: Answer, ranks: int) -> Measured:
    expected = reference.unsharded_run()
    found, cluster = _run(ranks, _sharded_program, factory)
    for rank, (steps, _) in enumerate(found):
        for step, parameters in enumerate(steps):
            before = expected[step - 1] if step else reference.first_values()
            alike.check_update(ranks, rank, f"after step {step}", parameters, expected[step], before)
    _refuse_states(ranks, [held for _, held in found])
    _refuse_silence(ranks, cluster, STEPS)
    wire = targets.in_sequence(*(targets.ring("all_gather", length, ranks) for length in LENGTHS))
    shards = sum(-(-length // ranks) for length in LENGTHS)
    return _measured(cluster, Target(8 * sum(LENGTHS) + 8 * shards, STEPS * wire.most_nbytes, STEPS * wire.steps))


def _sharded_program(rank: Rank, factory: Answer) -> Any:
    module = Module(rank, 0, whole=True)
    sharded = _made(factory, "get_sharded_optimizer", ["step"], rank, module.parameters, OPTIMIZER)
    steps = []
    for step in range(STEPS):
        gradients = {name: lent(rank, g, "gradient", name) for name, g in reference.gradients(step).items()}
        sharded.step(gradients)
        steps.append(alike.copied(module.parameters, "the parameters", module.shapes))
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


# -- fully sharded ----------------------------------------------------------------------------------------------------


def _fsdp_on(factory: Answer, ranks: int) -> Measured:
    expected = reference.engine_run(ranks, 3)
    found, _ = _run(ranks, _fsdp_program, factory, True)
    for rank, steps in enumerate(found):
        for step, (loss, parameters, _) in enumerate(steps):
            alike.check_loss(ranks, rank, step, loss, expected.losses[step][rank])
            before = expected.parameters[step - 1] if step else reference.first_values()
            alike.check_update(ranks, rank, f"after step {step}", parameters, expected.parameters[step], before)
    found, cluster = _run(ranks, _fsdp_program, factory, False)
    rest = 12 * sum(-(-length // ranks) for length in LENGTHS) + 4 * LARGEST
    for rank, steps in enumerate(found):
        if steps[-1][-1] > rest:
            raise Refused(f"On N={ranks} rank {rank} holds {steps[-1][-1]:,} bytes after a step where {rest:,} are "
                          "enough: between steps only shards of weights and state may stay")
    _refuse_silence(ranks, cluster, 2 * STEPS - 1)  # all know the first values
    measured, most = _measured(cluster, expected.target), expected.target.peak_nbytes + 2 * 4 * LARGEST
    if measured.peak_nbytes > most:
        raise Refused(f"On N={ranks} a rank holds {measured.peak_nbytes:,} bytes at its fullest where {most:,} are "
                      "enough: free each layer's weights and gradient as soon as they are used")
    return measured


def _fsdp_program(rank: Rank, factory: Answer, inspect: bool) -> Any:
    module = Module(rank, 0, whole=False)
    fsdp = _made(factory, "get_fsdp", ["step", "gathered"], rank, module, OPTIMIZER)
    steps = []
    for step in range(STEPS):
        x, target = (lent(rank, one) for one in reference.batch(rank.index, step))
        loss = fsdp.step(x, target)
        del x, target
        held = rank.memory.now_nbytes
        whole = {name: fsdp.gathered(name) for name in module.names} if inspect else {}
        steps.append((loss, alike.copied(whole, "what gathered() returns", module.shapes) if inspect else {}, held))
        del whole
    return steps
