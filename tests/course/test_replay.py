"""The worked example comes out as pencil and paper have it, and is computed, not recited."""

import json
from dataclasses import replace

import numpy as np
import pytest

import zerosim as zs
from tests.support import broken_lines, printed
from zerosim.course import mistakes as of_mistakes
from zerosim.course import worked_example as lesson
from zerosim.planning import STAGES as SHARDED_STATES
from zerosim.planning import Job, sent_nbytes

EXAMPLE, PUBLISHED, replay = lesson.Example(), lesson.published_example(), lesson.replay
OVERFLOWS = replace(PUBLISHED, samples=(((300.0, 0.0), -6e4), ((2.0, 1.0), 7.0)))  # w3's gradient, 60600 · 600
RESULTS = ("losses", "local_gradients", "reduced_gradients", "m", "v", "master", "compute")
STAGE_3_WITH_RECOMPUTATION = """
    all_gather layer1, forward layer1, free layer1, all_gather layer2, forward layer2, free layer2, loss all,
    all_gather layer1, recompute layer1, free layer1, all_gather layer2, recompute layer2, backward layer2,
    reduce_scatter layer2, free layer2, free layer2, all_gather layer1, backward layer1, reduce_scatter layer1,
    free layer1, free layer1, update all"""


@pytest.fixture(scope="module")
def found():
    """The published step in every stage."""
    return lesson.replays(PUBLISHED, zs.STAGES)


@pytest.fixture(scope="module")
def two_steps():
    """The example as it is by default, in every stage."""
    return lesson.replays(EXAMPLE, zs.STAGES)


def results_of(example, stage):
    return [{key: step[key] for key in RESULTS if key in step} for step in replay(example, stage).as_json()["steps"]]


PUBLISHED_NUMBERS = {
    "losses": [10.125, 15.125], "local_gradients": [[0, 0, 0, -4.5], [-11, -5.5, -5.5, -5.5]],
    "reduced_gradients": [-5.5, -2.75, -2.75, -5], "m": [-0.55, -0.275, -0.275, -0.5],
    "v": [0.030250002, 0.0075625004, 0.0075625004, 0.025], "master": [2.1, -2.9, 1.1, 0.6],
    "compute": ["2.099609375", "-2.900390625", "1.099609375", "0.60009765625"]}


def test_every_stage_ends_in_the_published_numbers(found):
    for stage in found.stages.values():
        step, = stage.as_json()["steps"]
        assert {key: step[key] for key in RESULTS} == PUBLISHED_NUMBERS


def test_two_steps_begin_with_the_published_one_and_go_on_with_both_relus_alive(two_steps):
    for number, stage in two_steps.stages.items():
        first, second = stage.as_json()["steps"]
        assert {key: first[key] for key in RESULTS} == PUBLISHED_NUMBERS
        assert 0 not in np.array(second["local_gradients"])
        assert {key: second[key] for key in RESULTS} == {key: two_steps.stages[0].as_json()["steps"][1][key]
                                                         for key in RESULTS}
        # m, v and weights beside Adam written out in double, from the second step's own mean gradient
        g, m, v, w = (np.array(one[key], np.float64) for one, key in (
            (second, "reduced_gradients"), (first, "m"), (first, "v"), (first, "master")))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w -= 0.1 * (m / 0.19) / (np.sqrt(v / (1 - 0.999**2)) + 1e-8)
        for key, value in (("m", m), ("v", v), ("master", w)):
            assert np.allclose(second[key], value, rtol=2e-6), (number, key)  # a dozen roundings to fp32


def test_the_default_is_the_models_weights_in_the_engines_own_layout_without_recomputation():
    first = zs.models.first_weights(zs.models.four_weights())
    assert [w for array in first.values() for w in array.reshape(-1).tolist()] == list(EXAMPLE.weights)
    assert (EXAMPLE.layout, EXAMPLE.recompute) == ("per_unit", "none")
    assert (PUBLISHED.layout, PUBLISHED.recompute, PUBLISHED.steps) == ("contiguous", "segment(2)", 1)
    assert [replay(example, 3).steps[0].sent_nbytes for example in (EXAMPLE, PUBLISHED)] == [[12, 12], [16, 12]]


