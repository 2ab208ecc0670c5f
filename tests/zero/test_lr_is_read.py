"""Every optimizer of the package reads the learning rate of the step, which a schedule changes."""

import pytest

import zerosim as zs
from zerosim.optim.shardability import reads_its_group

OPTIMIZERS = [getattr(zs.optim, name)() if name not in ("SGD", "Momentum") else getattr(zs.optim, name)(lr=0.1)
              for name in zs.optim.__all__
              if isinstance(getattr(zs.optim, name), type) and issubclass(getattr(zs.optim, name), zs.optim.Optimizer)
              and name != "Optimizer"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: type(one).__name__)
def test_an_optimizer_of_the_package_reads_the_lr_of_the_step(optimizer):
    assert len(OPTIMIZERS) == 15
    assert reads_its_group(optimizer)
