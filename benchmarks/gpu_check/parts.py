"""The parts of gpu-check, and what each of them checks.

What takes time to import is imported by the part that needs it, since the command itself needs their names alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu_check.processes import Ended, run
from benchmarks.gpu_check.report import Machine, Writer, look, on_path, python

BUDGET_SECONDS = 600.0  # of a part, at most


def kernels(report: Writer, machine: Machine) -> None:
    """What is installed, and the suite's tests of kernels and of training, bit by bit."""
    from benchmarks.gpu_check import suite
    from zerosim.doctor import examine

    def usable(found: dict) -> str:
        return "; ".join(f"{row['name']}: {row['reason']}" for row in found["backends"]
                         if not row["usable"] and row["name"] != "MPI")

    report.check("zerosim doctor", lambda: examine().as_json(), judge=usable)
    for file in suite.KERNELS:
        report.check(file, lambda file=file: suite.pytest([file], 0.8 * BUDGET_SECONDS),
                     suite.missing(), judge=suite.judged, remark=suite.remark)


def exhaustive(report: Writer, machine: Machine) -> None:
    """Functions of all floats, and sums of all pairs of 16-bit numbers."""
    from benchmarks.gpu_check import exhaustive as every
    from zerosim.backends.cupy.kernels import CupyKernels

    for name in every.FUNCTIONS:
        report.check(f"{name} of every float32", lambda name=name: every.all_arguments(CupyKernels(), name),
                     judge=every.judged_function, remark=every.remark_on_function)
    for name in ("fp16", "bf16"):
        report.check(f"every sum of two {name}", lambda name=name: every.all_pairs(CupyKernels(), name),
                     judge=every.judged_sums, remark=every.remark_on_sums)


def sanitizer(report: Writer, machine: Machine) -> None:
    """Every kernel, watched by compute-sanitizer."""
    from benchmarks.gpu_check import sanitizer as watched

    program = on_path("compute-sanitizer")
    seconds = BUDGET_SECONDS / len(watched.TOOLS)
    for tool in watched.TOOLS:
        report.check(f"compute-sanitizer, {tool}", lambda tool=tool: asdict(run(
            [*watched.words_of(program, tool), *python("-m", "benchmarks.gpu_check.sanitizer")], seconds)),
            "" if program else watched.MISSING, judge=lambda found: watched.judged(Ended(**found)))


def speed(report: Writer, machine: Machine) -> None:
    """Every kernel beside the card's copy; products."""
    from benchmarks.gpu_check import speed as timed
    from zerosim.backends.cupy.kernels import CupyKernels

    def measured() -> dict:
        import cupy

        free, _ = cupy.cuda.runtime.memGetInfo()
        return timed.all_kernels(CupyKernels(), timed.elements_for(free), lambda line: print(f"    {line}", flush=True))

    report.check("kernels beside the card's copy", measured, judge=timed.judged, remark=timed.remark)


def mpi(report: Writer, machine: Machine) -> None:
    """The conformance suite: ranks of one process, and processes whose arrays travel over MPI by way of the host."""
    from benchmarks.gpu_check import suite

    suite.worlds(report, lambda world: world.library != "NCCL", suite.CONFORMANCE, BUDGET_SECONDS / 3)


def nccl(report: Writer, machine: Machine) -> None:
    """The conformance suite over NCCL between processes that share one card; bandwidths between two of them."""
    from benchmarks.gpu_check import collectives, suite

    suite.worlds(report, lambda world: world.library == "NCCL" and world.cards == 1, suite.CONFORMANCE,
                 BUDGET_SECONDS / 3)
    old = "" if machine.nccl is None or version(machine.nccl) >= collectives.SHARING_NCCL else (
        f"NCCL {machine.nccl} does not know NCCL_MULTI_RANK_GPU_ENABLE, which came with 2.30")
    for name, find, missing in (("as processes", lambda: collectives.by_processes(2), machine.missing),
                                ("in one process", collectives.in_one_process, machine.missing or old)):
        report.check(f"bandwidth of 2 ranks on one GPU, {name}", find, missing, judge=collectives.judged,
                     remark=collectives.remark)


def cards(report: Writer, machine: Machine) -> None:
    """The conformance suite over NCCL with a card for each rank, bandwidths between all cards, and programs that
    fail."""
    import zerosim as zs
    from benchmarks.gpu_check import collectives, suite

    count = len(machine.cards)
    alone = "" if count > 1 else f"this machine has {count} GPU, and ranks on GPUs of their own need 2"
    report.check("bandwidth over all GPUs, in one process",
                 lambda: collectives.measured(zs.NCCLCluster(count), collectives.ELEMENTS), machine.missing or alone,
                 judge=collectives.judged, remark=collectives.remark)
    for files, test_seconds in ((suite.CONFORMANCE, suite.TEST_SECONDS), (suite.FAILURES, suite.FAILURE_SECONDS)):
        suite.worlds(report, lambda world: world.cards > 1, files, BUDGET_SECONDS / 4, test_seconds)


def training(report: Writer, machine: Machine) -> None:
    """Stages and formats to the same bits, the card's end, Ctrl-C, memory, and seconds beside PyTorch's."""
    import zerosim as zs
    from benchmarks.gpu_check import training as trained

    for ranks in trained.RANKS:
        report.check(f"{ranks} ranks: stages and runs agree", lambda ranks=ranks: trained.stages_agree(ranks=[ranks]),
                     judge=trained.judged_bits, remark=trained.remark_on_bits)
    report.check("memory beside nvidia-smi", trained.memory, judge=trained.judged_memory,
                 remark=trained.remark_on_memory)
    report.check("a step beside PyTorch's", trained.measured, remark=trained.remark)
    for name, ends in (("Ctrl-C", trained.at_ctrl_c), ("the card's end", trained.at_the_cards_end)):
        report.check(name, lambda ends=ends: ends(zs.CuPyCluster(2)), judge=trained.judged_end,
                     remark=trained.remark_on_end)


def failures(report: Writer, machine: Machine) -> None:
    """Programs that fail, in every world of one card: each says so on all ranks, and the world works afterwards."""
    from benchmarks.gpu_check import suite

    suite.worlds(report, lambda world: world.cards == 1, suite.FAILURES, BUDGET_SECONDS / 3, suite.FAILURE_SECONDS)


PARTS: Mapping[str, Callable[[Writer, Machine], None]] = {
    part.__name__: part for part in (kernels, exhaustive, sanitizer, speed, mpi, nccl, training, cards, failures)}


def version(text: str) -> tuple[int, ...]:
    """(2, 30) for 2.30.4."""
    return tuple(map(int, text.split(".")[:2]))


def run_part(name: str, file: Path) -> None:
    """Runs a part in this process; where there is no card all of it is left out."""
    machine = look()
    report = Writer(file, name, machine)
    if machine.cards:
        PARTS[name](report, machine)
    report.end(machine.missing_card)

