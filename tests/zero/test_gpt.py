"""A GPT under every stage, format, number of ranks and number of micro-batches: the twin's bits."""

import numpy as np
import pytest

import zerosim as zs
from tests.cases import chosen, covering
from tests.twin import Rule, Twin
from tests.zero.training import assert_stages_equal_the_twin, bits, run, train
from zerosim.models import GPT

ADAM = zs.optim.AdamW(lr=0.01)


def token_batches(model, ranks, micro_batches, steps, seed=0, rows=2):
    """batches[step][rank][j] = (tokens, next tokens), different everywhere."""
    rng, shape = np.random.default_rng(seed), (rows, model.config.context)
    return [[[tuple(rng.integers(0, model.config.vocabulary, shape) for _ in range(2)) for _ in range(micro_batches)]
             for _ in range(ranks)] for _ in range(steps)]


def assert_equal_to_the_twin(model, ranks, k, policy, *, steps=2, data=None, **options):
    return assert_stages_equal_the_twin(model, data or token_batches(model, ranks, k, steps), ADAM, policy=policy,
                                        clip_norm=1.0, **options)[1]


@pytest.mark.parametrize(("ranks", "compute", "k"), covering([1, 2, 3, 4, 8], ["fp32", "bf16", "fp16"], [1, 3], turn=1))
def test_a_gpt_equals_the_twin_under_every_stage(compute, ranks, k):
    scale = 1024.0 if compute == "fp16" else 1.0
    assert_equal_to_the_twin(GPT("gpt-nano"), ranks, k, zs.Policy(compute, loss_scale=scale))


@pytest.mark.parametrize("options", [
    {"tied": False}, {"units": "sub_block"}, {"units": 2}, {"normalization": "global"}], ids=str)
def test_any_gpt_equals_its_twin(options):
    runs = chosen([(1, {}), (3, {})], [(stage, {}) for stage in zs.STAGES])
    assert_equal_to_the_twin(GPT("gpt-nano", **options), 3, 2, zs.Policy("bf16"), runs=runs)


def test_a_gpt_with_dropout_equals_its_twin_and_differs_from_one_without():
    from dataclasses import replace

    from zerosim.models import PRESETS

    dropping = GPT(replace(PRESETS["gpt-nano"], dropout=0.25))
    runs = [(stage, {"recompute": recompute})
            for stage, recompute in covering(zs.STAGES, ("none", "block", "segment(2)", "sub_block"))]
    with_it = assert_equal_to_the_twin(dropping, 3, 2, zs.Policy("bf16"), runs=runs)
    without = assert_equal_to_the_twin(GPT("gpt-nano"), 3, 2, zs.Policy("bf16"), runs=[(3, {})])
    assert [step["norm"] for step in with_it] != [step["norm"] for step in without]


def test_global_normalization_weighs_every_token_the_same_and_own_does_not():
    """Ranks with 1 to 16 valid targets: the global mean gradient is that of one device with all tokens in one batch."""
    ranks, rng = 3, np.random.default_rng(1)
    data = token_batches(GPT("gpt-nano"), ranks, 2, 1)
    for mine in data[0]:
        for _, target in mine:
            target[rng.random(target.shape) < rng.random()] = -1
    norms = {}
    for normalization in ("own", "global"):
        model = GPT("gpt-nano", normalization=normalization)
        norms[normalization] = assert_equal_to_the_twin(model, ranks, 2, zs.Policy(), data=data, steps=1)[0]["norm"]
    together = tuple(np.concatenate([pair[i] for mine in data[0] for pair in mine]) for i in (0, 1))
    single = Twin(GPT("gpt-nano"), ADAM, 1, zs.Policy(), "per_unit", "local_first")
    expected = single.step([[together]])["norm"]
    assert abs(norms["global"] - expected) < 1e-5 * expected  # fp32 sums in another order
    assert abs(norms["own"] - expected) > 1e-3 * expected


