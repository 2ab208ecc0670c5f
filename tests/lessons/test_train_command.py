"""``zerosim train`` and ``zerosim compare`` as one types them."""

import json

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from zerosim.cli import app

TINY = ["--model", "gpt-nano", "--steps", "2", "--ranks", "2", "--batch", "2"]
SHORT = [*TINY, "--sample", "2"]


def ask(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_training_prints_losses_memory_traffic_and_a_sample():
    done = ask("train", *TINY)
    assert done.exit_code == 0, done.output
    for words in ("gpt-nano on moby_dick: 6,960 parameters", "entropy of single bytes", "optimizer state", "gradients",
                  "Steps: 2, of 32 tokens each; skipped: 0", "It writes:", "Call me "):
        assert words in done.stdout
    assert max(map(cell_len, done.stdout.splitlines())) <= 80


def test_training_as_json_has_every_step():
    data = json.loads(ask("train", *SHORT, "--json").stdout)
    assert [step["number"] for step in data["steps"]] == [1, 2]
    assert data["options"]["stage"] == 3
    assert data["bits_per_byte"] == pytest.approx(data["held_out_loss"] / 0.6931471805599453)


@pytest.mark.parametrize("switch", [
    ["--stage", "1"], ["--compute", "fp32"], ["--optimizer", "sgd"], ["--lr", "0.1"], ["--micro-batches", "2"],
    ["--batch", "3"], ["--recompute", "segment(2)"], ["--layout", "contiguous"], ["--seed", "1"], ["--ranks", "3"],
    ["--loss-scale", "8"]], ids=" ".join)
def test_every_switch_changes_what_comes_out(switch):
    plain, changed = (json.loads(ask("train", *SHORT, "--json", *more).stdout) for more in ([], switch))
    plain.pop("options"), changed.pop("options")
    assert plain != changed


def test_a_text_of_ones_own_is_trained_on(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("abc " * 200, encoding="utf-8")
    done = ask("train", *SHORT, "--text", str(path))
    assert done.exit_code == 0
    assert "on mine.txt" in done.stdout


@pytest.mark.parametrize(("arguments", "text"), [
    (["--text", "there is no such file"], "cannot be read: No such file or directory"),
    (["--ranks", "0"], "ranks=0 must be a whole number"), (["--model", "gpt-5"], "the presets are gpt-nano"),
    (["--stage", "7"], "ZeRO has the stages"), (["--optimizer", "adamm"], "no optimizer is called 'adamm'"),
    (["--compute", "fp61"], "fp16"), (["--capacity", "1000"], "left of capacity_nbytes=1,000"),
    (["--loss-scale", "x"], "neither a positive number nor 'dynamic'"), (["--lr", "-1"], "lr=-1.0 must be")], ids=str)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, text):
    done = ask("train", *TINY, "--json", *arguments)
    assert done.exit_code == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"short"])
def test_a_text_that_cannot_be_trained_on_is_one_line(tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    done = ask("train", *SHORT, "--text", str(path))
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_comparing_says_that_the_stages_agree():
    done = ask("compare", *TINY)
    assert done.exit_code == 0, done.output
    assert "All 4 runs saw the same losses and ended in the same weights, bit for bit." in done.stdout
    assert max(map(cell_len, done.stdout.splitlines())) <= 80


def test_comparing_formats_says_that_they_do_not():
    done = ask("compare", *TINY, "--over", "compute", "--values", "fp32,bf16")
    assert "These ended in the same weights, bit for bit: fp32; bf16." in done.stdout


def test_comparing_stages_with_micro_batches_says_why_there_are_two_orders():
    done = ask("compare", *TINY, "--ranks", "3", "--micro-batches", "2")
    assert "bit for bit: 0, 1; 2, 3." in done.stdout
    assert "Stages 0 and 1 add up micro-batches before they reduce" in done.stdout


def test_a_comparison_as_json_has_each_run_by_its_value():
    data = json.loads(ask("compare", *TINY, "--values", "0,3", "--json").stdout)
    assert (data["over"], data["same_bits"], list(data["runs"])) == ("stage", True, ["0", "3"])


@pytest.mark.parametrize("name", ["figure.svg", "figure.png"])
def test_a_comparison_is_drawn_where_it_is_asked_to(tmp_path, name):
    assert ask("compare", *TINY, "--values", "0,3", "--figure", str(tmp_path / name)).exit_code == 0
    assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--over", "stages"], "did you mean 'stage'"),
        (["--figure", "x.pdf"], "end its name with one of .svg"),
        (["--figure", "no/such/folder/x.svg"], "asked to draw into"),
        (["--values", "0,9"], "ZeRO has the stages"),
    ],
    ids=str,
)
def test_a_comparison_that_cannot_be_is_one_line_before_anything_is_written(arguments, text):
    done = ask("compare", *TINY, *arguments)
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert text in done.stderr
