"""Control messages between processes over TCP, by the standard library alone: for jobs that no MPI has started.

Rank 0 listens, every other rank has one connection to it, and rank 0 passes on what they tell each other. Threads read,
so that messages are taken, and an end of the job is heard, while a rank waits inside a library. Whoever connects proves
to know the job's key, as multiprocessing.connection has it done, and sends plain data: nothing of it is run.
"""

import contextlib
import getpass
import os
import queue
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, NoReturn

from zerosim.backends.processes.control import Channel, Failed, lost_text
from zerosim.backends.processes.plain import from_bytes, to_bytes
from zerosim.ranks.errors import BackendError, RemoteError, ranks_text

# -- A job as launchers describe it to each of its processes, in variables of the environment that torchrun made usual -
# `connect` reads them, and hands them over.

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PORT_OFFSET = 1  # torchrun's own store may be listening at MASTER_PORT; rank 0 listens at the next port
SECRET, SHORTEST_SECRET = "ZEROSIM_JOB_KEY", 16
ONE_MACHINE = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ProcessJob:
    """This process' place in its job, the address of rank 0's channel, and the key that only the job's processes know.

    ``key`` None: all processes are on one machine, where rank 0 makes a key and leaves it to its own user.
    """

    rank: int
    ranks: int
    local_rank: int
    address: tuple[str, int]
    key: bytes | None


