"""The same numbers as PyTorch's, where PyTorch is installed."""

import numpy as np
import pytest

from tests.models.gpt_runs import batch_of, run_of
from zerosim.models import GPT, GPTConfig

torch = pytest.importorskip("torch", reason="PyTorch is an optional peer, and not installed here")

SHAPES = [GPTConfig(2, 12, 3, 8, 17), GPTConfig(1, 64, 1, 33, 40), GPTConfig(3, 40, 5, 16, 256)]
# float64: some dozen roundings of 1.1e-16 after each other. fp32: the same of 6e-8.
BOUNDS = {"fp64": 1e-12, "fp32": 1e-4}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", SHAPES)
def test_loss_and_gradients_are_torchs(dtype: str, tied: bool, config: GPTConfig) -> None:
    from benchmarks import torch_gpt

    run = run_of(GPT(config, tied=tied), dtype, scatter=0.2)
    x, target = batch_of(run.model, batch=3)
    loss, gradients = run.gradients(x, target)
    w = torch_gpt.tensors_of(run.w)
    wanted = torch_gpt.step(run.model, w, torch.tensor(x), torch.tensor(target), fused=False)
    assert loss == pytest.approx(wanted.item(), rel=BOUNDS[dtype])
    for name, gradient in gradients.items():
        theirs = w[name].grad.numpy()
        assert np.abs(gradient - theirs).max() <= BOUNDS[dtype] * np.abs(theirs).max(), name
