"""``zerosim train`` as one types it."""

import json
import re
from functools import cache

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from zerosim.cli import app
from zerosim.course.training import TrainingStep
from zerosim.course.training_view import progress_bar

TINY = ["--model", "gpt-nano", "--steps", "2", "--ranks", "2", "--batch", "2"]
SHORT = [*TINY, "--sample", "2"]


def ask(*arguments):
    return CliRunner().invoke(app, ["train", *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_training_prints_losses_memory_traffic_and_a_sample():
    done = ask(*TINY)
    assert done.exit_code == 0, done.output
    for words in ("gpt-nano on moby_dick: 6,960 parameters", "entropy of single bytes   3.0943  4.464",
                  "optimizer state", "gradients", "Steps: 2, of 32 tokens each; skipped: 0; loss scale at the end: 1.",
                  "SHA-256 of all master weights, the same on every rank: ", "It writes:", "Call me "):
        assert re.sub(r" +", " ", words) in re.sub(r"\s+", " ", done.stdout)
    assert max(map(cell_len, done.stdout.splitlines())) <= 80
    assert done.stderr == ""  # no bar in a pipe


def test_the_headline_says_what_updates_what():
    said = " ".join(ask(*SHORT, "--optimizer", "Muon", "--ranks", "1").stdout.split())
    assert ("ZeRO-3 on 1 rank, layout whole_matrices, bf16, muon (lr 0.05; vectors and embeddings by adamw)") in said


def test_training_as_json_has_every_step():
    data = json.loads(ask(*SHORT, "--json").stdout)
    assert [step["number"] for step in data["steps"]] == [1, 2]
    assert data["steps"][0].keys() == {"number", "loss", "norm", "scale", "skipped", "tokens", "peak_nbytes_by_kind",
                                       "sent_nbytes"}
    assert (data["options"]["stage"], data["options"]["layout"]) == (3, "per_unit")
    assert data["held_out_bits_per_byte"] == pytest.approx(data["held_out_loss"] / 0.6931471805599453)


def test_a_step_that_is_saved_is_not_printed(tmp_path):
    printed = json.loads(ask(*SHORT, "--json", "--save", str(tmp_path / "run.json")).stdout)
    assert printed == json.loads(ask(*SHORT, "--json").stdout)
    assert json.loads((tmp_path / "run.json").read_text())


@cache
def without_options(*arguments):
    """A run's JSON without its options, so that only what came out can differ."""
    data = json.loads(ask(*SHORT, "--json", *arguments).stdout)
    del data["options"]
    return data


@pytest.mark.parametrize("switch", [
    ["--stage", "1"], ["--compute", "fp32"], ["--optimizer", "sgd"], ["--lr", "0.1"], ["--micro-batches", "2"],
    ["--batch", "3"], ["--recompute", "segment(2)"], ["--layout", "contiguous"], ["--seed", "1"], ["--ranks", "3"],
    ["--loss-scale", "8"], ["--sample", "3"], ["--steps", "3"]], ids=" ".join)
def test_every_switch_changes_what_comes_out(switch):
    assert without_options() != without_options(*switch)


def test_gathering_whole_matrices_sends_more_than_owning_them():
    owned, gathered = (json.loads(ask(*SHORT, "--json", "--optimizer", "soap", *more).stdout)
                       for more in ([], ["--gather"]))
    assert owned["options"]["layout"] == "whole_matrices"
    assert gathered["options"]["layout"] == "per_unit"
    assert owned["sent_nbytes"] != gathered["sent_nbytes"]


def test_a_text_of_ones_own_is_trained_on(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("abc " * 200, encoding="utf-8")
    done = ask(*SHORT, "--text", str(path))
    assert done.exit_code == 0
    assert "on mine.txt" in done.stdout


# -- while it runs ----------------------------------------------------------------------------------------------------


def shown(terminal: bool) -> str:
    """What the bar has said after two of three steps."""
    console = Console(width=120, force_terminal=terminal, record=True, color_system=None)
    with console.capture() as seen, progress_bar(console, 3) as bar:
        bar.begin("stage 2")
        for number in (1, 2):
            bar.heard(TrainingStep(number, 2.5, 1.0, 256.0, False, 1024, {"parameter": 1_500_000}, {}))
    return seen.get()


def test_the_bar_shows_loss_speed_scale_and_memory():
    assert re.search(r"stage 2 .*2/3 loss 2\.500  [\d,]+ tokens/s  scale 256  1\.5 MB", shown(terminal=True))


def test_no_bar_is_drawn_where_nobody_sits_at_a_terminal():
    assert shown(terminal=False).strip() == ""


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "text"), [
    (["--text", "there is no such file"], "cannot be read: No such file or directory"),
    (["--text", "."], "cannot be read: Is a directory"),
    (["--ranks", "0"], "ranks=0 must be a whole number"), (["--ranks", "7000"], "no layout has one for each rank"),
    (["--model", "gpt-5"], "the presets are gpt-nano"), (["--steps", "-3"], "steps=-3 must be a whole number"),
    (["--stage", "7"], "ZeRO has the stages"), (["--optimizer", "adamm"], "no optimizer is called 'adamm'"),
    (["--optimizer", "muon", "--layout", "per_unit"], "Muon needs all of"),
    (["--compute", "fp61"], "fp16"), (["--compute", "fp8_e4m3"], "take 'fp8', an experiment in which"),
    (["--compute", "fp16", "--loss-scale", "1e38"], "all 2 steps were skipped"),
    (["--capacity", "1000"], "left of capacity_nbytes=1,000"),
    (["--capacity", "-1"], "capacity_nbytes=-1 must be a number of bytes"),
    (["--recompute", "some"], "recompute='some' names no policy"),
    (["--loss-scale", "x"], "neither a positive number nor 'dynamic'"), (["--lr", "-1"], "lr=-1.0 must be"),
    (["--lr", "nan"], "lr=nan must be a positive number"),
    (["--lr", "1e30"], "training has diverged: from step 2 on the loss is no finite number, and 1 of 2 steps"),
    (["--batch", "1000000000000"], "this machine has too little memory for it")], ids=str)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, text):
    done = ask(*TINY, "--json", *arguments)
    assert done.exit_code == 2, done.output
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"short"])
def test_a_text_that_cannot_be_trained_on_is_one_line(tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    done = ask(*SHORT, "--text", str(path))
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_what_it_writes_and_the_names_of_files_are_printed_as_they_are(tmp_path):
    """A model of one repeated text writes brackets, which are no markup of the terminal's."""
    text = tmp_path / "[red]x.txt"
    text.write_text("[b]c[/b]" * 3000)
    done = ask(*TINY, "--steps", "60", "--sample", "80", "--lr", "0.03", "--text", str(text))
    assert done.exit_code == 0, done.output
    assert "on [red]x.txt" in done.stdout
    assert "[/b]" in done.stdout[done.stdout.index("It writes"):]


def test_the_table_shows_the_rank_that_holds_most():
    """Whole matrices on five ranks: rank 0 owns nothing."""
    done = ask(*TINY, "--ranks", "5", "--optimizer", "muon")
    assert re.search(r"rank [1-4] holds, bytes", done.stdout)
    assert "Ranks differ: at the peak the emptiest holds" in done.stdout


def test_fp8_is_an_experiment_that_says_so():
    done = ask(*TINY, "--compute", "fp8")
    assert "an experiment: bf16 with matrix products of fp8" in " ".join(done.stdout.split())
    data = [json.loads(ask(*TINY, "--compute", compute, "--json").stdout) for compute in ("fp8", "bf16")]
    assert data[0]["digest"] != data[1]["digest"]
