"""A policy is a value: what is not said follows from compute, and what makes no sense is refused."""

import ml_dtypes
import numpy as np
import pytest

import zerosim as zs
from zerosim.numerics.loss_scale import Dynamic


def test_what_is_not_said_is_as_compute() -> None:
    policy = zs.Policy("bf16")
    assert policy.compute_dtype == policy.reduce_dtype == policy.accumulate_dtype == zs.FORMATS["bf16"].dtype


def test_each_format_can_be_said_by_itself() -> None:
    policy = zs.Policy("bf16", reduce="fp32", accumulate="fp16")
    assert (policy.reduce_dtype, policy.accumulate_dtype) == (np.float32, np.float16)


def test_the_divisor_is_scale_times_ranks_times_micro_batches_unless_the_reduction_has_averaged() -> None:
    assert zs.Policy().divisor(ranks=3, micro_batches=2, scale=8.0) == 48
    assert zs.Policy(average="split").divisor(ranks=3, micro_batches=2, scale=8.0) == 16


def test_a_rule_of_loss_scaling_is_a_loss_scale_too_and_starts_anew_for_every_run() -> None:
    policy = zs.Policy("fp16", loss_scale=Dynamic("torch", initial=8.0, window=1))
    first, second = policy.start_scaling(), policy.start_scaling()
    first.update(False)
    assert (first.scale, second.scale) == (16.0, 8.0)
    assert zs.Policy(loss_scale=4).start_scaling().scale == 4.0


def test_what_is_not_said_of_master_state_output_and_matmul_changes_nothing() -> None:
    for compute in zs.FORMATS:
        policy = zs.Policy(compute)
        assert policy == zs.Policy(compute, master="fp32", state="fp32", output=None, matmul=None)
        assert (policy.output_dtype, policy.master_dtype) == (policy.compute_dtype, np.float32)


def test_a_policy_is_a_value_also_with_a_rule_of_scaling() -> None:
    one, same, other = (zs.Policy("fp16", loss_scale=Dynamic("torch", window=w)) for w in (5, 5, 6))
    assert one == same != other
    assert len({one, same, other}) == 2


def test_a_master_may_be_the_copy_that_computes_or_a_finer_one() -> None:
    for compute, master in (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp16"), ("fp8_e4m3", "bf16")):
        assert zs.Policy(compute, master=master).master_dtype == zs.FORMATS[master].dtype


def test_every_array_at_rest_has_a_format_of_its_own() -> None:
    policy = zs.Policy("bf16", output="fp32", master="fp16", state="bf16")
    assert (policy.output_dtype, policy.master_dtype, policy.state_dtype) == (
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
    )
    assert zs.Policy("fp16").output_dtype == np.float16
    assert (zs.Policy("fp16").master_dtype, zs.Policy("fp16").state_dtype) == (np.float32, np.float32)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"compute": "fp17"}, "no number format is named 'fp17'"),
        ({"reduce": "int8"}, "'int8'"),
        ({"master": "fp17"}, "no number format is named 'fp17'"),
        ({"state": "fp17"}, "no number format is named 'fp17'"),
        ({"output": "fp17"}, "no number format is named 'fp17'"),
        ({"compute": None}, "no number format is None; there are fp32"),
        ({"master": None}, "no number format is None"),
        ({"state": None}, "no number format is None"),
        ({"master": "bf16"}, "master='bf16' has fewer mantissa bits than compute='fp32', .* for no second copy"),
        ({"compute": "fp16", "master": "bf16"}, "take master='fp32', or master='fp16' for no second copy"),
        ({"compute": "fp8_e4m3", "matmul": "fp8"}, "compute='fp8_e4m3' has 8 already; take compute='bf16' with it"),
        ({"loss_scale": Dynamic}, "or a rule such as Dynamic"),
        ({"loss_scale": True}, "loss_scale=True must be a positive finite number"),
        ({"matmul": "fp16"}, "matmul='fp16' is no way to multiply; choose one of None, 'fp8'"),
        ({"loss_scale": "dynamic"}, "or a rule such as Dynamic"),
        ({"average": "mean"}, "choose one of cast_then_divide"),
        ({"average": "splitt"}, "did you mean 'split'"),
        ({"loss_scale": 0.0}, "positive finite number"),
        ({"loss_scale": float("inf")}, "positive finite number"),
        ({"loss_scale": float("nan")}, "positive finite number"),
        ({"loss_scale": "big"}, "positive finite number"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(settings, text) -> None:
    with pytest.raises(ValueError, match=text):
        zs.Policy(**settings)
