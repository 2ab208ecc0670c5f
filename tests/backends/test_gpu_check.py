"""gpu-check without a GPU: what is left out and why, what counts as failed, what is kept of a part that does not come
to its end, and the measurements' arithmetic. What is measured here is of doubles, or made up; none is a GPU's."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zerosim as zs
from benchmarks import gpu_check
from benchmarks.gpu_check import collectives, exhaustive, report, sanitizer, speed, suite, training
from benchmarks.gpu_check.processes import ROOT, Ended, Started
from benchmarks.gpu_check.report import FAILED, LEFT_OUT, PARTS, RAN, Check, Machine, Part, Writer, Wrong
from tests.backends import doubles
from tests.backends.test_one_suite import assert_same
from tests.backends.worlds import HERE, TORCHRUN, Processes
from tests.ranks import programs
from tests.support import ask, assert_command_refuses, assert_refused, fresh
from zerosim.backends.cupy.kernels import CupyKernels
from zerosim.models import GPTConfig
from zerosim.numerics import arrays

NONE = Machine({"python": "3"}, [], "there is no driver")
CARD = Machine({"cupy": "14.2.0", "nccl": "2.32.3"}, ["NVIDIA H200"])
SMALL = GPTConfig(layers=1, channels=8, heads=2, context=8, vocabulary=17)
GOOD = {"ring_has_the_simulators_bits": True, "rows": [], "native_is_ulps_and_share_from_the_ring": {}}


# -- parts, their files and their ends --------------------------------------------------------------------------------

@pytest.fixture
def in_this_process(monkeypatch) -> list[str]:
    """Parts run here, on made-up machines, with two checks each; the list says which ran."""
    ran: list[str] = []

    def run(words: list[str], seconds: float, **_: Any) -> Ended:
        gpu_check.carry_out(words[-2], words[-1])
        return Ended(0, "", "", 1.0)

    def made_up(writer: Writer, machine: Machine) -> None:
        ran.append(writer.part.name)
        writer.check("works", lambda: {"answer": 42}, remark=lambda found: f"it is {found['answer']}")
        writer.check("is not here", lambda: 1 / 0, "no need")

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(gpu_check, "look", lambda: CARD)
    monkeypatch.setattr(gpu_check, "import_module", lambda _: SimpleNamespace(
        **{f"check_{name}": made_up for name in PARTS}))
    return ran


def test_parts_that_are_asked_for_run_in_the_tables_order_and_replace_their_files_alone(
        monkeypatch, tmp_path, in_this_process) -> None:
    assert gpu_check.main(["training", "speed"], 60, tmp_path) == 0
    assert in_this_process == ["speed", "training"]
    monkeypatch.setattr(gpu_check, "look", lambda: NONE)
    assert gpu_check.main(["speed"], 60, tmp_path) == 0, "training's file is still there, and well"
    assert in_this_process == ["speed", "training"]
    without, found = report.parts_in(tmp_path)
    assert (without.name, without.status, without.reason) == ("speed", LEFT_OUT, "there is no driver")
    assert (without.counts(), found.counts()) == ("no check ended", "1 ran, 1 left out")
    assert (found.cards, found.versions) == (("NVIDIA H200",), CARD.versions)
    assert [(check.status, check.reason, check.found) for check in found.checks] == [
        (RAN, "it is 42", {"answer": 42}), (LEFT_OUT, "no need", None)]
    assert gpu_check.main([], 60, tmp_path) == 1, "nothing was checked"
    assert report.page(tmp_path) == "Nothing has been run on a GPU yet.\n"


def test_a_check_that_raises_or_finds_what_is_wrong_has_failed_and_the_others_are_tried(tmp_path) -> None:
    def slow(found: int) -> str:
        raise Wrong(f"{found} is not enough")

    writer = Writer(tmp_path / "speed.json", "speed", CARD)
    writer.check("raises", lambda: {}["memory"])
    writer.check("is slow", lambda: 3, remark=slow)
    writer.check("is well", lambda: 4)
    writer.end()
    part = Part.read(tmp_path / "speed.json")
    assert [(check.name, check.status, check.reason) for check in part.checks] == [
        ("raises", FAILED, "KeyError: 'memory'"), ("is slow", FAILED, "3 is not enough"), ("is well", RAN, "")]
    assert (part.status, report.all_is_well([part])) == (FAILED, False)


def test_a_part_that_is_ended_keeps_what_it_had_checked_and_says_in_what_it_was(tmp_path) -> None:
    file = tmp_path / "speed.json"

    def hangs() -> None:
        for status, why in ((report.OUT_OF_TIME, "took longer than 60 seconds, and was ended"), (report.DIED, "died")):
            part = gpu_check.left(file, status, why)
            assert (part.status, part.reason) == (status, f"{why} in 'hangs'")
            assert [check.name for check in part.checks] == ["works"]
            assert not report.all_is_well([part])
            report.write(file, writer.part)

    writer = Writer(file, "speed", CARD)
    writer.check("works", lambda: 1)
    writer.check("hangs", hangs)
    writer.end()
    assert gpu_check.left(file, report.DIED, "").status == RAN, "it has come to its end"
    report.write(tmp_path / "mpi.json", Part("mpi"))
    assert gpu_check.left(tmp_path / "mpi.json", report.DIED, "exit code 3").reason == "exit code 3"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="this system does not show processes' environments")
def test_what_takes_too_long_is_ended_with_processes_that_have_left_its_session(tmp_path) -> None:
    sleeps = "import sys, pathlib, signal; pathlib.Path(sys.argv[1]).touch(); signal.pause()"
    program = ("import subprocess, sys\nprint('it runs', flush=True)\n"
               f"subprocess.run([sys.executable, '-c', {sleeps!r}, sys.argv[1]], start_new_session=True)")
    with Started([sys.executable, "-c", program, tmp_path / "there"]) as started:
        while not (tmp_path / "there").exists():
            assert started.process.poll() is None
        assert len(started.left()) == 2
        ended = started.ended(0)
        assert (ended.code, ended.stdout, started.left()) == (None, "it runs\n", [])
        assert started.process.returncode is not None


def test_an_interrupted_part_is_written_as_such(monkeypatch, tmp_path) -> None:
    def interrupted(words: list[str], *_: Any, **__: Any) -> None:
        Writer(words[-1], words[-2], CARD).check("works", lambda: 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main(["speed", "mpi"], 60, tmp_path)
    (part,) = report.parts_in(tmp_path)
    assert (part.name, part.status, part.counts()) == ("speed", report.INTERRUPTED, "1 ran")


def test_the_command_refuses_what_it_cannot_do(monkeypatch, tmp_path) -> None:
    (tmp_path / "cards.json").write_text("{}")
    for words, said in ((("--only", "speed,nix"), "--only names 'nix', and the parts are kernels, exhaustive,"),
                        (("--only", " , "), "--only names ' , ', and the parts are"),
                        (("--page", "--only", "mpi"), "--only mpi chooses what to run; leave one of them out"),
                        (("--page",), "cards.json is no report of gpu-check (KeyError: 'cards'); remove it, or name"),
                        (("--budget", "601"), "a budget of 601 seconds was asked for; a part takes more than 0 and at "
                                              "most 600"), (("--budget", "0"), "a budget of 0 seconds")):
        assert_command_refuses(said, "gpu-check", "--out", str(tmp_path), *words)
    monkeypatch.setattr("zerosim.cli.tools.__file__", str(tmp_path / "zerosim/cli/tools.py"))
    assert_command_refuses(f"there are none in {tmp_path}; take a checkout", "gpu-check")


def test_the_commands_help_names_every_part_and_each_is_a_function() -> None:
    text = " ".join(ask("gpu-check", "--help", columns=200).stdout.replace("│", " ").split())
    assert ", ".join(PARTS) in text
    assert all(callable(getattr(getattr(gpu_check, module), f"check_{name}")) for name, module in PARTS.items())


def test_the_page_has_every_check_of_what_ran_on_a_card_and_the_docs_have_that_page(tmp_path) -> None:
    report.write(tmp_path / "mpi.json", Part("mpi", LEFT_OUT))
    report.write(tmp_path / "speed.json", Part(
        "speed", report.OUT_OF_TIME, "was ended", "2026-11-22T20:00:00+00:00", cards=("A", "A", "B"),
        versions={"cupy": "14"}, checks=(Check("copy", RAN, "4000 GB/s | best", 1.25), Check("adam", FAILED))))
    assert report.page(tmp_path).split("\n") == [
        "| part | checks | card | when | versions |", "|---|---|---|---|---|",
        "| speed | 1 ran, 1 failed; out of time: was ended | 2 × A, B | 2026-11-22 | cupy 14 |", "", "### speed", "",
        "| check | | remark | seconds |", "|---|---|---|---|", "| copy | ran | 4000 GB/s \\| best | 1.2 |",
        "| adam | failed |  | 0.0 |", ""]
    text = (ROOT / "docs/verified_on.md").read_text(encoding="utf-8")
    assert text.endswith(f"\n## On a GPU\n\n{report.page(ROOT / 'docs/verified')}")


# -- what the parts run -----------------------------------------------------------------------------------------------

ALONE = "this machine has 1 GPU, and ranks on GPUs of their own need 2"


@pytest.mark.parametrize(("machine", "reasons"), [
    (CARD, ["", "", ALONE]),
    (Machine({"nccl": "2.27.5"}, ["A"]), [
        "", "NCCL 2.27.5 does not know NCCL_MULTI_RANK_GPU_ENABLE, which came with 2.30", ALONE]),
    (Machine({}, ["A"], "there is no NCCL"), ["there is no NCCL"] * 3),
    (Machine({"nccl": "2.32"}, ["A"] * 8), [""] * 3)])
def test_which_bandwidths_are_measured_follows_from_the_cards_and_nccl(monkeypatch, tmp_path, machine, reasons) -> None:
    for name in ("measured", "by_processes", "in_one_process"):
        monkeypatch.setattr(collectives, name, lambda *_: GOOD)
    monkeypatch.setattr(suite, "check_worlds", lambda *_: None)
    monkeypatch.setattr(zs, "NCCLCluster", lambda ranks: ranks, raising=False)
    writer = Writer(tmp_path / "nccl.json", "nccl", machine)
    collectives.check_nccl(writer, machine)
    collectives.check_cards(writer, machine)
    assert [check.reason for check in writer.part.checks if check.status == LEFT_OUT] == list(filter(None, reasons))
    assert [check.status == RAN for check in writer.part.checks] == [not reason for reason in reasons]


def test_pytest_runs_beside_plugins_and_warnings_and_tells_what_failed(tmp_path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest, warnings\npytestmark = pytest.mark.gpu\n"
        "def test_warns(pytestconfig):\n    warnings.warn('no path of CUDA')\n"
        "    assert not pytestconfig.pluginmanager.has_plugin('xdist')\n"
        "def test_fails():\n    assert not 1\n")
    found = suite.pytest([str(tmp_path / "test_it.py")], 600)
    assert (found["exit_code"], len(found["failures"])) == (1, 1)
    assert_refused(lambda: suite.remark(found), "exit code 1: 1 failed, 1 passed.*test_fails", Wrong)


def test_processes_that_share_a_card_send_and_add_as_ranks_of_one_process(compiler: None) -> None:
    world = Processes("a double that is shared", 3, TORCHRUN, "nccl", doubled_gpus=4, device="cuda:0",
                      share_devices=True)
    assert_same(world, programs.every_collective, "bf16", (7,))


def test_the_suite_can_be_asked_for_one_world_alone_whatever_other_worlds_its_tests_want() -> None:
    found = fresh("-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "-W", "default", *suite.CONFORMANCE,
                  *suite.FAILURES, ZEROSIM_TEST_WORLD=HERE.name)
    assert f"[{HERE.name}]" in found
    assert "MPI" not in found


@pytest.mark.slow
def test_the_tests_for_gpus_pass_on_a_double_of_one_in_every_process(gpus, tmp_path, monkeypatch) -> None:
    """Else nobody runs them where there is no GPU."""
    gpus(1)
    (tmp_path / "sitecustomize.py").write_text(
        "from tests.backends import doubles\nin_place = doubles.installed(1)\nin_place.__enter__()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    writer = Writer(tmp_path / "part.json", "worlds", CARD)
    writer.check("kernels", lambda: suite.pytest(suite.KERNELS, 600),
                 remark=lambda found: suite.remark({**found, "skipped": []}))
    names = ["CuPy over MPI, 4 processes", "NCCL, 3 processes on one GPU"]
    suite.check_worlds(writer, lambda world: world.name in names, suite.CONFORMANCE, 600)
    assert [(check.name, check.reason[-400:]) for check in writer.part.checks if check.status != RAN] == []
    assert [check.name for check in writer.part.checks] == ["kernels", *names]


# -- arithmetic over all inputs ---------------------------------------------------------------------------------------

CODES = [(0, 300), (0x3F000000, 0x3F000300), (0x42B17200, 0x42B17300), (0x7F7FFF00, 0x7F800100),
         (0x80000000, 0x80000100), (0xC2CFF000, 0xC2CFF100), (0xFF7FFF00, 0xFF800100)]  # subnormal, infinite, NaN too


@pytest.mark.parametrize("name", exhaustive.FUNCTIONS)
def test_errors_of_functions_are_measured_as_numpy_measures_them(stand_in: Any, name: str) -> None:
    """Of NumPy's own functions, which stand in for CUDA's; a result that is 5 ULP off is found where it is."""
    found = exhaustive.all_arguments(stand_in, name, CODES)
    x = np.concatenate([np.arange(*span, dtype=np.uint32) for span in CODES]).view(np.float32)
    with np.errstate(all="ignore"):
        y, exact = (exhaustive.FUNCTIONS[name](x.astype(dtype)) for dtype in (np.float32, np.float64))
        exact32 = exact.astype(np.float32)
        finite = np.isfinite(y) & np.isfinite(exact32)
        step = 2.0 ** (np.maximum(np.frexp(exact)[1] - 1, -126) - 23)
        largest = (np.abs(y - exact) / step)[finite].max()
    assert (y[~finite] == exact32[~finite])[~np.isnan(exact32[~finite])].all()
    assert found["arguments"] == len(x)
    assert found["largest_ulps"] == pytest.approx(largest, rel=1e-6)
    moved = y.copy()
    moved[400] = (y[400:401].view(np.uint32) + 5).view(np.float32)[0]
    apart, at = exhaustive.distance(stand_in, name, stand_in.uploaded(x), stand_in.uploaded(moved))
    assert (apart > 4, at) == (True, x[400])
    moved[7] = np.nan
    assert exhaustive.distance(stand_in, name, stand_in.uploaded(x), stand_in.uploaded(moved))[0] == 1e300


@pytest.mark.parametrize("name", [name for name in zs.FORMATS if name != "fp32"])
def test_casts_are_compared_with_the_formula_and_every_one_that_differs_is_counted(
        stand_in: Any, name: str, monkeypatch) -> None:
    count = sum(stop - first for first, stop in CODES)
    found = exhaustive.all_casts(stand_in, name, CODES, threads=100)
    assert exhaustive.remark_on_casts(found) == f"{count:,} casts, the formula's bits"
    odd = ("ZS CODE zs_narrow_formula(float x) { return zs_narrow_NAME(x) ^ 1u; }"
           "ZS float zs_widen_formula(CODE code) { return zs_widen_NAME(code ^ 1u); }")
    odd = odd.replace("CODE", f"u{zs.FORMATS[name].bits}").replace("NAME", name)
    monkeypatch.setattr(exhaustive, "cast_formulas", lambda _: odd)
    found = exhaustive.all_casts(stand_in, name, [(0x3F800000, 0x3F800007), (0x7F800001, 0x7F800003)], threads=3)
    assert (found["wrong"], found["example"]) == (7, "0x3f800006")
    assert_refused(lambda: exhaustive.remark_on_casts(found), (
        "7 of 9 casts differ from the formula's, that of the float32 of code 0x3f800006 among them"), Wrong)


# Signed zeros, subnormal, largest, infinite and NaN codes, and some in between.
CODES_OF_16_BITS = [0, 1, 0x7F, 0x80, 0x3FF, 0x400, 0x1234, 0x3C00, 0x7BFF, 0x7C00, 0x7E01, 0x7F7F, 0x7F80, 0x8000,
                    0x8001, 0xFF80]


@pytest.mark.parametrize(("name", "formula"), [
    ("fp16", "a + b"), ("bf16", "a + b"), *product(["fp8_e4m3", "fp8_e5m2"], exhaustive.OF_PAIRS)])
def test_what_is_computed_of_pairs_of_codes_is_compared(stand_in: Any, name: str, formula: str, monkeypatch) -> None:
    """In fp8 for every pair."""
    left, pairs = (CODES_OF_16_BITS, 16 << 16) if zs.FORMATS[name].bits == 16 else (None, 256 << 8)
    found = exhaustive.all_pairs(stand_in, name, formula, left)
    assert (found["pairs"], found["wrong"]) == (pairs, 0), found["example"]

    def wrong(self: CupyKernels, a: Any, b: Any, out: Any) -> None:
        right(self, a, b, out)
        arrays.words(out)[0x3C:0x3D] = stand_in.uploaded(np.array([0x3D], arrays.words(out).dtype))

    right, exact = exhaustive.OF_PAIRS[formula]
    monkeypatch.setitem(exhaustive.OF_PAIRS, formula, (wrong, exact))
    found = exhaustive.all_pairs(stand_in, name, formula, [0])
    doubled = {"fp8_e4m3": 0x44, "fp8_e5m2": 0x40}.get(name)  # 1.5 and 1.0 are 0x3c
    should = {"a + b": 0x3C, "(a + b) + b": doubled, "max(a, b)": 0x3C, "min(a, b)": 0}[formula]
    assert found == {"pairs": 1 << zs.FORMATS[name].bits, "wrong": 1,
                     "example": f"codes 0x0 and 0x3c make 0x3d and should make {should:#x}"}


# -- kernels and their speed ------------------------------------------------------------------------------------------

# What others are made of, what moves no elements, and copies to the host, which `training` times.
PARTS_OF_KERNELS = {"add_column_sums", "apply", "computes_in", "empty", "fill", "matrix", "onto_grid", "picked", "room",
                    "room_for", "row_blocks", "row_maxima", "row_products", "row_sums", "scale_past", "scratch",
                    "serving", "round_into", "slack_nbytes", "uploaded", "wide", "widen", "count_targets",
                    "index_range", "largest_finite", "copy_beside"}


@pytest.mark.slow
def test_the_table_of_kernels_has_every_kernel_and_each_is_timed(stand_in: Any, monkeypatch) -> None:
    monkeypatch.setattr(speed, "REPEATS", 1)
    names = [name for name in dir(CupyKernels) if not name.startswith("_") and callable(getattr(CupyKernels, name))]
    found = speed.all_kernels(stand_in, 1009)
    called = {row["name"].split()[0] for row in found["kernels"]}
    assert all(row["seconds"] > 0 for row in (found["copy"], *found["kernels"]))
    assert called == {*names} - PARTS_OF_KERNELS


def test_a_kernels_share_is_that_of_the_copys_bandwidth(monkeypatch, stand_in: Any) -> None:
    monkeypatch.setattr(speed, "copy_of", lambda n: (lambda: None))
    monkeypatch.setattr(speed, "calls", lambda kernels, n: iter([
        speed.Call("adam_step", lambda: None, 28 * n, streams=True), speed.Call("column_sum", lambda: None, 4 * n),
        speed.Call("matmul bf16", lambda: None, 6 * n, 100 * n)]))
    monkeypatch.setattr(speed, "seconds_of", lambda call, copy: 8 * 2**27 / 4e12 if call is copy else 1e-3)
    found = speed.all_kernels(stand_in, 1 << 27)
    assert [row["share_of_copy"] for row in found["kernels"]] == pytest.approx(
        [28 * 2**27 / 4e9, 4 * 2**27 / 4e9, 6 * 2**27 / 4e9])
    assert speed.remark(found) == ("the copy moves 4000 GB/s; all that streams at 85% of it or more; of the others "
                                   "below: column_sum 13%; matmul bf16 13 TFLOP/s")
    found["kernels"][0]["share_of_copy"] = 0.6
    assert_refused(lambda: speed.remark(found), "the copy moves 4000 GB/s; below 85% of it: adam_step 60%$", Wrong)
    assert speed.elements_for(140 << 30) == speed.ELEMENTS
    assert speed.elements_for(8 << 30) == 1 << 26
    assert_refused(lambda: speed.elements_for(1 << 20), "end what else runs on it")


# -- training ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def one_block(monkeypatch) -> None:
    """Half of gpt-nano is trained in its place."""
    monkeypatch.setattr(training, "GPT", lambda _: zs.models.GPT(SMALL))


@pytest.mark.usefixtures("one_block")
def test_stages_and_runs_that_differ_in_a_bit_are_named(stand_in: Any) -> None:
    found = training.stages_agree(ranks=1, formats=["bf16"])
    assert training.remark_on_bits(found) == "5 trainings, equal bits"
    runs = iter(range(100))

    def strange(rank: zs.Rank, stage: int, compute: str) -> tuple[Any, str]:
        return [((float("nan"),), 1.0, False)], f"{stage == 2}{next(runs) if compute == 'fp16' else ''}"

    found = training.stages_agree(ranks=1, formats=["bf16", "fp16"], program=strange)
    assert_refused(lambda: training.remark_on_bits(found), (
        "^N=1, bf16: stage 2 differs, a loss is no number; N=1, fp16: two runs differ, stage 1 differs, stage 2 "
        "differs, stage 3 differs, a loss is no number$"), Wrong)


@pytest.mark.usefixtures("one_block")
def test_offload_is_checked_for_bits_and_copies_beside_sums_are_measured(stand_in: Any, monkeypatch) -> None:
    monkeypatch.setattr(training, "PLACES", {"host": "host"})
    found = training.offloaded(ranks=1, count=100, stages=[2])
    assert (found["trainings"], found["different"]) == (1, [])
    assert all(value > 0 for row in found["copies"].values() for value in row.values())
    row = {"bytes_per_second": 2e10, "copy_seconds": 2.0, "compute_seconds": 2.0, "both_seconds": 2.5}
    assert training.remark_on_offload({**found, "copies": {"to host": row}}) == (
        "1 trainings, the bits of none; to host 20.0 GB/s, 75% of it beside sums")


@pytest.mark.usefixtures("one_block")
def test_the_cards_end_and_ctrl_c_leave_a_cluster_that_trains_as_before(stand_in: Any, monkeypatch) -> None:
    cuda = doubles.fake_cuda.Cuda.current
    cuda.capacity_nbytes = cuda.used_nbytes + (8 << 20)
    monkeypatch.setattr(training, "LARGEST_PIECE", 1 << 22)
    said = [training.remark_on_end(ends(zs.CuPyCluster(2))) for ends in (training.at_the_cards_end, training.at_ctrl_c)]
    assert said[0].startswith("OutOfMemoryError: Out of memory allocating")
    assert said[1].startswith("KeyboardInterrupt after ")


def test_every_byte_of_the_pool_is_counted(stand_in: Any) -> None:
    measured = training.memory(zs.CuPyCluster, SMALL)
    assert measured["card_nbytes"] == measured["counted_nbytes"] == measured["pool_used_nbytes"] > 0


def test_a_training_step_is_measured_on_doubles_too(gpus, monkeypatch) -> None:
    gpus(1)
    monkeypatch.setattr(training, "torch_is_missing", lambda: "PyTorch is not installed")
    found = training.measured("bf16", zs.NCCLCluster, SMALL, batch=1, rounds=1)
    assert 0 < found["python_share"] <= 1
    assert training.remark({**found, "seconds": 0.1, "python_share": 0.25}) == (
        "100.0 ms a step, Python's share 25%; nothing beside it: PyTorch is not installed")
    assert training.remark({**found, "torch": {"ratio": 1.25}}).endswith("1.25 times PyTorch's")


# -- bandwidths between ranks -----------------------------------------------------------------------------------------

def test_bandwidth_is_that_of_the_slowest_rank() -> None:
    """8 ranks, 2^20 float32 in 1 ms: algorithm bandwidth 4.194 GB/s, and nccl-tests' bus factor is 2·7/8."""
    rows = collectives.rows_of([{("all_reduce", "ring", 1 << 20): 0.5e-3 if rank else 1e-3} for rank in range(8)])
    assert [row["bus_bytes_per_second"] for row in rows] == pytest.approx([4194304e3 * 14 / 8])
    found = {**GOOD, "rows": rows, "native_is_ulps_and_share_from_the_ring": {"bf16": (1200, 0.31)}}
    assert collectives.remark(found) == ("all_reduce, bus bandwidth: ring 7.3 GB/s, native 0.0 GB/s; native from the "
                                         "ring: bf16 at most 1,200 ULP, 31% of sums")


