"""The worked example comes out as pencil and paper have it, and is computed, not recited."""

import json
from dataclasses import replace

import numpy as np
import pytest

import zerosim as zs
from tests.support import broken_lines, printed
from zerosim.course import worked_example as lesson
from zerosim.planning import STAGES as SHARDED_STATES
from zerosim.planning import Job, sent_nbytes

EXAMPLE, replay = lesson.Example(), lesson.replay
OVERFLOWS = replace(EXAMPLE, samples=(((300.0, 0.0), -6e4), ((2.0, 1.0), 7.0)))  # w3's gradient, 60600 · 600
RESULTS = ("losses", "local_gradients", "reduced_gradients", "m", "v", "master", "compute")
STAGE_3_WITH_RECOMPUTATION = """
    all_gather layer1, forward layer1, free layer1, all_gather layer2, forward layer2, free layer2, loss all,
    all_gather layer1, recompute layer1, free layer1, all_gather layer2, recompute layer2, backward layer2,
    reduce_scatter layer2, free layer2, free layer2, all_gather layer1, backward layer1, reduce_scatter layer1,
    free layer1, free layer1, update all"""


@pytest.fixture(scope="module")
def found():
    return lesson.replays(EXAMPLE, zs.STAGES)


def results_of(example, stage):
    data = replay(example, stage).as_json()
    return {key: data[key] for key in RESULTS}


def test_every_stage_ends_in_the_published_numbers(found):
    for stage in found.stages.values():
        assert {key: stage.as_json()[key] for key in RESULTS} == {
            "losses": [10.125, 15.125], "local_gradients": [[0, 0, 0, -4.5], [-11, -5.5, -5.5, -5.5]],
            "reduced_gradients": [-5.5, -2.75, -2.75, -5], "m": [-0.55, -0.275, -0.275, -0.5],
            "v": [0.030250002, 0.0075625004, 0.0075625004, 0.025], "master": [2.1, -2.9, 1.1, 0.6],
            "compute": ["2.099609375", "-2.900390625", "1.099609375", "0.60009765625"]}


def test_each_stage_does_what_is_published_in_the_published_order(found):
    stories = {number: [f"{step.op} {step.unit}" for step in stage.events] for number, stage in found.stages.items()}
    assert stories[3] == [part.strip() for part in STAGE_3_WITH_RECOMPUTATION.split(",")]
    places = [stories[2].index(step) for step in ("reduce_scatter layer2", "free layer2", "backward layer1")]
    assert places == sorted(places)
    for stage in found.stages.values():
        ends = tuple(recorder.snapshots["end"].held_nbytes for recorder in stage.recorders)
        assert stage.events[-1].held_nbytes == ends != stage.events[0].held_nbytes
    sending = [step for step in found.stages[1].events if any(step.sent_nbytes)]
    assert [(step.op, step.sent_nbytes) for step in sending] == [("reduce_scatter", (4, 4)), ("all_gather", (4, 4))]


def test_gradients_peak_at_12_bytes_in_stage_1_and_at_8_in_stage_2(found):
    for stage, peak in ((1, 12), (2, 8)):
        for of_rank in zip(*(step.held_nbytes for step in found.stages[stage].events), strict=True):
            assert max(held.get("gradient", 0) + held.get("unit_gradient", 0) for held in of_rank) == peak


def test_replicated_copies_disagree_between_update_and_all_gather_where_the_optimizer_is_sharded(found):
    for stage, disagree in ((0, False), (1, True), (2, True)):
        one = found.stages[stage]
        after = [one.whole("parameter", "update", rank).tolist() for rank in range(2)]
        assert (after[0] != after[1]) is disagree
        if disagree:
            assert after == [[2.099609375, -2.900390625, 1.0, 0.5], [2.0, -3.0, 1.099609375, 0.60009765625]]
        assert len({tuple(one.whole("parameter", "end", rank).tolist()) for rank in range(2)}) == 1


