"""What a decoder's blocks keep and compute again, measured, equals closed forms: to the byte and to the operation."""

from dataclasses import replace
from itertools import product

import pytest

from tests.cases import covering
from tests.models.contexts import FLOWING, bits_of
from tests.models.runs import batch_of, run_of
from zerosim.models import GPT, PRESETS, GPTConfig, Llama, LlamaConfig, Recompute
from zerosim.numerics import policy
from zerosim.planning import Transformer, activations, flops, step_activations

NANO = PRESETS["gpt-nano"]
INSIDE = ["none", "sub_block", "selective", "tiled"]
POLICIES = [*INSIDE, "block", "segment(2)", "segment(3)", "block+tiled", "segment(2)+selective", "block+sub_block",
            "segment(2)+tiled"]
# B, T, C, H: longer than wide, wider than long, one head, one token, and longer than a strip (64) and a tile (128).
SHAPES = [(2, 8, 12, 3), (3, 40, 8, 2), (1, 5, 30, 1), (4, 1, 6, 6), (1, 130, 4, 1), (2, 257, 4, 2)]


# Of a Llama: keys for one head or more, wider heads than channels, biases of Qwen 2, and Qwen 3's norms.
KINDS = {"GPT": {}, "Llama": {"key_value_heads": 1, "feed_forward": 30},
         "Qwen 3": {"head_channels": 22, "head_norms": True}, "Qwen 2": {"biases": ("qkv",)},
         "biased": {"biases": ("projection", "feed_forward"), "feed_forward": 7}}


def model_and_block(kind, batch, tokens, channels, heads, vocabulary, dropout=0.0, itemsize=2, **options):
    """A model of three blocks, and one of them on paper."""
    of = (3, channels, heads, tokens, vocabulary, dropout)
    if kind == "GPT":
        return GPT(GPTConfig(*of), **options), activations.Block(batch, tokens, channels, heads, itemsize)
    own = {"head_channels": 2 * (channels // heads // 2 or 1), **KINDS[kind]}
    model = Llama(LlamaConfig(*of, **own), **options)
    has = model.config
    sizes = Transformer(channels, 3, heads, vocabulary, has.feed_forward, has.key_value_heads, has.head_channels,
                        gated=True, layer_norm=False, head_norms=has.head_norms, biases=has.biases)
    return model, activations.Block.of(sizes, batch, tokens, itemsize)


# -- operations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "shape", "kind"), [
    *((policy, shape, "GPT") for policy in INSIDE for shape in SHAPES),
    *covering(INSIDE, SHAPES, list(KINDS)[1:], count=24)])
def test_what_a_block_computes_is_the_closed_form(policy, shape, kind):
    model, block = model_and_block(kind, *shape, 5, itemsize=4)
    run, batch = run_of(model, "fp32", scatter=0.2), shape[0]
    x = run.model.units[0].forward(run.ctx, run.w, batch_of(run.model, batch)[0])[0]
    run.ctx = replace(run.ctx, keep=Recompute.parse(policy).inside)
    unit, before = run.model.units[1], run.recorder.flops
    _, kept = unit.forward(run.ctx, run.w, x)
    between = run.recorder.flops
    unit.backward(run.ctx, run.w, kept, x)
    assert (between - before, run.recorder.flops - between) == (
        sum(flops.forward(block).values()), sum(flops.backward(block, policy).values()))


@pytest.mark.parametrize(("policy", "kind"), covering(POLICIES, KINDS))
def test_what_is_computed_a_second_time_is_what_the_blocks_compute_beyond_keeping_all(policy, kind):
    block, recompute = model_and_block(kind, 2, 8, 12, 3, 5)[1], Recompute.parse(policy)
    inside = "none" if recompute.inside == "all" else recompute.inside
    again = sum(flops.backward(block, inside).values()) - sum(flops.backward(block, "none").values())
    if recompute.units_per_segment is not None:
        again += sum(flops.forward(block).values())
    if inside == "tiled":  # less what backward saves by summing dO·O instead of P·dP
        again -= flops.ROW_SUM * (block.positions * block.sizes.query_channels - block.square)
    assert flops.recomputed(block, 4, policy) == 4 * again


# -- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "dropout", "dtype"), covering(POLICIES, [0.0, 0.2], ["bf16", "fp32", "fp16"]))
def test_recomputation_changes_no_bit_of_loss_and_gradients(policy, dropout, dtype):
    """Nor do segments change a bit of tiled attention, which alone has other bits."""
    run = run_of(GPT(replace(NANO, dropout=dropout)), dtype, scatter=0.2)
    batch, inside = batch_of(run.model), "tiled" if "tiled" in policy else "none"
    (loss, plain), (again, gradients) = run.gradients(*batch, inside), run.gradients(*batch, policy)
    assert loss == again
    assert all((bits_of(plain[name]) == bits_of(gradients[name])).all() for name in run.model.shapes)


# -- every moment -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "kind", "shape", "dropout"), covering(
    product(POLICIES, [("sub_block", 1), ("block", 2), (2, 4)]), KINDS, [(2, 8, 12, 3), (1, 30, 4, 2), (3, 5, 40, 4)],
    [0.0, 0.1]), ids=str)
def test_the_moments_of_a_step_are_those_of_the_estimate(row, kind, shape, dropout):
    policy, (units, parts) = row
    model, block = model_and_block(kind, *shape, 50, dropout, units=units)
    run = run_of(model, "bf16")
    run.gradients(*batch_of(run.model, shape[0]), policy)
    moments = step_activations.snapshots(block, 3, 50, policy, dropout=dropout > 0, parts_per_unit=parts)
    wanted = [(moment.nbytes.get("activation", 0) + moment.nbytes.get("checkpointed_input", 0),
               moment.nbytes.get("activation_gradient", 0)) for moment in moments]
    seen = iter(run.recorder.moments)
    assert all(moment in seen for moment in wanted)  # one after the other: `in` goes on where it has stopped
    assert max(map(sum, wanted)) == max(map(sum, run.recorder.moments))
    assert not any(run.recorder.now[kind] for kind in FLOWING)


def test_logits_in_fp32_are_moments_of_their_own_size():
    run = run_of(GPT("gpt-nano"), "bf16")
    run.ctx = replace(run.ctx, policy=policy.Policy("bf16", output="fp32"))
    run.gradients(*batch_of(run.model))
    moments = step_activations.snapshots(activations.Block(2, 8, 12, 3), 2, 17, output_itemsize=4)
    assert max(moment.total_nbytes for moment in moments) == max(map(sum, run.recorder.moments))
    (back,) = (moment for moment in moments if (moment.phase, moment.unit, moment.step) == ("backward", 3, "logits"))
    assert back.nbytes["activation_gradient"] == 2 * 8 * (17 * (4 + 2) + 12 * 2)
