"""What is read may be anything: an error says so by the file's name, and nothing is run, written, or left half-read."""

import os
import random
import shutil
import sys
import threading
import warnings
from collections import Counter
from contextlib import suppress

import pytest

from tests.hostile.readers import ANSWER, READERS, SHARD, edited
from tests.hostile.spoiling import DEEP, Raises, put
from tests.support import ask, assert_command_refuses
from zerosim.ranks import process
from zerosim.zero import CheckpointError

FORBIDDEN = {"pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.remove",
             "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "shutil.rmtree"}


@process.guarded  # for all tests after these it is called inside a cluster's bookkeeping too, where Ctrl-C waits
class Watch:
    """What Python's own audit hears of this thread in a ``with`` block: files opened for writing, programs, pickles.

    A module that is imported for the first time may be written as bytecode; what other tests have left running opens
    files in threads of its own.
    """

    def __init__(self):
        self.seen, self.thread = None, threading.get_ident()
        sys.addaudithook(self.hear)  # nothing takes it away again

    def hear(self, event, given):
        if self.seen is None or threading.get_ident() != self.thread:
            return
        opens = event == "open" and not isinstance(given[0], int)  # what has a number has been opened before
        writes = opens and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in FORBIDDEN or (writes and given[0] != os.devnull)) and ".pyc" not in str(given[:1]):
            self.seen.append((event, given[:2]))

    def __enter__(self):
        self.seen = []
        return self.seen

    def __exit__(self, *_):
        self.seen = None


@pytest.fixture(scope="module")
def watch():
    return Watch()


@pytest.fixture
def opened(tmp_path):
    """A function that makes a folder of a reader's good files."""
    def fill(reader):
        folder = tmp_path / "hostile"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in reader.files().items():
            (folder / name).write_bytes(content)
        return folder
    return fill


def read(reader, folder, said, watch):
    """How the reading ended; fails where that is no way to end."""
    found = None
    with watch as seen, warnings.catch_warnings(action="ignore"):
        try:
            reader.read(folder)
        except Exception as error:
            found = error
    assert seen == [], said
    if found is not None:
        assert type(found) in (ValueError, CheckpointError), f"{said}: {found!r}"
        assert "hostile" in str(found), f"{said}: {found} names no file"
    return "read" if found is None else "refused"


def asked(reader, folder, said):
    """How the command ended: with what it prints, or in one line that says why not."""
    command = reader.command(folder)
    done = ask(*command)
    assert done.exit_code in (0, *reader.codes), (said, done.output)
    if done.exit_code == 2:
        assert done.stderr.startswith(f"zerosim {command[0]}: "), (said, done.stderr)
        assert done.stderr.count("\n") == 1, (said, done.stderr)
    return {0: "read", 2: "refused"}.get(done.exit_code, "no answer")


def tried(reader, opened, watch, times, by_command):
    """Counts of ends, of so many bad inputs in Python and so many of them by the command too."""
    ends, folder = Counter(), opened(reader)
    place = folder / reader.spoiled
    assert read(reader, folder, "the good files", watch) == "read"
    for number in range(times):
        what = put(reader.files()[reader.spoiled], reader.structure, place, random.Random(f"{reader.name} {number}"))
        reader.mend(folder)
        before = {file.name: os.lstat(file) for file in folder.iterdir()}
        said = f"{reader.name}, input {number}: {what}"
        if reader.read is not id:
            ends[read(reader, folder, said, watch)] += 1
        if number < by_command:
            ends[f"{asked(reader, folder, said)} by the command"] += 1
        assert {file.name: os.lstat(file) for file in folder.iterdir()}.keys() == before.keys(), said
        opened(reader)
    return ends


