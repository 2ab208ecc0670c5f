"""A cluster's last run as a file, in the one form that recordings have.

Recordings belong to planning, which lies above clusters, and a cluster may ask `display` alone, inside a method: so
what saves a cluster's run stands here.
"""

from pathlib import Path
from typing import Any

from zerosim.planning.recording import Recording, record
from zerosim.planning.recording import save as save_recording
from zerosim.ranks.trace import Trace


def recording_of(cluster: Any) -> Recording:
    """The recording of a cluster's last run; of one rank that stands for all N, the program of all N.

    Where each rank is a process of its own, every process calls it. Raises ValueError before the first run, after one
    that failed, and where a trace has dropped rows.
    """
    if not cluster.runs:
        raise ValueError("this cluster has run nothing to its end yet, and so has nothing to save; "
                         "call run(program) first")
    ranks, traces = cluster.ranks[0].size, cluster.runs[-1].trace
    if traces[0] is not cluster.trace[0]:
        raise ValueError("this cluster's last run failed or is not over, and cluster.trace is what it did until then, "
                         "while the last of cluster.runs is the one before it; run again, or save that one by "
                         "planning.recording.save(planning.record(cluster.runs[-1].trace), path)")
    if cluster.representative is not None:
        return record(traces).on_ranks(ranks)
    if is_one_of_many(cluster):
        gathered = cluster.gather([(trace.rows, trace.held_at_start, trace.kept_rows, trace.dropped)
                                   for trace in traces])
        return record(Trace(rows, held_at_start=held, kept_rows=kept, dropped=dropped)
                      for of_process in gathered for rows, held, kept, dropped in of_process)
    return record(traces)


def is_one_of_many(cluster: Any) -> bool:
    """True where each rank is a process of its own, and this one has one of them."""
    return cluster.representative is None and len(cluster.ranks) < cluster.ranks[0].size


def save(cluster: Any, path: str | Path) -> Path:
    """Writes what the last run did to a JSON file: all of it, or nothing. Under MPI every process calls it, and rank 0
    writes. Raises ValueError as `recording_of` does, and for a path that cannot be written.
    """
    recording, path = recording_of(cluster), Path(path)
    if is_one_of_many(cluster) and cluster.ranks[0].index:
        return path
    return save_recording(recording, path)
