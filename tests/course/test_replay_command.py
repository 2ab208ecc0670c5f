"""``zerosim replay`` as one types it."""

import json

import pytest
from typer.testing import CliRunner

from zerosim.cli import app


def ask(*arguments):
    """What the command prints, and how it ends."""
    return CliRunner().invoke(app, ["replay", *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


def stages(*arguments):
    """The stages of the JSON."""
    done = ask("--json", *arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["stages"]


def test_without_options_it_tells_all_four_stages_and_that_they_agree():
    done = ask()
    assert done.exit_code == 0
    assert all(f"stage {stage}: parameters" in done.stdout for stage in range(4))
    assert "are the same in every stage, bit for bit" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_json_of_all_stages_has_the_published_numbers():
    found = stages()
    assert list(found) == ["0", "1", "2", "3"]
    for stage in found.values():
        assert stage["master"] == [2.1, -2.9, 1.1, 0.6]
        assert stage["compute"] == ["2.099609375", "-2.900390625", "1.099609375", "0.60009765625"]
        assert stage["v"] == [0.030250002, 0.0075625004, 0.0075625004, 0.025]
    assert [found[stage]["sent_nbytes"] for stage in "0123"] == [[8, 8], [8, 8], [8, 8], [16, 12]]


@pytest.mark.parametrize("change", [
    ["--weights", "1,1,1,1"], ["--data", "1,1:2; 2,2:9"], ["--lr", "0.01"], ["--ranks", "3"], ["--compute", "bf16"],
    ["--recompute", "none"], ["--layout", "per_unit"]], ids=" ".join)
def test_every_option_changes_what_comes_out(change):
    assert stages("--stage", "3", *change) != stages("--stage", "3")


def test_hops_add_the_messages():
    assert "hop 0, 0 → 1" in ask("--stage", "1", "--hops").stdout
    assert "hop 0" not in ask("--stage", "1").stdout


def test_as_many_samples_as_given_make_as_many_ranks():
    assert len(stages("--stage", "2", "--data", "1,3:5; 2,1:7; 0,1:2")["2"]["losses"]) == 3


def test_what_is_no_finite_number_is_a_text_in_the_json():
    found = stages("--stage", "2", "--data", "300,0:-60000; 2,1:7")["2"]  # w3's gradient, 60600 · 600, leaves fp16
    assert "inf" in found["local_gradients"][0]
    assert "inf" in found["reduced_gradients"]
    assert found["master"] == [2.0, -3.0, 1.0, 0.5]  # the step was skipped


@pytest.mark.parametrize(("arguments", "text"), [
    (["--stage", "4"], "choose one of 0, 1, 2, 3, or all"), (["--weights", "1,2"], "four weights"),
    (["--weights", "a,b,c,d"], "numbers separated by commas"), (["--data", "1,2"], "a sample is x1,x2:t"),
    (["--ranks", "0"], "at least one rank"), (["--ranks", "3", "--data", "1,2:3"], "1 samples for 3 ranks"),
    (["--compute", "fp61"], "fp16"), (["--layout", "units"], "choose one of per_unit, contiguous"),
    (["--recompute", "some"], "segment(k)"), (["--lr", "-1"], "lr")], ids=str)
def test_wrong_options_are_one_line_and_exit_code_2(arguments, text):
    done = ask(*arguments)
    assert done.exit_code == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
