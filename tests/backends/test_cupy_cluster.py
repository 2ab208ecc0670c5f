"""Programs and training on a CuPyCluster whose CuPy is the stand-in: the bits, ledgers and traces of a Cluster.

What is shown is the kernels' arithmetic on the CPU and that arrays are told apart everywhere; no GPU runs here, and
what is a library's there (matmul, sums along rows, exp, tanh) is NumPy's here.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zerosim as zs
from tests.backends import fake_cupy
from tests.backends.fakes import differing, kernels
from tests.zero.training import batches
from zerosim.models import GPT
from zerosim.numerics.arrays import on_device, to_host
from zerosim.numerics.formats import FORMATS

__all__ = ["kernels"]
pytestmark = pytest.mark.usefixtures("kernels")
STATE = ("parameter", "master", "m", "v")


def trained(rank: zs.Rank, model: GPT, data: list, options: dict[str, Any]) -> dict[str, Any]:
    """Losses, norms and every state of every parameter after some steps."""
    engine = zs.Engine(rank, model, options.pop("optimizer", None) or zs.optim.AdamW(lr=0.01), **options)
    results = [engine.step(step[rank.index]) for step in data]
    states = {(name, key): value for name in model.shapes for key, value in engine.state(name).items()
              if value is not None}
    return {"losses": [r.losses for r in results], "norms": [r.norm for r in results],
            "skipped": [r.skipped for r in results], "states": states}


def assert_equal_runs(ranks: int, model: Any, data: list, **options: Any) -> None:
    """A CuPyCluster leaves the bits, the bytes sent and the bytes held of a Cluster."""
    one, other = zs.Cluster(ranks), zs.CuPyCluster(ranks)
    expected = one.run(lambda rank: trained(rank, model, data, dict(options)))
    found = other.run(lambda rank: trained(rank, model, data, dict(options)))
    for mine, right in zip(found, expected, strict=True):
        assert mine["losses"] == right["losses"]
        assert mine["norms"] == right["norms"]
        assert mine["skipped"] == right["skipped"]
        assert mine["states"].keys() == right["states"].keys()
        for key, value in mine["states"].items():
            assert on_device(value), key
            assert differing(to_host(value), right["states"][key]) == 0, key
    assert [t.sent_nbytes() for t in other.trace] == [t.sent_nbytes() for t in one.trace]
    assert other.memory.peak_nbytes_by_kind == one.memory.peak_nbytes_by_kind


@pytest.mark.parametrize(("compute", "stage"), [("bf16", 0), ("bf16", 1), ("bf16", 2), ("bf16", 3), ("fp32", 3),
                                                ("fp16", 3)])
def test_a_gpt_trains_to_the_bits_of_a_cluster(compute: str, stage: int) -> None:
    model, ranks, steps = GPT("gpt-nano"), {0: 2, 1: 4, 2: 3, 3: 3}[stage], 2 if stage == 3 else 1
    policy = zs.Policy(compute, loss_scale=1024.0 if compute == "fp16" else 1.0)
    assert_equal_runs(ranks, model, batches(model, ranks, 2, steps), stage=stage, policy=policy, clip_norm=1.0)


@pytest.mark.parametrize("options", [
    {"recompute": "block", "overlap": True, "bucket_nbytes": 10_000},
    {"recompute": "sub_block", "policy": zs.Policy("bf16", reduce="fp32", average="split")},
    {"policy": zs.Policy("bf16", matmul="fp8")},
    {"policy": zs.Policy("bf16", wire="fp32", master="bf16", state="bf16")}], ids=str)  # fmt: skip
def test_levers_of_the_engine_work_on_devices_arrays(options: dict[str, Any]) -> None:
    model = GPT("gpt-nano")
    assert_equal_runs(3, model, batches(model, 3, 2, 1), stage=3, **({"policy": zs.Policy("bf16")} | options))


@pytest.mark.parametrize("optimizer", [
    zs.optim.SGD(lr=0.1), zs.optim.LAMB(), zs.optim.Muon(), zs.optim.Adafactor(), zs.optim.Shampoo(),
    zs.optim.SOAP(every=1), zs.optim.Lion(), zs.optim.Adan()], ids=lambda o: type(o).__name__)  # fmt: skip
def test_every_optimizer_steps_on_devices_arrays(optimizer: Any) -> None:
    """Two steps; bits, but for what a decomposition's matmul of another layout decides: within 1e-3."""
    model = GPT("gpt-nano")
    data = batches(model, 2, 1, 2)
    options = {"stage": 2, "policy": zs.Policy("fp32"), "optimizer": optimizer, "gather": True}
    expected = zs.Cluster(2).run(lambda rank: trained(rank, model, data, dict(options)))
    found = zs.CuPyCluster(2).run(lambda rank: trained(rank, model, data, dict(options)))
    for mine, right in zip(found, expected, strict=True):
        for key, value in mine["states"].items():
            assert np.abs(to_host(value).astype(np.float64) - right["states"][key]).max() < 1e-3, key


