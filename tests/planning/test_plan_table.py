"""A plan shows well where it is asked: printed, as a table; and one finds its parts."""

import re
from inspect import signature

import pytest

import zerosim as zs
from zerosim.planning.plan_table import FEWER

LLAMA = {"ranks": 8, "batch": 4, "tokens": 2048}


def test_a_terminal_shows_the_verdict_first_and_a_line_for_each_row_with_columns_set_to_the_right():
    found = zs.plan("llama-2-7b", **LLAMA)
    verdict, subject, empty, head, *lines, _, units = str(found).splitlines()
    assert verdict == found.verdict
    assert subject.startswith("llama-2-7b: 6,738,415,616 parameters, 8 ranks of h100-80, 1 micro-batch of 4 sequences")
    assert empty == ""
    assert re.split(r"\s{2,}", head.strip()) == [*FEWER]
    assert len(lines) == len(found.rows)
    assert {len(line) for line in [head, *lines]} == {len(head)}
    assert lines[0].split()[:3] == ["0", "none", "107.81"]
    assert units.startswith("GB are 10⁹ bytes")


def test_its_short_form_is_the_verdict_in_one_line():
    found = zs.plan("llama-2-7b", **LLAMA)
    assert repr(found) == f"<Plan of llama-2-7b on 8 ranks: {found.verdict}>"


def test_a_number_of_parameters_is_said_once():
    assert str(zs.plan(parameters="7.5e9")).count("7,500,000,000") == 1


def test_a_notebook_that_asks_what_a_plan_can_be_asked_is_shown_every_option():
    shown, taken = signature(zs.plan), signature(zs.planning.plan_config)
    assert shown.parameters == taken.parameters
    assert shown.return_annotation is zs.planning.Plan
    assert {"model", "ranks", "device", "offload", "host_link"} <= set(shown.parameters)


@pytest.mark.parametrize("name", ["cost", "hardware", "recording", "timeline", "plan_config", "PlanConfig", "Plan",
                                  "Row", "explained"])
def test_what_a_plan_is_made_of_is_found_in_planning(name):
    assert name in zs.planning.__all__
    assert getattr(zs.planning, name) is not None


@pytest.mark.parametrize(("former", "now"), [("question", "plan_config"), ("Question", "PlanConfig"),
                                             ("DIALECTS", "CONVENTIONS"), ("Dialect", "Convention"),
                                             ("States", "ShardedStates")])
def test_a_former_name_warns_and_is_the_same_thing(former, now):
    with pytest.warns(DeprecationWarning, match=f"zerosim.planning.{former} is now called {now}"):
        assert getattr(zs.planning, former) is getattr(zs.planning, now)


def test_a_plans_former_option_warns_and_counts():
    with pytest.warns(DeprecationWarning, match="dialect= is now called convention="):
        assert zs.plan("gpt2", dialect="fp32").rows == zs.plan("gpt2", convention="fp32").rows
    with pytest.raises(TypeError, match="unexpected keyword argument 'dialect'"):
        zs.plan("gpt2", dialect="fp32", convention="zerosim")
