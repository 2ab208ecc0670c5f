"""What must hold of the plan of any program: columns add up, more costs no less, and answers are of rows."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import THOROUGH
from tests.planning.configurations import some_row_fits
from zerosim.planning import Transformer, model_of, questions

POLICIES = ("none", "selective", "block")
# Widths that all numbers of ranks divide, so that no shard is padded.
MODELS = st.builds(
    lambda heads, blocks, groups, wide, tied, layer_norm: model_of("drawn", Transformer(
        128 * heads, blocks, heads, 32_000, feed_forward=256 * wide, key_value_heads=heads // groups, tied=tied,
        layer_norm=layer_norm, gated=not layer_norm, tokens=4096)),
    st.sampled_from([8, 16, 32]), st.integers(2, 6), st.sampled_from([1, 2, 8]), st.integers(4, 48), st.booleans(),
    st.booleans())
OPTIONS = st.fixed_dictionaries({
    "runtime": st.sampled_from(["fsdp2", "deepspeed", "megatron"]), "ranks": st.sampled_from([2, 4, 8]),
    "batch": st.integers(1, 5), "sequence": st.integers(1, 4096), "micro_batches": st.integers(1, 3),
    "device": st.sampled_from(["h100-80", "a100-40", "mi300x"]), "compute": st.sampled_from(["bf16", "fp16"]),
    "loss_chunks": st.sampled_from([1, 8]), "compiled": st.booleans(), "margin": st.sampled_from([0.0, 0.1, 0.3]),
    "tokens": st.just(10**9), "price": st.sampled_from([0, 2.5])}).map(
        lambda asked: asked | {"compiled": asked["compiled"] and asked["runtime"] != "megatron"})


def by_kind(model, asked):
    """Rows by stage and policy."""
    return {(row.stage, row.recompute): row for row in zs.plan(model, recompute=POLICIES, **asked).rows}


@given(MODELS, OPTIONS, st.permutations(["batch", "sequence", "micro_batches", "ranks", "margin", "device"]))
def test_columns_add_up_more_costs_no_less_and_a_faster_device_takes_no_longer(model, asked, names):
    """Of what costs more two are looked at; thorough: every one."""
    found, config = by_kind(model, asked), zs.planning.plan_config(model, **asked)
    for (stage, policy), row in found.items():
        assert row.has_margin == config.has_margin(stage, policy)
        assert row.total_nbytes == row.states_nbytes + row.transient_nbytes + row.overhead_nbytes == sum(
            one.nbytes for one in row.held) == row.capacity_nbytes - row.spare_nbytes
        assert 0 < row.model_flops_per_step <= row.flops_per_step
        assert 0 < row.model_flops_utilization <= 1
        assert row.tokens_per_second * row.step_seconds == pytest.approx(
            asked["ranks"] * asked["batch"] * asked["sequence"] * asked["micro_batches"])
        whole = questions.training(config, row)
        assert whole.money == pytest.approx(asked["price"] * whole.device_hours)
    for stage in {stage for stage, _ in found}:
        rows = [found[stage, policy] for policy in POLICIES]
        assert [row.flops_per_step for row in rows] == sorted(row.flops_per_step for row in rows)
        # The input of a checkpointed block is held beside what is made again of it.
        held = 4 * asked["batch"] * asked["sequence"] * model.transformer.channels
        assert rows[0].total_nbytes + held >= max(row.total_nbytes for row in rows)
    dearer = {"batch": asked["batch"] + 1, "sequence": asked["sequence"] + 64, "micro_batches":
              asked["micro_batches"] + 1, "ranks": asked["ranks"] // 2, "margin": 0.5, "device": "a100-40"}
    for name in names if THOROUGH else names[:2]:
        value = dearer[name]
        if (name, value) == ("ranks", 1) or (name, asked["device"]) == ("device", "mi300x"):
            continue  # one rank has no buckets; another maker's card is no faster or slower one
        for key, other in by_kind(model, asked | {name: value}).items():
            row = found[key]
            own = (other.overhead_nbytes, row.overhead_nbytes) if name == "device" else (0, 0)  # cuBLAS's is the card's
            assert other.total_nbytes - own[0] >= row.total_nbytes - own[1], (name, key)
            assert row.has_margin or not other.has_margin, (name, key)
            assert name == "ranks" or other.step_seconds >= row.step_seconds * (1 - 1e-9), (name, key)


@given(MODELS, OPTIONS)
@settings(max_examples=8)
def test_what_is_the_largest_or_the_fewest_has_the_margin_and_one_more_or_less_has_not(model, asked):
    config = zs.planning.plan_config(model, **asked)

    def fits(**changed):
        return some_row_fits(replace(config, **changed))

    batch, tokens = questions.largest_batch(config), questions.largest_sequence(config)
    assert not fits(batch=batch + 1)
    assert not fits(sequence=tokens + 128)
    assert (batch > 0) == any(row.has_margin for row in replace(config, batch=max(1, batch)).plan().rows)
    assert tokens == 0 or fits(sequence=tokens)
    fewest, network = questions.fewest_ranks(config), zs.planning.Network(config.network.inside)
    assert fewest is None or fits(ranks=fewest, network=network)
    assert fewest in (None, 1) or fewest > 8 or not fits(ranks=fewest - 1, network=network)
    assert (fewest is None) <= (batch == 0)


@given(MODELS, OPTIONS)
@settings(max_examples=8)
def test_what_tune_takes_is_a_row_of_the_plan_of_its_settings(model, asked):
    given_too = {name: asked[name] for name in ("runtime", "ranks", "sequence", "device", "compute", "margin")}
    found = zs.tune(model, global_batch=4 * asked["ranks"], recompute="none,block", offload="none", **given_too)
    for one in found.tried[:3]:
        again = zs.plan(model, stage=one.row.stage, recompute=one.row.recompute, batch=one.config.batch,
                        global_batch=4 * asked["ranks"], prefetch=one.config.options.prefetch, **given_too)
        assert again.rows == (one.row,)
        assert one.row.has_margin
