"""Control messages over TCP, between ranks that are threads: what arrives, who is missed, and how a job ends.

The last test kills a real process, of a job that other files would have to begin again.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.backends.worlds import DOUBLES, free_port
from tests.ranks import programs
from tests.support import assert_refused
from zerosim.backends.processes.control import Failed, Finished, Joining
from zerosim.backends.processes.plain import from_bytes, to_bytes
from zerosim.backends.processes.tcp import TCPChannel, job_of, key_file_for_this_user, key_of_this_user, reject_reason

NUMERIC = (*np.typecodes["AllInteger"], *np.typecodes["Float"], *[fmt.dtype for fmt in zs.FORMATS.values()], ">f4")
MINE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


class Threads:
    """A job whose ranks are threads. Their clock stands still until the test says that time is up; where a process
    would end, its thread does as if its line had, and ``ended`` gets the exit code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port, self.now, self.pool = free_port(), 0.0, ThreadPoolExecutor(8)
        self.welcomed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.retried: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda seconds: self._sleep(seconds))
        monkeypatch.setattr("zerosim.backends.processes.tcp.time", clock)
        monkeypatch.setattr("zerosim.backends.processes.tcp.os", SimpleNamespace(_exit=self._exit))

        def noted(index: int, *others: Any) -> str | None:
            self.welcomed.put(index)
            return reject_reason(index, *others)

        monkeypatch.setattr("zerosim.backends.processes.tcp.reject_reason", noted)

    def _sleep(self, seconds: float) -> None:
        self.retried.put(seconds)
        time.sleep(seconds)

    def _exit(self, code: int) -> None:
        self.ended.put(code)
        raise EOFError

    def begin(self, does: Any, rank: int, ranks: int, key: bytes | None = b"key") -> Future[Any]:
        """A rank that does something with its channel."""
        return self.pool.submit(lambda: does(TCPChannel(rank, ranks, ("127.0.0.1", self.port), key)))

    def wait_for(self, *ranks: int) -> None:
        """Returns when rank 0 has let these in."""
        assert {self.welcomed.get(timeout=600) for _ in ranks} == set(ranks)

    def time_is_up(self) -> None:
        """For those who still wait for somebody."""
        self.now = 1000.0


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    job = Threads(monkeypatch)
    yield job
    job.time_is_up()
    job.pool.shutdown()


def heard(channel: TCPChannel, count: int) -> list[Any]:
    """So many control messages, in order of arrival."""
    found, deadline = list[Any](), time.monotonic() + 600
    while len(found) < count and time.monotonic() < deadline:
        found += channel.arrived()
        time.sleep(0.001)
    return found


def latest(channel: TCPChannel) -> None:
    """Everyone tells everyone 100 things, and rank r tells rank r+1 one thing more; all hear them in their order."""
    for number in range(100):
        channel.send((channel.index, number))
    right, left = (channel.index + 1) % channel.size, (channel.index - 1) % channel.size
    channel.send("to you alone", right)
    found = heard(channel, 100 * (channel.size - 1) + (channel.size > 1))
    for rank in {*range(channel.size)} - {channel.index}:
        said = [message for source, message in found if source == rank]
        assert said == [(rank, number) for number in range(100)] + ["to you alone"] * (rank == left)
    assert channel.all_gather([channel.index] * 3) == [[rank] * 3 for rank in range(channel.size)]
    assert list(map(len, channel.all_gather(b"x" * 2_000_000 * channel.index))) == [
        2_000_000 * rank for rank in range(channel.size)]
    channel.close()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_control_arrive_in_the_order_in_which_each_rank_sent_them(threads: Threads, ranks: int) -> None:
    for its in [threads.begin(latest, rank, ranks) for rank in reversed(range(ranks))]:
        its.result(600)


def test_rank_0_names_those_who_did_not_come(threads: Threads) -> None:
    first, second = (threads.begin(latest, rank, 4) for rank in (0, 2))
    threads.wait_for(2)
    threads.time_is_up()
    said = (f"ranks [1, 3] of 4 did not come to 127.0.0.1:{threads.port} within 300 seconds; start all ranks with the "
            "same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, each with its own RANK")
    assert str(first.exception(600)) == said
    assert str(second.exception(600)) == f"rank 2 was not let in at 127.0.0.1:{threads.port}: {said}"


def test_a_rank_without_a_rank_0_says_where_it_looked(threads: Threads) -> None:
    lone = threads.begin(latest, 1, 2)
    threads.retried.get(timeout=600)
    threads.time_is_up()
    said = (rf"rank 1 of 2 did not reach rank 0 at 127.0.0.1:{threads.port} within 300 seconds: .*refused.*; is rank 0 "
            "started, and are MASTER_ADDR and MASTER_PORT")
    assert_refused(lambda: lone.result(600), said, zs.BackendError)


