"""Long and large runs, in memory that stays flat: 10,000 steps, 1,000 clusters, 2,000 ranks."""

import gc
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import greenlet
import numpy as np
import pytest

import zerosim as zs
from zerosim.models import MLP

pytestmark = pytest.mark.slow
MODEL = MLP([2, 3, 1])


def engine_and_data(rank):
    x = np.full((1, 2), 1 + rank.index % 7, np.float32)
    return zs.Engine(rank, MODEL, zs.optim.Adam(lr=0.1), stage=3, policy="bf16"), (x, x[:, :1])


def resident_nbytes():
    """Bytes of this process in the machine's memory; 0 where the system does not say."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def test_in_10000_steps_neither_blocks_nor_bytes_nor_what_ranks_hold_grow(record_property):
    steps, marks = 10_000, []

    def program(rank):
        engine, data = engine_and_data(rank)
        for step in range(steps + 1):
            if rank.index == 0 and step % 1000 == 0:
                gc.collect()
                marks.append((sys.getallocatedblocks(), resident_nbytes(), rank.memory.now_nbytes))
            engine.step(*data)
        return engine.steps_taken
    assert list(zs.Cluster(2, trace_rows=500).run(program)) == [steps + 1] * 2
    blocks, resident, held = zip(*marks, strict=True)
    record_property("steps in flat memory", steps)
    record_property("blocks of memory that the last 5,000 steps left", blocks[-1] - blocks[5])
    assert abs(blocks[-1] - blocks[5]) < 2000
    assert resident[-1] - resident[5] < 2**22  # an element of 8 bytes left by each step would be seen in blocks
    assert len(set(held[1:])) == 1


def test_1000_clusters_leave_no_greenlets_threads_files_or_memory(record_property):
    def counts():
        gc.collect()
        return (sum(isinstance(one, greenlet.greenlet) for one in gc.get_objects()), threading.active_count(),
                len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0, sys.getallocatedblocks())

    def fails(rank):
        work = rank.all_reduce(np.ones(3), async_op=True)
        if rank.index == 1:
            raise KeyError("on purpose")
        return work.wait()

    def use(number):
        cluster = zs.Cluster(3, seed=number)
        if number % 3 == 0:
            cluster.run(lambda rank: engine_and_data(rank)[0].step(*engine_and_data(rank)[1]))
        elif number % 3 == 1:
            with suppress(KeyError):
                cluster.run(fails)
        else:
            with zs.step_through(lambda rank: rank.all_reduce(np.ones(3)), cluster=cluster) as events:
                next(iter(events))  # and no more

    found = []
    for number in range(1000):
        use(number)
        if number in (99, 999):
            found.append(counts())
    (*before, blocks), (*after, more) = found
    record_property("clusters opened and closed", 1000)
    record_property("blocks of memory that the last 900 clusters left", more - blocks)
    assert after == before
    assert more - blocks < 2000


def test_2000_ranks_take_a_step_and_hold_the_same_bits(record_property):
    def program(rank):
        engine, data = engine_and_data(rank)
        engine.step(*data)
        return engine.state("layer0.weight")["master"].tobytes(), rank.memory.peak_nbytes

    results = list(zs.Cluster(2000).run(program))
    record_property("ranks in one cluster", len(results))
    record_property("bytes at most of a rank among 2,000", max(peak for _, peak in results))
    assert len({bits for bits, _ in results}) == 1
