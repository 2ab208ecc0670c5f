"""A sharded checkpoint saved and loaded, beside a plain write and read of the same bytes, put on the disk."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import zerosim as zs

from . import Action, Row, Side

RANKS, WIDTHS = 4, (2048,) * 5


def made(small: bool) -> tuple[zs.Cluster, Any, Path]:
    """A cluster with engines that have taken a step, and a folder of its own."""
    widths = (16,) * 3 if small else WIDTHS
    cluster = zs.Cluster(RANKS)

    def program(rank: zs.Rank) -> zs.Engine:
        engine = zs.Engine(rank, zs.models.MLP(widths, bias=False), zs.optim.Adam(), stage=3, policy="bf16")
        data = np.random.default_rng(rank.index)
        engine.step([(data.normal(size=(2, widths[0])), data.normal(size=(2, widths[-1])))])
        return engine

    folder = tempfile.mkdtemp(prefix="zerosim-bench-")
    atexit.register(shutil.rmtree, folder)
    return cluster, cluster.run(program), Path(folder)


def of_zerosim(verb: str) -> Side:
    """``save`` or ``load`` of all ranks."""
    def prepare(small: bool) -> Action:
        cluster, engines, folder = made(small)
        cluster.run(lambda rank: engines[rank.index].save(folder / "state"))
        return lambda: cluster.run(lambda rank: getattr(engines[rank.index], verb)(folder / "state"))[0] and None

    return prepare


def plain(act: Callable[[Path, bytes], object]) -> Side:
    """The same files, by the standard library alone."""
    def prepare(small: bool) -> Action:
        cluster, engines, folder = made(small)
        cluster.run(lambda rank: engines[rank.index].save(folder / "state"))
        files = [(folder / path.name, path.read_bytes()) for path in sorted((folder / "state").iterdir())
                 if path.is_file()]
        for path, content in files:
            write(path, content)
        return lambda: [act(path, content) for path, content in files] and None

    return prepare


def write(path: Path, content: bytes) -> None:
    """All of it, on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


ROWS = (
    Row("save", "A checkpoint of 16 Mi parameters saved by 4 ranks, stage 3, bf16", "a plain write, fsynced", 1.2,
        of_zerosim("save"), plain(write), repetitions=3),
    Row("load", "The same checkpoint loaded by 4 ranks", "a plain read", 1.2, of_zerosim("load"),
        plain(lambda path, content: path.read_bytes()), repetitions=3),
)
