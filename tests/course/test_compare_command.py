"""``zerosim compare`` as one types it."""

import json
from functools import cache

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from tests.cases import chosen
from zerosim.cli import app

TINY = ["--model", "gpt-nano", "--steps", "2", "--ranks", "2", "--batch", "2"]


def ask(*arguments):
    return CliRunner().invoke(app, ["compare", *TINY, *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_comparing_says_that_the_stages_agree():
    done = ask()
    assert done.exit_code == 0, done.output
    assert "All 4 runs saw the same losses and ended in the same weights, bit for bit." in done.stdout
    assert max(map(cell_len, done.stdout.splitlines())) <= 80
    assert done.stderr == ""


def test_comparing_formats_says_that_they_do_not():
    assert "No two runs ended in the same weights." in ask("--over", "compute", "--values", "fp32,bf16").stdout


def test_comparing_stages_with_micro_batches_says_why_there_are_two_orders():
    done = ask("--ranks", "3", "--micro-batches", "2")
    assert "bit for bit: 0, 1; 2, 3." in done.stdout
    assert "Stages 0 and 1 add up micro-batches before they reduce" in done.stdout


def test_comparing_recomputation_says_why_tiled_attention_differs():
    done = ask("--over", "recompute")
    assert "bit for bit: none, sub_block, selective, block; tiled." in " ".join(done.stdout.split())
    assert "Tiled attention adds in another order" in done.stdout
    assert max(map(cell_len, done.stdout.splitlines())) <= 80


def test_comparing_optimizers_shows_the_learning_rate_and_layout_of_each():
    lines = ask("--over", "optimizer", "--values", "sgd,soap").stdout.splitlines()
    assert any(line.split() == ["layout", "per_unit", "whole_matrices"] for line in lines)
    assert any(line.split()[:2] == ["learning", "rate"] for line in lines)


def test_a_comparison_as_json_has_each_run_by_its_value():
    data = json.loads(ask("--values", "0,3", "--json").stdout)
    assert (data["over"], data["same_bits"], data["same_bits_by_value"]) == ("stage", True, [[0, 3]])
    assert list(data["runs"]) == ["0", "3"]


@cache
def without_options(*arguments):
    """A comparison's JSON without the options of its runs, so that only what came out can differ."""
    data = json.loads(ask("--json", *arguments).stdout)
    for run in data["runs"].values():
        run.pop("options")
    return data


@pytest.mark.parametrize("switch", [
    ["--stage", "1"], ["--compute", "fp32"], ["--optimizer", "sgd"], ["--lr", "0.1"], ["--micro-batches", "2"],
    ["--batch", "3"], ["--recompute", "block"], ["--layout", "contiguous"], ["--seed", "1"], ["--ranks", "3"],
    ["--loss-scale", "8"], ["--steps", "1"]], ids=" ".join)
def test_every_switch_changes_what_comes_out(switch):
    over = ["--over", "optimizer", "--values", "sgd,lion"] if "--optimizer" not in switch else ["--values", "0,3"]
    assert without_options(*over) != without_options(*over, *switch)


@pytest.mark.parametrize("name", chosen(["figure.png"], ["figure.svg", "figure.png"]))
def test_a_comparison_is_drawn_where_it_is_asked_to(tmp_path, name):
    assert ask("--values", "0,3", "--figure", str(tmp_path / name)).exit_code == 0
    light = (tmp_path / name).read_bytes()
    assert len(light) > 5000
    assert ask("--values", "0,3", "--figure", str(tmp_path / name), "--dark").exit_code == 0
    assert (tmp_path / name).read_bytes() != light
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--over", "stages"], "did you mean 'stage'"),
        (["--figure", "x.pdf"], "end its name with one of .svg"),
        (["--figure", "no/such/folder/x.svg"], "asked to draw into 'no/such/folder/x.svg', which is in no folder"),
        (["--figure", "/proc/x.svg"], "asked to draw into '/proc/x.svg'"),
        (["--dark"], "asked for --dark without a figure"),
        (["--values", "0,²"], "ZeRO has the stages"),
        (["--values", "0,9"], "ZeRO has the stages"),
        (["--values", "3"], "name two or more that differ"),
        (["--over", "optimizer", "--layout", "per_unit"], "Muon needs all of"),
        (["--capacity", "70000"], "stage 0: rank 0 asked for"),
        (["--capacity", "100000", "--values", "3,2,1"], "stage 1: rank"),
    ],
    ids=str,
)
def test_a_comparison_that_cannot_be_is_one_line_before_anything_is_written(arguments, text):
    done = ask(*arguments, "--json")
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert text in done.stderr