COLLECTIVES = [("reduce_scatter", "ring"), ("reduce_scatter", "pairwise"), ("reduce_scatter", "halving"),
               ("all_reduce", "ring"), ("all_reduce", "tree"), ("all_reduce", "doubling"), ("all_reduce", "everyone"),
               ("all_gather", "ring"), ("all_gather", "bruck"), ("all_to_all", "pairwise"), ("broadcast", "tree"),
               ("reduce", "tree"), ("gather", "pairwise")]  # fmt: skip


@pytest.mark.parametrize(("fmt", "debug"), [*((fmt, False) for fmt in (*FORMATS, "int32")), ("bf16", True)])
@pytest.mark.parametrize(("operation", "algorithm"), COLLECTIVES)
def test_collectives_give_the_bits_of_a_cluster(operation: str, algorithm: str, fmt: str, debug: bool) -> None:
    for ranks in (1, 2, 4, 5) if algorithm not in ("halving", "doubling") else (1, 2, 4):
        def program(rank: zs.Rank) -> Any:
            rng = np.random.default_rng(rank.index)
            x = rng.standard_normal(rank.size * 7).astype(FORMATS[fmt].dtype if fmt in FORMATS else fmt)
            held = rank.memory.alloc(x.shape, x.dtype, "input")
            rank.kernels.cast_pack(x, held)
            work = getattr(rank, operation)(held, algorithm=algorithm, async_op=operation != "barrier")
            found = work.wait()
            return None if found is None else to_host(found).copy()

        expected, found = (kind(ranks, debug=debug).run(program) for kind in (zs.Cluster, zs.CuPyCluster))
        for mine, right in zip(found, expected, strict=True):
            assert (mine is None) == (right is None)
            assert mine is None or differing(mine, right) == 0


def test_the_ledger_at_rest_is_the_pools_used_bytes_within_its_slack() -> None:
    model, before = GPT("gpt-nano"), fake_cupy.POOL["used"]
    cluster = zs.CuPyCluster(3)
    engines = cluster.run(lambda rank: zs.Engine(rank, model, zs.optim.AdamW(), stage=1, policy=zs.Policy("bf16")))
    held = sum(memory.now_nbytes + memory.slack_nbytes for memory in cluster.memory)
    assert held > 50_000
    assert fake_cupy.POOL["used"] - before == held + cluster.kernels.scratch_nbytes
    del engines
    cluster.runs.clear()
    assert sum(memory.now_nbytes for memory in cluster.memory) == 0


def test_an_array_that_a_program_made_is_held_with_the_pools_slack() -> None:
    def program(rank: zs.Rank) -> tuple[int, int, int]:
        before = fake_cupy.POOL["used"]
        x = rank.memory.hold(rank.xp.zeros(100, np.float32), "input")
        y = rank.memory.hold(np.zeros(100, np.float32), "input")
        assert rank.memory.kind_of(x[3:]) == rank.memory.kind_of(y) == "input"
        return rank.memory.now_nbytes, rank.memory.slack_nbytes, fake_cupy.POOL["used"] - before

    assert zs.CuPyCluster(1).run(program)[0] == (800, 112, 512)


