"""What a GPT's activations hold under the engine equals pencil and paper; stage 3's peak is explained, kind by kind."""

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from zerosim.models import GPT, GPTConfig
from zerosim.planning import activations, closed_forms
from zerosim.planning.activations import snapshots

ADAM = zs.optim.Adam(lr=0.01)
FLOWING = ("activation", "checkpointed_input", "activation_gradient")
POLICIES = ("none", "block", "segment(2)", "sub_block", "selective", "tiled")
SHAPE = BATCH, TOKENS, CHANNELS, HEADS = 3, 16, 12, 3
LAYERS, VOCABULARY = 3, 19


def model(layers=LAYERS, **options):
    return GPT(GPTConfig(layers, CHANNELS, HEADS, TOKENS, VOCABULARY), **options)


def tokens(seed):
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(0, VOCABULARY, (BATCH, TOKENS)) for _ in range(2))


def stepped(rank, gpt, **options):
    engine = zs.Engine(rank, gpt, ADAM, policy=zs.Policy("bf16"), **options)
    engine.step([tokens(rank.index)])
    return engine


@pytest.mark.parametrize("policy", POLICIES)
def test_each_block_more_keeps_what_the_closed_form_says_between_forward_and_backward(policy):
    def held(rank, layers):
        engine = zs.Engine(rank, model(layers), ADAM, stage=3, policy=zs.Policy("bf16"), recompute=policy)
        tape = engine.forward(*tokens(rank.index))
        now = rank.memory.now_nbytes_by_kind
        engine.backward(tape)
        return now.get("activation", 0) + now.get("checkpointed_input", 0)

    two, three = (zs.Cluster(2).run(held, layers)[0] for layers in (2, 4))
    block = activations.Block(*SHAPE)
    of_block = {"block": 2 * block.stream, "segment(2)": block.stream}.get(policy) or activations.kept(
        block, policy
    ).nbytes
    assert three - two == 2 * of_block


@pytest.mark.parametrize(("policy", "stage"), covering(POLICIES, zs.STAGES))
def test_the_peak_of_activations_and_their_gradients_is_pencils_under_every_stage(policy, stage):
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: stepped(rank, model(), stage=stage, recompute=policy) and None)
    pencil = snapshots(activations.Block(*SHAPE), LAYERS, VOCABULARY, policy)
    for memory in cluster.memory:
        assert memory.peak_nbytes_of(FLOWING) == max(moment.total_nbytes for moment in pencil)


@pytest.mark.parametrize("policy", POLICIES)
def test_stage_3s_peak_is_explained_to_the_byte_by_kind(policy):
    """Shards, one gathered unit, its gradient, and what flows at that moment: the largest sum of them is the peak."""
    gpt, ranks = model(tied=False), 2
    cluster = zs.Cluster(ranks)
    cluster.run(lambda rank: stepped(rank, gpt, stage=3, recompute=policy) and None)
    job = closed_forms.Job(tuple(unit.parameter_count for unit in gpt.units), ranks, closed_forms.STAGES[3],
                           policy=zs.Policy("bf16"))
    resting, units = closed_forms.resting_nbytes(job)[0], job.padded_lengths
    tokens_nbytes = BATCH * TOKENS * 8  # int64
    explained = []
    for moment in snapshots(activations.Block(*SHAPE), LAYERS, VOCABULARY, policy):
        in_unit = "loss" not in (moment.phase, moment.step)
        back = in_unit and moment.phase == "backward"
        unit = 2 * units[moment.unit]
        explained.append(resting | moment.nbytes | {
            "gathered_parameter": unit * in_unit, "unit_gradient": unit * back,
            "input": tokens_nbytes * (1 if back else 2)})  # the targets go with the loss
    largest = max(explained, key=lambda held: sum(held.values()))
    assert {kind: n for kind, n in largest.items() if n} == cluster.memory[0].peak_nbytes_by_kind


def test_segments_pay_their_own_gathers_and_finer_policies_do_not():
    gathers = {}
    for policy in POLICIES:
        cluster = zs.Cluster(2)
        cluster.run(lambda rank, p=policy: stepped(rank, model(tied=False), stage=3, recompute=p) and None)
        gathers[policy] = len(cluster.trace[0].collectives("all_gather", "parameters"))
    units = LAYERS + 2
    assert gathers.pop("segment(2)") == sum(closed_forms.gathers_by_unit(units, 2)) > 2 * units
    assert set(gathers.values()) == {2 * units}


def test_activations_run_out_of_memory_at_stage_3_and_recomputation_makes_room():
    """States are a small part of what stage 3 holds: what does not fit are activations."""
    def run(policy, capacity):
        return zs.Cluster(2, capacity_nbytes=capacity).run(
            lambda rank: stepped(rank, model(), stage=3, recompute=policy) and None
        )

    cluster = zs.Cluster(2)
    cluster.run(lambda rank: stepped(rank, model(), stage=3, recompute="block") and None)
    room = cluster.memory[0].peak_nbytes
    with pytest.raises(zs.OutOfMemoryError, match=r"it holds .*activation [\d,]+"):
        run("none", room)
    run("block", room)
