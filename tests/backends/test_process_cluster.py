"""What a cluster of processes says of itself, with a channel and links that have nobody to talk to."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zerosim as zs
from zerosim.backends.processes.transport import OwnResult, ProcessCluster


class NoChannel:
    """The channel of the only process."""

    index, size, closed = 0, 1, False

    def post(self, note: Any, to: int | None = None) -> None:
        """Nobody reads it."""

    def arrived(self) -> Iterator[tuple[int, Any]]:
        """Nothing."""
        return iter(())

    def everyone(self, value: Any) -> list[Any]:
        """This one's."""
        return [value]

    def close(self) -> None:
        """Closed."""
        self.closed = True


class NoLinks:
    """Carries nothing, and notes its end."""

    library, in_order = "nothing", False

    def __init__(self) -> None:
        self.ended: list[str] = []

    def idle(self) -> bool:
        """Nothing is under way."""
        return True

    def drain(self) -> bool:
        """Nothing is under way."""
        return True

    def close_drained(self) -> None:
        """After a failure."""
        self.ended.append("drained")

    def close(self) -> None:
        """After a run."""
        self.ended.append("closed")


class Alone(ProcessCluster):
    """A world of one process."""

    def __init__(self, **options: Any) -> None:
        self.links = NoLinks()
        settings = {"capacity_nbytes": None, "debug": False, "blas_threads": 1, "timeout_seconds": 1.0} | options
        super().__init__(NoChannel(), **settings)

    def _point_to_point(self) -> Any:
        return self.links


def test_a_run_returns_this_ranks_result_at_its_index_and_closes_its_links() -> None:
    cluster = Alone()
    assert cluster.run(lambda rank, add: rank.index + add, 5)[0] == 5
    assert cluster.links.ended == ["closed"]
    assert cluster.gather(7) == [7]
    assert (cluster.index, len(cluster.ranks), cluster.world) == (0, 1, "each a process, over nothing")
    assert repr(cluster) == "<Alone: rank 0 of 1, 1 runs>"


def test_after_an_error_the_links_are_drained_and_nothing_stays_held() -> None:
    cluster = Alone()

    def program(rank: zs.Rank) -> None:
        held = rank.memory.alloc(10, np.float32, "parameter")
        raise KeyError(len(held))

    with pytest.raises(KeyError) as caught:
        cluster.run(program)
    assert caught.value.__notes__ == ["raised by rank 0 of 1"]
    assert cluster.links.ended == ["drained"]
    assert cluster.memory.now_nbytes == [0]


def test_what_goes_wrong_on_the_way_though_the_program_has_returned_is_an_error_of_the_run() -> None:
    cluster, answers = Alone(), [False, False]

    def idle() -> bool:
        if answers:
            return answers.pop()
        raise KeyError("an illegal address")

    cluster.links.idle = idle
    with pytest.raises(KeyError) as caught:
        cluster.run(lambda rank: None)
    assert caught.value.__notes__ == ["raised by rank 0 of 1"]
    assert cluster.links.ended == ["drained"]


def test_a_ctrl_c_that_came_inside_the_bookkeeping_is_raised_at_the_next_call() -> None:
    """Inside the ledger it has to wait; without a hub nobody else would ask for it before the end of the run."""
    reached = []

    def program(rank: zs.Rank) -> None:
        rank._state.backend.interrupts.pending = True
        rank.trace.span("one")
        reached.append("before")
        rank.exchange(np.ones(1), 0, np.ones(1), 0)
        reached.append("after")

    with pytest.raises(KeyboardInterrupt) as caught:
        Alone().run(program)
    assert reached == ["before"]
    assert caught.value.__notes__ == ["raised by rank 0 of 1"]


@pytest.mark.parametrize("index", [0, 2, -1, -3, 7, slice(0, 2)])
def test_another_ranks_result_points_to_gather(index: int | slice) -> None:
    results = OwnResult(1, 3, "mine")
    with pytest.raises(IndexError, match=r"this process ran rank 1 of 3 and has its result alone: results\[1\]"):
        results[index]
    with pytest.raises(IndexError, match=r"cluster\.gather\(value\) gives every process the values of all"):
        results[index]


def test_the_own_result_is_found_from_both_ends() -> None:
    results = OwnResult(1, 3, "mine")
    assert (results[1], results[-2], len(results), repr(results)) == ("mine", "mine", 3, "rank 1: 'mine'")


@pytest.mark.parametrize("through", [list, tuple, sum, lambda results: 1 in results, lambda results: [*results]])
@pytest.mark.parametrize("own", [0, 1])
def test_going_through_the_results_of_all_ranks_is_refused_and_never_stops_at_the_own(through: Any, own: int) -> None:
    with pytest.raises(IndexError, match=r"cluster\.gather\(value\) gives every process the values of all"):
        through(OwnResult(own, 2, 1))


def test_the_only_ranks_results_can_be_gone_through() -> None:
    assert list(OwnResult(0, 1, 7)) == [7]


def test_stepping_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"the others of this one are in other processes; step through the same "
                                         r"program on zs\.Cluster\(ranks\)"):
        next(Alone().events(lambda rank: None))


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="must be above 0: how long a rank waits before it tells the others"):
        Alone(timeout_seconds=seconds)


def test_closing_closes_the_channel() -> None:
    cluster = Alone()
    cluster.close()
    assert cluster._channel.closed


def test_an_unknown_backend_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="no backend 'mpl'; choose one of mpi"):
        zs.connect("mpl")
