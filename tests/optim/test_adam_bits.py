"""SGD's and Adam's steps: golden bits, a scalar loop, and the variants that must give other bits."""

import numpy as np
import pytest

from tests.numerics.oracle import same
from zerosim.numerics.arrays import BLOCK
from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim import SGD, AdamW
from zerosim.optim.base import UpdateContext

HYPER = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
LENGTHS = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1]


KERNELS = NumpyKernels()


def adam(state: dict[str, np.ndarray], *, step: int, weight_decay: float = 0.0, **hyper: float) -> None:
    optimizer = AdamW(**{**HYPER, **hyper}, weight_decay=weight_decay)
    optimizer.update(UpdateContext(KERNELS), state["w"], state["g"], {"m": state["m"], "v": state["v"]}, step)


def sgd(state: dict[str, np.ndarray], lr: float) -> None:
    SGD(lr).update(UpdateContext(KERNELS), state["w"], state["g"], {}, 1)


def example() -> dict[str, np.ndarray]:
    """Four weights and their averaged gradients, the moments at zero."""
    return {
        "w": np.array([2, -3, 1, 0.5], np.float32),
        "m": np.zeros(4, np.float32),
        "v": np.zeros(4, np.float32),
        "g": np.array([-5.5, -2.75, -2.75, -5], np.float32),
    }


def random_state(length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    w, m, g = rng.standard_normal((3, length)).astype(np.float32)
    return {"w": w, "m": m, "v": np.abs(rng.standard_normal(length)).astype(np.float32), "g": g}


def naive_adam(state: dict[str, np.ndarray], step: int, decay: float = 0.0) -> dict[str, np.ndarray]:
    """The formula on whole arrays, each scalar a float32 made from a double."""
    f = np.float32
    w, m, v, g = state["w"], state["m"], state["v"], state["g"]
    m = f(0.9) * m + f(1 - 0.9) * g
    v = f(0.999) * v + f(1 - 0.999) * (g * g)
    if decay:
        w = w * f(1 - 0.1 * decay)
    w = w - (f(0.1) * (m / f(1 - 0.9**step))) / (np.sqrt(v / f(1 - 0.999**step)) + f(1e-8))
    return {"w": w, "m": m, "v": v, "g": g}


def test_the_first_step_of_the_four_weights_has_its_published_bits() -> None:
    state = example()
    adam(state, step=1)
    assert same(state["v"], np.array([0.030250002, 0.0075625004, 0.0075625004, 0.025], np.float32))
    assert same(state["w"], np.array([2.1, -2.9, 1.1, 0.6], np.float32))
    assert same(state["m"], np.float32(1 - 0.9) * example()["g"])
    assert same(state["g"], example()["g"])


def test_corrections_in_float32_give_other_weights() -> None:
    state = example()
    one, f = np.float32(1), np.float32
    m, v = f(1 - 0.9) * state["g"], f(1 - 0.999) * (state["g"] * state["g"])
    corrected = (m / (one - f(0.9))) / (np.sqrt(v / (one - f(0.999))) + f(1e-8))
    w = state["w"] - f(0.1) * corrected
    assert same(w, np.array([2.0999994, -2.9000006, 1.0999993, 0.5999993], np.float32))


def test_factors_in_float32_give_other_weights() -> None:
    state = example()
    one, f = np.float32(1), np.float32
    m, v = (one - f(0.9)) * state["g"], (one - f(0.999)) * (state["g"] * state["g"])
    corrected = (m / f(1 - 0.9)) / (np.sqrt(v / f(1 - 0.999)) + f(1e-8))
    w = state["w"] - f(0.1) * corrected
    assert same(w, np.array([2.1000006, -2.8999994, 1.1000006, 0.6000007], np.float32))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_adam_in_blocks_is_the_formula_on_whole_arrays(length: int, decay: float) -> None:
    state = random_state(length)
    expected = {name: x.copy() for name, x in state.items()}
    for step in (1, 2, 7):
        adam(state, step=step, weight_decay=decay)
        expected = naive_adam(expected, step, decay)
        assert all(same(state[name], expected[name]) for name in state)


def test_adam_may_be_cut_anywhere() -> None:
    whole, cut = random_state(1000), random_state(1000)
    adam(whole, step=3)
    for part in (slice(0, 1), slice(1, 700), slice(700, 700), slice(700, 1000)):
        adam({name: x[part] for name, x in cut.items()}, step=3)
    assert all(same(whole[name], cut[name]) for name in whole)


def test_decay_shrinks_the_weight_before_the_step_and_not_the_gradient() -> None:
    state = example()
    adam(state, step=1, weight_decay=0.5)
    plain = example()
    adam(plain, step=1)
    assert same(state["m"], plain["m"])
    assert same(state["v"], plain["v"])
    assert state["w"] == pytest.approx(example()["w"] * 0.95 + [0.1, 0.1, 0.1, 0.1], rel=1e-6)


def test_the_step_number_and_every_hyperparameter_change_bits() -> None:
    base = {**HYPER, "step": 2, "weight_decay": 0.0}
    changed = {"lr": 0.2, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-2, "step": 3, "weight_decay": 0.1}

    def weights(**arguments: float) -> np.ndarray:
        state = random_state(50)
        adam(state, **arguments)  # type: ignore[arg-type]
        return state["w"]

    for name, value in changed.items():
        assert not same(weights(**base), weights(**{**base, name: value})), name


@pytest.mark.parametrize("length", LENGTHS)
def test_sgd_subtracts_the_rate_times_the_gradient(length: int) -> None:
    state = random_state(length)
    expected = state["w"] - np.float32(0.1) * state["g"]
    sgd(state, 0.1)
    assert same(state["w"], expected)


def test_steps_neither_warn_nor_raise_under_a_strict_errstate() -> None:
    states = [example(), example()]
    for state in states:
        state["g"][:] = [np.inf, np.nan, 1e30, 1e-30]
    adam(states[0], step=1)
    sgd(states[0], 3e38)
    with np.errstate(all="raise"):
        adam(states[1], step=1)
        sgd(states[1], 3e38)
    assert all(same(states[0][name], states[1][name]) for name in states[0])
