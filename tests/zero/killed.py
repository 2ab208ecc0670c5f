"""A saving run that is killed again and again: ``killed.py FOLDER TIMES SEED``.

Each time a fork of this process goes on from the checkpoint, and saves after every step, until it is killed (SIGKILL)
at a random moment of its saving. What is then there must load, be of the step that was saved last or of the one that
was being saved, and have the bits of a run that nobody interrupts.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zerosim as zs
from tests.zero.training import ADAM, ODD, batches, bits, flat_state

RANKS, MODEL = 3, ODD
DATA = batches(MODEL, RANKS, 1, 7)


def engine_of(rank):
    return zs.Engine(rank, MODEL, ADAM, stage=2, policy=zs.Policy("bf16"))


def take(engine):
    """The step that comes next: data repeat, steps do not."""
    engine.step(DATA[engine.steps_taken % len(DATA)][engine.rank.index])


def whole_state(engine):
    return {name: bits(array) for name, array in flat_state(engine).items()}


def saving(rank, folder, pipe):
    """Goes on, and says so whenever a save begins."""
    engine = engine_of(rank)
    if (folder / "index.json").exists():
        engine.load(folder)
    while True:
        take(engine)
        if rank.index == 0:
            os.write(pipe, b"%8d" % engine.steps_taken)
        engine.save(folder)


def looked_at(rank, folder):
    engine = engine_of(rank)
    engine.load(folder)
    return engine.steps_taken, whole_state(engine)


def uninterrupted(rank, steps):
    engine, states = engine_of(rank), [None]
    for _ in range(steps):
        take(engine)
        states.append(whole_state(engine))
    return states


def main(folder, times, seed):
    chance, seen, unfinished, saves = random.Random(seed), [], 0, 0.02
    for number in range(times):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            zs.Cluster(RANKS).run(saving, folder, writer)
        os.close(writer)
        began, skipped = time.perf_counter(), chance.randrange(1, 3) + (number == 0)
        for _ in range(skipped):
            step = int(os.read(reader, 8))
        began, saves = time.perf_counter(), min(1.0, max(saves, (time.perf_counter() - began) / skipped))
        while time.perf_counter() < began + chance.random() * saves:
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as pipe:
            rest = pipe.read()
        last = int(rest[-8:] or step)
        unfinished += any(file.name.startswith(".") for file in folder.iterdir())
        taken, state = zs.Cluster(RANKS).run(looked_at, folder)[0]
        assert taken in (last, last - 1), (taken, last)
        seen.append((taken, state))
    states = zs.Cluster(RANKS).run(uninterrupted, max(taken for taken, _ in seen))[0]
    assert all(state == states[taken] for taken, state in seen), "a wrong bit"
    print(f"{times} times killed, {unfinished} left unfinished files, {seen[-1][0]} steps taken")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
