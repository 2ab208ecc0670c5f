"""A cluster's last run as a file, in the one form that recordings have."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerosim.planning.recording import TraceLike, record
from zerosim.planning.recording import save as save_recording
from zerosim.planning.recording.tables import Recording


def recording_of(cluster: Any) -> Recording:
    """What the last run of a cluster did; of one rank that stands for all N, the program of all N.

    Raises ValueError before the first run, and for a rank whose others are in other processes.
    """
    if not cluster.runs:
        raise ValueError("this cluster has run nothing to its end yet, and so has nothing to save; "
                         "call run(program) first")
    ranks, traces = cluster.ranks[0].size, cluster.runs[-1].trace
    if len(traces) == ranks:
        return record(traces)
    if getattr(cluster, "representative", None) is not None:
        return record(traces).on_ranks(ranks)
    gather = getattr(cluster, "gather", None)
    assert gather is not None, "the other ranks' traces are in other processes"
    return record([trace for of_process in gather(list(traces)) for trace in of_process])


def save(cluster: Any, path: str | Path) -> Path:
    """Writes what the last run did to a JSON file: all of it, or nothing. Under MPI every process calls it, and rank 0
    writes. Raises ValueError as `recording_of` does, and for a path that cannot be written.
    """
    recording, path = recording_of(cluster), Path(path)
    if len(cluster.ranks) < cluster.ranks[0].size and cluster.ranks[0].index and not hasattr(cluster, "representative"):
        return path
    return write(recording, path)


def save_traces(traces: Iterable[TraceLike], path: str | Path) -> Path:
    """Writes what these ranks did, in rank order; ValueError for a path that cannot be written."""
    return write(record(traces), path)


def require_place(path: str | Path) -> None:
    """Raises ValueError for a path whose folder is not there, before anything is run for it."""
    if not Path(path).absolute().parent.is_dir() or Path(path).is_dir():
        raise ValueError(f"asked to save a recording as {str(path)!r}, but its folder is not there, or it is one; "
                         "name a file in a folder that is there")


def write(recording: Recording, path: str | Path) -> Path:
    """Writes a recording; ValueError for a path that cannot be written."""
    require_place(path)
    return save_recording(recording, path)
