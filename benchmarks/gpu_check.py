"""Everything that only a machine with NVIDIA GPUs can show: the suite's GPU part, then measurements; a report in JSON.

``python benchmarks/gpu_check.py [REPORT.json]``, or ``make gpu-check``. Each part ran, failed, or was left out with its
reason; the exit code is 1 when a part failed, or when there is no GPU, so that nothing was checked.
"""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RAN, FAILED, LEFT_OUT = "ran", "failed", "left out"
SUITE = ("tests/backends", "-m", "gpu")  # slow ones too
EXCUSES = r"needs \d+ GPUs, and this machine has \d+|mpi4py|mpiexec"  # all else that is skipped should have run
SUITE_SECONDS, SHARING_SECONDS = 3600.0, 300.0
SHARED_ELEMENTS = ("16384", "1048576", "16777216")
SHARING_NCCL = (2, 30)  # the first that takes NCCL_MULTI_RANK_GPU_ENABLE
ON_ONE_HOST = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Part:
    """One thing that was to be checked: whether it ran, failed or was left out, why, and what was found."""

    name: str
    status: str
    reason: str = ""
    found: Any = None


@dataclass(frozen=True)
class Report:
    """All parts, and on what they ran."""

    date: str
    host: str
    versions: dict[str, str]
    cards: list[str]
    parts: list[Part] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when no part failed and there was a card to check."""
        return bool(self.cards) and all(part.status != FAILED for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"ok": self.ok, **asdict(self)}


@dataclass(frozen=True)
class Machine:
    """The devices here: CuPy's versions, the cards, and NCCL's version; ``missing`` says why there is nothing."""

    versions: dict[str, str]
    cards: list[str]
    nccl: str | None
    missing: str = ""


def look() -> Machine:
    """Looks for CuPy, a driver, cards and NCCL."""
    import numpy as np

    import zerosim as zs
    from zerosim.backends.cupy.cluster import cuda_text, cupy_on, device_count
    from zerosim.backends.nccl.adapter import NCCL

    versions = {"python": platform.python_version(), "zerosim": zs.__version__, "numpy": np.__version__}
    try:
        xp = cupy_on(0)
    except zs.BackendError as error:
        return Machine(versions, [], None, str(error))
    versions |= {"cupy": xp.__version__, "cuda_of_cupy": cuda_text(xp.cuda.runtime.runtimeGetVersion())}
    versions["cuda_of_driver"] = cuda_text(xp.cuda.runtime.driverGetVersion())
    versions["driver"] = _driver()
    cards = [xp.cuda.runtime.getDeviceProperties(index)["name"].decode() for index in range(device_count(xp))]
    try:
        nccl = NCCL().version
    except zs.BackendError as error:
        return Machine(versions, cards, None, str(error))
    return Machine({**versions, "nccl": nccl}, cards, nccl)


def _driver() -> str:
    try:
        said = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], text=True,
                              capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown: nvidia-smi did not say"
    return said.split("\n")[0].strip()


# -- parts ------------------------------------------------------------------------------------------------------------

def part(name: str, run: Callable[[], Any], missing: str = "", *, judge: Callable[[Any], str] = lambda found: "",
         remark: Callable[[Any], str] = lambda found: "") -> Part:
    """Runs a part unless something that it needs is missing; ``judge`` says what is wrong with what it found, and
    ``remark`` what is worth saying of it."""
    if missing:
        return Part(name, LEFT_OUT, missing)
    print(f"== {name}", flush=True)
    try:
        found = run()
    except Exception as error:  # the other parts are to be tried nevertheless
        traceback.print_exc()
        return Part(name, FAILED, f"{type(error).__name__}: {error}")
    wrong = judge(found)
    return Part(name, FAILED if wrong else RAN, wrong or remark(found), found)


def suite() -> dict[str, Any]:
    """The tests that need a GPU, in a process of their own; the lines with which pytest ends, and what it skipped."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *SUITE], cwd=ROOT,
                          text=True, capture_output=True, timeout=SUITE_SECONDS,
                          env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "10000"})
    print(done.stdout[-4000:], flush=True)
    return {"exit_code": done.returncode, "said": done.stdout.strip().split("\n")[-1],
            "skipped": re.findall(r"^SKIPPED.*$", done.stdout, re.MULTILINE)}


def judged_suite(found: dict[str, Any]) -> str:
    """The faults of a run of the suite: failures, or tests skipped for a card or a library that is here."""
    if found["exit_code"]:
        return f"pytest ended with exit code {found['exit_code']}: {found['said']}"
    unexcused = [line for line in found["skipped"] if not re.search(EXCUSES, line)]
    return f"skipped, though there is a GPU: {'; '.join(unexcused)}" if unexcused else ""


def kernels() -> dict[str, Any]:
    """Adam, casts and additions beside the card's copy."""
    from benchmarks.gpu_kernels import all_kernels

    return all_kernels()


def kernels_summary(found: dict[str, Any]) -> str:
    """The copy's bandwidth, and what is slower than it should be beside it."""
    slow = [f"{row['name']} {row['share_of_copy']:.0%}" for row in found["kernels"] if not row["is_fast_enough"]]
    said = f"below {found['smallest_share']:.0%} of it: {', '.join(slow)}" if slow else "all fast enough beside it"
    return f"the copy moves {found['copy']['bytes_per_second'] / 1e9:.0f} GB/s; {said}"


