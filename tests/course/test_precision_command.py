"""``zerosim precision`` as one types it."""

import json

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from zerosim.cli import app

FEW = ["--model", "gpt-nano", "--steps", "1", "--format", "bf16"]


def ask(*arguments):
    return CliRunner().invoke(app, ["precision", *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def data():
    return json.loads(ask(*FEW, "--json").stdout)


def test_the_lesson_is_printed_unless_json_is_asked_for(data):
    done = ask(*FEW)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Mixed precision: what goes wrong in 16 bits")
    assert max(map(cell_len, done.stdout.splitlines())) <= 80
    assert data["question"] == {"format": "bf16", "model": "gpt-nano", "steps": 1}


@pytest.mark.parametrize("switch", [["--format", "fp16"], ["--steps", "3"]], ids=" ".join)
def test_every_switch_changes_what_comes_out(switch, data):
    changed = json.loads(ask(*FEW, "--json", *switch).stdout)
    assert changed.keys() == data.keys()
    assert changed["underflows"] != data["underflows"]
    assert changed["rested"] != data["rested"]


def test_a_text_of_ones_own_is_counted_on(tmp_path, data):
    path = tmp_path / "mine.txt"
    path.write_text("abc " * 200, encoding="utf-8")
    changed = json.loads(ask(*FEW, "--json", "--text", str(path)).stdout)
    assert changed["underflows"]["text"] == "mine.txt"
    assert changed["underflows"]["loss"] != data["underflows"]["loss"]
    assert changed["trials"] == data["trials"]


@pytest.mark.parametrize(("arguments", "text"), [
    (["--format", "fp61"], "no number format is named 'fp61'"), (["--model", "gpt-5"], "the presets are gpt-nano"),
    (["--steps", "0"], "steps=0 must be a whole number, 1 or more"),
    (["--text", "there is no such file"], "cannot be read: No such file or directory")], ids=str)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, text):
    done = ask(*FEW, "--json", *arguments)
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert text in done.stderr


def test_help_explains_every_switch():
    text = ask("--help").output
    for switch in ("--text", "--format", "--model", "--steps", "--json"):
        assert switch in text