def job_of(variables: Mapping[str, str]) -> ProcessJob | None:
    """The job that these variables describe; None where they describe none.

    Raises BackendError for a job that is described in part, or wrongly, and for one of several machines without a
    secret.
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
    return ProcessJob(rank, ranks, local, (variables["MASTER_ADDR"], port + PORT_OFFSET), _key(variables, ranks))


def _key(variables: Mapping[str, str], ranks: int) -> bytes | None:
    secret = variables.get(SECRET, "")
    if secret:
        if len(secret) < SHORTEST_SECRET:
            raise BackendError("TCP", f"{SECRET} has {len(secret)} characters, which somebody else may guess; give all "
                                      f"processes a random text of {SHORTEST_SECRET} or more, as openssl rand -hex 16 "
                                      "prints one")
        return secret.encode()
    together = _number(variables, "LOCAL_WORLD_SIZE") if variables.get("LOCAL_WORLD_SIZE") else None
    if together == ranks or (together is None and variables["MASTER_ADDR"] in ONE_MACHINE):
        return None
    found = (f"LOCAL_WORLD_SIZE={together} of WORLD_SIZE={ranks}" if together is not None else
             f"MASTER_ADDR={variables['MASTER_ADDR']}, and no LOCAL_WORLD_SIZE that says otherwise")
    raise BackendError("TCP", f"processes on several machines ({found}) need a secret, so that nobody else on the "
                              f"network speaks as one of them; set {SECRET} to the same random text on all of them, as "
                              "openssl rand -hex 16 prints one")


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not text.strip().isdecimal():
        raise BackendError("TCP", f"{name}={text!r} in the environment must be a whole number from 0 on")
    return int(text)


# -- The channel -------------------------------------------------------------------------------------------------------

MESSAGE, ABORT, LOST, CLOSE = range(4)  # what a frame is about
LOOPBACK = "127.0.0.1"
RETRY_SECONDS = 0.1
LOOK_SECONDS = 0.2       # how often one who waits for others looks at the time
HANG_UP_SECONDS = 10.0  # what another process may take to answer, or to hang up, when it has all that it needs
Head = tuple[int, int, int | None]  # of a frame: what, from whom, to whom (None: all others); a value as bytes follows


class TCPChannel(Channel):
    """Carries plain data between N processes, by way of rank 0.

    ``address`` is where the others find rank 0, which listens at that port of all its addresses, since a machine does
    not always know the one by which it is found; with port 0 a lone rank 0 may choose one. With ``key`` None all are on
    this machine: rank 0 listens to it alone. All are waited for at the beginning, for ``timeout_seconds`` at the most.
    A process that ends without a word is a rank that failed.
    """

    def __init__(self, index: int, ranks: int, address: tuple[str, int], key: bytes | None, *,
                 timeout_seconds: float = 300.0) -> None:
        """Raises BackendError where not all ranks come in time, naming who is missing, and where one is refused."""
        super().__init__(index, ranks)
        self.address = address if key else (LOOPBACK, address[1])
        self._deadline, self._timeout_seconds = time.monotonic() + timeout_seconds, timeout_seconds
        self._notes: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._closing = False
        self._connections: dict[int, Connection] = (
            {} if ranks == 1 else {0: self._join(key)} if index else self._listen(key))
        self._locks = {rank: threading.Lock() for rank in self._connections}
        self._readers = [threading.Thread(target=self._read, args=(rank,), daemon=True, name=f"zerosim reads {rank}")
                         for rank in self._connections]
        for reader in self._readers:
            reader.start()

    # -- coming together ------------------------------------------------------------------------------------------

    def _listen(self, given: bytes | None) -> dict[int, Connection]:
        """Connections to all other ranks. Each handshake has a thread: who keeps silent keeps nobody waiting."""
        connections: dict[int, Connection] = {}
        refused: dict[Connection, str] = {}
        news = threading.Condition()  # of both
        key = given or secrets.token_bytes(32)

        def handshake(connection: Connection, host: str) -> None:
            refused[connection] = f"{host} connected, and left or kept silent"
            try:
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
                index, ranks = received(connection)
                with news:
                    reason = reject_reason(index, ranks, self.size, connections)
                    connection.send_bytes(to_bytes(reason))
                    if reason is None:
                        connections[index] = connection
                        news.notify_all()
                        del refused[connection]
                        return
            except AuthenticationError:
                reason = "it does not know this job's key"
            except (EOFError, ConnectionError):
                reason = None
            except (OSError, AssertionError, ValueError, TypeError):  # what came is no first frame
                reason = "it does not speak as a process of zerosim does"
            if reason is not None:
                refused[connection] = f"{host} was refused: {reason}"
            connection.close()

        with (self._bound(everywhere=given is not None) as server,
              key_file_for_this_user(self.address[1], key, needed=given is None)):
            server.settimeout(LOOK_SECONDS)
            accepting = threading.Thread(target=_accept, args=(server, handshake), daemon=True)
            accepting.start()
            with news:
                while len(connections) < self.size - 1 and self._left() > 0:
                    news.wait(LOOK_SECONDS)
        accepting.join()
        missing = [rank for rank in range(1, self.size) if rank not in connections]
        text = self._missed(missing, list(refused.values())) if missing else None
        for connection in connections.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(to_bytes(text))
        if text is not None:
            raise BackendError("TCP", text)
        return connections

    def _bound(self, *, everywhere: bool) -> socket.socket:
        both = everywhere and socket.has_dualstack_ipv6()
        try:
            server = socket.create_server(("" if everywhere else LOOPBACK, self.address[1]), backlog=self.size,
                                          family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
        except OSError as error:
            raise BackendError("TCP", f"rank 0 cannot listen at port {self.address[1]}: {error}; set MASTER_PORT to a "
                                      "port with the next one free") from error
        self.address = self.address[0], server.getsockname()[1]
        return server

    def _missed(self, missing: list[int], refused: list[str]) -> str:
        said = f" ({'; '.join(dict.fromkeys(refused))})" if refused else ""
        return (f"{ranks_text(missing)} of {self.size} did not come to {self._where()} within "
                f"{self._timeout_seconds:g} seconds{said}; start all ranks with the same WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT, each with its own RANK")

    def _join(self, given: bytes | None) -> Connection:
        error: Exception | None = None
        while self._left() > 0:
            try:
                reached = socket.create_connection(self.address, timeout=max(0.1, min(5.0, self._left())))
                connection = connection_of(reached)
                self._await(connection)
                key = given or key_of_this_user(self.address[1])  # which is there since rank 0 listens
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
                connection.send_bytes(to_bytes((self.index, self.size)))
                for _ in ("accepted", "all are here"):
                    self._await(connection)
                    reason = received(connection)
                    if reason is not None:
                        self._refused(reason)
                return connection
            except AuthenticationError:
                self._refused("what answers there does not know this job's key")
            except AssertionError:  # what came is no challenge
                self._refused("it does not speak as a process of zerosim does")
            except FileNotFoundError as found:
                self._refused(f"rank 0 left no key in {found.filename} here; where processes have other files or users "
                              f"than rank 0, as in containers, set {SECRET} to the same random text for all of them")
            except (OSError, EOFError) as failed:
                error = failed if str(failed) else ConnectionError("rank 0 went away")
                time.sleep(RETRY_SECONDS)
        raise BackendError("TCP", f"rank {self.index} of {self.size} did not reach rank 0 at {self._where()} within "
                                  f"{self._timeout_seconds:g} seconds: {error}; is rank 0 started, and are MASTER_ADDR "
                                  "and MASTER_PORT those of its machine?")

    def _await(self, connection: Connection) -> None:
        """Returns when something has come; rank 0 may have begun later, and waits as long as this rank."""
        if not connection.poll(max(0.1, self._left()) + HANG_UP_SECONDS):
            raise TimeoutError("rank 0 keeps silent")

    def _refused(self, reason: str) -> NoReturn:
        raise BackendError("TCP", f"rank {self.index} was not let in at {self._where()}: {reason}") from None

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _where(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    # -- messages -------------------------------------------------------------------------------------------------

    def send(self, message: Any, to: int | None = None) -> None:
        """Sends a message to one rank, or to all others, and returns at once."""
        if to != self.index:
            self._send(MESSAGE, to, to_bytes(message))

    def incoming(self) -> Iterator[tuple[int, Any]]:
        """(rank, message) of what has come since the last call; of a lost process, that it failed and drained."""
        while True:
            try:
                yield self._notes.get_nowait()
            except queue.Empty:
                return

    def abort(self) -> None:
        """Ends all processes of the job at once, without their clean-up."""
        self._send(ABORT)
        os._exit(1)

    def close(self) -> None:
        """Every process calls it; what was sent before has arrived then."""
        self.all_gather(None)
        self._closing = True
        self._send(CLOSE)
        for reader in self._readers:
            reader.join(HANG_UP_SECONDS)
        for connection in self._connections.values():
            connection.close()

    # -- frames ---------------------------------------------------------------------------------------------------

    def _send(self, what: int, to: int | None = None, data: bytes = b"") -> None:
        self._pass_on((what, self.index, to), data)

    def _pass_on(self, head: Head, data: bytes) -> None:
        """Sends a frame towards its reader: from rank 0 to whom it concerns, from others to rank 0."""
        _, source, to = head
        for rank, connection in self._connections.items():
            if rank != source and (self.index or to in (None, rank)):
                # That a connection is broken its reader notices.
                with contextlib.suppress(OSError), self._locks[rank]:
                    connection.send_bytes(to_bytes(head))
                    connection.send_bytes(data)

    def _read(self, rank: int) -> None:
        """A thread: takes what comes on one connection until it ends."""
        connection = self._connections[rank]
        try:
            while True:
                what, source, to = received(connection)
                data = connection.recv_bytes()
                if what == CLOSE:
                    return
                if self.index == 0 and to != 0:
                    self._pass_on((what, source, to), data)
                if to in (None, self.index):
                    self._take(what, source, data)
        except (OSError, EOFError, ValueError, TypeError, LookupError):  # its end, or no frame
            if not self._closing:
                self._lost({rank} if self.index == 0 else {0})

    def _take(self, what: int, source: int, data: bytes) -> None:
        if what == ABORT:
            print(f"rank {source} of {self.size} has ended the job; rank {self.index} ends too", file=sys.stderr,
                  flush=True)
            os._exit(1)
        if what == LOST:
            self._lost(from_bytes(data))
        else:
            self._notes.put((source, from_bytes(data)))

    def _lost(self, ranks: set[int]) -> None:
        """Processes have ended without a word: for whoever reads the messages they have failed."""
        if self.index == 0:
            self._send(LOST, None, to_bytes(ranks))
        for rank in ranks:
            failed = Failed.of(RemoteError(lost_text([rank], self.size)), rank)
            self._notes.put((rank, replace(failed, drained=True)))
        self.lost |= ranks


def received(connection: Connection) -> Any:
    """The value that comes next; ValueError for what is no plain data."""
    return from_bytes(connection.recv_bytes())


def connection_of(connected: socket.socket) -> Connection:
    """A connection of the library's over a socket, on which small messages leave at once."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())