def collectives_summary(found: dict[str, Any]) -> str:
    """The best bus bandwidth of each algorithm's all-reduce, and how far NCCL's own sums are from the ring's."""
    from benchmarks.apart import distances as native_distances

    best: dict[str, float] = {}
    for row in found["rows"]:
        if row["operation"] == "all_reduce":
            rate = row["bus_bytes_per_second"] or 0.0
            best[row["algorithm"]] = max(rate, best.get(row["algorithm"], 0.0))
    rates = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in best.items())
    return (f"all_reduce, bus bandwidth: {rates}; native from the ring: "
            f"{native_distances(found['native_is_ulps_and_share_from_the_ring'])}")


def training_summary(found: dict[str, Any]) -> str:
    """Seconds, Python's share, and the ratio to PyTorch's."""
    beside = (f"{found['torch']['ratio']:.2f} times PyTorch's" if found["torch"]
              else f"nothing beside it: {found['no_torch_because']}")
    return f"{1e3 * found['seconds']:.1f} ms a step, Python's share {found['python_share']:.0%}; {beside}"


def collectives(ranks: int) -> dict[str, Any]:
    """Over all cards, in one process."""
    import zerosim as zs
    from benchmarks.gpu_collectives import ELEMENTS, measured

    return measured(zs.NCCLCluster(ranks), ELEMENTS)


def judged_bits(found: dict[str, Any]) -> str:
    """A ring over NCCL must have the simulator's bits."""
    return "" if found["ring_has_the_simulators_bits"] else "the ring over NCCL has other bits than the simulator's"


def shared_in_one_process() -> dict[str, Any]:
    """Two ranks on one card, as NCCL 2.30 allows it."""
    return _answer([_start(["one-process", "2", *SHARED_ELEMENTS], {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})])


def shared_by_processes() -> dict[str, Any]:
    """Two processes on one card that take each other for other machines."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1), "LOCAL_RANK": "0"}
    return _answer([_start(["processes", "2", *SHARED_ELEMENTS],
                           {**ON_ONE_HOST, **place, "RANK": str(rank), "NCCL_HOSTID": f"zerosim-{rank}"})
                    for rank in range(2)])


def _start(words: Sequence[str], settings: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "benchmarks/gpu_collectives.py", *words], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "PYTHONPATH": str(ROOT), **settings})


def _answer(processes: "Sequence[subprocess.Popen[str]]", seconds: float = SHARING_SECONDS) -> dict[str, Any]:
    """The output of the first process; RuntimeError where one fails, or takes too long, and then none is left over."""
    try:
        said = [process.communicate(timeout=seconds) for process in processes]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"did not end within {seconds:g} seconds, as it is known to where NCCL_MAX_CTAS is not "
                           "lowered") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    for process, (_, error) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {error.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(said[0][0].strip().split("\n")[-1])
    return found


def training() -> dict[str, Any]:
    """A gpt step, beside PyTorch's."""
    from benchmarks.gpu_training import measured

    return measured()


def check(machine: Machine) -> list[Part]:
    """All parts, in turn; what cannot run here is left out with its reason. Where there is a GPU, NCCL has to be."""
    cards = len(machine.cards)
    no_gpu = "" if cards else machine.missing
    many = no_gpu or (f"this machine has {cards} GPU, and ranks on GPUs of their own need 2" if cards == 1 else "")
    one = no_gpu or (f"this machine has {cards} GPUs, so no two ranks need to share one" if cards > 1 else "")
    old = "" if machine.nccl is None or _at_least(machine.nccl, SHARING_NCCL) else (
        f"NCCL {machine.nccl} does not know NCCL_MULTI_RANK_GPU_ENABLE, which came with 2.30")
    return [
        part("the suite's GPU part", suite, no_gpu, judge=judged_suite, remark=lambda found: found["said"]),
        part("kernels beside the card's copy", kernels, no_gpu, remark=kernels_summary),
        part(f"collectives over {cards} GPUs, in one process", lambda: collectives(cards), many, judge=judged_bits,
             remark=collectives_summary),
        part("two ranks on one card, in one process", shared_in_one_process, one or old, judge=judged_bits),
        part("two ranks on one card, as processes", shared_by_processes, one, judge=judged_bits),
        part("a training step beside PyTorch's", training, no_gpu, remark=training_summary)]


def _at_least(version: str, wanted: tuple[int, int]) -> bool:
    return tuple(map(int, version.split(".")[:2])) >= wanted


def told(report: Report) -> str:
    """The report in words."""
    lines = [f"{', '.join(report.cards) or 'no GPU'}; "
             + ", ".join(f"{name} {version}" for name, version in report.versions.items())]
    lines += [f"{part.status:>8}: {part.name}" + f" ({part.reason})" * bool(part.reason) for part in report.parts]
    ran = sum(part.status == RAN for part in report.parts)
    wrong = "" if report.ok else "; NOT everything is as it should be"
    lines.append(f"{ran} of {len(report.parts)} parts ran{wrong}")
    return "\n".join(lines)


def main(path: str = "gpu_check.json") -> int:
    """Checks, writes the report, and returns the exit code."""
    machine = look()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(now, platform.node(), machine.versions, machine.cards, check(machine))
    Path(path).write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    print(told(report))
    print(f"written to {path}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
