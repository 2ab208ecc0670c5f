"""What a GPU computes, beside NumPy: the suite of the stand-in's arithmetic again, on the card; bounds for libraries.

Skipped, by name and with the reason, where no GPU can be used; `make gpu-check` runs it where one can. The tests that
are taken over from the stand-in's modules run here with this module's `kernels`: the same assertions, the same bits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zerosim as zs
from tests.backends import test_cupy_arithmetic, test_cupy_cluster
from tests.backends.test_cupy_arithmetic import DTYPES, NARROW, all_codes, chance
from tests.backends.test_cupy_cluster import trained
from tests.zero.training import batches
from zerosim.backends.cupy.cluster import cupy_on
from zerosim.models import GPT
from zerosim.numerics.arrays import to_host
from zerosim.numerics.formats import FORMATS
from zerosim.numerics.kernels import NumpyKernels

try:
    cupy = cupy_on(0)
except zs.BackendError as missing:
    pytest.skip(f"the GPU's part of the suite did not run: {missing}", allow_module_level=True)

NUMPY = NumpyKernels()
# The library's exp and tanh are another than NumPy's: bounds for those are below.
BITS = [name for name in vars(test_cupy_arithmetic) if name.startswith("test_") and "gelu" not in name]
globals().update({name: getattr(test_cupy_arithmetic, name) for name in BITS})
test_collectives_give_the_bits_of_a_cluster = test_cupy_cluster.test_collectives_give_the_bits_of_a_cluster
test_an_input_that_changes_before_the_wait_is_noticed_on_the_device = (
    test_cupy_cluster.test_an_input_that_changes_before_the_wait_is_noticed_on_the_device)
test_debug_mode_shows_what_is_read_too_early = test_cupy_cluster.test_debug_mode_shows_what_is_read_too_early


@pytest.fixture
def kernels() -> Iterator[Any]:
    """CuPy's kernels on the first GPU."""
    from zerosim.backends.cupy.kernels import CupyKernels

    with np.errstate(all="ignore"):
        yield CupyKernels()


