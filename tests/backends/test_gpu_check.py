"""gpu_check without a GPU: what is left out and why, what counts as failed, the report's shape, and the arithmetic of
bandwidths. Measurements here are of doubles, or made up; none is a GPU's."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import zerosim as zs
from benchmarks import gpu_check, gpu_collectives, gpu_training
from benchmarks.gpu_check import FAILED, LEFT_OUT, RAN, Machine, Part, Report
from zerosim.models import GPTConfig

KERNELS = {"copy": {"bytes_per_second": 4e12}, "smallest_share": 0.85, "kernels": [
    {"name": "adam_step", "share_of_copy": 0.93, "is_fast_enough": True},
    {"name": "fp32 to fp16", "share_of_copy": 0.6, "is_fast_enough": False}]}
TRAINING = {"seconds": 0.1, "python_share": 0.25, "torch": {"seconds": 0.08, "ratio": 1.25}}
NONE = Machine({"python": "3"}, [], None, "there is no driver")


@pytest.fixture
def made_up(monkeypatch) -> list[str]:
    """Every part finds something at once; the list says which ran."""
    ran: list[str] = []

    def stand_in(name: str, found: Any) -> Any:
        def run(*_: object) -> Any:
            ran.append(name)
            return found
        return run

    good = {"ring_has_the_simulators_bits": True, "rows": [], "native_is_ulps_and_share_from_the_ring": {}}
    for name, found in (("suite", {"exit_code": 0, "said": "9 passed", "skipped": []}), ("kernels", KERNELS),
                        ("collectives", good), ("shared_in_one_process", good), ("shared_by_processes", good),
                        ("training", TRAINING)):
        monkeypatch.setattr(gpu_check, name, stand_in(name, found))
    return ran


NO_SHARING = "this machine has 8 GPUs, so no two ranks need to share one"
TOO_FEW = "this machine has 1 GPU, and ranks on GPUs of their own need 2"
VERSIONS = {"cupy": "14.2.0", "nccl": "2.32.3", "driver": "575"}


@pytest.mark.parametrize(("machine", "ran", "reasons"), [
    (Machine(VERSIONS, ["A"], "2.32.3"),
     ["suite", "kernels", "shared_in_one_process", "shared_by_processes", "training"], [TOO_FEW]),
    (Machine({}, ["A"], "2.27.5"), ["suite", "kernels", "shared_by_processes", "training"],
     [TOO_FEW, "NCCL 2.27.5 does not know NCCL_MULTI_RANK_GPU_ENABLE, which came with 2.30"]),
    (Machine({}, ["A"] * 8, "2.32.3"), ["suite", "kernels", "collectives", "training"], [NO_SHARING] * 2),
    (NONE, [], ["there is no driver"] * 6),
])
def test_the_report_says_when_and_on_what_and_what_of_it_ran_or_why_not(
        monkeypatch, tmp_path, made_up, machine: Machine, ran: list[str], reasons: list[str]) -> None:
    file = tmp_path / "report.json"
    monkeypatch.setattr(gpu_check, "look", lambda: machine)
    code, report = gpu_check.main(str(file)), json.loads(file.read_text())
    assert report.keys() == {"ok", "date", "host", "versions", "cards", "parts"}
    assert (code, report["ok"]) == ((0, True) if ran else (1, False))
    assert (report["versions"], report["cards"]) == (machine.versions, machine.cards)
    assert report["date"].endswith("+00:00")
    assert made_up == ran
    assert [part["status"] for part in report["parts"]].count(RAN) == len(ran)
    assert [part["reason"] for part in report["parts"] if part["status"] == LEFT_OUT] == reasons


def test_a_part_that_raises_has_failed_and_the_others_are_tried(monkeypatch, made_up) -> None:
    def broken() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_check, "kernels", broken)
    parts = gpu_check.check(Machine({}, ["A"], "2.32.3"))
    assert [(part.name, part.reason) for part in parts if part.status == FAILED] == [
        ("kernels beside the card's copy", "RuntimeError: out of memory")]
    assert made_up[-1] == "training"
    assert not Report("", "", {}, ["A"], parts).ok


def test_a_gpu_without_nccl_and_a_ring_with_other_bits_are_failures_and_not_excused() -> None:
    lines = ["SKIPPED [3] a.py:1: CuPy is installed, but NCCL is not to be had",
             "SKIPPED [3] a.py:1: needs 8 GPUs, and this machine has 1", "SKIPPED [3] a.py:1: mpi4py is not installed"]
    found = {"exit_code": 0, "said": "9 passed, 9 skipped", "skipped": lines}
    assert gpu_check.judged_suite(found) == f"skipped, though there is a GPU: {lines[0]}"
    assert gpu_check.judged_suite({**found, "skipped": lines[1:]}) == ""
    assert gpu_check.judged_suite({**found, "exit_code": 1}) == "pytest ended with exit code 1: 9 passed, 9 skipped"
    assert gpu_check.judged_bits({"ring_has_the_simulators_bits": True}) == ""
    assert "other bits" in gpu_check.judged_bits({"ring_has_the_simulators_bits": False})


def test_what_is_told_names_every_part_with_its_status() -> None:
    report = Report("", "", {"cupy": "14"}, ["NVIDIA H200"], [Part("a", RAN), Part("b", FAILED, "why"),
                                                              Part("c", LEFT_OUT, "no need")])
    assert gpu_check.told(report).split("\n") == [
        "NVIDIA H200; cupy 14", "     ran: a", "  failed: b (why)", "left out: c (no need)",
        "1 of 3 parts ran; NOT everything is as it should be"]


def test_numbers_that_matter_are_told_beside_the_part() -> None:
    assert gpu_check.kernels_summary(KERNELS) == "the copy moves 4000 GB/s; below 85% of it: fp32 to fp16 60%"
    assert gpu_check.training_summary(TRAINING) == "100.0 ms a step, Python's share 25%; 1.25 times PyTorch's"
    alone = {**TRAINING, "torch": None, "no_torch_because": "PyTorch is not installed"}
    assert gpu_check.training_summary(alone).endswith("nothing beside it: PyTorch is not installed")
    rows = [{"operation": "all_reduce", "algorithm": name, "bus_bytes_per_second": rate}
            for name, rate in (("ring", 1e9), ("ring", 9e9), ("native", 2e9))]
    found = {"rows": rows, "native_is_ulps_and_share_from_the_ring": {"bf16": (1200, 0.31)}}
    assert gpu_check.collectives_summary(found) == ("all_reduce, bus bandwidth: ring 9.0 GB/s, native 2.0 GB/s; native "
                                                 "from the ring: bf16 at most 1,200 ULP, 31% of sums")


def test_a_job_that_hangs_is_ended_and_reported() -> None:
    hanging = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(6000)"], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with pytest.raises(RuntimeError, match=r"did not end within 0.3 seconds"):
        gpu_check._answer([hanging], seconds=0.3)
    assert hanging.returncode is not None


# -- bandwidths -------------------------------------------------------------------------------------------------------

def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """8 ranks, 2^20 float32 in 1 ms: algorithm bandwidth 4.194 GB/s; the bus factors are 2·7/8, 7/8 and 7/8."""
    found = [[(operation, "ring", 1 << 20, 0.5e-3 if rank else 1e-3) for operation in gpu_collectives.OPERATIONS]
             for rank in range(8)]
    rows = gpu_collectives.rows_of(found)
    assert [row["bus_bytes_per_second"] for row in rows] == pytest.approx(
        [4194304e3 * 14 / 8, 4194304e3 * 7 / 8, 4194304e3 * 7 / 8])
    assert {row["seconds"] for row in rows} == {1e-3}  # of the slowest rank


def test_what_is_measured_runs_on_doubles_with_the_simulators_bits(gpus) -> None:
    gpus(3)
    found = gpu_collectives.measured(zs.NCCLCluster(3), [16, 300], repetitions=2)  # 16: as powers of 2 are
    assert found["ring_has_the_simulators_bits"]
    assert [(row["operation"], row["algorithm"], row["nbytes"]) for row in found["rows"]] == [
        (operation, algorithm, nbytes) for operation in gpu_collectives.OPERATIONS
        for algorithm in gpu_collectives.ALGORITHMS for nbytes in (72, 1200)]
    assert all(row["bus_bytes_per_second"] > 0 for row in found["rows"])
    apart = found["native_is_ulps_and_share_from_the_ring"]
    assert all(ulps > 0 and 0 < share < 1 for ulps, share in apart.values())  # the double adds in rank order
    assert set(apart) == {"fp32", "bf16", "fp16"}


def test_the_time_of_a_collective_is_that_of_those_that_are_counted(gpus) -> None:
    gpus(2)
    ticks = iter(np.arange(100) / 4)
    results = zs.NCCLCluster(2).run(
        lambda rank: gpu_collectives.timed(rank, "all_gather", "ring", 8, "float32", 5, lambda: float(next(ticks))))
    assert all(0 < seconds <= 0.75 / 5 for seconds in results)  # four readings of a clock, over five repetitions


def test_a_training_step_is_measured_on_doubles_too(gpus, monkeypatch) -> None:
    gpus(1)
    monkeypatch.setattr(gpu_training, "torch_is_missing", lambda: "there is no GPU in this test")
    config = GPTConfig(layers=1, channels=8, heads=2, context=8, vocabulary=17)
    found = gpu_training.measured("bf16", zs.NCCLCluster, config, batch=1, rounds=1)
    assert 0 < found["python_share"] <= 1
    assert (found["torch"], found["no_torch_because"]) == (None, "there is no GPU in this test")
