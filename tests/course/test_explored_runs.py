"""The runs of the page that moves are the engine's: bytes equal the closed forms beside them, numbers the example's."""

import json
import zlib
from dataclasses import fields
from functools import cache
from urllib.parse import parse_qsl

import numpy as np
import pytest

from zerosim.course import explore, explored_runs, worked_example
from zerosim.planning import timeline
from zerosim.ranks import memory

MESH, ONE_NODE, TWO_NODES = explored_runs.MESH, explored_runs.ONE_NODE, explored_runs.TWO_NODES
StepSetting = explored_runs.StepSetting
SOME = [StepSetting(1, stage=0), StepSetting(2, stage=1, format="fp16", overlap=True), StepSetting(3, stage=2, micro=2),
        StepSetting(4, stage=3, overlap=True, prefetch=True, recompute=True, micro=2, slow=True),
        StepSetting(4, MESH, stage=3, offload=True), StepSetting(4, TWO_NODES, stage=0),
        StepSetting(4, MESH, stage=0, micro=2)]


def words(data, place):
    return [data["words"][at] for at in data["columns"][place]]


@pytest.mark.parametrize("setting", SOME, ids=str)
def test_what_a_run_held_and_sent_is_what_the_formulas_beside_it_say(setting):
    step = explored_runs.recorded_step(setting)
    rows = {(what, kind): nbytes for what, kind, _, _, nbytes in explored_runs.formulas(setting)}
    for rank, (trace, held) in enumerate(zip(step.traces, step.held, strict=True)):
        assert {purpose: trace.sent_nbytes(purpose) for purpose in ("gradients", "parameters")} == {
            purpose: rows["sent", purpose][rank] for purpose in ("gradients", "parameters")}
        of_kind = dict.fromkeys(memory.RESTING_KINDS, 0)
        for (kind, _, nbytes), times in held.items():
            of_kind[kind] += nbytes * times
        assert sum(of_kind.values()) == sum(trace.held_at_start.values())
        away = ("master", "optimizer_state") if setting.offload else ()
        assert of_kind == {kind: 0 if kind in away else rows["held", kind][rank] for kind in memory.RESTING_KINDS}


@pytest.mark.parametrize("value", ["held", "sent"])
def test_a_formula_with_numbers_comes_to_the_bytes_of_a_rank(value):
    for setting in SOME:
        for what, kind, _, numbers, nbytes in explored_runs.formulas(setting):
            if what == value and setting.n in (1, 2, 4):  # three ranks do not divide all units
                assert eval(numbers.replace(",", "").replace("·", "*")) == nbytes[0], (setting, kind)


def test_a_chunk_has_every_run_of_its_ranks_with_the_numbers_of_the_worked_example():
    chunk = explored_runs.chunk_of([StepSetting(2, stage=3, format="fp16", slow=slow) for slow in (False, True)])
    data = json.loads(zlib.decompress(chunk.deflated))
    found = worked_example.replay(worked_example.Example(), 3).steps[0]
    even, slow = data["runs"].values()
    assert even["end"] < slow["end"]
    assert even["numbers"] == slow["numbers"]
    numbers = even["numbers"]
    assert numbers["moments"] == ["start", "backward 1", "reduce", "update", "end"]
    for rank, looks in enumerate(numbers["looks"]):
        for moment, states in zip(("start", "backward", "reduce", "update", "end"), looks, strict=True):
            for state, place in zip(numbers["states"], data["columns"][states], strict=True):
                held = found.held_part(state, moment, rank)
                texts = words(data, place)
                if (moment, state) == ("start", "gradient"):
                    assert [text in ("·", "") for text in texts] == [True] * 4
                else:
                    assert [text and float(text) for text in texts] == [
                        pytest.approx(held[at], rel=1e-6) if at in held else "" for at in range(4)]
        ((x1, x2, target, _, _, loss, *gradient),) = (words(data, place) for place in numbers["passes"][rank])
        assert ((float(x1), float(x2)), float(target)) == found.example.sample(rank)
        assert (float(loss), [*map(float, gradient)]) == (found.losses[rank], found.local_gradients[rank])