def test_every_setting_changes_the_result_in_the_same_way_in_all_stages(found):
    before = {key: found.stages[0].as_json()[key] for key in RESULTS}
    for change in ({"weights": (1.0, 1.0, 1.0, 1.0)}, {"samples": (((1.0, 1.0), 2.0), ((2.0, 2.0), 9.0))},
                   {"learning_rate": 0.01}, {"ranks": 3}, {"compute": "bf16"}, {"compute": "fp32"}):
        of_stages = [results_of(replace(EXAMPLE, **change), stage) for stage in zs.STAGES]
        assert all(of_stage == of_stages[0] for of_stage in of_stages), change
        assert of_stages[0] != before, change


@pytest.mark.parametrize("layout", ["contiguous", "per_unit"])
def test_bytes_of_steps_and_hops_are_those_of_the_closed_forms_for_any_number_of_ranks(layout):
    for ranks in (1, 2, 3, 4, 5, 8):
        for stage in zs.STAGES:
            found = replay(replace(EXAMPLE, ranks=ranks, layout=layout), stage)
            sent = sent_nbytes(Job((2, 2), ranks, SHARDED_STATES[stage], layout=layout, policy=zs.Policy("fp16"),
                                   recompute_units=2))
            assert found.sent_nbytes == [sum(two) for two in zip(sent["gradients"], sent["parameters"], strict=True)]
            assert [sum(step.sent_nbytes[rank] for step in found.events) for rank in range(ranks)] == found.sent_nbytes
            for step in found.events:
                hops = found.hops.get(step.call, []) if step.call is not None else []
                assert step.sent_nbytes == tuple(sum(made.hop.nbytes for made in hops if made.hop.source == rank)
                                                 for rank in range(ranks))
    assert len({lesson.sample_of(rank) for rank in range(16)}) == 16  # who is given no sample has one of its own


def test_what_is_gathered_again_for_recomputation_is_sent_again():
    for recompute, sent in (("segment(2)", [16, 12]), ("none", [12, 12]), ("block", [12, 12])):
        assert replay(replace(EXAMPLE, recompute=recompute), 3).sent_nbytes == sent, recompute


def test_an_overflowing_example_is_skipped_and_says_so():
    found = lesson.replays(OVERFLOWS, [2])
    data = json.loads(json.dumps(found.as_json(), allow_nan=False))["stages"]["2"]
    assert data["skipped"]
    assert data["master"] == list(EXAMPLE.weights)
    assert "inf" in data["local_gradients"][0]
    assert "inf" in data["reduced_gradients"]
    assert "every rank skipped the step" in printed(found)


def test_the_json_gives_back_the_same_fp32():
    found = lesson.replays(replace(EXAMPLE, learning_rate=0.3), zs.STAGES)
    whole = found.as_json()
    assert json.loads(json.dumps(whole)) == whole
    for number, stage in whole["stages"].items():
        assert {*RESULTS, "events", "skipped", "peak_nbytes_by_kind", "sent_nbytes"} == stage.keys()
        assert np.array(stage["v"], np.float32).tobytes() == found.stages[int(number)].whole("v", "end").tobytes()


def test_the_printed_replay_shows_every_number_and_fits_80_columns(found):
    for number, stage in found.stages.items():
        text = printed(lesson.Replays(EXAMPLE, {number: stage}))
        gathered = {1: "has w1 2.0996094", 3: "has w1 2, w2 -3"}.get(number, "")
        for part in ("10.125", "15.125", "-0.55", "0.030250002", "2.1", "2.099609375", "0.60009765625", "w1 -11",
                     gathered):
            assert part in text, number
        assert broken_lines(text) == []
        assert ("copies disagree" in text) is (number in {1, 2})
    hop = "hop 0, 1 → 0, chunk 0: -11, -5.5"
    assert hop in printed(found.view(hops=True))
    assert hop not in printed(found)
