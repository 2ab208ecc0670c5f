"""NCCL on doubles of GPUs and of the library: what is asked of it and in which order, and how streams wait.

No GPU and no NCCL runs here. What is shown: groups, devices, streams, counts and types of every call; that streams wait
for each other where they must. That the calls add up to a Cluster's bits, the one suite shows.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

import zerosim as zs
from tests.backends.fake_cuda import RaceError
from tests.backends.worlds import SECONDS, Job
from tests.cases import chosen
from tests.ranks import programs
from tests.ranks.asking import ROWS, TABLE, allowed, ask
from tests.support import assert_refused
from zerosim.backends.nccl.adapter import DeviceStreams
from zerosim.backends.nccl.cluster import NCCLProcessCluster
from zerosim.backends.processes.tcp import TCPChannel
from zerosim.numerics import arrays

WORLDS = (1, 2, 3, 4, 5)
WIRE_NAMES = {"float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "int16": "uint8"}  # moved as bytes


def stream_of(device: int) -> int:
    """The communication stream of a device: the second one that the doubles made there."""
    return 1000 * (device + 1) + 2


def asked(rank: zs.Rank, operation: str, algorithm: str, dtype: Any, length: int, op: str = "sum") -> Any:
    options = {"op": op} if "reduce" in operation else {}
    return programs.on_host(ask(rank, operation, algorithm, programs.vector(rank, length, dtype), None, **options))


def grouped(row: Any, devices: tuple[int, ...]) -> list[list[tuple[Any, ...]]]:
    """The groups that a collective's own hops ask for: each step one, each hop that carries anything two calls."""
    name, size = WIRE_NAMES.get(str(row.call.wire_dtype), str(row.call.wire_dtype)), row.call.wire_dtype.itemsize
    count = (lambda nbytes: nbytes) if str(row.call.wire_dtype) in WIRE_NAMES else (lambda nbytes: nbytes // size)
    found = []
    for _, hops in groupby(row.hops(), key=lambda hop: hop.step):
        calls = []
        for hop in hops:
            if hop.nbytes:
                source, destination = devices[hop.source], devices[hop.destination]
                calls.append(("send", hop.source, devices, count(hop.nbytes), name, stream_of(source), hop.destination))
                calls.append(("recv", hop.destination, devices, count(hop.nbytes), name, stream_of(destination),
                              hop.source))
        found += [calls] * bool(calls)
    return found


@pytest.mark.parametrize("ranks", WORLDS)
def test_every_step_of_every_algorithm_is_one_group_of_sends_and_receives(gpus, ranks: int) -> None:
    """Each in another type from world to world; thorough: in every one."""
    dtypes = [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]
    for number, (operation, algorithm) in enumerate(ROWS):
        for dtype in chosen(dtypes[(number + ranks) % 3:][:1], dtypes):
            if allowed(operation, algorithm, ranks):
                doubles, what = gpus(ranks), (operation, algorithm, dtype, 2 * ranks + 1)
                cluster = zs.NCCLCluster(ranks)
                found = cluster.run(asked, *what)
                (row,) = cluster.trace[0].collectives()
                assert doubles.nccl.log == grouped(row, tuple(range(ranks))), what
                assert arrays.sha256(list(found)) == arrays.sha256(list(zs.Cluster(ranks).run(asked, *what))), what


# -- the library's own ------------------------------------------------------------------------------------------------

OWN = {"reduce_scatter": ("reduceScatter", "reduce"), "all_gather": ("allGather", "broadcast"),
       "all_reduce": ("allReduce", "allReduce"), "broadcast": ("broadcast", "broadcast"),
       "reduce": ("reduce", "reduce"), "gather": (None, None), "all_to_all": (None, None)}


@pytest.mark.parametrize("operation", OWN)
def test_native_is_one_group_of_the_librarys_own_collective(gpus, operation: str) -> None:
    for ranks in WORLDS:
        for uneven in (0, 1):
            doubles = gpus(ranks)
            found = zs.NCCLCluster(ranks).run(asked, operation, "native", np.int32, 4 * ranks + uneven)
            wanted = zs.Cluster(ranks).run(asked, operation, TABLE[operation][0], np.int32, 4 * ranks + uneven)
            assert arrays.sha256(list(found)) == arrays.sha256(list(wanted)), (ranks, uneven)
            if OWN[operation][0] is None and ranks == 1:
                assert doubles.nccl.log == []
                continue
            (group,) = doubles.nccl.log
            name = OWN[operation][uneven if ranks > 1 else 0]
            assert {call[0] for call in group} == ({"send", "recv"} if name is None else {name}), (ranks, uneven)
            assert {(call[1], call[5]) for call in group} == {(rank, stream_of(rank)) for rank in range(ranks)}
            if name is not None:
                chunks = ranks if uneven and ranks > 1 and operation in ("reduce_scatter", "all_gather") else 1
                assert len(group) == chunks * ranks


# -- streams, devices -------------------------------------------------------------------------------------------------

def overlapping(rank: zs.Rank) -> Any:
    """Computes, communicates what was computed, and computes with what came."""
    x = programs.vector(rank, 11, np.float32)
    total = rank.xp.empty(11, np.float32)
    rank.kernels.add_rounded(x, x, total)
    work = rank.all_reduce(total, async_op=True)
    summed = work.wait()
    rank.kernels.add_rounded(summed, x, total)
    return programs.on_host(rank.exchange(total, (rank.index + 1) % rank.size, x, (rank.index - 1) % rank.size))


def test_streams_wait_for_each_other_where_they_must_and_the_judge_sees_what_is_forgotten(gpus) -> None:
    gpus(3)
    found, wanted = zs.NCCLCluster(3).run(overlapping), zs.Cluster(3).run(overlapping)
    assert arrays.sha256(list(found)) == arrays.sha256(list(wanted))
    for forgotten in ("follow", "catch_up"):
        with patch.object(DeviceStreams, forgotten, lambda self, event: None), pytest.raises(RaceError):
            zs.NCCLCluster(3).run(overlapping)


def test_a_rank_finds_its_device_current_whatever_happened_meanwhile(gpus) -> None:
    doubles = gpus(4)

    def program(rank: zs.Rank) -> list[int]:
        here, x = [doubles.cuda.selected], programs.vector(rank, 8, np.float32)
        _ = rank.all_reduce(x, algorithm="tree")
        here.append(doubles.cuda.selected)
        work = rank.all_reduce(x, async_op=True)
        rank.exchange(x, rank.index ^ 1, rank.xp.empty(8, np.float32), rank.index ^ 1)
        here.append(doubles.cuda.selected)
        for sender in (0, 1):  # whoever comes second moves the message, and goes on at once
            came = rank.xp.empty(8, np.float32)
            rank.send(x, rank.index ^ 1) if rank.index % 2 == sender else rank.recv(came, rank.index ^ 1)
            here.append(doubles.cuda.selected)
        work.wait()
        rank.barrier()
        rank.split(rank.index % 2).all_gather(x)
        return [*here, doubles.cuda.selected]

    for seed in (0, 1, 2):
        results = zs.NCCLCluster(4, devices=[3, 1, 0, 2], seed=seed).run(program)
        assert list(results) == [[3] * 6, [1] * 6, [0] * 6, [2] * 6]
        assert doubles.cuda.selected == 0


def test_stepping_shows_every_hop_and_leaves_the_callers_device_alone(gpus) -> None:
    doubles, shown = gpus(3), []
    for cluster in (zs.Cluster(3), zs.CuPyCluster(3), zs.NCCLCluster(3)):
        with zs.step_through(asked, "all_reduce", "ring", np.float32, 6, cluster=cluster) as steps:
            shown.append([(str(event.hop), arrays.to_host(event.values).tobytes(), doubles.cuda.selected)
                          for event in steps])
    assert shown[0] == shown[1] == shown[2]
    assert {selected for _, _, selected in shown[2]} == {0}


def test_flags_and_counts_on_the_host_need_no_nccl(gpus) -> None:
    doubles = gpus(3)
    results = zs.NCCLCluster(3).run(lambda rank: rank.all_reduce(np.array([rank.index]))[0])
    assert (list(results), doubles.nccl.log) == ([3, 3, 3], [])


def test_groups_of_the_same_ranks_have_one_communicator(gpus) -> None:
    doubles = gpus(4)

    def program(rank: zs.Rank) -> None:
        for _ in range(3):
            rank.split(rank.index % 2).all_gather(programs.vector(rank, 2, np.float32))

    zs.NCCLCluster(4).run(program)
    assert sorted(comm.devices for comm in doubles.nccl.alive) == [(0, 2), (0, 2), (1, 3), (1, 3)]


def test_a_work_makes_nobody_on_the_host_wait(gpus) -> None:
    doubles = gpus(3)
    known = []

    def program(rank: zs.Rank) -> Any:
        x = programs.vector(rank, 50, np.float32)
        summed = rank.reduce_scatter(x, async_op=True).wait()
        rank.kernels.add_rounded(summed, summed, summed)
        rank.barrier()
        known.append(dict(doubles.cuda.host))  # what the host knows to have happened on the streams
        rank.barrier()
        return summed

    zs.NCCLCluster(3).run(program)
    assert known == [{}] * 3


# -- what goes wrong --------------------------------------------------------------------------------------------------

def test_a_rank_that_raises_aborts_every_communicator_and_the_next_run_works(gpus) -> None:
    doubles = gpus(3)
    cluster = zs.NCCLCluster(3)
    cluster.run(asked, "all_reduce", "ring", np.float32, 6)
    with pytest.raises(programs.Boom) as caught:
        cluster.run(programs.fails, 1, "work")
    assert "raised by rank 1 of 3" in caught.value.__notes__
    assert {comm.state for comm in doubles.nccl.alive} == {"aborted"}
    host = doubles.cuda.host  # knows all that could still write to memory of the next run
    assert all(host.get(stream.ptr, 0) >= stream.clock.get(stream.ptr, 0) for stream in doubles.cuda.streams)
    assert list(cluster.run(lambda rank: int(rank.all_reduce(rank.xp.asarray(np.array([1])))[0]))) == [3, 3, 3]


@pytest.mark.parametrize("ranks", ["here", "a process"])
@pytest.mark.parametrize("answers", [[700], [600, 600, 700]], ids=str)
def test_an_error_of_a_device_is_raised_and_not_waited_for_without_end(gpus, ranks: str, answers: list[int]) -> None:
    """CuPy's ``Stream.done`` is False for every status but success: an illegal address (700) as well as not ready."""
    doubles = gpus(2)
    cluster = zs.NCCLCluster(2) if ranks == "here" else NCCLProcessCluster(TCPChannel(0, 1, ("", 0), b""), local_rank=0)

    def program(rank: zs.Rank) -> None:
        _ = rank.all_reduce(programs.vector(rank, 8, np.float32))
        left = list(answers)
        doubles.cupy.cuda.runtime.streamQuery = lambda pointer: left.pop(0) if len(left) > 1 else left[0]

    assert_refused(lambda: cluster.run(program), "700", doubles.cupy.cuda.runtime.CUDARuntimeError)
    assert {comm.state for comm in doubles.nccl.alive} == {"aborted"}
    assert not any(memory.now_nbytes for memory in cluster.memory)


def test_a_run_ends_when_the_devices_have_done_everything(gpus) -> None:
    doubles, asked = gpus(2), []

    def program(rank: zs.Rank) -> None:
        _ = rank.all_reduce(programs.vector(rank, 8, np.float32))
        doubles.cupy.cuda.runtime.streamQuery = lambda pointer: asked.append(pointer) or (600 if len(asked) < 9 else 0)

    zs.NCCLCluster(2).run(program)
    assert {1001, 1002, 2001, 2002} <= set(asked)


# -- a GPU for each process -------------------------------------------------------------------------------------------

def test_two_ranks_on_one_card_are_refused_on_every_process_unless_asked_for() -> None:
    for process in Job(2, "torchrun").start(["tests.backends.doubles"]):
        said = process.communicate(timeout=SECONDS)[1]
        assert "ranks [0, 1] of 2 have one GPU, 0000:00:00.0 of " in said
        assert "start no more processes on a machine than it has GPUs, or, to share cards pass share_devices" in said
