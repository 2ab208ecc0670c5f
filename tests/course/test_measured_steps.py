"""Measured steps of optimizers whose state may be cut anywhere: the ledger is pencil's, in all formats of state."""

from fractions import Fraction

import pytest

import zerosim as zs
from zerosim.course.measured import measured_bytes, measured_step

OPTIMIZERS = [zs.optim.Adam(), zs.optim.AdaGrad(), zs.optim.Adan(), zs.optim.LAMB(), zs.optim.LARS(), zs.optim.Lion(),
              zs.optim.Momentum(lr=0.1), zs.optim.RMSprop(), zs.optim.SGD(lr=0.1)]
POLICIES = [zs.Policy("bf16"), zs.Policy("fp32"), zs.Policy("fp16", accumulate="fp32"), zs.Policy("bf16", state="bf16")]
ADAN_NBYTES = 4 + 4 + 4 + 2  # m, v, n in fp32; the gradient before in bf16


@pytest.mark.parametrize("stage", zs.STAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: type(one).__name__)
def test_both_measures_agree_with_pencil_for_every_policy_and_with_each_other(optimizer, stage):
    for policy in POLICIES:
        step = measured_step((5, 7, 3), optimizer, ranks=3, stage=stage, policy=policy, rows=2)
        found = measured_bytes((5, 7, 3), optimizer, ranks=3, stage=stage, policy=policy)
        assert found.resting_nbytes == step.resting_nbytes[0]
        assert step.parameter_count == 5 * 7 + 7 + 7 * 3 + 3
        assert sum(found.resting_nbytes.values()) >= step.formula_nbytes * step.parameter_count  # padding is more


def test_a_slot_in_bf16_is_counted_as_two_bytes():
    stages = {stage: measured_step((4, 4), zs.optim.Adan(), ranks=5, stage=stage, policy=zs.Policy("bf16"), rows=1)
              for stage in zs.STAGES}
    assert [one.formula for one in stages.values()] == ["22", "4 + 18/N", "2 + 20/N", "22/N"]
    assert stages[1].resting_nbytes[0]["optimizer_state"] == ADAN_NBYTES * 4  # 4·4 + 4 parameters over 5 ranks
    assert stages[3].formula_nbytes == Fraction(22, 5)
    half = measured_step((4, 4), zs.optim.Adan(), ranks=5, stage=0, policy=zs.Policy("bf16", state="bf16"), rows=1)
    assert half.formula == "16"


@pytest.mark.parametrize("stage", zs.STAGES)
def test_state_that_depends_on_shapes_is_refused_by_name(stage):
    for measure in (lambda **said: measured_step(rows=1, **said), measured_bytes):
        with pytest.raises(ValueError, match="what Muon keeps depends on the shapes of tensors, and is no number of"):
            measure(widths=(4, 4), optimizer=zs.optim.Muon(), ranks=3, stage=stage, policy=zs.Policy("bf16"))
