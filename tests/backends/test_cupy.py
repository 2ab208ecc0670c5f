"""CuPy: training on a device's arrays, what its memory holds, functions traced into kernels, and the real CuPy.

On the stand-in what is shown is the kernels' arithmetic on the CPU and that arrays are told apart everywhere; what is a
library's on a GPU is NumPy's there. Tests of `card` and of `cupy` run where there is a GPU, or CuPy.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

import zerosim as zs
from tests.backends.fake_cuda import RaceError, Stream
from tests.backends.fake_cupy import pinned_memory_of
from tests.backends.gpu_order import cluster_in_gpu_order
from tests.cases import chosen
from tests.ranks import programs
from tests.support import assert_refused
from tests.zero.training import MODELS, batches
from zerosim.backends.cupy import host
from zerosim.backends.cupy.tracing import Unknown, _remembered, key_of
from zerosim.models import GPT
from zerosim.numerics import arrays
from zerosim.optim import SGD, AdamW

# -- training ---------------------------------------------------------------------------------------------------------

def states_of(found: tuple[Any, dict[str, Any]]) -> dict[tuple[str, str], np.ndarray]:
    """The states of a training, by parameter and kind."""
    return {(name, key): x for name, state in found[1].items() for key, x in state.items() if x is not None}


@pytest.mark.parametrize("optimizer", chosen(
    [zs.optim.LAMB(), zs.optim.Adafactor(), zs.optim.SOAP(every=1)],
    [zs.optim.SGD(lr=0.1), zs.optim.LARS(), zs.optim.LAMB(), zs.optim.Muon(), zs.optim.Adafactor(),
     zs.optim.Shampoo(), zs.optim.SOAP(every=1), zs.optim.Lion(), zs.optim.Adan()]),
    ids=lambda o: type(o).__name__)
def test_every_optimizer_steps_on_devices_arrays(stand_in: Any, optimizer: Any) -> None:
    """Two steps; bits, but for what a decomposition's matmul of another layout decides: within 1e-3."""
    found, wanted = (cluster.run(lambda rank: programs.gpt(rank, 2, "bf16", optimizer=optimizer, gather=True))
                     for cluster in (zs.CuPyCluster(2), cluster_in_gpu_order(2)))
    for mine, right in zip(map(states_of, found), map(states_of, wanted), strict=True):
        for key, x in right.items():
            assert np.abs(mine[key].astype(np.float64) - x).max() < 1e-3, key


def test_units_whose_backward_is_found_have_a_clusters_bits_on_devices_arrays(stand_in: Any) -> None:
    model = MODELS["autodiff"]()
    data = batches(model, 2, 1, 2)

    def program(rank: zs.Rank) -> Any:
        engine = zs.Engine(rank, model, SGD(lr=0.1), stage=3, policy="bf16")
        losses = [engine.step([tuple(programs.on_rank(rank, x) for x in pair) for pair in step[rank.index]]).losses
                  for step in data]
        return losses, programs.on_host({name: engine.state(name) for name in model.shapes})

    found, wanted = (list(cluster.run(program)) for cluster in (zs.CuPyCluster(2), cluster_in_gpu_order(2)))
    assert arrays.sha256(found) == arrays.sha256(wanted)
    assert wanted[0][0][0] != wanted[0][0][1], "it trained"


