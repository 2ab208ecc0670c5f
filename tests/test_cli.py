"""The shell of all commands: its help, how commands fail, and that it looks right where nobody has colors.

What each command prints and refuses is in `course/test_commands.py`.
"""

import os
import re
import signal
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import zerosim
from tests.support import ask, command_line, fresh
from zerosim import cli

PLAIN = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
COMMAND = [sys.executable, "-m", "zerosim"]
QUICK = [*COMMAND, "cost", "--nbytes", "14e9", "--ranks", "8", "--link", "nvlink4"]
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


# -- help and version -------------------------------------------------------------------------------------------------


def test_help_groups_all_commands_in_the_order_in_which_one_needs_them_each_with_an_example_that_can_be_typed():
    text, commands = ask().output, typer.main.get_command(cli.app).commands  # they keep what they parse
    assert text.rstrip() == ask("--help").output.rstrip()
    assert [name for names in cli.shell.GROUPS.values() for name in names] == command_line().list_commands(None)
    assert set(command_line().list_commands(None)) == set(commands)
    headed = re.findall(r"^(\S.*)\n(?=\S+ +\S.*\n)", text, re.M)
    assert [group for group in cli.shell.GROUPS if group not in headed] == []
    for name, command in commands.items():
        example = command.epilog.removeprefix(cli.shell.EXAMPLE)
        assert f"$ {example}\n" in re.sub(" +\n", "\n", text), name
        _, _, words = example.rpartition(f"zerosim {name}")
        command.make_context(name, words.split())  # raises where an option is gone


@pytest.mark.parametrize(("name", "in_python"), [("plan", zerosim.plan), ("tune", zerosim.tune)])
def test_what_is_typed_is_an_option_of_the_same_name_in_python(name, in_python):
    taken, own = {*signature(in_python).parameters}, {"ds_config", "explain", "measure", "json", "compare"}
    for option in command_line().commands[name].params:
        words = {flag.removeprefix("--").replace("-", "_") for flag in option.opts} - own
        assert {word if word in taken else f"{word}_nbytes" for word in words} <= taken, option.name


def test_help_of_a_command_has_its_example_and_a_short_name():
    assert "For example: zerosim lost-updates --format bf16" in ask("lost-updates", "--help").output
    assert ask("lost-updates", "-h").output == ask("lost-updates", "--help").output
    for more in ([], ["plan"]):  # a command behind it does not run
        done = ask("--version", *more)
        assert (done.exit_code, done.output) == (0, f"zerosim {zerosim.__version__}\n")


def test_help_imports_no_lesson_and_draws_nothing():
    program = ("import sys\nfrom typer.testing import CliRunner\nfrom zerosim import cli\n"
               "assert CliRunner().invoke(cli.app, ['--help']).exit_code == 0\n"
               "print(*sorted(name for name in sys.modules if name.startswith(('zerosim.course', 'matplotlib'))))")
    assert fresh("-c", program).split() == []


def test_the_console_script_is_the_same_command_and_ends_with_the_exit_code_of_wrong_input():
    script = Path(sys.executable).with_name("zerosim")
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    done = subprocess.run([script, *QUICK[3:], "--ranks", "0"], capture_output=True, text=True, env=PLAIN)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "zerosim cost: --ranks must be at least 1, got 0\n"


# -- the terminal -----------------------------------------------------------------------------------------------------


