"""What can go wrong between ranks, as exceptions whose texts say who, where and what to do."""


class MismatchError(ValueError):
    """Ranks of one group called different collectives, or a message did not fit where it arrived."""


class DeadlockError(RuntimeError):
    """No rank can go on; the text says who waits for whom, and where in the source."""


class PendingWorkError(RuntimeError):
    """An asynchronous collective was used wrongly: read before ``wait()``, its input changed, or never waited for."""


class OutOfMemoryError(MemoryError):
    """A rank asked for more bytes than its capacity leaves; the text lists what it holds by kind."""


class RankUseError(RuntimeError):
    """A rank was used outside its own running program: in another thread, another rank's program, or no run."""


class AsymmetryError(ValueError):
    """One rank was to stand for all of them in something that not every rank would do in the same way."""


class BackendError(RuntimeError):
    """A world of ranks that cannot be had here; the text says what is missing and how to get it."""

    def __init__(self, backend: str, text: str) -> None:
        super().__init__(text)
        self.backend = backend

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.backend, str(self))


class RemoteError(RuntimeError):
    """A rank in another process raised an exception that cannot be made again in this one; the text says which."""


class RankStopped(BaseException):
    """Unwinds a rank because another one failed; a BaseException, so that ``except Exception`` lets it pass."""