@pytest.mark.gpu
@pytest.mark.parametrize(("compute", "near"), [("fp32", 1e-5), ("fp16", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_gpt_trains_on_a_gpu_as_on_a_cluster(card: Any, compute: str, near: float, ranks: int) -> None:
    """By SGD, which does not turn a gradient's last bit into a step; within a few roundings of the compute format."""
    found, wanted = (cluster.run(lambda rank: programs.gpt(rank, 3, compute, optimizer=SGD(lr=0.1), steps=3))
                     for cluster in (zs.CuPyCluster(ranks), zs.Cluster(ranks)))
    for mine, right in zip(found, wanted, strict=True):
        for (losses, _, _, skipped), (right_losses, _, _, right_skipped) in zip(mine[0], right[0], strict=True):
            assert np.allclose(losses, right_losses, rtol=near)
            assert skipped == right_skipped
        for key, x in states_of(right).items():
            if key[1] == "master":
                assert np.abs(states_of(mine)[key] - x).max() < near, key


# -- memory ---------------------------------------------------------------------------------------------------------

def test_an_array_that_a_program_made_is_held_with_the_pools_slack(kernels: Any) -> None:
    pool = kernels.xp.get_default_memory_pool()

    def program(rank: zs.Rank) -> tuple[int, int, int]:
        before = pool.used_bytes()
        x = rank.memory.hold(rank.xp.zeros(100, np.float32), "input")
        y = rank.memory.hold(np.zeros(100, np.float32), "input")
        assert rank.memory.kind_of(x[3:]) == rank.memory.kind_of(y) == "input"
        return rank.memory.now_nbytes, rank.memory.slack_nbytes, pool.used_bytes() - before

    assert zs.CuPyCluster(1).run(program)[0] == (800, 112, 512)


def test_debug_mode_shows_what_is_read_too_early(kernels: Any) -> None:
    def program(rank: zs.Rank) -> Any:
        x = rank.memory.alloc(6, zs.FORMATS["fp8_e5m2"].dtype, "input")
        out = rank.memory.alloc(12, np.int32, "input")
        return np.isnan(arrays.to_host(x).astype(np.float32)).all(), arrays.to_host(out).view(np.uint8)[0]

    assert list(zs.CuPyCluster(2, debug=True).run(program)) == [(True, 0xA5)] * 2


# -- the host beside a device ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8_e4m3"])
def test_what_is_copied_to_pinned_memory_and_back_is_the_same_to_the_bit(kernels: Any, name: str) -> None:
    dtype, rng = zs.FORMATS[name].dtype, np.random.default_rng(1)
    for count in (0, 1, 1000):
        values = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
        x, back = kernels.uploaded(values), kernels.empty(count, dtype)
        there = kernels.on_host.empty(count + 3, dtype)[3:]
        kernels.copy_beside(x, there)()
        assert there.tobytes() == values.tobytes()
        kernels.copy_beside(there, back)()
        assert arrays.to_host(back).tobytes() == values.tobytes()


def test_pinned_memory_comes_from_a_pool_with_slack_or_is_made_to_measure(
        stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LARGEST_POOLED_NBYTES", 4096)
    taken = {}
    for nbytes in (1, 512, 513, 4096, 5000):
        taken[nbytes] = len(pinned_memory_of(stand_in.on_host.empty(nbytes, np.uint8)))
        assert nbytes + stand_in.on_host.slack_nbytes(nbytes) == taken[nbytes]
    assert taken == {1: 512, 512: 512, 513: 1024, 4096: 4096, 5000: 5000}
    assert stand_in.on_host.slack_nbytes(0) == 0


@pytest.mark.parametrize("optimizer", [zs.optim.KFAC(), zs.optim.Muon(), zs.optim.LAMB()],
                         ids=lambda o: type(o).__name__)
def test_an_update_on_the_host_has_the_bits_of_one_on_the_device(stand_in: Any, optimizer: Any) -> None:
    """Products of matrices too, which are NumPy's on both here."""
    model = MODELS["odd"]()
    data = batches(model, 2, 1, 2)

    def program(rank: zs.Rank, offload: Any) -> Any:
        engine = zs.Engine(rank, model, optimizer, stage=2, layout="whole_matrices", clip_norm=0.1, offload=offload,
                           groups=[zs.Group("*.bias", optimizer=AdamW())])
        for step in data:
            engine.step(step[rank.index])
        return [arrays.to_host(engine.state(name)["master"]) for name in model.shapes]

    found = [arrays.sha256(list(zs.CuPyCluster(2).run(program, asked))) for asked in (None, "host")]
    assert found[0] == found[1]


def test_the_host_adds_squares_as_the_device_does(kernels: Any) -> None:
    plain, differs = zs.Cluster(1).kernels, 0
    for count in (0, 1, 31, 33, 1025, 40_000):
        for name in ("fp32", "bf16"):
            x = np.random.default_rng(count).standard_normal(count).astype(zs.FORMATS[name].dtype)
            for divisor in (1.0, 3.0, 2.0**70):
                found = kernels.on_host.sum_of_squares(x, divisor)
                assert found == kernels.sum_of_squares(kernels.uploaded(x), divisor), (count, name, divisor)
                differs += found != plain.sum_of_squares(x, divisor)
    assert differs


def test_the_double_finds_what_does_not_wait_for_a_copy_or_a_copy_that_does_not_wait(
        stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, values = stand_in.uploaded(np.arange(8.0, dtype=np.float32)), np.arange(8.0, dtype=np.float32)
    there = stand_in.on_host.empty(8, np.float32)
    arrived = stand_in.copy_beside(x, there)
    assert arrays.is_poisoned(there.view(np.int32)), "nothing is there before the host has waited"
    arrived()
    assert there.tolist() == values.tolist()
    arrived = stand_in.copy_beside(x, there)
    with pytest.raises(RaceError, match="may still be using"):  # one of two results is written over what is copied yet
        stand_in.relu(stand_in.uploaded(values), x, stand_in.empty(1, np.uint8))
    arrived()
    stand_in.copy_beside(there, x)
    with pytest.raises(RaceError, match="may still be using"):  # the device computes with what is not there yet
        stand_in.add_rounded(x, x, x)
    arrived = stand_in.copy_beside(there, stand_in.empty(8, np.float32))
    there[0] += 1
    assert_refused(arrived, "the host changed pinned memory", RaceError)
    monkeypatch.setattr(Stream, "wait_event", lambda *_: None)
    with pytest.raises(RaceError, match="may still be using"):  # what is copied is computed yet
        stand_in.copy_beside(stand_in.uploaded(values), there)


# -- functions that are traced once ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Rates:
    lr: float


class Mutable:
    lr = 1.0


def scaled(value: Any, x: Any, result: Any) -> None:
    np.multiply(x, value, out=result)


def test_equal_functions_with_equal_constants_have_equal_keys_and_others_have_not() -> None:
    def functions() -> list[Any]:
        constants = (0.1, -0.1, 0.0, -0.0, 1, True, None, np.float64(0.1), np.float32(0.1), Rates(0.1),
                     Rates(np.float64(0.1)), np.add, (0.1,))
        return [*(partial(scaled, constant) for constant in constants), partial(np.multiply, 0.1),
                SGD(0.1).update_block, SGD(0.2).update_block]

    keys, again = (list(map(key_of, functions())) for _ in range(2))
    assert [[key == other for other in again] for key in keys] == np.eye(len(keys)).tolist()


def test_what_may_change_is_never_remembered() -> None:
    lr = [1.0]

    @dataclass(frozen=True)
    class Closing:
        def update_block(self, x: Any) -> None:
            np.multiply(x, lr[0], out=x)

    for value in (Closing().update_block, Mutable(), [1.0], np.ones(2), {"lr": 1.0}, lambda x: np.add(x, 1)):
        with pytest.raises(Unknown):
            key_of(partial(scaled, value))


def test_a_step_of_an_optimizer_traces_each_of_its_functions_once(stand_in: Any) -> None:
    def program(rank: zs.Rank) -> None:
        engine = zs.Engine(rank, GPT("gpt-nano"), AdamW())
        engine.step(batches(GPT("gpt-nano"), 1, 1, 1)[0][0])

    _remembered.cache_clear()
    zs.CuPyCluster(1).run(program)
    traced = _remembered.cache_info()
    assert traced.hits > 5 * traced.misses


# -- what the real CuPy says of arrays; no GPU is needed ---------------------------------------------------------------
# An array over memory of the host that is said to be a device's knows its base, its address and its views as any other.

MEMORY = np.zeros(4096, np.uint8)


def made(cupy: Any, shape: Any, dtype: Any, offset: int = 0) -> Any:
    memory = cupy.cuda.UnownedMemory(MEMORY.ctypes.data, MEMORY.nbytes, MEMORY, 0)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, offset))


@pytest.mark.gpu
def test_arrays_of_every_format_are_told_apart_and_have_a_base(cupy: Any) -> None:
    for name in zs.FORMATS:
        x = made(cupy, (4, 6), zs.FORMATS[name].dtype)
        for told in (arrays.is_array, arrays.on_device, arrays.is_writable, arrays.has_data):
            assert told(x), (name, told.__name__)
        for view in (x, x[1:].reshape(-1)[2:].T, arrays.words(x)[:, ::2]):
            assert arrays.base_of(view) is x, name
        assert arrays.words(x).dtype == f"u{x.dtype.itemsize}"
        assert arrays.start(x[1:, 2:]) == arrays.start(x) + 8 * x.dtype.itemsize
        assert arrays.contiguous(x) is weakref.ref(x)() is x


@pytest.mark.gpu
def test_shared_memory_is_found_as_numpy_finds_it(cupy: Any) -> None:
    x, same = made(cupy, (8, 8), np.float32), np.zeros((8, 8), np.float32)
    keys = [(slice(0, 3),), (slice(3, 8),), (slice(None), 0), (slice(None), 7), (slice(2, 2),),
            (slice(None, None, -1),), (slice(None), slice(None, None, 2)), (slice(None), slice(1, None, 2))]
    for a in keys:
        for b in keys:
            assert arrays.may_share_memory(x[a], x[b]) == np.may_share_memory(same[a], same[b]), (a, b)
            assert arrays.is_same_memory(x[a], x[b]) == arrays.is_same_memory(same[a], same[b]), (a, b)
    assert not arrays.may_share_memory(x, same)


@pytest.mark.gpu
def test_numpy_refuses_to_convert_in_silence(cupy: Any) -> None:
    assert_refused(lambda: np.asarray(made(cupy, 3, np.float32)), "Implicit conversion", TypeError)
