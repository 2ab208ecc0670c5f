"""This process as one rank among others that a launcher has started: the edge where a run meets its surroundings."""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerosim.backends import TIMEOUT_SECONDS

if TYPE_CHECKING:
    from zerosim.backends.processes.cluster import ProcessCluster
    from zerosim.backends.processes.control import Channel
    from zerosim.backends.processes.tcp import ProcessJob


DEFAULT_DEVICES = {"mpi": "cpu", "nccl": "cuda"}  # by backend
BACKENDS = tuple(DEFAULT_DEVICES)
# How many processes a launcher has started: Slurm's srun says it whether it speaks PMI or not, Open MPI's and MPICH's
# mpiexec, torchrun. HPE's PALS sets PMI_SIZE too, and says how many of the processes are on this machine.
SRUN_COUNT, PALS_COUNT = "SLURM_STEP_NUM_TASKS", "PALS_LOCAL_SIZE"
MPIEXEC_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LAUNCHERS_COUNTS = (SRUN_COUNT, *MPIEXEC_COUNTS, PALS_COUNT, "WORLD_SIZE")

LAUNCHERS = ("mpiexec", "mpirun")


def connect(backend: str = "mpi", *, device: str | None = None, share_devices: bool = False,
            capacity_nbytes: int | None = None, debug: bool = False, blas_threads: int = 1,
            trace_rows: int | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> "ProcessCluster":
    """The cluster of all processes of this job; ``connect().run(program)`` runs ``program(rank)`` on each of them.

    Under ``mpiexec -n 4`` there are 4 ranks; without a launcher there is one. Start scripts as ``mpiexec -n 4 python
    -m mpi4py script.py``. ``device`` has the rank's arrays: ``"cpu"``, over MPI the default; ``"cuda"``, the GPU of its
    local rank modulo the GPUs that the process sees; or ``"cuda:1"``, that one. Over MPI they travel by way of the host
    (in memory that no rank is charged for), so that several ranks may have one card, and no NCCL is needed.

    With ``nccl`` each process has a GPU. There the launcher may also be torchrun, or any that sets RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT (and LOCAL_RANK, where a machine has several): then no MPI is needed, and rank 0 listens
    for their messages at MASTER_PORT + 1. ``share_devices`` lets several ranks have one GPU. A rank that has waited for
    ``timeout_seconds`` tells the others for what, so that a deadlock is explained. Other options are `Cluster`'s.

    Raises BackendError where the backend cannot be had, or knows nothing of the other processes that a launcher has
    started, and ValueError for an unknown one, or for a device that it does not have.
    """
    if backend not in BACKENDS:
        raise ValueError(f"no backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    number = _number(device or DEFAULT_DEVICES[backend])
    options: dict[str, Any] = {"capacity_nbytes": capacity_nbytes, "debug": debug, "blas_threads": blas_threads,
                               "trace_rows": trace_rows, "timeout_seconds": timeout_seconds}
    if backend == "nccl":
        if number is None:
            raise ValueError(f"device={device!r}, but NCCL moves what lies on GPUs; say device='cuda', or "
                             "backend='mpi'")
        from zerosim.backends.nccl.cluster import NCCLProcessCluster

        channel, local_rank = _channel()
        return NCCLProcessCluster(channel, device=number, local_rank=local_rank, share_devices=share_devices, **options)
    if share_devices:
        raise ValueError("share_devices=True is about NCCL, which wants a GPU for each rank; over MPI ranks may share "
                         "one as they are: leave it out")
    from zerosim.backends.cupy.cluster import gpu_of
    from zerosim.backends.mpi import MPICluster

    gpu = None if number is None else gpu_of(_local_rank(), number)
    cluster = MPICluster(processor=gpu, **options)
    if cluster.ranks[0].size == 1:
        _check_alone(os.environ)
    return cluster


def _number(device: str) -> int | None:
    """The number of a GPU, -1 for the local rank's; None for the CPU."""
    kind, colon, number = device.partition(":")
    if kind == "cpu" and not colon:
        return None
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ValueError(f"no device {device!r}; choose 'cpu', 'cuda' for the GPU of the process' local rank, or a GPU "
                         "by its number, as in 'cuda:0'")
    return int(number) if colon else -1


def launched() -> "ProcessJob | None":
    """The job of which a launcher's variables make this process a part, as torchrun sets them; None without a launcher.

    Raises BackendError for a job that is described in part, or wrongly.
    """
    from zerosim.backends.processes.tcp import job_of

    return job_of(os.environ)


def installed_program(*names: str) -> str | None:
    """The first of these programs that lies beside this interpreter, where what belongs to its packages is, or on the
    PATH: an environment need not be activated."""
    import shutil

    beside = os.path.dirname(sys.executable)
    paths = (path for name in names for path in (shutil.which(name, path=beside), shutil.which(name)))
    return next((path for path in paths if path), None)


def raised_elsewhere(error: BaseException) -> bool:
    """True for an exception that another process of this job raised first."""
    from zerosim.backends.processes import control

    return control.raised_elsewhere(error)


def started_together(variables: Mapping[str, str]) -> tuple[str, int] | None:
    """The variable in which a launcher says that it has started several processes, and how many; None without one.

    An mpiexec that has started one process, inside a step of srun's or PALS', has the last word.
    """
    counts = {name: int(count) for name in LAUNCHERS_COUNTS if (count := variables.get(name, "").strip()).isdecimal()}
    if any(counts.get(name) == 1 for name in MPIEXEC_COUNTS):
        counts = {name: count for name, count in counts.items() if name not in (SRUN_COUNT, PALS_COUNT)}
    return next(((name, count) for name, count in counts.items() if count > 1), None)


def _check_alone(variables: Mapping[str, str]) -> None:
    """Raises BackendError where a launcher has started several processes, and MPI knows this one alone: then each would
    be a world of its own, without a word."""
    from zerosim.ranks.errors import BackendError

    said = started_together(variables)
    if said is None:
        return
    name, count = said
    remedy = "use the mpiexec that belongs to that library (zerosim doctor names both)"
    if name == SRUN_COUNT:
        remedy = ("say srun --mpi=pmi2 for MPICH's library, srun --mpi=pmix for Open MPI's (srun --mpi=list shows what "
                  "there is), or " + remedy)
    elif "PALS_RANKID" in variables:
        remedy = ("build mpi4py with the MPI library of this system, which PALS speaks with: pip install "
                  "--force-reinstall --no-binary=mpi4py mpi4py")
    raise BackendError("MPI", f"a launcher has started {count} processes ({name}={count}), but mpi4py's MPI library "
                              f"knows this one alone; {remedy}; under torchrun call zs.connect('nccl')")


def _channel() -> "tuple[Channel, int]":
    """The channel that takes this job's messages to and fro, and this process' place on its machine."""
    job = launched()
    if job is not None:
        from zerosim.backends.processes.tcp import TCPChannel

        return TCPChannel(job.rank, job.ranks, job.address, job.key), job.local_rank
    from zerosim.backends.mpi import MPIChannel, mpi

    library = mpi()
    if library.COMM_WORLD.size == 1:
        _check_alone(os.environ)
    return MPIChannel(library.COMM_WORLD), _local_rank()


def _local_rank() -> int:
    """This process' place among MPI's on its machine."""
    from zerosim.backends.mpi import mpi

    library = mpi()
    neighbors = library.COMM_WORLD.Split_type(library.COMM_TYPE_SHARED)
    place: int = neighbors.rank
    neighbors.Free()
    return place
