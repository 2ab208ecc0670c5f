"""All stages compute the same bits, those of the twin, and hold and send the closed forms' bytes, whatever is drawn."""

import numpy as np
import pytest

import zerosim as zs
from tests.zero.drawn import drawn, made
from tests.zero.training import ODD, assert_equals_twin, assert_runs_equal_the_twin, batches, run, twin_of
from zerosim.models import MLP


@pytest.mark.filterwarnings("ignore::zerosim.SkippedStepWarning")  # of fp16, now and then
@pytest.mark.parametrize("case", drawn(18))  # of 18 models, each once and 17 optimizers
def test_a_training_at_any_stage_equals_the_twin_and_holds_and_sends_the_closed_forms_bytes(case):
    model, data, options = made(case)
    _, said = assert_runs_equal_the_twin(model, data, **options)
    assert len({step["norm"] for step in said}) > 1, "it trained on something"


def test_norms_of_a_tensor_of_several_blocks_are_the_twins():
    model = MLP((300, 300), seed=1)
    assert_runs_equal_the_twin(model, batches(model, 1, 1, 2), zs.optim.LARS(), runs=[(0, {})])


def test_float64_equals_the_twin_and_comes_nearer_than_fp32_to_one_concatenated_batch():
    """The mean of the ranks' means is that over the whole batch, element by element; the additions come in another
    order. A gradient is a sum of some 40 products, rounded at 2^-53 each in place of 2^-24."""
    model, data = ODD, batches(ODD, 5, 2, 2)
    assert_runs_equal_the_twin(model, data, policy=zs.Policy("fp64"), clip_norm=0.5)
    joined = [[[tuple(map(np.concatenate, zip(*(pair for mine in data[0] for pair in mine), strict=True)))]]]
    many, one, narrow = (run(model, steps, stage=2, policy=name)[0]["m"].astype(np.float64)
                         for steps, name in ((data[:1], "fp64"), (joined, "fp64"), (data[:1], "fp32")))
    most = np.abs(one).max()
    assert np.abs(many - one).max() < 1e-14 * most < 1e-10 * most < np.abs(narrow - one).max() < 1e-5 * most


@pytest.mark.slow
def test_1024_ranks_take_the_twins_step():
    model = MLP((8, 16, 4))
    data = batches(model, 1024, 1, 1)
    assert_equals_twin(run(model, data, stage=3), *twin_of(model, data))
