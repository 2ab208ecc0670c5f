"""The same steps as PyTorch's optimizers, where PyTorch is installed."""

import numpy as np
import pytest

from tests.optim.papers import tensors, updated
from zerosim import optim

torch = pytest.importorskip("torch", reason="PyTorch is an optional peer, and not installed here")

pytestmark = pytest.mark.peer
STEPS = 10
# Both compute in fp32, in other orders: some dozen roundings of 6e-8 a step, on updates of 0.1 to 1, ten steps.
BOUND = 2e-5
# torch orthogonalizes in bf16: five iterations of products whose entries are rounded to 2^-9, on updates of lr 0.02
# times at most 1.2, ten steps.
BF16_BOUND = 10 * 0.02 * 1.2 * 5 * 2**-9


def torchs(make, w, gradients):
    """The weights after torch's steps."""
    parameter = torch.nn.Parameter(torch.tensor(w))
    theirs = make([parameter])
    for g in gradients:
        parameter.grad = torch.tensor(g)
        theirs.step()
    return parameter.detach().numpy()


CASES = {
    "SGD": (optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "Momentum": (optim.Momentum(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "Nesterov": (optim.Momentum(lr=0.1, nesterov=True),
                 lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "AdaGrad's defaults": (optim.AdaGrad(), lambda p: torch.optim.Adagrad(p)),
    "RMSprop's defaults": (optim.RMSprop(), lambda p: torch.optim.RMSprop(p)),
    "Adam's defaults": (optim.Adam(), lambda p: torch.optim.Adam(p)),
    "AdamW's defaults": (optim.AdamW(), lambda p: torch.optim.AdamW(p)),
    # torch bounds V from below by eps1² where the paper adds eps1 to the squares: both far below what is here.
    "Adafactor's defaults": (optim.Adafactor(), lambda p: torch.optim.Adafactor(p, eps=(1e-15, 1e-3))),
}


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (30,)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_steps_are_torchs(name, shape):
    optimizer, make = CASES[name]
    w, gradients = tensors(shape, STEPS)
    found = updated(optimizer, w, gradients)[0].reshape(shape)
    np.testing.assert_allclose(found, torchs(make, w, gradients), rtol=0, atol=BOUND)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)], ids=str)
def test_muon_is_torchs_on_the_transposed_weight(shape, nesterov):
    """torch's weights are (outputs, inputs), and its factor is that of rows over columns."""
    w, gradients = tensors(shape, STEPS)
    found, _ = updated(optim.Muon(nesterov=nesterov, weight_decay=0.1), w, gradients)
    expected = torchs(lambda p: torch.optim.Muon(p, lr=0.02, nesterov=nesterov, weight_decay=0.1),
                      np.ascontiguousarray(w.T), gradients.transpose(0, 2, 1).copy()).T
    factor = max(1, shape[1] / shape[0])**0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=factor * BF16_BOUND)
    assert np.abs(found - w).mean() > 5 * factor * BF16_BOUND, "it moved by much more than the bound"
