"""The command line: what each switch changes, how it fails, and that it looks right where nobody has colors."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import zerosim
from zerosim import cli

PLAIN = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
FEW = ["lost-updates", "--steps", "3"]
COMMAND = [sys.executable, "-m", "zerosim"]
MINUTES = 600  # seconds after which a process is taken to hang, on a busy machine too
# The command line, which says on standard output when the lesson has begun. A shell's background ignores Ctrl-C.
SAYS_WHEN_IT_RUNS = """
import signal
from zerosim import cli
from zerosim.course import lost_updates as lesson

def begun(question, answer=lesson.lost_updates):
    print("it runs", flush=True)
    return answer(question)

signal.signal(signal.SIGINT, signal.default_int_handler)
lesson.lost_updates = begun
cli.main()
"""


def run(*arguments, **environment):
    return CliRunner().invoke(cli.app, list(arguments), env={**PLAIN, **environment})


def fresh(*arguments, **environment):
    """The command in a process of its own, its output in pipes."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, env={**os.environ, **PLAIN, **environment})


# --- help and version ---------------------------------------------------------------------------------------


def test_help_lists_the_commands_and_explains_every_switch_of_each():
    for arguments, words in (((), ("lost-updates", "doctor")),
                             (("lost-updates", "--help"), ("--format", "--weight", "--update", "--steps", "--json"))):
        text = run(*arguments).output
        assert [word for word in words if word not in text] == []
    assert run("lost-updates", "-h").output == text


def test_help_imports_no_lesson_and_draws_nothing():
    program = ("import sys\nfrom typer.testing import CliRunner\nfrom zerosim import cli\n"
               "assert CliRunner().invoke(cli.app, ['--help']).exit_code == 0\n"
               "print(*sorted(name for name in sys.modules if name.startswith(('zerosim.course', 'matplotlib'))))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_version_is_the_packages():
    assert run("--version").output == f"zerosim {zerosim.__version__}\n"


@pytest.fixture(scope="module")
def data():
    return json.loads(run(*FEW, "--json").stdout)


# --- lost-updates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", [("--format", "bf16"), ("--weight", "0.1"), ("--update", "-3e-4"), ("--steps", "4")],
                         ids=str)  # fmt: skip
def test_every_switch_changes_the_data(switch, data):
    changed = json.loads(run(*FEW, "--json", *switch).stdout)
    assert changed.keys() == data.keys()
    assert changed["question"] != data["question"]
    assert changed | {"question": data["question"]} != data


def test_text_is_printed_unless_json_is_asked_for(data):
    assert run(*FEW).stdout.startswith("Lost updates: a small number")
    assert data["question"]["steps"] == 3


def test_a_pipe_gets_80_columns_and_no_color():
    done = fresh(*FEW)
    text = done.stdout.decode()
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert done.stderr == b""


def test_an_encoding_without_greek_letters_gets_question_marks_and_no_traceback():
    done = fresh(*FEW, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"w + ?" in done.stdout


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("switch", "said"), [
    (("--format", "fp61"), "no number format is named 'fp61'; there are fp16, fp32, bf16, fp8_e4m3, fp8_e5m2"),
    (("--weight", "1e6"), "fp16 has no number as large as the weight 1e+06: its largest is 65504"),
    (("--update", "0"), "a finite number other than 0, found 0.0"), (("--steps", "0"), "at least once, found steps=0")])
def test_values_that_cannot_be_are_one_line_on_standard_error(switch, said):
    done = run(*FEW, *switch)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("zerosim lost-updates: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_process_ends_with_the_exit_code_of_wrong_input():
    done = fresh(*FEW, "--steps", "0")
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)


def test_a_switch_that_does_not_parse_is_explained_and_exits_with_2():
    result = run("lost-updates", "--steps", "many")
    assert result.exit_code == 2
    assert "--steps" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("error", "exit_code", "said"), [
    (zerosim.OutOfMemoryError("rank 0 asked for 8 bytes;\n  it holds 96"), 2,
     "zerosim fail: rank 0 asked for 8 bytes; it holds 96\n"),
    (KeyboardInterrupt(), 130, ""), (ZeroDivisionError("a bug"), 1, "")],  # of our own, and it keeps its traceback
    ids=["out of memory", "ctrl-c", "a bug"])
def test_an_error_in_a_command_is_one_line_unless_it_is_our_own(monkeypatch, error, exit_code, said):
    app = typer.Typer()
    monkeypatch.setattr(cli.shell, "app", app)

    @cli.command("fail")
    def fail() -> None:
        raise error

    result = CliRunner().invoke(app, [])
    assert (result.exit_code, result.output) == (exit_code, said)
    assert (result.exception is error) == (exit_code == 1)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT that can be sent to one process")
def test_ctrl_c_ends_a_long_run_quietly_with_130():
    process = subprocess.Popen([sys.executable, "-c", SAYS_WHEN_IT_RUNS, "lost-updates", "--steps", "100000000"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **PLAIN})
    assert process.stdout.readline() == b"it runs\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=MINUTES)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes that break with EPIPE")
@pytest.mark.parametrize("switches", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_goes_away_leaves_no_traceback(switches):
    process = subprocess.Popen([*COMMAND, *FEW, *switches], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, **PLAIN})  # fmt: skip
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=MINUTES)) == (b"", 1)
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_a_full_disk_is_one_line_and_exit_code_1():
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, *FEW], stdout=full, stderr=subprocess.PIPE,
                              env={**os.environ, **PLAIN})
    said = done.stderr.decode()
    assert (done.returncode, said.count("\n")) == (1, 1)
    assert said.startswith("zerosim lost-updates: what it has to say cannot be written: ")


@pytest.mark.skipif(os.name == "nt", reason="a shell closes standard output here with >&-")
def test_a_closed_standard_output_leaves_no_traceback():
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *COMMAND, *FEW], capture_output=True,
                          env={**os.environ, **PLAIN})
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("columns", ["0", "1"])
def test_a_terminal_that_says_it_has_no_width_gets_40_columns(columns):
    lines = run(*FEW, COLUMNS=columns).stdout.splitlines()
    assert 30 <= max(map(len, lines)) <= 40


def test_the_console_script_is_the_same_command():
    script = Path(sys.executable).with_name("zerosim")
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"zerosim \d+\.\d+\.\d+\s", done.stdout)