def test_who_does_not_belong_is_not_let_in(threads: Threads) -> None:
    first, second = (threads.begin(latest, rank, 3) for rank in (0, 2))
    threads.wait_for(2)
    for rank, ranks, key, said in [(1, 3, b"another", "what answers there does not know this job's key"),
                                   (2, 3, b"key", "two processes say that they are rank 2"),
                                   (1, 4, b"key", "rank 1 was started as one of 4 ranks, and rank 0 as one of 3"),
                                   (3, 3, b"key", "there is no rank 3 among 3, beside rank 0")]:
        refused = threads.begin(latest, rank, ranks, key).exception(600)
        assert str(refused) == f"rank {rank} was not let in at 127.0.0.1:{threads.port}: {said}"
    assert not first.done()
    assert not second.done()


class Telltale:
    """A pickle that makes a folder where it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def test_strangers_are_ignored_and_pickles_are_never_read_even_of_who_knows_the_key(
        threads: Threads, tmp_path: Path) -> None:
    first = threads.begin(latest, 0, 2)
    while True:
        with suppress(ConnectionRefusedError):
            stranger, silent = (socket.create_connection(("127.0.0.1", threads.port)) for _ in range(2))
            break
    knowing = Client(("127.0.0.1", threads.port), authkey=b"key")
    with silent, Connection(stranger.detach()) as line, knowing:
        for each in (line, knowing):
            each.send(Telltale(tmp_path / "read"))
            with suppress(EOFError, OSError):  # when it has been hung up upon
                while each.recv_bytes():
                    pass
        second = threads.begin(latest, 1, 2)
        for its in (first, second):
            its.result(600)
    assert not (tmp_path / "read").exists()
    pickle.loads(pickle.dumps(Telltale(tmp_path / "read")))
    assert (tmp_path / "read").exists()  # as it would have been


def test_a_rank_whose_connection_ends_without_a_word_has_failed_and_nobody_awaits_its_value(threads: Threads) -> None:
    said = "rank 2 of 3 can no longer be reached: its process has ended, or the network between us has"

    def dies(channel: TCPChannel) -> None:
        if channel.index == 2:
            connection, = channel._connections.values()
            with socket.socket(fileno=os.dup(connection.fileno())) as connected:
                connected.shutdown(socket.SHUT_RDWR)
            return
        ((source, message),) = heard(channel, 1)
        assert isinstance(message, Failed)
        assert (source, message.rank, message.summary, message.drained) == (2, 2, f"RemoteError: {said}", True)
        assert_refused(lambda: channel.all_gather(None), said, zs.RemoteError)

    for its in [threads.begin(dies, rank, 3) for rank in range(3)]:
        its.result(600)


def test_an_abort_ends_every_process_and_says_who_did_it(threads: Threads, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        threads.begin(lambda channel: channel.index == 1 and channel.abort(), rank, 3)
    assert [threads.ended.get(timeout=600) for _ in range(3)] == [1, 1, 1]
    said = capsys.readouterr().err
    assert all(f"rank 1 of 3 has ended the job; rank {rank} ends too" in said for rank in (0, 2))


@pytest.mark.parametrize("frame", [[b"5"], [b"[]"], [b"[" * 10**5], [b'["tuple",0,1,null,["bytes","!"]]'], [b"\xff"],
                                   [b'["tuple",0,1,0]', b"{"]], ids=lambda frame: str(frame)[:40])
def test_a_rank_that_sends_what_is_no_frame_has_failed(threads: Threads, frame: list[bytes]) -> None:
    def babbles(channel: TCPChannel) -> None:
        if channel.index == 1:
            for part in frame:
                channel._connections[0].send_bytes(part)
            return
        (source, message), = heard(channel, 1)
        assert (source, type(message), message.drained) == (1, Failed, True)

    for its in [threads.begin(babbles, rank, 2) for rank in range(2)]:
        its.result(600)


# -- jobs -------------------------------------------------------------------------------------------------------------

def test_a_job_is_read_from_torchruns_variables() -> None:
    job, alone = job_of({**MINE, "LOCAL_RANK": "1", "WORLD_SIZE": "16", "RANK": "9"}), job_of(MINE)
    assert job is not None
    assert alone is not None
    assert (job.rank, job.ranks, job.local_rank, job.address) == (9, 16, 1, ("127.0.0.1", 29501))
    assert alone.local_rank == 1, "without LOCAL_RANK the rank is taken"
    assert job_of({}) is job_of({"MASTER_ADDR": "somewhere", "MASTER_PORT": "1"}) is None


def test_a_job_of_one_machine_needs_no_secret_and_its_key_is_its_users_alone(monkeypatch, tmp_path) -> None:
    far = {**MINE, "MASTER_ADDR": "node-1"}
    assert job_of({**far, "LOCAL_WORLD_SIZE": "4"}).key is job_of(MINE).key is None
    assert job_of({**far, "ZEROSIM_JOB_KEY": "0123456789abcdef"}).key == b"0123456789abcdef"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with key_file_for_this_user(29501, b"random", needed=True):
        assert key_of_this_user(29501) == b"random"
        (folder,) = tmp_path.iterdir()
        assert [path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())] == [0, 0]
    assert list(folder.iterdir()) == []
    (folder / "29501.key").mkdir()
    assert_refused(key_file_for_this_user(29501, b"random", needed=True).__enter__,
                   r"cannot leave the job's key .*29501\.key.*, or set ZEROSIM_JOB_KEY", zs.BackendError)
    (folder / "29501.key").rmdir()
    folder.rename(tmp_path / "another")
    folder.symlink_to(tmp_path / "another")  # whose own mode is 0o777
    for read in (lambda: key_of_this_user(29501), key_file_for_this_user(29501, b"random", needed=True).__enter__):
        assert_refused(read, "can be read or written by others; remove it, or set ZEROSIM_JOB_KEY", zs.BackendError)


def test_a_process_that_does_not_see_rank_0s_key_says_so_and_waits_no_longer(threads: Threads, monkeypatch) -> None:
    """As in a container with files of its own, on rank 0's network."""
    def unseen(port: int) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", f"/tmp/{port}.key")

    monkeypatch.setattr("zerosim.backends.processes.tcp.key_file_for_this_user", lambda *_, **__: nullcontext())
    monkeypatch.setattr("zerosim.backends.processes.tcp.key_of_this_user", unseen)
    _, second = (threads.begin(latest, rank, 2, None) for rank in (0, 1))
    said = rf"not let in at .*: rank 0 left no key in /tmp/{threads.port}\.key here; .*, set ZEROSIM_JOB_KEY"
    assert_refused(lambda: second.result(600), said, zs.BackendError)