def steps_apart(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """How many numbers of the format lie between two arrays' elements, where both are finite."""
    kind = np.dtype(f"i{found.dtype.itemsize}")
    ordered = []
    for x in (found, expected):
        code = x.view(kind).astype(np.int64)
        ordered.append(np.where(code < 0, np.int64(np.iinfo(kind).min) - code, code))
    finite = np.isfinite(found.astype(np.float64)) & np.isfinite(expected.astype(np.float64))
    return np.abs(ordered[0] - ordered[1])[finite]


@pytest.mark.parametrize("name", [*NARROW, "fp32"])
@pytest.mark.parametrize("exact", [False, True])
def test_gelu_is_within_a_few_steps_of_numpys(kernels: Any, name: str, exact: bool) -> None:
    """16 and 8 bits: one step of the format. fp32: 1e-6 of 1 + |x|, since 1 + tanh cancels for negative x."""
    x = all_codes(name) if name in NARROW else chance("fp32", 100_000)
    found, expected = kernels.uploaded(np.zeros_like(x)), np.zeros_like(x)
    kernels.gelu(kernels.uploaded(x), found, exact=exact)
    NUMPY.gelu(x, expected, exact=exact)
    near = np.abs(x.astype(np.float64)) < 100
    difference = np.abs(to_host(found).astype(np.float64) - expected.astype(np.float64))[near]
    allowed = (1 + np.abs(x.astype(np.float64)))[near] * (1e-6 if name == "fp32" else 2.0**-FORMATS[name].mantissa_bits)
    assert (difference <= allowed).all()


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp8_e4m3", "fp64"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 33, 5), (256, 512, 128), (128, 4096, 64)])
def test_products_are_within_their_bound(kernels: Any, name: str, shape: tuple[int, int, int]) -> None:
    """k·2^-23·Σ|a·b| for the sum in float32, and half a step of the result's format for the one rounding."""
    m, k, n = shape
    rng = np.random.default_rng(0)
    a, b, bias = (rng.standard_normal(s).astype(DTYPES[name]) for s in ((m, k), (k, n), n))
    wide = [x.astype(np.float64) for x in (a, b, bias)]
    right, size = wide[0] @ wide[1] + wide[2], np.abs(wide[0]) @ np.abs(wide[1]) + np.abs(wide[2])
    sums = (k + 1) * size * (2.0**-23 if name != "fp64" else 2.0**-51)
    for turned in (False, True):
        operands = [kernels.uploaded(x.T.copy()).T if turned else kernels.uploaded(x) for x in (a, b)]
        for out in (name, "fp64" if name == "fp64" else "fp32"):
            found = kernels.uploaded(np.zeros((m, n), DTYPES[out]))
            kernels.matmul(*operands, bias=kernels.uploaded(bias), out=found)
            step = 2.0 ** -(52 if out == "fp64" else FORMATS[out].mantissa_bits)
            assert (np.abs(to_host(found).astype(np.float64) - right) <= sums + step * (np.abs(right) + sums)).all()


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_rows_attention_and_loss_are_near_numpys(kernels: Any, name: str) -> None:
    """fp32: 2e-5 of the largest value; bf16: two of its steps there."""
    rng = np.random.default_rng(1)
    qkv, do = (rng.standard_normal(s).astype(DTYPES[name]) for s in ((2, 100, 96), (2, 100, 32)))
    p, o, dqkv, sums = (np.zeros(s, DTYPES[name]) for s in ((2, 4, 100, 100), do.shape, qkv.shape, (2, 4, 100)))
    sums = sums.astype(np.float32)
    calls = [("attend", (qkv, 4, p, o)), ("attend_gradient", (qkv, 4, p, do, dqkv)),
             ("attend_tiled", (qkv, 4, sums, o)), ("attend_tiled_gradient", (qkv, 4, sums, o, do, dqkv))]  # fmt: skip
    for call, arguments in calls:
        on_device = [kernels.uploaded(x) if isinstance(x, np.ndarray) else x for x in arguments]
        getattr(kernels, call)(*on_device)
        getattr(NUMPY, call)(*arguments)
        found, expected = to_host(on_device[-1]).astype(np.float64), arguments[-1].astype(np.float64)
        assert np.abs(found - expected).max() <= (2e-5 if name == "fp32" else 2.0**-6) * np.abs(expected).max(), call
    logits, targets = rng.standard_normal((300, 600)).astype(DTYPES[name]), rng.integers(-1, 600, 300)
    log_sums = [np.zeros(300, np.float32), kernels.uploaded(np.zeros(300, np.float32))]
    losses = (NUMPY.softmax_loss(logits, targets, log_sums[0]),
              kernels.softmax_loss(kernels.uploaded(logits), kernels.uploaded(targets), log_sums[1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def run(kind: type, ranks: int, compute: str, stage: int, steps: int = 3) -> Any:
    model, scale = GPT("gpt-nano"), 1024.0 if compute == "fp16" else 1.0
    options = {"stage": stage, "policy": zs.Policy(compute, loss_scale=scale), "optimizer": zs.optim.SGD(lr=0.1)}
    data = batches(model, ranks, 1, steps)
    return kind(ranks).run(lambda rank: trained(rank, model, data, dict(options)))


@pytest.mark.parametrize(("compute", "near"), [("fp32", 1e-5), ("fp16", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_gpt_trains_as_on_a_cluster(compute: str, near: float, ranks: int) -> None:
    """By SGD, which does not turn a gradient's last bit into a step; within a few roundings of the compute format."""
    found, expected = run(zs.CuPyCluster, ranks, compute, 3), run(zs.Cluster, ranks, compute, 3)
    for mine, right in zip(found, expected, strict=True):
        assert np.allclose(mine["losses"], right["losses"], rtol=near)
        assert mine["skipped"] == right["skipped"]
        for key, value in mine["states"].items():
            if key[1] == "master":
                assert np.abs(to_host(value) - right["states"][key]).max() < near, key


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_the_four_stages_agree_in_bits_on_a_gpu_too(compute: str) -> None:
    runs = [run(zs.CuPyCluster, 3, compute, stage) for stage in range(4)]
    for other in runs[1:]:
        for rank in range(3):
            assert other[rank]["losses"] == runs[0][rank]["losses"]
            for key, value in other[rank]["states"].items():
                if key[1] == "master":
                    assert to_host(value).tobytes() == to_host(runs[0][rank]["states"][key]).tobytes(), key


def test_the_ledger_at_rest_is_the_pools_used_bytes() -> None:
    """With its slack, and what the kernels hold between calls; after a step too."""
    pool, model = cupy.get_default_memory_pool(), GPT("gpt-nano")
    gc.collect()
    before = pool.used_bytes()
    cluster = zs.CuPyCluster(3)
    data = batches(model, 3, 1, 1)

    def program(rank: zs.Rank) -> zs.Engine:
        engine = zs.Engine(rank, model, zs.optim.AdamW(), stage=2, policy=zs.Policy("bf16"))
        engine.step(data[0][rank.index])
        return engine

    cluster.run(program)
    gc.collect()
    held = sum(memory.now_nbytes + memory.slack_nbytes for memory in cluster.memory)
    assert pool.used_bytes() - before == held + cluster.kernels.scratch_nbytes
