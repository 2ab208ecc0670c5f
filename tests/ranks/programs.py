"""Rank programs that run in every world. They stand in a module of their own, so that other processes can import them.

A program takes its inputs from NumPy to the rank's own arrays and returns NumPy arrays: worlds differ in between.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import zerosim as zs
from tests.ranks.asking import ROWS, allowed, ask, cuts_of, takes_splits
from tests.ranks.data import FLOATS, INTEGERS
from tests.support import DISK, literally
from zerosim.numerics import arrays, loss_scale


def on_rank(rank: zs.Rank, values: np.ndarray) -> Any:
    """The values as an array of the rank's own module, bit for bit, in formats too that the module does not know."""
    return rank.xp.asarray(arrays.words(values)).view(values.dtype)


def on_host(x: Any) -> Any:
    """The values in NumPy, also of arrays inside of containers; what is no array stays what it is."""
    if isinstance(x, dict):
        return {key: on_host(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(map(on_host, x))
    return np.array(arrays.to_host(x)) if arrays.is_array(x) else x


class Boom(Exception):
    """A failure of the tests' own."""


class Stubborn(Exception):
    """A failure that cannot be made again from what pickle keeps of it."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Mute(Exception):
    """A failure that has no text."""

    def __str__(self) -> str:
        raise LookupError("no text")


def vector(rank: zs.Rank, length: int, dtype: Any, seed: int = 0) -> Any:
    """(n,) normals that differ on every rank, and from call to call."""
    values = np.random.default_rng([seed, rank.index, length]).standard_normal(length).astype(np.float32)
    return on_rank(rank, values.astype(dtype))


def every_collective(rank: zs.Rank, format: str, lengths: Sequence[int]) -> list[Any]:
    """Every algorithm of the table on vectors of these lengths, by the default cut and by uneven ones."""
    found = []
    for operation, algorithm in ROWS:
        if not allowed(operation, algorithm, rank.size):
            continue
        for seed, length in enumerate(lengths):
            x = vector(rank, length, FLOATS[format], seed)
            cuts = [None, *cuts_of(length, rank.size)] if takes_splits(operation, algorithm, rank.size) else [None]
            found += [on_host(ask(rank, operation, algorithm, x, cut, root=seed % rank.size)) for cut in cuts]
    return found


def reductions(rank: zs.Rank, x: Any) -> list[Any]:
    """Means of x (n,) by every rule, extrema, wider wires and wider additions, and in place."""
    found = [rank.all_reduce(x, op=op) for op in ("max", "min", "mean")]
    found += [rank.all_reduce(x, op="mean", average=rule) for rule in ("divide_then_sum", "split", "premultiply")]
    if x.itemsize < 4:
        found += [rank.reduce_scatter(x, wire="fp32"), rank.reduce_scatter(x, algorithm="pairwise", accumulate="fp32"),
                  rank.all_reduce(x, algorithm="everyone", accumulate="fp32")]
    rank.all_reduce(x, out=x)
    return [*map(on_host, found), on_host(x)]


def options_of_reductions(rank: zs.Rank, format: str) -> list[Any]:
    """Reductions of a format."""
    return reductions(rank, vector(rank, 4 * rank.size + 3, FLOATS[format]))


def messages(rank: zs.Rank) -> list[Any]:
    """A ring of exchanges of growing length, then a chain of sends and receives, then an empty message."""
    right, left, found = (rank.index + 1) % rank.size, (rank.index - 1) % rank.size, []
    for length in (0, 1, 7, 50_000):
        out = on_rank(rank, np.zeros(length, np.float32))
        found.append(on_host(rank.exchange(vector(rank, length, np.float32), right, out, left)))
    passed = on_rank(rank, np.array([rank.index], np.int64))
    if rank.index:
        rank.recv(passed, rank.index - 1)
    if rank.index + 1 < rank.size:
        rank.send(passed + on_rank(rank, np.array([10], np.int64)), rank.index + 1)
    return [*found, on_host(passed)]


def again(rank: zs.Rank) -> list[Any]:
    """A message round the ring and a sum, to see that ranks still talk to each other."""
    x = vector(rank, 7, np.float32)
    came = rank.exchange(x, (rank.index + 1) % rank.size, on_rank(rank, np.zeros(7, np.float32)),
                         (rank.index - 1) % rank.size)
    return [on_host(came), on_host(rank.all_reduce(x))]


def groups(rank: zs.Rank) -> list[Any]:
    """Odd and even ranks apart, in reverse order; then groups inside the groups; then one that not all join."""
    half = rank.split(rank.index % 2, key=-rank.index)
    quarter = half.split(half.index // 2)
    some = rank.split(0 if rank.index < 2 else None)
    x = vector(rank, 9, np.float32)
    found = [half.index, half.size, half.all_reduce(x), half.all_gather(x), quarter.all_reduce(x), rank.all_reduce(x)]
    if some is not None:
        found.append(some.reduce_scatter(x))
    return [on_host(item) if hasattr(item, "dtype") else item for item in found]


KEPT: dict[int, zs.Rank] = {}


def keeps_a_group(rank: zs.Rank, turn: int) -> Any:
    """One turn of four on a cluster: a group of the first is asked again, also after a run that failed."""
    if turn == 0:
        KEPT[rank.index] = rank.new_group([*range(rank.index % 2, rank.size, 2)])
    if turn == 2 and rank.index == 0:
        raise LookupError("this run fails")
    return on_host(KEPT[rank.index].all_reduce(vector(rank, 9, np.float32)))


def on_a_mesh(rank: zs.Rank) -> list[Any]:
    """Groups that all know; the hierarchical collectives; a step of hybrid sharding and one of all of ZeRO++."""
    mesh = zs.Mesh(2, rank.size // 2) if rank.size % 2 == 0 else zs.Mesh(rank.size, 1)
    algorithm, x = f"hierarchical({mesh.ranks_per_node})", vector(rank, 4 * rank.size + 1, np.float32)
    found = [mesh.inside(rank).all_reduce(x), mesh.across(rank).all_gather(x), rank.all_reduce(x, algorithm=algorithm),
             rank.all_gather(rank.reduce_scatter(x, algorithm=algorithm), length=len(x), algorithm=algorithm)]
    model, data = zs.models.MLP((6, 40, 4), seed=3), np.random.default_rng(rank.index)
    for options in ({"stage": 2}, {"stage": 3, "zeropp": "hpz+qwz+qgz", "recompute": "block"}):
        engine = zs.Engine(rank, model, zs.optim.Adam(), policy=zs.Policy("bf16"), mesh=mesh, overlap=True, **options)
        batch = [tuple(on_rank(rank, data.normal(size=(3, width)).astype(np.float32)) for width in (6, 4))
                 for _ in range(2)]
        engine.step(batch)
        found += [engine.state(name)["master"] for name in model.shapes]
    return on_host(found)


def works(rank: zs.Rank) -> list[Any]:
    """Several collectives under way at once, waited for in another order, beside others that are not asynchronous; of
    two that write into memory of the program's, one arrives there by way of a copy."""
    xs = [vector(rank, 5 * rank.size + i, np.float32, i) for i in range(5)]
    out, place = (on_rank(rank, np.zeros(len(x), np.float32)) for x in xs[3:])
    begun = [rank.all_reduce(xs[0], async_op=True), rank.reduce_scatter(xs[1], async_op=True),
             rank.all_gather(xs[2], async_op=True), rank.all_reduce(xs[3], async_op=True, out=out),
             rank.all_reduce(xs[4], async_op=True, out=place, copy_in_flight=False)]
    between = rank.all_reduce(xs[1])
    unseen = bool(np.isnan(on_host(out)).all())
    found = [on_host(work.wait()) for work in (begun[2], begun[0], begun[4], begun[3], begun[1])]
    return [unseen, on_host(between), *found, on_host(out), on_host(place)]


def under_way(rank: zs.Rank) -> list[Any]:
    """A message that only arrives if an asynchronous collective lets the program go on, and others go on beside it."""
    begun = rank.all_reduce(vector(rank, 5000, np.float32), async_op=True)
    passed = on_rank(rank, np.array([rank.index], np.int64))
    if rank.index == 0:
        for other in range(1, rank.size):
            rank.send(passed, other)
    else:
        rank.recv(passed, 0)
    second = rank.all_reduce(vector(rank, 100, np.float32, 1))
    return [on_host(passed), on_host(second), on_host(begun.wait())]


def computing(rank: zs.Rank) -> tuple[int, int, int]:
    """Bytes sent of an asynchronous all-reduce: at once, beside arithmetic alone (ten minutes at most), and in all."""
    work = rank.all_reduce(vector(rank, 48_000, np.float32), async_op=True)
    at_once, until = rank.trace.sent_nbytes(), time.monotonic() + 600
    whole = 2 * (rank.size - 1) * 48_000 * 4 // rank.size
    while rank.trace.sent_nbytes() < whole and time.monotonic() < until:
        rank.trace.compute(flops=1)
        time.sleep(1e-4)
    beside = rank.trace.sent_nbytes()
    rank.barrier()
    work.wait()
    return at_once, beside, rank.trace.sent_nbytes()


def late_comer(rank: zs.Rank) -> list[Any]:
    """Rank 0 enters a collective only after it was told to, by a rank that has begun that collective already."""
    x, told = vector(rank, 3000, np.float32), on_rank(rank, np.zeros(1, np.int64))
    if 0 == rank.index < rank.size - 1:
        rank.recv(told, rank.size - 1)
        return [on_host(told), on_host(rank.all_reduce(x))]
    begun = rank.all_reduce(x, async_op=True)
    if 0 < rank.index == rank.size - 1:
        rank.send(on_rank(rank, np.array([7], np.int64)), 0)
    return [on_host(told), on_host(begun.wait())]


def counted(rank: zs.Rank) -> tuple[Any, ...]:
    """What memory and trace say after some work."""
    held = rank.memory.alloc(100, np.float32, "parameter")
    with rank.trace.span("one"):
        _ = rank.all_reduce(held, purpose="gradients")
    rank.all_gather(held, purpose="parameters", async_op=True).wait()
    return (rank.memory.now_nbytes_by_kind, rank.memory.peak_nbytes_by_kind, rank.trace.sent_nbytes("gradients"),
            rank.trace.sent_nbytes("parameters"), rank.trace.sent_nbytes(span="one"),
            [(row.call.operation, row.sent_nbytes) for row in rank.trace.collectives()])


def four(rank: zs.Rank, stage: int, compute: str) -> tuple[Any, ...]:
    """One step of the worked example: losses, weights, master, moments."""
    model = zs.models.four_weights((2.0, -3.0, 1.0, 0.5))
    engine = zs.Engine(rank, model, zs.optim.Adam(lr=0.1), stage=stage, policy=zs.Policy(compute), layout="contiguous")
    (x1, x2), target = [((1.0, 3.0), 5.0), ((2.0, 1.0), 7.0), ((1.5, 1.0), 6.0), ((0.5, 2.0), 4.0)][rank.index % 4]
    batch = np.array([[x1, x2]], np.float32), np.array([[target]], np.float32)
    losses = engine.step([batch]).losses
    return losses, on_host({name: engine.state(name) for name in model.shapes})


# Three units, of which two share a table; each state of each parameter costs every world a collective.
SMALL = replace(zs.models.PRESETS["gpt-nano"], layers=1)
# What differs from one step of AdamW on two micro-batches; from the fourth on, other layouts and kernels.
TRAININGS: dict[str, dict[str, Any]] = {
    "two steps": {"steps": 2},
    "one step": {},
    "overlapping": {"overlap": True, "prefetch": 1, "bucket_nbytes": 2000},
    "one contiguous vector": {"layout": "contiguous", "steps": 2},
    "by micro-batch": {"reduction": "micro_batch", "overlap": True, "bucket_nbytes": 2000},
    "all on disk": {"offload": zs.Offload("disk", "disk", "disk", DISK)},
    "all on the host, overlapping": {"offload": "host", "overlap": True, "prefetch": 1},
    "blocks computed again": {"recompute": "block", "overlap": True, "bucket_nbytes": 4000},
    "fp32 sums": {"recompute": "sub_block", "policy": zs.Policy("bf16", reduce="fp32", average="split")},
    "fp8 products, bf16 at rest": {"policy": zs.Policy("bf16", wire="fp32", master="bf16", state="bf16", matmul="fp8")},
    **{name: {"optimizer": getattr(zs.optim, name)(lr=1e-3), "layout": "whole_matrices"}
       for name in ("LAMB", "Muon", "Adafactor")}}


def gpt(rank: zs.Rank, stage: int, compute: str, how: str = "two steps", **options: Any) -> tuple[Any, ...]:
    """Trains a GPT on tokens that differ everywhere: losses, scales, norms, and every state of every parameter."""
    options = {"optimizer": zs.optim.AdamW(lr=1e-3), "steps": 1, "clip_norm": 1.0,
               "policy": zs.Policy(compute, loss_scale=1024.0 if compute == "fp16" else 1.0),
               **TRAININGS[how], **options}
    model, steps = zs.models.GPT(SMALL), options.pop("steps")
    engine = zs.Engine(rank, model, options.pop("optimizer"), stage=stage, **options)
    rng = np.random.default_rng(rank.index)
    found = []
    for _ in range(steps):
        tokens = rng.integers(0, model.config.vocabulary, (2, 2, 2, model.config.context))
        step = engine.step([(x, y) for x, y in tokens])
        found.append((step.losses, step.scale, step.norm, step.skipped))
    states = {name: engine.state(name) for name in model.shapes}
    assert all(isinstance(x, rank.xp.ndarray) for state in states.values() for x in state.values() if x is not None)
    return found, on_host(states)


def skips_and_goes_on(rank: zs.Rank) -> Any:
    """One rank's data overflow: what each rank hears, as an error at once, and a good step after it."""
    first = zs.models.first_weights(model := zs.models.MLP((3, 5, 2)))
    policy, found = zs.Policy(loss_scale=loss_scale.Static(skips=1)), list[Any]()
    for stage in (0, 2):
        engine = zs.Engine(rank, model, zs.optim.Adam(), stage=stage, policy=policy, weights=first)
        for value in (3e38 if rank.index == rank.size - 1 else 1.0, 0.5):
            try:
                x, y = (on_rank(rank, np.full((2, width), value, np.float32)) for width in (3, 2))
                found.append(engine.step(x, y).norm)
            except zs.NonFiniteGradients as error:
                found.append(str(error))
    return found


def saved_and_loaded(rank: zs.Rank, folder: str) -> Any:
    """A step after a save, and the same step of a new engine that went on from there; then its whole state."""
    model = zs.models.GPT(SMALL)
    x, target = np.random.default_rng(rank.index).integers(0, 17, (2, 2, 8))

    def engine(stage: int) -> zs.Engine:
        return zs.Engine(rank, model, zs.optim.Adam(), stage=stage, policy=zs.Policy("bf16"))

    first, second = engine(2), engine(3)
    first.step([(x, target)])
    first.save(folder, rank.size)
    report = second.load(folder)
    ends = [one.step([(x, target)]) for one in (first, second)]
    assert str(ends[0]) == str(ends[1])
    return report.progress, report.nbytes_read, ends[1].losses, on_host([second.state(name) for name in model.shapes])


def native(rank: zs.Rank, operation: str, format: str, op: str, lengths: Sequence[int]) -> list[tuple[Any, ...]]:
    """What this rank brought; what the library's own collective gives, now (of an odd length in place, where that can
    be) and as a work; and what the table's first gives."""
    found = []
    for length in lengths:
        values = on_host(vector(rank, length, (FLOATS | INTEGERS)[format]))
        if op in ("max", "min") and format in FLOATS:
            values[rank.index::5], values[1::3] = np.nan, [0.0, -0.0][rank.index % 2]
        x, first, again = (on_rank(rank, values.copy()) for _ in range(3))
        options: dict[str, Any] = {"op": op} if "reduce" in operation else {}
        call, whole = getattr(rank, operation), operation in ("all_reduce", "broadcast")
        now = call(first, algorithm="native", out=first if whole and length % 2 else None, **options)
        ours = call(x, **options)
        later = call(again, algorithm="native", async_op=True, out=again if whole else None, **options).wait()
        found.append((on_host(x), on_host(now), on_host(later), on_host(ours)))
    return found


def fails(rank: zs.Rank, failing: int, kind: str) -> None:
    """One rank raises, while the others wait for it, or have works under way."""
    begun = rank.all_reduce(vector(rank, 3000, np.float32), async_op=True) if kind == "work" else None
    if rank.index == failing:
        endless: list[Any] = []
        endless.append(endless)
        raise {"stubborn": Stubborn(1, 2), "mute": Mute(), "endless": ValueError(endless), "stop": StopIteration(4),
               "file": FileNotFoundError(2, "No such file", "data.bin")}.get(kind) or Boom(f"only on rank {rank.index}")
    if begun is not None:
        begun.wait()
    rank.barrier()


SUM = "all_reduce(call 0, (12,), float32"
Asks = Callable[[zs.Rank, Any], Any]


@dataclass(frozen=True)
class Different:
    """What the last rank asks for with x (12,) of float32, what all others ask for, and how an error shows both."""

    last: Asks
    its: str = ""
    most: Asks = lambda r, x: r.all_reduce(x)
    theirs: str = f"{SUM})"


DIFFERENT = {
    "another collective": Different(lambda r, x: r.all_reduce(x), f"{SUM})", lambda r, x: r.reduce_scatter(x),
                                    "reduce_scatter(call 0, (12,), float32)"),
    "another shape": Different(lambda r, x: r.all_reduce(x[:6]), "all_reduce(call 0, (6,), float32)"),
    "the same size in another shape": Different(lambda r, x: r.all_reduce(x.reshape(4, 3)),
                                                "all_reduce(call 0, (4, 3), float32)"),
    "another type": Different(lambda r, x: r.all_reduce(vector(r, 12, np.int32)), "all_reduce(call 0, (12,), int32)"),
    "another op": Different(lambda r, x: r.all_reduce(x, op="max"), f"{SUM}, op=max)"),
    "another algorithm": Different(lambda r, x: r.all_reduce(x, algorithm="tree"), f"{SUM}, algorithm=tree)"),
    "another wire": Different(lambda r, x: r.all_reduce(x, wire="fp16"), f"{SUM}, wire=float16)"),
    "another root": Different(
        lambda r, x: r.broadcast(x, 1), "broadcast(call 0, (12,), float32, algorithm=tree, root=1)",
        lambda r, x: r.broadcast(x), "broadcast(call 0, (12,), float32, algorithm=tree)"),
    "another place in the program": Different(
        lambda r, x: [r.all_reduce(x), r.barrier()], "barrier(call 1, (0,), uint8, algorithm=dissemination)",
        lambda r, x: [r.all_reduce(x), r.all_reduce(x)], "all_reduce(call 1, (12,), float32)"),
    "another text to agree on": Different(
        lambda r, x: r.agreeing("yes").all_reduce(x), f"{SUM}, yes)",
        lambda r, x: r.agreeing("no").all_reduce(x), f"{SUM}, no)"),
    # What the short form leaves out is shown where it is the difference.
    "another cut": Different(lambda r, x: r.all_reduce(x, splits=(*[0] * r.size, 12)),
                             f"{SUM}, ...splits=(0, ...0, 12), ...)", theirs=f"{SUM}, ...splits=(0, ..., 12), ...)"),
    "another purpose": Different(lambda r, x: r.all_reduce(x, purpose="state"), f"{SUM}, ...purpose=state, ...)",
                                 theirs=f"{SUM}, ...purpose=unspecified, ...)"),
}
# What the last rank does where another one waits for 4 elements from it, or all for all.
MISSED = {
    "nothing": Different(lambda r, x: None, most=lambda r, x: r.barrier()),
    **{f"a message of another {what}": Different(last, most=lambda r, x: r.index or r.recv(x[:4], r.size - 1))
       for what, last in {"length": lambda r, x: r.send(x[:2], 0),
                          "shape": lambda r, x: r.send(x[:4].reshape(4, 1), 0),
                          "type": lambda r, x: r.send(vector(r, 4, np.int32), 0)}.items()}}


def disagrees(rank: zs.Rank, what: str) -> None:
    """The last rank asks for something else."""
    asks = (DIFFERENT | MISSED)[what]
    (asks.last if rank.index == rank.size - 1 else asks.most)(rank, vector(rank, 12, np.float32))


def mismatch(what: str, ranks: int, *, all_heard: bool = True) -> str:
    """A pattern of the error where the last rank calls something else; it names the ranks that have been heard."""
    asked = DIFFERENT[what]
    others = "rank 0 is" if ranks == 2 else f"ranks {list(range(ranks - 1))} are" if all_heard else "...rank..."
    return literally("^the ranks of a group must make the same collective calls in the same order, but "
                     f"{others} in {asked.theirs} at programs.py:... in ...; rank {ranks - 1} is in {asked.its} at "
                     "programs.py:... in .... Look for a branch that depends on the rank, or for shapes, "
                     "dtypes or options that differ.$")


def catches_that_it_disagrees(rank: zs.Rank, what: str) -> None:
    """Several asynchronous collectives are under way when the last rank asks for something else; and every rank goes on
    whatever it is told of that."""
    xs = [vector(rank, 5 * rank.size + i, np.float32, i) for i in range(3)]
    begun = [rank.all_reduce(xs[0], async_op=True), rank.reduce_scatter(xs[1], op="mean", async_op=True),
             rank.all_reduce(xs[2], out=xs[2], async_op=True)]
    with suppress(Exception):
        disagrees(rank, what)
        for work in begun:
            work.wait()
    rank.barrier()


def everyone_receives(rank: zs.Rank) -> None:
    """Nobody sends, and nobody minds."""
    with suppress(Exception):
        rank.recv(vector(rank, 4, np.float32), (rank.index + 1) % rank.size)


def answers_after_it_has_heard(rank: zs.Rank) -> Any:
    """Rank 0 exchanges with the last rank, which receives first, and sends then."""
    mine, out = vector(rank, 5, np.float32), on_rank(rank, np.zeros(5, np.float32))
    if rank.index == 0:
        rank.exchange(mine, rank.size - 1, out, rank.size - 1)
    elif rank.index == rank.size - 1:
        rank.recv(out, 0)
        rank.send(mine, 0)
    return on_host(out)


def nobody_answers(rank: zs.Rank, what: str) -> None:
    """The last rank sends rank 0 what it never asks for: a message, its part of a sum."""
    if rank.index == rank.size - 1:
        x = vector(rank, 4, np.float32)
        rank.send(x, 0) if what == "message" else rank.reduce(x, algorithm="naive")


def goes_on_whatever_happens(rank: zs.Rank) -> int:
    """Rank 0 raises; the others let nothing stop them."""
    if rank.index == 0:
        raise Boom("only on rank 0")
    try:
        rank.barrier()
    except BaseException:
        return rank.index
    return -1


def fails_beside_a_new_group(rank: zs.Rank, seed: int) -> None:
    """The last rank raises while the others, each at its own pace, make a group of their own."""
    for _ in range(20 * ((7 * rank.index + seed) % 5)):
        rank.trace.compute(flops=1)
    others = rank.split(0 if rank.index < rank.size - 1 else None)
    if others is None:
        raise Boom("outside the group")
    _ = others.all_reduce(vector(rank, 3, np.float32))
    rank.barrier()


def the_first_takes_long(rank: zs.Rank) -> int:
    """The last rank waits for what rank 0 sends only when it has heard that the last rank waits long."""
    told = np.zeros(1, np.int64)
    if rank.index == 0:
        while rank.size - 1 not in rank._state.backend.waiting:
            rank.trace.compute(flops=1)  # reads the control messages
        rank.send(np.array([7]), rank.size - 1)
    elif rank.index == rank.size - 1:
        rank.recv(told, 0)
    return int(told[0])


def fails_amid_native(rank: zs.Rank) -> None:
    """All ranks have begun the library's own collectives when one of them raises."""
    begun = [rank.all_reduce(vector(rank, 3000, FLOATS["bf16"]), algorithm="native", async_op=True) for _ in range(3)]
    rank.barrier()
    if rank.index == 0:
        raise Boom(f"with {len(begun)} under way")
    rank.barrier()


def changes_its_input(rank: zs.Rank) -> None:
    """Every rank writes to what it has handed over."""
    x = on_rank(rank, np.zeros(6, np.float32))
    work = rank.all_gather(x, async_op=True)
    x[...] = on_rank(rank, np.full(6, 2.0, np.float32))
    work.wait()


def on_the_host(rank: zs.Rank) -> list[Any]:
    """Flags, counts and messages on the host, in place too; and works, whose hops may come in another order than that
    of the calls, waited for backwards."""
    x = np.arange(6) + rank.index
    others = [np.random.default_rng([i, rank.index]).standard_normal(300) for i in range(3)]
    begun = [rank.all_reduce(each, async_op=True) for each in (x, *others)]
    rank.exchange(x, (rank.index + 1) % rank.size, out := np.empty(6, x.dtype), (rank.index - 1) % rank.size)
    found = [out, *(work.wait() for work in reversed(begun)), rank.all_reduce(x),
             rank.all_gather(np.array([rank.index])), rank.reduce(x, rank.size - 1)]
    rank.all_reduce(x, out=x)
    return [*found, x]


def dies(rank: zs.Rank) -> None:
    """The last rank is killed while the others wait for it."""
    if rank.index == rank.size - 1:
        os.kill(os.getpid(), 9)
    rank.barrier()


def holds(rank: zs.Rank, nbytes: int) -> int:
    """Asks for so many bytes on the last rank."""
    return rank.memory.alloc(nbytes if rank.index == rank.size - 1 else 1, np.uint8, "parameter").nbytes