# -- plain data -------------------------------------------------------------------------------------------------------

LEAVES = (st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
          | st.sampled_from([1024, 20_000]).map(lambda bits: -1 << bits)
          | st.sampled_from([np.float32(0.1), np.dtype(np.int16), np.dtype(ml_dtypes.bfloat16), Joining(
              ((0, 1), (2,)), b"id"), Finished({(((0, 1), ()), "send", 1): 3})]))
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(
    st.integers() | st.tuples(st.text()), inner), max_leaves=12)


@given(VALUES)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    found = from_bytes(to_bytes(value))
    assert (found, type(found)) == (value, type(value))


def test_arrays_come_back_bit_for_bit() -> None:
    for dtype in (*NUMERIC, "U3", "datetime64[s]", "?"):
        array = np.frombuffer(bytes(range(48)) * 10, np.dtype(dtype).newbyteorder("=")).reshape(2, -1)
        for value in (array, array.T, array[:, :0], array[0, :1].reshape(())):
            found = from_bytes(to_bytes(value))
            assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())


def test_what_is_not_plain_is_refused_on_both_ends() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert_refused(lambda: to_bytes(endless), "found a list that holds itself, or is nested too deep to travel")
    for value in (object(), [print], {1: np.array([print])}, Threads, np.ma.array([1, 2], mask=[0, 1]), Counter("ab"),
                  np.zeros(2, "V0")):
        assert_refused(lambda value=value: to_bytes(value),
                       "processes tell each other plain data alone: .* or start the job with mpiexec")
    for data in (b"{", b"[]", b'["object","subprocess","Popen"]', b'["object","zerosim.ranks.errors","RemoteError"]',
                 b'["tuple"', b'[' * 10**5, b'["array","O",[1],""]', b'["unknown"]', pickle.dumps(1)):
        assert_refused(lambda data=data: from_bytes(data), "")


@pytest.mark.skipif(os.name != "posix", reason="processes are killed as on Unix")
def test_a_process_that_is_killed_ends_the_run_of_the_others_with_its_rank_named() -> None:
    with pytest.raises(RuntimeError, match="rank 2 of 3 can no longer be reached: its process has ended") as caught:
        DOUBLES[-1].run(programs.dies)
    assert "did not hear of it" not in str(caught.value)  # nobody has waited for its farewell