@pytest.mark.parametrize(("ranks", "compute"), [(1, "fp16"), (2, "fp16"), (2, "fp32"), (3, "bf16"), (5, "fp16")])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_step_in_which_mistakes_are_made_has_the_bits_of_the_engine_where_none_is_made(ranks, compute, optimizer):
    example = replace(EXAMPLE, ranks=ranks, compute=compute, optimizer=optimizer, steps=3)
    by_hand = zs.Cluster(ranks).run(of_mistakes.train, example)
    for step in replay(example, 1).steps:
        for rank, of_rank in enumerate(by_hand):
            shown = of_rank[step.number - 1]
            masters = {} if compute == "fp32" else {"master": "master"}  # the fp32 weights are their own masters, whole
            for name, key in {"weights": "parameter", **masters, **{slot: slot for slot in step.slots}}.items():
                held = step.recorders[rank].snapshots["end"].values[key]
                assert shown[name].tobytes() == np.array([held[at] for at in sorted(held)], shown[name].dtype).tobytes()


def test_every_mistake_changes_a_number_that_is_shown_and_one_step_of_adam_hides_a_forgotten_division():
    one, two = (of_mistakes.mistakes_in(replace(EXAMPLE, steps=steps)) for steps in (1, 2))
    for mistake in of_mistakes.MISTAKES:
        assert any(two.changed[mistake]["adam"].values()), mistake
        assert any(two.changed[mistake][optimizer]["weights"] for optimizer in ("adam", "sgd")), mistake
    unseen = [mistake for mistake in of_mistakes.MISTAKES if not one.changed[mistake]["adam"]["weights"]]
    assert unseen == ["sum", "relu", "no master", "moments", "step count"]
    assert two.changed["sum"] == {
        "adam": {"gradient": [1, 2], "m": [1, 2], "v": [1, 2], "master": [], "weights": []},
        "sgd": {"gradient": [1, 2], "m": [], "v": [], "master": [1, 2], "weights": [1, 2]}}
    assert two.weights["sum"]["sgd"][0] == [3.0996094, -2.4492188, 1.5498047, 1.5]  # 2 + 1.1 ...
    assert "Adam's weights do not show that the sum is not divided by N." in printed(two)
    assert broken_lines(printed(two)) == []
    assert json.loads(json.dumps(two.as_json())) == two.as_json()


def test_each_stage_does_what_is_published_in_the_published_order(found):
    stories = {number: [f"{step.op} {step.unit}" for step in stage.steps[0].events]
               for number, stage in found.stages.items()}
    assert stories[3] == [part.strip() for part in STAGE_3_WITH_RECOMPUTATION.split(",")]
    places = [stories[2].index(step) for step in ("reduce_scatter layer2", "free layer2", "backward layer1")]
    assert places == sorted(places)
    for stage in (stage.steps[0] for stage in found.stages.values()):
        ends = tuple(recorder.snapshots["end"].held_nbytes for recorder in stage.recorders)
        assert stage.events[-1].held_nbytes == ends != stage.events[0].held_nbytes
    sending = [step for step in found.stages[1].steps[0].events if any(step.sent_nbytes)]
    assert [(step.op, step.sent_nbytes) for step in sending] == [("reduce_scatter", (4, 4)), ("all_gather", (4, 4))]


def test_gradients_peak_at_12_bytes_in_stage_1_and_at_8_in_stage_2(found):
    for stage, peak in ((1, 12), (2, 8)):
        for of_rank in zip(*(step.held_nbytes for step in found.stages[stage].steps[0].events), strict=True):
            assert max(held.get("gradient", 0) + held.get("unit_gradient", 0) for held in of_rank) == peak


def test_replicated_copies_disagree_between_update_and_all_gather_where_the_optimizer_is_sharded(found):
    for stage, disagree in ((0, False), (1, True), (2, True)):
        one = found.stages[stage].steps[0]
        after = [one.whole("parameter", "update", rank).tolist() for rank in range(2)]
        assert (after[0] != after[1]) is disagree
        if disagree:
            assert after == [[2.099609375, -2.900390625, 1.0, 0.5], [2.0, -3.0, 1.099609375, 0.60009765625]]
        assert len({tuple(one.whole("parameter", "end", rank).tolist()) for rank in range(2)}) == 1