def _accept(server: socket.socket, handshake: Callable[[Connection, str], None]) -> None:
    """A thread: lets each that connects shake hands in a thread of its own, until the server is closed."""
    while True:
        try:
            accepted, peer = server.accept()
            connection = connection_of(accepted)
        except TimeoutError:
            continue
        except OSError:
            if server.fileno() < 0:  # closed: all are here, or time is up
                return
            time.sleep(RETRY_SECONDS)  # one that has gone again, or more connections than this process may have
            continue
        threading.Thread(target=handshake, args=(connection, peer[0]), daemon=True).start()


def reject_reason(index: int, ranks: int, here: int, there: Mapping[int, Connection]) -> str | None:
    """The reason to refuse a process that knows the key, where ``here`` ranks are expected; None for none."""
    if type(index) is not int or type(ranks) is not int:
        raise ValueError(f"no rank and number of ranks: {index!r}, {ranks!r}")
    if ranks != here:
        return f"rank {index} was started as one of {ranks} ranks, and rank 0 as one of {here}"
    if not 0 < index < ranks:
        return f"there is no rank {index} among {ranks}, beside rank 0"
    return f"two processes say that they are rank {index}" if index in there else None


# -- The key of a job on one machine: in a file that its user alone can read -------------------------------------------


def _key_file(port: int) -> Path:
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    return Path(tempfile.gettempdir()) / f"zerosim-{user}" / f"{port}.key"


@contextlib.contextmanager
def key_file_for_this_user(port: int, key: bytes, *, needed: bool) -> Iterator[None]:
    """Inside, the key lies where `key_of_this_user` finds it, if it is needed."""
    if not needed:
        yield
        return
    file = _key_file(port)
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        _check_private(file.parent)
        file.unlink(missing_ok=True)  # of a job that was killed
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(key)
    except OSError as error:
        raise BackendError("TCP", f"rank 0 cannot leave the job's key to the other processes of this user: {error}; "
                                  f"make room for {file}, or set {SECRET} to the same random text for all processes"
                           ) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def key_of_this_user(port: int) -> bytes:
    """The key that rank 0 has left; OSError where it has not."""
    file = _key_file(port)
    _check_private(file.parent)
    return file.read_bytes()


def _check_private(folder: Path) -> None:
    """Raises BackendError for a folder in which somebody else may have put a key."""
    found = folder.lstat()  # of a link itself, which somebody else may have made
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o077):
        raise BackendError("TCP", f"{folder}, where rank 0 leaves the job's key to the other processes of this user, "
                                  f"can be read or written by others; remove it, or set {SECRET} to the same random "
                                  "text for all processes")