@pytest.mark.parametrize("times", [30, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_bad_inputs_are_refused_by_the_name_of_the_file(name, times, opened, watch, record_property):
    reader = READERS[name]
    by_command = {30: (1, 0), 1000: (100, 20)}[times][reader.seconds]
    ends = tried(reader, opened, watch, times, by_command)
    assert ends["refused"] > times / 3 or reader.read is id
    for end, count in ends.items():
        record_property(f"bad inputs {end}", count)


@pytest.mark.parametrize(("name", "bad", "words"), [
    # Each was a traceback once: the smallest input that showed it.
    ("configuration of DeepSpeed", b'{"a":' * DEEP, "is no JSON file of a configuration: it is nested more than 100"),
    ("configuration of a GPT-2", b'{"n_embd": ' + b"[" * 980 + b"]" * 980 + b"}", "it is nested more than 100 levels"),
    ("recording", b'{"format": 1, "format": 2}', "the key 'format' stands there twice"),
    ("index of a checkpoint", b'{"sha256": "", "sha256": "", "checkpoint": {}}', "'sha256' stands there twice"),
    *(("index of a checkpoint", edited(place, value), words) for place, value, words in [
        (("files", 0, "name"), f"../hostile/{SHARD}", f"the file '../hostile/{SHARD}' is no shard of this folder"),
        (("steps_taken",), -1, "checkpoint.steps_taken is -1, and is to be a count"),
        (("counts",), [], "there are 2 files, and counts of 0 ranks"),
        (("parameters",), [], "checkpoint.parameters is [], and is to be a dict"),
        (("parameters", "layer0.bias"), {}, "checkpoint.parameters.layer0.bias lacks optimizer, shape, slots"),
        (("settings",), None, "checkpoint.settings is None, and is to be a dict"),
        (("loss_scale", "state"), {}, "index.json: a loss scaler of the kind 'static' goes on from scale"),
        (("counts", 0, "exit"), 1, "checkpoint.counts[0] should not have exit"),
        (("tensors", "master/layer0.bias", "dtype"), "F3", "the tensor master/layer0.bias is of the type 'F3', and th"),
        (("tensors", "master/layer0.bias", "pieces", 0, "file"), 9, "has elements in file 9, of 2"),
        (("tensors", "master/layer0.bias", "pieces", 0, "count"), 99, "has not the 99 elements of the tensor")]),
])
def test_what_was_a_traceback_is_an_error_that_says_what_is_wrong(name, bad, words, opened):
    reader = READERS[name]
    folder = opened(reader)
    (folder / reader.spoiled).write_bytes(bad(reader.files()[reader.spoiled]) if callable(bad) else bad)
    reader.mend(folder)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the words are compared below
        reader.read(folder)
    assert words in str(caught.value)


def test_a_forged_shape_asks_for_no_memory(opened):
    reader = READERS["index of a checkpoint"]
    folder, name = opened(reader), "master/layer0.weight"
    for place, value in ((("parameters", "layer0.weight", "shape"), [10**9] * 2),
                         (("tensors", name, "shape"), [10**9] * 2), (("tensors", name, "pieces", 1, "count"), 10**18)):
        content = (folder / reader.spoiled).read_bytes()
        (folder / reader.spoiled).write_bytes(edited(place, value)(content))
    reader.mend(folder)
    assert_command_refuses("000 elements of the tensor", *reader.command(folder))


@pytest.mark.parametrize(("text", "words"), [
    ("a." * DEEP + "a", "recursion"), ("-" * DEEP + "1", "nested too deep for Python"), ("\0", "line 1 is not Python")])
def test_a_file_that_python_cannot_read_is_not_graded(text, words, tmp_path):
    (tmp_path / "answers.py").write_text(text)
    assert_command_refuses(words, "puzzles", "--grade", f"{tmp_path / 'answers.py'}")


def test_an_answer_that_ends_its_process_by_any_exception_is_refused_and_no_traceback_is_printed(tmp_path, capfd):
    (tmp_path / "own.py").write_text(f"class Own(BaseException):\n    pass\n{ANSWER.decode()}raise Own\n")
    with suppress(SystemExit):
        done = ask("puzzles", "mean", "--check", f"{tmp_path / 'own.py'}:mean")
    assert "It was ended by Own; let the function return." in done.stdout
    assert "Traceback" not in capfd.readouterr().err


def test_the_watch_hears_what_must_not_be_done(tmp_path, watch):
    import pickle
    with watch as seen:
        (tmp_path / "x").write_text("x")
        pickle.loads(pickle.dumps(Raises()))
    assert {event for event, _ in seen} == {"open", "pickle.find_class", "subprocess.Popen"}