def test_a_pipe_gets_80_columns_no_color_and_question_marks_where_its_encoding_has_no_greek():
    done = subprocess.run(QUICK, capture_output=True, env={**PLAIN, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    text = done.stdout.decode("ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "That wall is N???? of nvlink4" in text


def test_a_terminal_that_says_it_has_no_width_gets_40_columns():
    for columns in (0, 1):
        lines = ask("cost", *QUICK[4:], columns=columns).stdout.splitlines()
        assert 30 <= max(map(len, lines)) <= 40


# -- mistakes, and the ends of streams and processes ------------------------------------------------------------------


@pytest.mark.parametrize(("error", "exit_code", "said"), [
    (zerosim.OutOfMemoryError("rank 0 asked for 8 bytes;\n  it holds 96\n  of 100"), 2,
     "zerosim fail: rank 0 asked for 8 bytes; it holds 96; of 100\n"),
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


@pytest.mark.parametrize(("typed", "said"), [
    ("train --ranks two", "zerosim train: --ranks takes a whole number, found 'two'; zerosim train --help"),
    ("train --lr=fast", "zerosim train: --lr takes a number, found 'fast'; "),
    ("train --stage 4", "zerosim train: --stage takes at most 3, found '4'; "),
    ("bench --rounds 0", "zerosim bench: --rounds takes at least 1, found '0'; "),
    ("train --rank 3", "zerosim train: No such option: --rank"),
    ("cost", "zerosim cost: Missing option '--nbytes', n, "),
    ("tune --model gpt2", "Missing option '--global-batch', G, the sequences of a step on all ranks together; zerosim"),
    ("trian", "zerosim: No such command 'trian'. Did you mean 'train'?"),
    ("plan gpt2 more", "zerosim plan: Got unexpected extra argument(s) (gpt2 more); if that is a model, write --model "
                       "gpt2; zerosim plan --help"),
    ("plan --model gpt2 gpt2", "zerosim plan: Got unexpected extra argument(s) (gpt2); zerosim plan --help"),
    ("links gpt2", "zerosim links: Got unexpected extra argument(s) (gpt2); zerosim links --help"),
    ("cost --nbytes", "zerosim cost: Option '--nbytes' requires an argument; zerosim cost --help")])
def test_what_cannot_be_parsed_is_one_line_of_our_own_and_exit_code_2(typed, said):
    done = ask(*typed.split())
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
    assert "--help lists what there is\n" in done.stderr


@pytest.mark.parametrize(("typed", "said"), [
    ("plan --model gpt2 --ranks 64", "say over how many nodes, as --nodes 8, or --nodes 1 where one link joins"),
    ("plan --model gpt2 --price 2", "--price 2 is of a whole training, and no tokens were asked for; say how many"),
    ("plan --model gpt2 --runtime zerosim --compiled", "--compiled is of fsdp2 and deepspeed, and this is a plan of"),
    ("plan --model gpt2 --no-overlap", "reductions always run beside backward in PyTorch; leave --overlap as"),
    ("plan --model gpt2 --offload optimizer=host", "--offload optimizer=host was asked for at stage 3: CPUOffload"),
    ("plan --model gpt2 --host-capacity 1GB", "--host-capacity 1000000000 is of offload to host, and nothing is place"),
    ("plan --model gpt2 --loss-chunks 0", "--loss-chunks must be at least 1, got 0"),
    ("plan --model gpt2 --lora 0", "--lora must be at least 1, got 0"),
    ("plan --model gpt2 --stage 4", "--stage 4: ZeRO has the stages 0, 1, 2, 3, found 4"),
    ("plan --model gpt2 --between foo --nodes 2", "--between foo: no link is called 'foo'; there are nvlink2"),
    ("plan --model gpt2 --ranks 9000", "--ranks 9000: 9,000 ranks were asked for; every rank's share is looked at, so"),
    ("plan --model gpt2 --mesh abc", "--mesh abc must be nodes and ranks of a node, as \"2x4\""),
    ("plan --lora 8 --model gpt2 --train-only head", "--lora or --weights were asked for too; leave it or them out"),
    ("tune --model gpt2 --global-batch 12", "--global-batch 12 cannot be shared equally by 8 ranks"),
    ("tune --model gpt2 --global-batch 64 --offload x", "kinds one by one of optimizer, gradients, parameters, as 'op"),
    ("cost --nbytes 9 --ranks 8 --link nvlink4 --itemsize 2", "take 8, or --itemsize 1"),
    ("train --sample -1", "--sample -1 must be a whole number, 0 or more"),
    ("train --capacity xx", "--capacity xx is no number; write it as 14GB"),
    ("compare --values 7", "--values 7: a comparison over stage takes two or more that differ, as in 0,1,2,3"),
    ("replay --weights 1,2", "four weights w1, w2, w3, w4, found 2: 1, 2\n")])
def test_an_error_speaks_of_options_as_they_are_typed_and_not_of_arguments_of_python(typed, said):
    """The sentence is the library's own; the shell alone puts options in the place of arguments."""
    command, *words = typed.split()
    done = ask(command, *words)
    assert done.exit_code == 2
    assert said in done.stderr
    own = {option.name for option in command_line().commands[command].params if option.opts[0].startswith("--")}
    assert not re.search(rf"(?<![-'+ ])\b({'|'.join(own)})=|\bNone\b|\bzs\.", done.stderr)
    assert not [name for name in own if "_" in name and name in done.stderr]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT that can be sent to one process")
def test_ctrl_c_ends_a_long_run_quietly_with_130():
    process = subprocess.Popen([sys.executable, "-c", SAYS_WHEN_IT_RUNS, "lost-updates", "--steps", "100000000"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=PLAIN)
    assert process.stdout.readline() == b"it runs\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=MINUTES)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes that break with EPIPE")
def test_a_reader_that_goes_away_leaves_no_traceback():
    process = subprocess.Popen(QUICK, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=PLAIN)
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=MINUTES)) == (b"", 1)
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
@pytest.mark.parametrize(("words", "output", "exit_code", "said"), [
    *((words, "/dev/full", 1, r"zerosim: what it has to say cannot be written: .*\n")
      for words in (QUICK, [*COMMAND, "--version"])),
    (QUICK, "&-", 0, "")])
def test_a_full_disk_is_one_line_and_exit_code_1_and_a_closed_output_is_nothing(words, output, exit_code, said):
    done = subprocess.run(["sh", "-c", f'"$@" >{output}', "sh", *words], stderr=subprocess.PIPE, text=True, env=PLAIN)
    assert done.returncode == exit_code
    assert re.fullmatch(said, done.stderr)