@pytest.mark.parametrize("normalization", ["own", "global"])
def test_the_token_counts_of_a_step_turn_its_losses_into_the_mean_over_all_tokens(normalization):
    """The loss of one device with all tokens in one batch, found from three ranks' results alone."""
    ranks, rng, model = 3, np.random.default_rng(2), GPT("gpt-nano", normalization=normalization)
    data = token_batches(model, ranks, 2, 1)[0]
    for mine in data:
        for _, target in mine:
            target[rng.random(target.shape) < rng.random()] = -1
            target[0, 0] = 1

    def step(rank, data):
        return zs.Engine(rank, model, ADAM).step(data[rank.index])

    results = list(zs.Cluster(ranks).run(step, data))
    together = tuple(np.concatenate([pair[i] for mine in data for pair in mine]) for i in (0, 1))
    expected = zs.Cluster(1).run(step, [[together]])[0]
    assert [result.tokens for result in results] == [tuple(int((t >= 0).sum()) for _, t in mine) for mine in data]
    assert [result.places for result in results] == [tuple(t.size for _, t in mine) for mine in data]
    found = 0.0
    for result in results:
        weights = result.places if normalization == "global" else result.tokens
        found += sum(loss * weight for loss, weight in zip(result.losses, weights, strict=True))
    (loss,), (tokens,), (places,) = expected.losses, expected.tokens, expected.places
    mean = loss * places / tokens if normalization == "global" else loss
    assert abs(found / tokens - mean) < 1e-5 * mean
    assert abs(np.mean([loss for result in results for loss in result.losses]) - mean) > 1e-3 * mean


@pytest.mark.parametrize("stage", [1, 3])
def test_no_recomputation_changes_a_bit(stage):
    model, data, policy = GPT("gpt-nano"), token_batches(GPT("gpt-nano"), 3, 1, 2), zs.Policy("bf16")
    kept, *others = (run(model, data, optimizer=ADAM, stage=stage, policy=policy, recompute=recompute)[0]
                     for recompute in ("none", "block", "segment(2)", "sub_block", "selective"))
    for again in others:
        assert bits(kept["master"]) == bits(again["master"])
        assert kept["losses"] == again["losses"]


def test_options_change_no_bit_of_a_gpt():
    model, data, policy = GPT("gpt-nano"), token_batches(GPT("gpt-nano"), 3, 2, 2), zs.Policy("bf16")
    for stage in (2, 3):
        plain, pulled = (run(model, data, optimizer=ADAM, stage=stage, policy=policy, **options)[0] for options in (
            {}, {"bucket_nbytes": 300, "overlap": True, "prefetch": 1, "keep_gathered": ()}))
        assert bits(plain["master"]) == bits(pulled["master"])


def test_no_rank_ever_holds_the_whole_model_at_stage_3():
    """Parameters are drawn shard by shard: until training gathers a unit, a rank holds its shard and no more."""
    model, ranks = GPT("gpt-nano"), 4
    cluster = zs.Cluster(ranks)
    engines = cluster.run(lambda rank: zs.Engine(rank, model, ADAM, stage=3, policy=zs.Policy("bf16")))
    shard = engines[0].layout.shard_length(0)
    assert cluster.memory.peak_nbytes == cluster.memory.now_nbytes == [16 * shard] * ranks
    whole = zs.Cluster(1).run(lambda rank: train(rank, model, [], stage=0, policy=zs.Policy("bf16")))
    assert [bits(r["master"]) for r in zs.Cluster(ranks).run(
        lambda rank: train(rank, model, [], stage=3, policy=zs.Policy("bf16")))] == [bits(whole[0]["master"])] * ranks


def test_norms_in_fp32_beside_16_bit_weights_equal_the_twin():
    model, data = GPT("gpt-nano"), token_batches(GPT("gpt-nano"), 3, 1, 2)
    assert_stages_equal_the_twin(model, data, ADAM, runs=[(3, {})], policy=zs.Policy("bf16"),
                                 rules={name: Rule(ADAM, "fp32") for name in model.shapes if "ln_" in name},
                                 groups=[zs.Group("*ln_*", compute="fp32")])