def test_every_hop_can_be_watched_on_the_device() -> None:
    def program(rank: zs.Rank) -> Any:
        return rank.all_reduce(rank.xp.full(6, rank.index, np.float32))

    with zs.step_through(program, cluster=zs.CuPyCluster(3)) as steps:
        arrived = [to_host(event.values).tolist() for event in steps]
    with zs.step_through(lambda rank: rank.all_reduce(np.full(6, rank.index, np.float32)), ranks=3) as steps:
        assert arrived == [event.values.tolist() for event in steps]


def test_a_rank_runs_out_of_its_capacity_on_the_device_too() -> None:
    with pytest.raises(zs.OutOfMemoryError, match="rank 0 asked for 4,000 bytes"):
        zs.CuPyCluster(2, capacity_nbytes=3999).run(lambda rank: rank.memory.alloc(1000, np.float32, "input"))


def test_debug_mode_shows_what_is_read_too_early() -> None:
    def program(rank: zs.Rank) -> Any:
        x = rank.memory.alloc(6, FORMATS["fp8_e5m2"].dtype, "input")
        out = rank.memory.alloc(12, np.int32, "input")
        return np.isnan(to_host(x).astype(np.float32)).all(), to_host(out).view(np.uint8)[0]

    assert list(zs.CuPyCluster(2, debug=True).run(program)) == [(True, 0xA5)] * 2


def test_an_input_that_changes_before_the_wait_is_noticed_on_the_device() -> None:
    def program(rank: zs.Rank) -> None:
        x = rank.xp.zeros(6, np.float32)
        work = rank.all_reduce(x, async_op=True)
        x[2] = 1.0
        work.wait()

    for debug in (False, True):
        with pytest.raises(zs.PendingWorkError, match="was changed before wait"):
            zs.CuPyCluster(3, debug=debug).run(program)


def test_numpys_arrays_in_a_devices_kernel_are_refused_by_name() -> None:
    def program(rank: zs.Rank) -> None:
        x = np.zeros(4, np.float32)
        rank.kernels.multiply_rounded(x, 2.0, x)

    with pytest.raises(ValueError, match=r"a NumPy array \(4,\) of type float32.*rank\.xp\.asarray"):
        zs.CuPyCluster(1).run(program)


def without(name: str) -> Any:
    """The stand-in with one thing missing, as a machine may have it."""
    fake = SimpleNamespace(**{key: getattr(fake_cupy, key) for key in ("cuda", "__version__")})
    runtime = SimpleNamespace(**vars(fake_cupy.cuda.runtime))
    fake.cuda = SimpleNamespace(**vars(fake_cupy.cuda) | {"runtime": runtime})
    if name == "driver":
        runtime.driverGetVersion = lambda: 0
    elif name == "newer driver":
        runtime.driverGetVersion = lambda: 11080
    elif name == "device":
        runtime.getDeviceCount = lambda: 0
    elif name == "bfloat16":
        fake.__version__ = "13.6.0"
    else:
        del fake.cuda.cublas
    return fake


@pytest.mark.parametrize(("missing", "said"), [
    ("driver", "no NVIDIA driver; run the program on a Cluster"),
    ("newer driver", r"built for CUDA 12\.9, and this machine's driver knows CUDA 11\.8 at most; install cupy-cuda11x"),
    ("device", r"device=0 was asked for, and this machine shows 0 GPU\(s\)"),
    ("bfloat16", r"CuPy 14 or later, which has bfloat16, and found 13\.6\.0; pip install 'zerosim\[gpu\]'"),
    ("cublas", r"cuBLAS and NVRTC.*pip install 'zerosim\[gpu\]'")])  # fmt: skip
def test_what_is_missing_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch, missing: str, said: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", without(missing))
    with pytest.raises(zs.BackendError, match=said):
        zs.CuPyCluster(2)


def test_a_machine_without_cupy_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(zs.BackendError, match=r"need CuPy.*pip install 'zerosim\[gpu\]'"):
        zs.CuPyCluster(2)


@pytest.mark.parametrize("device", [-1, 1.0, True, "0", None])
def test_a_device_is_a_number(device: Any) -> None:
    with pytest.raises(ValueError, match=r"must be the number of a GPU"):
        zs.CuPyCluster(2, device=device)