def test_the_page_offers_every_stage_on_every_number_of_ranks_in_either_format_and_each_switch():
    offered = explored_runs.settings()
    assert len(offered) == len(set(offered)) == 2 * 2 ** 3 * 2 * 10 * 7
    assert {(one.n, one.nodes) for one in offered} == {
        *((n, ONE_NODE) for n in explored_runs.RANKS), (4, TWO_NODES), (4, MESH)}
    assert {one.stage for one in offered if one.prefetch} == {3}


def test_a_chunk_holds_the_runs_of_one_stage_on_one_number_of_ranks_and_the_largest_is_begun_first():
    some = [StepSetting(1, stage=0), StepSetting(2, stage=0), StepSetting(2, stage=1)]
    assert [(chunk.name, chunk.runs) for chunk in explored_runs.chunks_of(some)] == [
        ("2 one 0", 1), ("2 one 1", 1), ("1 one 0", 1)]


# -- the questions of the page ----------------------------------------------------------------------------------------


@cache
def replayed(setting):
    """The recorded step of a setting, and its replay."""
    step = explored_runs.recorded_step(setting)
    return step, timeline.replay(step.recording, setting.machine)


def asked(question):
    """What the question's address says: its words, the setting, and the one beside it, by the fields' own types."""
    said = dict(parse_qsl(dict(explore.QUESTIONS)[question].removeprefix("#")))
    types = {field.name: {"bool": lambda text: text == "1", "int": int, "str": str}[field.type]
             for field in fields(StepSetting)}
    one = {name: types[name](text) for name, text in said.items() if name in types}
    beside = {name.removeprefix("b."): types[name.removeprefix("b.")](text) for name, text in said.items()
              if name.startswith("b.")}
    found = StepSetting(**one), StepSetting(**one | beside)
    assert {*found} <= {*explored_runs.settings()}
    return said, *found


def sent(setting):
    """Bytes of gradients and parameters that rank 0 sends in a step, and those that ranks 0 and 1 send to the other
    node."""
    traces = replayed(setting)[0].traces
    crossing = sum(hop.nbytes for rank in (0, 1) for row in traces[rank].collectives() for hop in row.hops()
                   if row.call.group[hop.source] == rank and row.call.group[hop.destination] > 1)
    return sum(traces[0].sent_nbytes(purpose) for purpose in ("gradients", "parameters")), crossing


ANSWERS = {
    "Why does ZeRO-3 send 1.5 times as much?": lambda said, a, b: sent(b)[0] == 1.5 * sent(a)[0],
    "When is memory fullest, and of what?": lambda said, a, b: float(said["t"]) == pytest.approx(
        1e6 * (curve := timeline.memory(replayed(a)[1], 0)).seconds[np.argmax(curve.nbytes)], abs=1e-3),
    "What does prefetch hide?": lambda said, a, b: (
        replayed(b)[1].exposed_seconds < replayed(a)[1].exposed_seconds and sent(a) == sent(b)),
    "Why is rank 1 waiting?": lambda said, a, b: (
        any(event.waited_seconds for event in replayed(a)[1].events(1)
            if event.start_seconds <= 1e-6 * float(said["t"]) < event.end_seconds)
        and not any(event.waited_seconds for event in replayed(StepSetting(4, stage=3))[1].events(1))),
    "What does recomputation save, and cost?": lambda said, a, b: (
        replayed(b)[0].peak_nbytes[0] < replayed(a)[0].peak_nbytes[0]
        and replayed(b)[1].step_seconds > replayed(a)[1].step_seconds and sent(a) == sent(b)),
    "What does a mesh keep off the slow link?": lambda said, a, b: sent(b)[1] < sent(a)[1],
    "What does it cost to keep Adam on the host?": lambda said, a, b: (
        replayed(b)[0].peak_nbytes[0] < replayed(a)[0].peak_nbytes[0]
        and replayed(b)[1].step_seconds > replayed(a)[1].step_seconds)}


@pytest.mark.parametrize("question", [question for question, _ in explore.QUESTIONS])
def test_what_a_question_of_the_page_supposes_is_so_in_the_runs_at_its_address(question):
    said, one, beside = asked(question)
    assert ANSWERS[question](said, one, beside)
    assert float(said["t"]) <= 1e6 * max(replayed(one)[1].step_seconds, replayed(beside)[1].step_seconds) + 1e-3
