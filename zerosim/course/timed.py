"""A planned step taken for real, with data, on ranks of this process: its seconds, and the most bytes that a rank held.

One rank runs at a time, so that the seconds are those of all N ranks' work, one after the other, and nothing is hidden
behind anything. They are the processor's, which other programs do not lengthen.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from time import process_time
from typing import Any

import numpy as np

from zerosim.course.measured import decoder_of
from zerosim.models.gpt import PRESETS as GPTS
from zerosim.models.llama import PRESETS as LLAMAS
from zerosim.models.llama import LlamaConfig, config_of
from zerosim.models.text import VOCABULARY
from zerosim.numerics.units import counted, gigabytes
from zerosim.planning.plan import PlanConfig
from zerosim.planning.shapes import PRESETS, Transformer, model_of
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine

STEPS = 3  # of which the fastest counts: in the first one memory is new
TRACE_ROWS = 1000  # that a rank keeps: nobody reads them


def preset_shape(name: Any) -> Any:
    """The shape of a preset that `zerosim train` alone has, over its vocabulary of bytes; any other model as it is."""
    if not isinstance(name, str) or name in PRESETS or name not in {**GPTS, **LLAMAS}:
        return name
    of = config_of(name)
    shape = Transformer(of.channels, of.layers, of.heads, VOCABULARY, tokens=of.context)
    if isinstance(of, LlamaConfig):
        return model_of(name, replace(
            shape, feed_forward=of.feed_forward, key_value_heads=of.key_value_heads, head_channels=of.head_channels,
            biases=of.biases, layer_norm=False, gated=True, tied=False, head_norms=of.head_norms))
    return model_of(name, replace(shape, positions=of.context))


def memory_nbytes() -> int | None:
    """The bytes of this machine's memory; None where the system does not say."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None


def _require_memory(nbytes: int, ranks: int) -> None:
    there = memory_nbytes()
    if there is not None and nbytes > there:
        raise ValueError(f"{counted(ranks, 'rank')} hold {gigabytes(nbytes)} GB in this process, which is on a machine "
                         f"with {gigabytes(there)} GB; take fewer ranks or a smaller model, or by='replay'")


def timed_step(config: PlanConfig, stage: int, policy: str, *, bucket_nbytes: int | None = None) -> tuple[float, int]:
    """(seconds, bytes): of the fastest of `STEPS` steps of the configuration's k micro-batches on N ranks, and the most
    that a rank held. Every rank has tokens of its own, drawn evenly.

    Raises ValueError as the engine does, and where by estimate all ranks together hold more than this machine has.
    """
    row = config.row(stage, policy)
    _require_memory(config.ranks * (row.total_nbytes - row.overhead_nbytes), config.ranks)
    model, shape = decoder_of(config.model, config.sequence), (config.batch, config.sequence)
    begun: list[float] = []

    def program(rank: Rank) -> None:
        engine = Engine(rank, model, config.optimizer, stage=stage, policy=config.policy, recompute=policy,
                        overlap=config.overlap, prefetch=config.prefetch, bucket_nbytes=bucket_nbytes)
        draw, most = np.random.default_rng(rank.index), model.config.vocabulary
        batches = [(draw.integers(0, most, shape), draw.integers(0, most, shape)) for _ in range(config.micro_batches)]
        for _ in range(STEPS):
            rank.barrier()  # no rank has begun the step, and none is still in the one before
            if rank.index == 0:
                begun.append(process_time())
            engine.step(batches)
        rank.barrier()
        if rank.index == 0:
            begun.append(process_time())

    cluster = Cluster(config.ranks, trace_rows=TRACE_ROWS)
    cluster.run(program)
    seconds = min(after - before for before, after in pairwise(begun))
    return seconds, max(memory.peak_nbytes for memory in cluster.memory)
