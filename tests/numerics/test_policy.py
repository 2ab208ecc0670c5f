"""A policy is a value: what is not said follows from compute; and a rule of scaling is started anew for every run."""

import numpy as np

import zerosim as zs
from zerosim.numerics import loss_scale


def dtypes(policy: zs.Policy) -> dict[str, str]:
    """The formats of all that a step computes and holds."""
    found = {name: getattr(policy, f"{name}_dtype")
             for name in ("compute", "output", "reduce", "accumulate", "master", "state")}
    return {name: zs.format_of(dtype).name for name, dtype in found.items()}


def test_what_is_not_said_is_as_compute_but_for_the_fp32_of_master_and_state() -> None:
    for compute in zs.FORMATS:
        policy = zs.Policy(compute)
        assert policy == zs.Policy(compute, master="fp32", state="fp32", output=None, matmul=None)
        assert dtypes(policy) == dict.fromkeys(("compute", "output", "reduce", "accumulate"), compute) | {
            "master": "fp32", "state": "fp32"}


def test_each_format_can_be_said_by_itself_and_the_master_may_be_the_copy_that_computes() -> None:
    for name in ("output", "reduce", "accumulate", "master", "state"):
        for fmt in ("fp16", "bf16"):
            assert dtypes(zs.Policy("bf16", **{name: fmt})) == dtypes(zs.Policy("bf16")) | {name: fmt}
    assert dtypes(zs.Policy("fp8_e4m3", master="bf16"))["master"] == "bf16"
    assert zs.Policy("bf16", wire="fp32").reduction == {"wire": "fp32"}
    assert zs.Policy("bf16", average="split").reduction == {"wire": None, "op": "mean", "average": "split"}


def test_in_float64_all_is_float64_but_master_and_state_and_a_name_alone_is_a_policy() -> None:
    policy = zs.Policy.of("fp64")
    assert policy == zs.Policy("fp64")
    assert all(dtype == np.float64 for dtype in (
        policy.compute_dtype, policy.output_dtype, policy.reduce_dtype, policy.accumulate_dtype))
    assert policy.master_dtype == policy.state_dtype == np.float32
    assert "fp64" not in zs.FORMATS
    assert zs.Policy.of(None) == zs.Policy()
    assert zs.Policy.of(policy) is policy


def test_the_divisor_is_scale_times_ranks_times_micro_batches_unless_the_reduction_has_averaged() -> None:
    assert zs.Policy().divisor(ranks=3, micro_batches=2, scale=8.0) == 48
    assert zs.Policy(average="split").divisor(ranks=3, micro_batches=2, scale=8.0) == 16


def test_a_policy_is_a_value_also_with_a_rule_of_scaling() -> None:
    one, same, other = (zs.Policy("fp16", loss_scale=loss_scale.Dynamic("torch", window=w)) for w in (5, 5, 6))
    assert one == same != other
    assert len({one, same, other}) == 2


def test_a_rule_of_loss_scaling_is_a_loss_scale_too_and_starts_anew_for_every_run() -> None:
    policy = zs.Policy("fp16", loss_scale=loss_scale.Dynamic("torch", initial=8.0, window=1))
    first, second = policy.start_scaling(), policy.start_scaling()
    first.update(False)
    assert (first.scale, second.scale) == (16.0, 8.0)
    assert zs.Policy(loss_scale=4).start_scaling().scale == 4.0
    assert loss_scale.scaling_of(4) == loss_scale.Static(4)