def test_what_is_measured_runs_on_doubles_with_the_simulators_bits(gpus) -> None:
    gpus(3)
    found = collectives.measured(zs.NCCLCluster(3), [16, 300], repetitions=2)  # 16: as powers of 2 are
    assert found["ring_has_the_simulators_bits"]
    assert [(row["operation"], row["algorithm"], row["nbytes"]) for row in found["rows"]] == [
        (operation, algorithm, nbytes) for operation in collectives.OPERATIONS
        for algorithm in collectives.ALGORITHMS for nbytes in (72, 1200)]
    assert all(row["bus_bytes_per_second"] > 0 for row in found["rows"])
    apart = found["native_is_ulps_and_share_from_the_ring"]
    assert all(ulps > 0 and 0 < share < 1 for ulps, share in apart.values())  # the double adds in rank order
    assert set(apart) == {"fp32", "bf16", "fp16"}


def test_the_time_of_a_collective_is_that_of_those_that_are_counted(gpus) -> None:
    gpus(2)
    ticks = iter(np.arange(100) / 4)
    results = zs.NCCLCluster(2).run(
        lambda rank: collectives.timed(rank, "all_gather", "ring", 8, 5, lambda: float(next(ticks))))
    assert all(0 < seconds <= 0.75 / 5 for seconds in results)  # four readings of a clock, over five repetitions