def test_every_setting_changes_the_result_in_the_same_way_in_all_stages():
    before = results_of(PUBLISHED, 0)
    for change in ({"weights": (1.0, 1.0, 1.0, 1.0)}, {"samples": (((1.0, 1.0), 2.0), ((2.0, 2.0), 9.0))},
                   {"learning_rate": 0.01}, {"ranks": 3}, {"compute": "bf16"}, {"compute": "fp32"},
                   {"optimizer": "sgd"}, {"steps": 2}):
        of_stages = [results_of(replace(PUBLISHED, **change), stage) for stage in zs.STAGES]
        assert all(of_stage == of_stages[0] for of_stage in of_stages), change
        assert of_stages[0] != before, change


@pytest.mark.parametrize("layout", ["contiguous", "per_unit"])
def test_bytes_of_steps_and_hops_are_those_of_the_closed_forms_for_any_number_of_ranks(layout):
    for ranks in (1, 2, 3, 4, 5, 8):
        for stage in zs.STAGES:
            found = replay(replace(PUBLISHED, ranks=ranks, layout=layout), stage).steps[0]
            sent = sent_nbytes(Job((2, 2), ranks, SHARDED_STATES[stage], layout=layout, policy=zs.Policy("fp16"),
                                   recompute_units=2))
            assert found.sent_nbytes == [sum(two) for two in zip(sent["gradients"], sent["parameters"], strict=True)]
            assert [sum(step.sent_nbytes[rank] for step in found.events) for rank in range(ranks)] == found.sent_nbytes
            for step in found.events:
                hops = found.hops.get(step.call, []) if step.call is not None else []
                assert step.sent_nbytes == tuple(sum(made.hop.nbytes for made in hops if made.hop.source == rank)
                                                 for rank in range(ranks))
    for step in (1, 2, 3):  # who is given no sample has one of its own
        assert len({lesson.sample_of(rank, step) for rank in range(16)}) == 16


def test_an_overflowing_example_is_skipped_and_says_so():
    found = lesson.replays(OVERFLOWS, [2])
    data = json.loads(json.dumps(found.as_json(), allow_nan=False))["stages"]["2"]["steps"][0]
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
        assert stage.keys() == {"steps", "peak_nbytes_by_kind"}
        for step, made in zip(stage["steps"], found.stages[int(number)].steps, strict=True):
            assert {*RESULTS, "events", "skipped", "sent_nbytes"} == step.keys()
            assert np.array(step["v"], np.float32).tobytes() == made.whole("v", "end").tobytes()


def test_the_printed_replay_shows_every_number_and_fits_80_columns(found):
    for number, stage in found.stages.items():
        text = printed(lesson.Replays(PUBLISHED, {number: stage}))
        gathered = {1: "has w1 2.0996094", 3: "has w1 2, w2 -3"}.get(number, "")
        for part in ("10.125", "15.125", "-0.55", "0.030250002", "2.1", "2.099609375", "0.60009765625", "w1 -11",
                     gathered):
            assert part in text, number
        assert broken_lines(text) == []
        assert ("copies disagree" in text) is (number in {1, 2})
    hop = "hop 0, 1 → 0, chunk 0: -11, -5.5"
    assert hop in printed(found.view(hops=True))
    assert hop not in printed(found.view(full=True))


def test_every_all_gather_shows_the_values_that_it_has_gathered(two_steps):
    """Of either layer: the new ones where it comes after the update, those of the step before in stage 3."""
    for number, stage in two_steps.stages.items():
        text = printed(lesson.Replays(EXAMPLE, {number: stage})).partition("What happens in step 2")[0]
        assert ("has w1 2.0996094" in text, "has w3 1.0996094" in text) == (number in {1, 2},) * 2
        assert ("has w1 2, w2 -3" in text) is (number == 3)


def test_all_stages_fit_one_screen_unless_they_are_asked_for_in_full(two_steps):
    text = printed(two_steps)
    assert broken_lines(text) == []
    assert len(text.splitlines()) <= 40
    for part in ("What it comes to, in every stage", "x = (2, 1), t = 7, then x = (2, 1), t = 3", "2.126953125",
                 "the same in every stage, bit for bit"):
        assert part in text
    full = printed(two_steps.view(full=True))
    assert "What happens in step 2" in full
    assert len(full.splitlines()) > 300
