"""Ctrl-C in the middle of a training step leaves nothing in the ledger, not even while its exception lives."""

import signal
import threading

import numpy as np
import pytest

import zerosim as zs
from tests.zero.training import flat_state
from zerosim.models import GPT

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