# -- what is wrong with what was found --------------------------------------------------------------------------------

SKIPPED = ["SKIPPED [3] a.py:1: needs 8 GPUs, and this machine has 1", "SKIPPED [3] a.py:1: mpi4py is not installed"]
TESTED = {"exit_code": 0, "seconds": 2.0, "said": "= 9 passed =", "skipped": SKIPPED, "failures": [], "end": "the end"}
COUNTED = {"counted_nbytes": 2_000_000_000, "pool_used_nbytes": 2_000_000_000, "card_nbytes": 2_500_000_000}


def sanitized(code: int | None, *lines: str) -> Ended:
    return Ended(code, "\n".join(f"========= {line}" for line in lines), "", 200.0)


def test_what_is_as_it_should_be_is_remarked_on() -> None:
    assert suite.remark(TESTED) == "9 passed"
    assert sanitizer.remark(sanitized(0, "COMPUTE-SANITIZER", "ERROR SUMMARY: 0 errors")) == ""
    assert sanitizer.remark(sanitized(0, "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")) == ""
    assert training.remark_on_memory(COUNTED) == "counted 2.000 GB, pool used 2.000 GB, card 2.500 GB"
    assert suite.usable({"backends": [{"name": "MPI", "usable": False, "reason": "it is not here"}]}) == ""
    assert collectives.answer([Ended(0, 'NCCL says\n{"rows": []}\n', "", 1.0)]) == {"rows": []}


