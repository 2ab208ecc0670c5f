"""A policy is a value: what is not said follows from compute, and what makes no sense is refused."""

import numpy as np
import pytest

import zerosim as zs


def test_what_is_not_said_is_as_compute() -> None:
    policy = zs.Policy("bf16")
    assert policy.compute_dtype == policy.reduce_dtype == policy.accumulate_dtype == zs.FORMATS["bf16"].dtype


def test_each_format_can_be_said_by_itself() -> None:
    policy = zs.Policy("bf16", reduce="fp32", accumulate="fp16")
    assert (policy.reduce_dtype, policy.accumulate_dtype) == (np.float32, np.float16)


def test_the_divisor_is_scale_times_ranks_times_micro_batches_unless_the_reduction_has_averaged() -> None:
    assert zs.Policy(loss_scale=8.0).divisor(ranks=3, micro_batches=2) == 48
    assert zs.Policy(loss_scale=8.0, average="split").divisor(ranks=3, micro_batches=2) == 16


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"compute": "fp17"}, "no number format is named 'fp17'"),
        ({"reduce": "int8"}, "'int8'"),
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
