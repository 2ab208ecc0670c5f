"""The worked example comes out as pencil and paper have it, and is computed, not recited."""

import json
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

import zerosim as zs
from zerosim.course.worked_example import Example, parse_samples, replay, replays_as_json, sample_of
from zerosim.course.worked_example_view import replays_view
from zerosim.display.terminal import as_text
from zerosim.planning import closed_forms as pencil

EXAMPLE = Example()
STAGE_3_WITH_RECOMPUTATION = """
    all_gather layer1, forward layer1, free layer1, all_gather layer2, forward layer2, free layer2, loss all,
    all_gather layer1, recompute layer1, free layer1, all_gather layer2, recompute layer2, backward layer2,
    reduce_scatter layer2, free layer2, free layer2, all_gather layer1, backward layer1, reduce_scatter layer1,
    free layer1, free layer1, update all"""


@pytest.mark.parametrize("stage", zs.STAGES)
def test_every_stage_ends_in_the_published_numbers(stage):
    found = replay(EXAMPLE, stage).as_json()
    assert found["losses"] == [10.125, 15.125]
    assert found["local_gradients"] == [[0, 0, 0, -4.5], [-11, -5.5, -5.5, -5.5]]
    assert found["reduced_gradients"] == [-5.5, -2.75, -2.75, -5]
    assert found["m"] == [-0.55, -0.275, -0.275, -0.5]
    assert found["v"] == [0.030250002, 0.0075625004, 0.0075625004, 0.025]
    assert found["master"] == [2.1, -2.9, 1.1, 0.6]
    assert found["compute"] == ["2.099609375", "-2.900390625", "1.099609375", "0.60009765625"]


@pytest.mark.parametrize(("stage", "recompute", "sent"), [
    (0, "segment(2)", [8, 8]), (1, "segment(2)", [8, 8]), (2, "segment(2)", [8, 8]), (3, "segment(2)", [16, 12]),
    (3, "none", [12, 12]), (2, "none", [8, 8]), (3, "block", [12, 12])])
def test_sent_bytes_are_the_published_ones(stage, recompute, sent):
    assert replay(replace(EXAMPLE, recompute=recompute), stage).sent_nbytes == sent


def test_stage_3_gathers_computes_frees_and_reduces_in_the_published_order():
    told = [f"{step.op} {step.unit}" for step in replay(EXAMPLE, 3).steps]
    assert told == [part.strip() for part in STAGE_3_WITH_RECOMPUTATION.split(",")]


def test_stage_2_reduces_layer_2_and_frees_it_before_layer_1_has_gradients():
    told = [f"{step.op} {step.unit}" for step in replay(EXAMPLE, 2).steps]
    assert told.index("reduce_scatter layer2") < told.index("free layer2") < told.index("backward layer1")


def test_one_reduce_scatter_and_one_all_gather_are_all_that_stage_1_sends():
    sending = [step for step in replay(EXAMPLE, 1).steps if any(step.sent_nbytes)]
    assert [(step.op, step.sent_nbytes) for step in sending] == [("reduce_scatter", (4, 4)), ("all_gather", (4, 4))]


def test_gradients_peak_at_12_bytes_in_stage_1_and_at_8_in_stage_2():
    for stage, peak in ((1, 12), (2, 8)):
        cluster = zs.Cluster(2)
        replay(EXAMPLE, stage, cluster=cluster)
        assert [memory.peak_nbytes_of(["gradient", "unit_gradient"]) for memory in cluster.memory] == [peak, peak]


@pytest.mark.parametrize(("stage", "disagree"), [(0, False), (1, True), (2, True)])
def test_replicated_copies_disagree_between_update_and_all_gather_where_the_optimizer_is_sharded(stage, disagree):
    found = replay(EXAMPLE, stage)
    after = [found.whole("parameter", "update", rank).tolist() for rank in range(2)]
    assert (after[0] != after[1]) is disagree
    if disagree:
        assert after == [[2.099609375, -2.900390625, 1.0, 0.5], [2.0, -3.0, 1.099609375, 0.60009765625]]
    assert len({tuple(found.whole("parameter", "end", rank).tolist()) for rank in range(2)}) == 1


@pytest.mark.parametrize("change", [
    {"weights": (1.0, 1.0, 1.0, 1.0)}, {"samples": (((1.0, 1.0), 2.0), ((2.0, 2.0), 9.0))}, {"learning_rate": 0.01},
    {"ranks": 3}, {"compute": "bf16"}, {"compute": "fp32"}], ids=str)
def test_every_setting_changes_the_result_in_the_same_way_in_all_stages(change):
    changed = replace(EXAMPLE, **change)
    keys = ("losses", "local_gradients", "reduced_gradients", "m", "v", "master", "compute")
    found = [{key: replay(changed, stage).as_json()[key] for key in keys} for stage in zs.STAGES]
    assert all(of_stage == found[0] for of_stage in found)
    before = replay(EXAMPLE, 0).as_json()
    assert found[0] != {key: before[key] for key in keys}