@pytest.mark.parametrize(("remark", "found", "said", "error"), [(*row, Wrong)[:4] for row in [
    (suite.usable, {"backends": [{"name": "CuPy", "usable": False, "reason": "no GPU"}]}, "^CuPy: no GPU$"),
    (suite.remark, {**TESTED, "skipped": [*SKIPPED, "SKIPPED [3] a.py:1: CuPy is installed, but NCCL is not"]},
     r"skipped, though there is a GPU: SKIPPED \[3\] a.py:1: CuPy is installed, but NCCL is not$"),
    (suite.remark, {**TESTED, "exit_code": None}, "^was ended after 2 seconds; the end"),
    (sanitizer.remark, sanitized(9, "Invalid __global__ read of size 4 bytes", "ERROR SUMMARY: 1 error"),
     "exit code 9: ========= Invalid __global__ read"),
    (sanitizer.remark, Ended(1, "========= ERROR SUMMARY: 0 errors\n", "AssertionError: cuBLAS left 3 of 9", 200.0),
     r"^exit code 1: =.*\nAssertionError: cuBLAS left"),
    (sanitizer.remark, sanitized(0, "RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"), "^exit code 0: "),
    (sanitizer.remark, sanitized(0, "COMPUTE-SANITIZER"), "no summary"),
    (sanitizer.remark, sanitized(None), "^did not end within 200 seconds$"),
    (exhaustive.remark_on_function, {"largest_ulps": 2.5, "at": "0x1p+0"}, "^2.5000 ULP, at 0x1p.0, from the exact"),
    (exhaustive.remark_on_pairs, {"pairs": 65536, "wrong": 1, "example": "codes 0x0 and"},
     "^1 of 65,536 results are wrong: codes 0x0 and"),
    (training.remark_on_end, {"error": "", "held_nbytes": [0, 8], "as_before": False},
     "the run did not end with an error; 8 bytes are still held; the cluster does not train as before"),
    (training.remark_on_offload, {"different": ["stage 2, disk"]}, "^other bits than without offload: stage 2, disk$"),
    (training.remark_on_memory, {**COUNTED, "pool_used_nbytes": 8},
     "2,000,000,000 bytes are counted, and the pool has handed out 8"),
    (collectives.remark, {**GOOD, "ring_has_the_simulators_bits": False}, "other bits"),
    (collectives.answer, [Ended(None, "", "", 120.0)], "did not end within 120 seconds.*NCCL_MAX_CTAS", RuntimeError),
    (collectives.answer, [Ended(0, "{}", "", 1.0), Ended(3, "", "duplicate GPU", 1.0)], "exit code 3: duplicate GPU",
     RuntimeError)]])
def test_what_is_not_as_it_should_be_is_wrong(remark: Any, found: Any, said: str, error: type[Exception]) -> None:
    assert_refused(lambda: remark(found), said, error)
