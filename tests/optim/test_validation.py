"""What optimizers refuse, and in which words."""

import numpy as np
import pytest

from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim import SGD, Adam, AdamW, Slot
from zerosim.optim.base import UpdateContext

KERNELS = NumpyKernels()
CTX = UpdateContext(KERNELS)


@pytest.mark.parametrize("optimizer", [SGD, Adam, AdamW])
@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf"), "0.1", True, None, 10**400])
def test_a_learning_rate_is_a_finite_number_of_at_least_zero(optimizer, lr):
    text = rf"^{optimizer.__name__} was given lr={lr!r}; lr is a finite number, 0 or more$"
    with pytest.raises(ValueError, match=text):
        optimizer(lr=lr)


@pytest.mark.parametrize("optimizer", [Adam, AdamW])
@pytest.mark.parametrize("name", ["beta1", "beta2"])
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, float("nan")])
def test_a_beta_lies_in_the_half_open_interval(optimizer, name, value):
    text = rf"^{optimizer.__name__} was given {name}={value!r}; {name} lies in \[0, 1\): at 1 the moment would never"
    with pytest.raises(ValueError, match=text):
        optimizer(**{name: value})


def test_epsilon_and_weight_decay_are_finite_and_not_negative():
    with pytest.raises(ValueError, match=r"Adam was given epsilon=-1e-08; epsilon is a finite number, 0 or more"):
        Adam(epsilon=-1e-8)
    with pytest.raises(ValueError, match=r"AdamW was given weight_decay=-0\.1; weight_decay is a finite number"):
        AdamW(weight_decay=-0.1)


def test_the_borders_of_the_hyperparameters_are_allowed():
    assert Adam(lr=0, beta1=0, beta2=0.0, epsilon=0.0).beta1 == 0
    assert AdamW(lr=np.float64(0.1), weight_decay=0).weight_decay == 0


def test_an_optimizer_is_a_value():
    assert Adam(lr=0.1) == Adam(lr=0.1) != Adam(lr=0.2)
    assert Adam() != AdamW(weight_decay=0.0)
    with pytest.raises(AttributeError):
        Adam().lr = 1.0  # type: ignore[misc]


def test_slots_are_fp32_of_the_shape_they_are_asked_for():
    assert SGD(lr=0.1).slots((3,)) == {}
    for optimizer in (Adam(), AdamW()):
        assert optimizer.slots((3, 4)) == {"m": Slot((3, 4), "fp32"), "v": Slot((3, 4), "fp32")}


@pytest.mark.parametrize(("what", "array", "found"), [
    ("w", np.zeros((2, 2), np.float32), r"float32 of shape \(2, 2\)"),
    ("w", np.zeros(4, np.float16), r"float16 of shape \(4,\)"),
    ("g", np.zeros(3, np.float32), r"float32 of shape \(3,\)"),
    ("g", np.zeros(4, np.float64), r"float64 of shape \(4,\)"),
    ("m", np.zeros(3, np.float32), r"float32 of shape \(3,\)"),
    ("v", np.zeros(4, np.float16), r"float16 of shape \(4,\)"),
])
def test_update_refuses_arrays_that_are_not_flat_fp32_of_one_length(what, array, found):
    arrays = {name: np.zeros(4, np.float32) for name in ("w", "g", "m", "v")} | {what: array}
    w, g, m, v = arrays.values()
    with pytest.raises(ValueError, match=rf"^Adam\.update asked for {what} in flat float32, of w's . elements, and "
                                         rf"found {found}; hand it the fp32 shards"):
        Adam().update(CTX, w, g, {"m": m, "v": v}, 1)


def test_update_refuses_a_state_that_is_not_its_own():
    w = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"Adam\.update asked for the state m, v, and found m; allocate what slots"):
        Adam().update(CTX, w, w, {"m": w}, 1)
    with pytest.raises(ValueError, match=r"SGD\.update asked for the state nothing, and found m"):
        SGD(lr=0.1).update(CTX, w, w, {"m": w}, 1)


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), Adam()])
def test_update_refuses_step_zero(optimizer):
    w = np.zeros(4, np.float32)
    state = {name: np.zeros(4, np.float32) for name in optimizer.slots((4,))}
    with pytest.raises(ValueError, match="was asked for step 0; count steps from 1, since at 0 the corrections of the"):
        optimizer.update(CTX, w, w.copy(), state, 0)


def test_a_group_with_an_unknown_hyperparameter_is_refused():
    with pytest.raises(ValueError, match="SGD was given a group with momentum; its hyperparameters are lr"):
        SGD(lr=0.1).for_group({"momentum": 0.9})
    with pytest.raises(ValueError, match=r"SGD was given lr=-1\.0"):
        SGD(lr=0.1).with_lr(-1.0)


def test_an_update_that_still_takes_a_group_is_warned_of_and_one_that_cannot_do_without_is_refused():
    with pytest.warns(DeprecationWarning, match=r"Old\.update takes group, which is no longer .* read self\.lr"):
        class Old(Adam):
            def update(self, ctx, w, g, state, step, group=None):
                super().update(ctx, w, g, state, step)
    w, expected = np.ones(4, np.float32), np.ones(4, np.float32)
    Old(lr=0.1).with_lr(0.2).apply(CTX, w, np.ones_like(w), {"m": np.zeros_like(w), "v": np.zeros_like(w)}, 1)
    Adam(lr=0.2).apply(CTX, expected, np.ones_like(w), {"m": np.zeros_like(w), "v": np.zeros_like(w)}, 1)
    np.testing.assert_array_equal(w, expected)
    with pytest.raises(TypeError, match=r"Older\.direction takes group, which is no longer passed"):
        class Older(Adam):
            def direction(self, ctx, w, g, state, step, group, out):
                out[...] = g
