"""A training step that fails or is interrupted leaves nothing behind: in the ledger, not even while its exception
lives, nor in engines that are kept for the next run."""

import itertools
import signal
import threading

import numpy as np
import pytest

import zerosim as zs
from tests.zero.optimizers import Plain
from tests.zero.training import batches, flat_state
from zerosim.models import GPT, MLP

OPTIONS = {"synchronous": {}, "overlapped": {"overlap": True, "prefetch": 1}, "recomputed": {"recompute": "block"}}


@pytest.fixture(autouse=True)
def pythons_own_handler():
    """A process that was begun in the background of a shell ignores Ctrl-C; these tests do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def step(rank, engine, index):
    """One step of two micro-batches, another one on every rank."""
    draw = np.random.default_rng([rank.index, index])
    engine.step([tuple(draw.integers(0, 17, (2, 8)) for _ in range(2)) for _ in range(2)])


@pytest.mark.parametrize("options", OPTIONS)
def test_an_interrupted_training_step_leaves_an_empty_ledger_and_a_cluster_that_trains(options):
    cluster, model = zs.Cluster(3), GPT("gpt-nano")

    def train(rank, steps, seconds=None):
        engine = zs.Engine(rank, model, zs.optim.Adam(lr=0.01), stage=3, **OPTIONS[options])
        if rank.index == 0 and seconds is not None:
            threading.Timer(seconds, signal.raise_signal, [signal.SIGINT]).start()
        for index in range(steps):
            step(rank, engine, index)
        return flat_state(engine)

    undisturbed = cluster.run(train, 2)
    for attempt in range(8):
        with pytest.raises(KeyboardInterrupt) as caught:
            cluster.run(train, 2000, 0.003 + 0.0107 * attempt)  # a lost signal shall end in a failure, and not never
        assert caught.value.__traceback__ is not None, "the exception is alive: its frames must hold no array"
        assert cluster.memory.now_nbytes == [0, 0, 0]
    for before, after in zip(undisturbed, cluster.run(train, 2), strict=True):
        assert all(np.array_equal(before[name], after[name]) for name in before)


MLP_OF_TWO = MLP((3, 5, 2), seed=1)


class Broken(Exception):
    """What a rank fails with."""


class Kept:
    """A cluster and its engines, which live through several runs, after one step."""

    def __init__(self, stage, options, optimizer=zs.optim.Adam(lr=0.01)):
        self.data, self.cluster = batches(MLP_OF_TWO, 2, 2, 2), zs.Cluster(2)
        self.make = lambda rank: zs.Engine(rank, MLP_OF_TWO, optimizer, stage=stage, **options)
        self.engines = self.cluster.run(self.make)
        self.step(0)

    def step(self, index):
        return list(self.cluster.run(lambda rank: self.engines[rank.index].step(self.data[index][rank.index])))


@pytest.mark.parametrize(("stage", "options"), [
    (0, {}), (1, {}), (2, {"overlap": True}), (3, {"overlap": True, "prefetch": 1})], ids=str)
def test_kept_engines_repeat_a_failed_step_as_if_it_had_not_begun_or_say_that_it_is_half_done(
        stage, options, monkeypatch):
    """A rank fails at each of its collectives in turn."""
    collective, undisturbed = zs.Rank._collective, Kept(stage, options)
    expected = undisturbed.step(1)
    for failing in itertools.count(1):
        kept, calls = Kept(stage, options), itertools.count(1)

        def fails(rank, *args, calls=calls, failing=failing, **others):
            if rank.index == 1 and next(calls) == failing:
                raise Broken
            return collective(rank, *args, **others)

        resting = kept.cluster.memory.now_nbytes
        with monkeypatch.context() as patch:
            patch.setattr(zs.Rank, "_collective", fails)
            try:
                kept.step(1)
                break
            except Broken:
                assert kept.cluster.memory.now_nbytes == resting
        try:
            assert kept.step(1) == expected
        except ValueError as error:
            assert stage in (1, 2), "elsewhere no collective follows the first update"
            assert any(text in str(error) for text in ("update of step 2 was broken off", "the other ranks have not"))
    assert failing > 2


def test_an_engine_whose_update_was_broken_off_goes_no_further():
    class FailsOnce(Plain):
        fails = False

        def update(self, ctx, w, g, state, step):
            if self.fails:
                raise Broken
            super().update(ctx, w, g, state, step)

    kept = Kept(0, {}, FailsOnce())
    FailsOnce.fails = True
    with pytest.raises(Broken):
        kept.step(1)
    FailsOnce.fails = False
    with pytest.raises(ValueError, match=r"update of step 2 was broken off, and some weights .* make a new engine"):
        kept.step(1)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_ranks_that_have_taken_different_numbers_of_steps_are_stopped(stage):
    kept = Kept(stage, {})
    with pytest.raises(zs.MismatchError, match=r"step 1, micro-batch(.|\n)*step 2, micro-batch"):
        kept.cluster.run(lambda rank: (kept.engines[1] if rank.index else kept.make(rank)).step(kept.data[1][0]))