def test_the_learning_rate_moves_every_weight_by_itself_in_adams_first_step():
    found = replay(replace(EXAMPLE, learning_rate=0.25), 2)
    assert [round(b - a, 6) for a, b in zip(EXAMPLE.weights, found.as_json()["master"], strict=True)] == [0.25] * 4


@pytest.mark.parametrize("layout", ["contiguous", "per_unit"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_bytes_equal_the_closed_forms_for_any_number_of_ranks(ranks, layout):
    for stage in zs.STAGES:
        found = replay(replace(EXAMPLE, ranks=ranks, layout=layout), stage)
        job = pencil.Job(
            (2, 2), ranks, pencil.STAGES[stage], layout=layout, policy=zs.Policy("fp16"), recompute_units=2
        )
        sent = pencil.sent_nbytes(job)
        assert found.sent_nbytes == [sum(pair) for pair in zip(sent["gradients"], sent["parameters"], strict=True)]
        assert [sum(step.sent_nbytes[rank] for step in found.steps) for rank in range(ranks)] == found.sent_nbytes


def test_the_hops_of_each_collective_carry_the_bytes_that_it_counts():
    found = replay(replace(EXAMPLE, ranks=3), 3)
    for step in found.steps:
        if step.call is not None:
            sent = [sum(made.hop.nbytes for made in found.hops.get(step.call, []) if made.hop.source == rank)
                    for rank in range(3)]
            assert sent == list(step.sent_nbytes)


def test_an_overflowing_example_is_skipped_and_says_so():
    found = replay(replace(EXAMPLE, samples=(((1.0, 3.0), 6e4), ((200.0, 100.0), -6e4))), 2)
    assert found.as_json()["skipped"]
    assert found.as_json()["master"] == list(EXAMPLE.weights)
    assert "every rank skipped the step" in printed(found, 2)


def test_ranks_without_given_samples_train_on_different_ones():
    samples = [sample_of(rank) for rank in range(16)]
    assert len(set(samples)) == 16


def test_the_json_has_the_announced_keys_and_survives_a_round_trip():
    whole = replays_as_json(EXAMPLE, {stage: replay(EXAMPLE, stage) for stage in zs.STAGES})
    assert json.loads(json.dumps(whole)) == whole
    assert (whole["ranks"], whole["format"], list(whole["stages"])) == (2, "fp16", ["0", "1", "2", "3"])
    for stage in whole["stages"].values():
        assert {"events", "losses", "local_gradients", "reduced_gradients", "m", "v", "master", "compute",
                "peak_nbytes_by_kind", "sent_nbytes"} <= stage.keys()
        assert all({"op", "unit", "sent_nbytes"} <= event.keys() for event in stage["events"])


def test_json_numbers_give_back_the_same_fp32():
    found = replay(replace(EXAMPLE, learning_rate=0.3), 1)
    exact = found.whole("v", "end")
    assert np.array(found.as_json()["v"], np.float32).tobytes() == exact.tobytes()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weights": (1.0,)}, "four weights w1, w2, w3, w4, found 1"),
        ({"ranks": 0}, "at least one rank, found ranks=0"),
        ({"ranks": 3, "samples": (((1.0, 2.0), 3.0),)}, "found 1 samples for 3 ranks"),
        ({"recompute": "all"}, "names no policy"),
        ({"compute": "fp12"}, "fp12"),
    ],
)
def test_settings_that_cannot_be_replayed_are_refused_with_what_to_do(change, text):
    with pytest.raises(ValueError, match=text):
        replace(EXAMPLE, **change)


@pytest.mark.parametrize("text", ["1,3", "1:2", "a,b:c", "1,2,3:4", "1,3:5;"])
def test_samples_that_do_not_parse_are_refused(text):
    with pytest.raises(ValueError, match="write for example"):
        parse_samples(text)


def printed(found, stage, hops=False, width=80):
    console = Console(file=StringIO(), width=width, force_terminal=False)
    console.print(as_text(replays_view(found.example, {stage: found}, hops=hops)))
    return console.file.getvalue()


@pytest.mark.parametrize("stage", zs.STAGES)
def test_the_printed_replay_shows_every_number_and_fits_80_columns(stage):
    text = printed(replay(EXAMPLE, stage), stage)
    for number in ("10.125", "15.125", "-0.55", "0.030250002", "2.1", "2.099609375", "0.60009765625", "w1 -11", "-5.5"):
        assert number in text
    assert max(map(len, text.splitlines())) <= 80
    assert ("copies disagree" in text) is (stage in {1, 2})


def test_hops_are_printed_when_asked_for():
    found = replay(EXAMPLE, 1)
    assert "hop 0, 1 → 0, chunk 0: -11, -5.5" in printed(found, 1, hops=True)
    assert "hop 0" not in printed(found, 1)
