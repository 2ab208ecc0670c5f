"""Frames on a socket, and how two processes show each other that they belong to one job without telling the key."""

import contextlib
import hashlib
import hmac
import json
import os
import pickle
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from zerosim.backends.processes.notes import Drained, Failed
from zerosim.ranks.errors import BackendError, RemoteError, ranks_text

LENGTH = struct.Struct("!Q")
NONCE_NBYTES = 32
HELLO_NBYTES = 4096       # more than any greeting; whoever announces more is no process of ours
GREETING = "zerosim notes 1"


class HandshakeError(ConnectionError):
    """The other side is not what it should be; the text says why."""


def send_frame(line: socket.socket, payload: bytes) -> None:
    """Sends the bytes, with their number before them."""
    line.sendall(LENGTH.pack(len(payload)) + payload)


def receive_frame(line: socket.socket, most_nbytes: int | None = None) -> bytes:
    """The bytes of one frame. Raises EOFError where the other side has gone, HandshakeError for too long a frame."""
    (length,) = LENGTH.unpack(_exactly(line, LENGTH.size))
    if most_nbytes is not None and length > most_nbytes:
        raise HandshakeError("it does not speak as a process of zerosim does")
    return _exactly(line, length)


def _exactly(line: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = line.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def greet(line: socket.socket, key: bytes, index: int, ranks: int) -> None:
    """The joining side: says who it is, proves that it has the key, has the other side prove it, and waits for all.

    Raises HandshakeError with the reason that the other side gives, or where it has not the key.
    """
    nonce = secrets.token_hex(NONCE_NBYTES)
    _say(line, {"greeting": GREETING, "rank": index, "ranks": ranks, "nonce": nonce})
    answer = _answer(line)
    if "refused" in answer:
        raise HandshakeError(str(answer["refused"]))
    if not _proves(answer, key, f"welcome {nonce} {index} {ranks}"):
        raise HandshakeError("what answers there does not know this job's key")
    _say(line, {"proof": _proof(key, f"greet {answer.get('nonce')} {index} {ranks}")})
    for _ in ("welcome", "all are here"):
        answer = _answer(line)
        if "refused" in answer:
            raise HandshakeError(str(answer["refused"]))


def all_are_here(line: socket.socket, refused: str | None = None) -> None:
    """The listening side: tells one that was welcome that notes can be sent, or why it does not."""
    _say(line, {"complete": True} if refused is None else {"refused": refused})


def welcome(line: socket.socket, key: bytes, ranks: int, there: set[int]) -> int:
    """The listening side: the index of the rank that has joined, once it has proved to have the key.

    Raises HandshakeError, after sending the other side the reason; ``there`` are the ranks that have joined already.
    """
    hello = _answer(line)
    index, nonce = hello.get("rank"), secrets.token_hex(NONCE_NBYTES)
    if hello.get("greeting") != GREETING:
        raise HandshakeError("it does not speak as a process of zerosim does")
    _say(line, {"nonce": nonce, "proof": _proof(key, f"welcome {hello.get('nonce')} {index} {hello.get('ranks')}")})
    if not _proves(_answer(line), key, f"greet {nonce} {index} {hello.get('ranks')}"):
        _refuse(line, "it does not know this job's key")
    if hello.get("ranks") != ranks:
        _refuse(line, f"rank {index} was started as one of {hello.get('ranks')} ranks, and rank 0 as one of {ranks}")
    if not isinstance(index, int) or not 0 < index < ranks:
        _refuse(line, f"there is no rank {index} among {ranks}, beside rank 0")
    if index in there:
        _refuse(line, f"two processes say that they are rank {index}")
    _say(line, {"welcome": index})
    return index


def _refuse(line: socket.socket, reason: str) -> NoReturn:
    _say(line, {"refused": reason})
    raise HandshakeError(reason)


def _say(line: socket.socket, what: dict[str, Any]) -> None:
    send_frame(line, json.dumps(what).encode())


def _answer(line: socket.socket) -> dict[str, Any]:
    try:
        heard = json.loads(receive_frame(line, HELLO_NBYTES))
    except ValueError:
        heard = None
    if not isinstance(heard, dict):
        raise HandshakeError("it does not speak as a process of zerosim does")
    return heard


def _proof(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _proves(answer: dict[str, Any], key: bytes, text: str) -> bool:
    return hmac.compare_digest(str(answer.get("proof")), _proof(key, text))


# ----------------------------------------------------------------------------------------------------
# A job as launchers describe it to each of its processes, in variables of the environment that torchrun made usual
# Nothing is read here: whoever stands at the edge hands the variables over.


NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PORT_OFFSET = 1  # torchrun's own store may be listening at MASTER_PORT; ours is one door further
SECRET = "ZEROSIM_JOB_KEY"
KEYED_BY = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", SECRET)


@dataclass(frozen=True, slots=True)
class ProcessJob:
    """This process' place in its job, the address of rank 0's notes, and a key that strangers do not know.

    Without ZEROSIM_JOB_KEY the key is made of the job's own variables: it keeps stray connections out, and not somebody
    who knows those. On a network that is not to be trusted, give all processes a secret of your own.
    """

    rank: int
    ranks: int
    local_rank: int
    address: tuple[str, int]
    key: bytes


def job_of(variables: Mapping[str, str]) -> ProcessJob | None:
    """The job that these variables describe; None where they describe none.

    Raises BackendError for a job that is described in part, or wrongly.
    """
    missing = [name for name in NEEDED if not variables.get(name)]
    if len(missing) == len(NEEDED) or ("RANK" in missing and "WORLD_SIZE" in missing):
        return None
    if missing:
        raise BackendError("TCP", f"a job of processes needs {', '.join(NEEDED)} in the environment, as torchrun sets "
                                  f"them, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    rank, ranks, port = (_number(variables, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    local = _number(variables, "LOCAL_RANK") if variables.get("LOCAL_RANK") else rank
    if not 0 <= rank < ranks:
        raise BackendError("TCP", f"RANK={rank} is none of the ranks 0 to {ranks - 1} of WORLD_SIZE={ranks}")
    if not 0 < port < 65535:
        raise BackendError("TCP", f"MASTER_PORT={port} must be a port whose next one is a port too, from 1 to 65534")
    said = "\0".join(f"{name}={variables.get(name, '')}" for name in KEYED_BY)
    key = hashlib.sha256(said.encode()).digest()
    return ProcessJob(rank, ranks, local, (variables["MASTER_ADDR"], port + PORT_OFFSET), key)


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not text.strip().isdecimal():
        raise BackendError("TCP", f"{name}={text!r} in the environment must be a whole number from 0 on")
    return int(text)


# -- Notes between processes over TCP, by the standard library alone: for jobs that no MPI has started ---------------
# Rank 0 listens, every other rank has one connection to it, and rank 0 passes on what they tell each other. Threads
# read, so that notes are taken, and an end of the job is heard, while a rank waits inside a library. Notes are pickles:
# they are read from processes only that have proved to know the job's key.


NOTE, VALUE, ABORT, GONE, BYE = range(5)  # what a frame is about
RETRY_SECONDS = 0.1
GREETING_SECONDS = 10.0   # what one that has connected may take to say who it is
Frame = tuple[int, int, int | None, Any]  # what, from whom, to whom (None: all others), and a pickle


class TCPChannel:
    """Carries pickled notes between N processes, by way of rank 0.

    ``address`` is where rank 0 listens; with port 0 a lone rank 0 may choose one. All are waited for at the beginning,
    for ``timeout_seconds`` at the most. A process that ends without a word is a rank that failed.
    """

    def __init__(self, index: int, ranks: int, address: tuple[str, int], key: bytes, *,
                 timeout_seconds: float = 300.0) -> None:
        """Raises BackendError where not all ranks come in time, naming who is missing, and where one is refused."""
        self.index, self.size, self.address = index, ranks, address
        self._deadline, self._timeout_seconds = time.monotonic() + timeout_seconds, timeout_seconds
        self._notes: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._values: dict[int, list[Any]] = {rank: [] for rank in range(ranks)}
        self._news = threading.Condition()
        self._gone: set[int] = set()
        self._closing = False
        self._locks: dict[int, threading.Lock] = {}
        self._lines: dict[int, socket.socket] = self._listen(key) if index == 0 else {0: self._join(key)}
        self._locks = {rank: threading.Lock() for rank in self._lines}
        self._readers = [threading.Thread(target=self._read, args=(rank,), daemon=True, name=f"zerosim notes {rank}")
                         for rank in self._lines]
        for reader in self._readers:
            reader.start()

    # -- coming together ------------------------------------------------------------------------------------------

    def _listen(self, key: bytes) -> dict[int, socket.socket]:
        if self.size == 1:
            return {}
        lines: dict[int, socket.socket] = {}
        refused: list[str] = []
        with self._bound() as server:
            while len(lines) < self.size - 1:
                server.settimeout(max(0.001, min(0.2, self._left())))
                try:
                    line, peer = server.accept()
                except TimeoutError:
                    if self._left() <= 0:
                        self._miss(lines, refused)
                    continue
                line.settimeout(GREETING_SECONDS)
                try:
                    lines[welcome(line, key, self.size, set(lines))] = line
                except (OSError, EOFError) as error:
                    refused.append(f"{peer[0]} was refused: {error}" if isinstance(error, HandshakeError)
                                   else f"{peer[0]} connected, and left or kept silent")
                    line.close()
        for line in lines.values():
            all_are_here(_ready(line))
        return lines

    def _bound(self) -> socket.socket:
        try:
            family = socket.getaddrinfo(*self.address, type=socket.SOCK_STREAM)[0][0]
            server = socket.create_server(self.address, family=family, backlog=self.size)
        except OSError as error:
            raise BackendError("TCP", f"rank 0 cannot listen at {self._where()}: {error}; set MASTER_ADDR to an "
                                      "address of rank 0's machine, and MASTER_PORT to a port with the next one free"
                               ) from error
        self.address = self.address[0], server.getsockname()[1]
        return server

    def _miss(self, lines: dict[int, socket.socket], refused: list[str]) -> NoReturn:
        said = f" ({'; '.join(dict.fromkeys(refused))})" if refused else ""
        missing = [rank for rank in range(1, self.size) if rank not in lines]
        text = (f"{ranks_text(missing)} of {self.size} did not come to {self._where()} within "
                f"{self._timeout_seconds:g} seconds{said}; start all ranks with the same WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT, each with its own RANK")
        for line in lines.values():
            with contextlib.suppress(OSError):
                all_are_here(line, refused=text)
            line.close()
        raise BackendError("TCP", text)

    def _join(self, key: bytes) -> socket.socket:
        error: Exception | None = None
        while self._left() > 0:
            try:
                line = socket.create_connection(self.address, timeout=max(0.1, min(5.0, self._left())))
            except OSError as failed:
                error = failed
                time.sleep(RETRY_SECONDS)
                continue
            line.settimeout(max(0.1, self._left()) + GREETING_SECONDS)  # rank 0 may have begun later, and waits as long
            try:
                greet(line, key, self.index, self.size)
            except HandshakeError as refused:
                line.close()
                raise BackendError("TCP", f"rank {self.index} was not let in at {self._where()}: {refused}"
                                   ) from refused
            except (OSError, EOFError) as failed:
                line.close()
                error = failed if str(failed) else ConnectionError("rank 0 went away")
                time.sleep(RETRY_SECONDS)
                continue
            return _ready(line)
        raise BackendError("TCP", f"rank {self.index} of {self.size} did not reach rank 0 at {self._where()} within "
                                  f"{self._timeout_seconds:g} seconds: {error}; is rank 0 started, and are MASTER_ADDR "
                                  "and MASTER_PORT those of its machine?")

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _where(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    # -- notes ----------------------------------------------------------------------------------------------------

    def post(self, note: Any, to: int | None = None) -> None:
        """Sends a note to one rank, or to all others, and returns at once."""
        if to != self.index:
            self._send(NOTE, to, pickle.dumps(note))

    def arrived(self) -> Iterator[tuple[int, Any]]:
        """(rank, note) of what has come since the last call; of a process that has gone, that it failed and drained."""
        while True:
            try:
                yield self._notes.get_nowait()
            except queue.Empty:
                return

    def everyone(self, value: Any) -> list[Any]:
        """The values of all processes, in rank order. Raises RemoteError where one has gone that did not give its."""
        self._send(VALUE, None, pickle.dumps(value))
        with self._news:
            self._values[self.index].append(value)
            while missing := [rank for rank in range(self.size) if not self._values[rank]]:
                gone = [rank for rank in missing if rank in self._gone]
                if gone:
                    raise RemoteError(gone_text(gone, self.size))
                self._news.wait(0.1)  # short, so that Ctrl-C is heard
            return [self._values[rank].pop(0) for rank in range(self.size)]

    def abort(self) -> None:
        """Ends all processes of the job at once, without their clean-up."""
        self._send(ABORT, None, None)
        os._exit(1)

    def close(self) -> None:
        """Every process calls it; what was sent before has arrived then."""
        self.everyone(None)
        self._closing = True
        self._send(BYE, None, None)
        for rank, line in self._lines.items():
            with contextlib.suppress(OSError), self._locks[rank]:
                line.shutdown(socket.SHUT_WR)
        for reader in self._readers:
            reader.join(GREETING_SECONDS)
        for line in self._lines.values():
            line.close()

    # -- frames ---------------------------------------------------------------------------------------------------

    def _send(self, what: int, to: int | None, payload: Any) -> None:
        self._pass_on((what, self.index, to, payload))

    def _pass_on(self, frame: Frame) -> None:
        """Sends a frame towards its reader: from rank 0 to whom it concerns, from others to rank 0."""
        _, source, to, _ = frame
        for rank, line in self._lines.items():
            if rank != source and (self.index or to in (None, rank)):
                # A line that is broken is noticed by its reader.
                with contextlib.suppress(OSError), self._locks[rank]:
                    send_frame(line, pickle.dumps(frame))

    def _read(self, rank: int) -> None:
        """A thread: takes what comes on one line until it ends."""
        try:
            while True:
                frame: Frame = pickle.loads(receive_frame(self._lines[rank]))
                if frame[0] == BYE:
                    return
                if self.index == 0 and frame[2] != 0:
                    self._pass_on(frame)
                if frame[2] in (None, self.index):
                    self._take(frame)
        except (OSError, EOFError):
            if not self._closing:
                self._lost({rank} if self.index == 0 else {0})

    def _take(self, frame: Frame) -> None:
        what, source, _, payload = frame
        if what == ABORT:
            print(f"rank {source} of {self.size} has ended the job; rank {self.index} ends too", file=sys.stderr,
                  flush=True)
            os._exit(1)
        if what == GONE:
            self._lost(payload)
        elif what == NOTE:
            self._notes.put((source, pickle.loads(payload)))
        else:
            with self._news:
                self._values[source].append(pickle.loads(payload))
                self._news.notify_all()

    def _lost(self, ranks: set[int]) -> None:
        """Processes have ended without a word: for whoever reads the notes they have failed."""
        if self.index == 0:
            self._send(GONE, None, ranks)
        for rank in ranks:
            for note in Failed.of(RemoteError(gone_text([rank], self.size))), Drained():
                self._notes.put((rank, note))
        with self._news:
            self._gone |= ranks
            self._news.notify_all()


def _ready(line: socket.socket) -> socket.socket:
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def gone_text(ranks: list[int], size: int) -> str:
    """The text of an error about processes that have ended without a word."""
    whose = "its process has" if len(ranks) == 1 else "their processes have"
    return f"{ranks_text(ranks)} of {size} can no longer be reached: {whose} ended, or the network between us has"
