"""The graders of a course's three functions: right ones pass bit for bit, and no cheat has values without messages."""

from typing import ClassVar

import numpy as np
import pytest

from tests.architecture.source import ROOT
from tests.course.puzzles.answers import function
from tests.support import ask, assert_refused
from zerosim.course import puzzles
from zerosim.course.puzzles import adapters, expected, solutions
from zerosim.optim import base


@pytest.mark.parametrize("name", adapters.GRADERS)
def test_a_right_function_equals_the_engine_on_every_world_and_meets_its_bytes(name):
    score = adapters.GRADERS[name](function(name))
    assert score.passed, score
    assert score.stars == "★★★", score
    assert [row.ranks for row in score.rows] == [1, 2, 3, 4, 5, 8]
    assert "Equal to the engine on N = 1, 2, 3, 4, 5, 8, bit for bit, in 3 steps." in repr(score)


def test_a_function_with_a_hole_is_open_and_what_exits_or_is_no_function_is_refused():
    score = adapters.grade_ddp(lambda rank, module: puzzles.hole("wrap the module"))
    assert (score.verdict, score.sentence) == ("open", "A hole is open: wrap the module.")
    assert_refused(lambda: adapters.grade_fsdp(3), "get_fsdp must be a function, found 3; hand it over without calling")

    def leaves(*given):
        raise SystemExit(0)

    for grade in adapters.GRADERS.values():
        assert grade(leaves).sentence.startswith("On N=1 rank 0 raised SystemExit in line ")


# -- who has the right values without the messages that bring them ----------------------------------------------------

def in_a_rings_order(arrays):
    """The mean of one tensor over ranks, as a ring adds it up."""
    flat, ranks = [one.reshape(-1) for one in arrays], len(arrays)
    total = expected.ring_sum(flat)
    total /= ranks
    return total.reshape(arrays[0].shape)


class SeeingDDP:
    """Reads what the others have in a dict that all ranks share."""

    shared: ClassVar = {}

    def __init__(self, rank, module):
        self.rank, self.module = rank, module
        self.shared[rank.index] = {name: w.copy() for name, w in module.parameters.items()}
        rank.barrier()
        for name, w in module.parameters.items():
            w[...] = self.shared[0][name]
        rank.barrier()

    def forward_backward(self, x, target):
        loss, own = self.module.forward_backward(x, target)
        self.shared[self.rank.index] = own
        self.rank.barrier()
        mean = {name: in_a_rings_order([self.shared[r][name] for r in range(self.rank.size)]) for name in own}
        self.rank.barrier()
        return loss, mean


class HalfSeeingDDP(SeeingDDP):
    """Begins like rank 0 by messages, and adds up without them."""

    def __init__(self, rank, module):
        self.rank, self.module = rank, module
        for parameter in module.parameters.values():
            rank.broadcast(parameter, out=parameter)


class ReplicatedOptimizer:
    """Updates everything on every rank, with states that no ledger knows; only a shard's worth is charged."""

    def __init__(self, rank, parameters, optimizer):
        self.rank, self.parameters, self.optimizer, self.steps = rank, parameters, optimizer, 0
        self.state = {name: {slot: np.zeros(w.size, np.float32) for slot in optimizer.slots((w.size,))}
                      for name, w in parameters.items()}
        length = sum(w.size for w in parameters.values())
        self.charged = rank.memory.alloc(2 * -(-length // rank.size), np.float32, "optimizer_state")

    def step(self, gradients):
        self.steps += 1
        for name, w in self.parameters.items():
            self.optimizer.update(base.UpdateContext(self.rank.kernels), w.reshape(-1), gradients[name].reshape(-1),
                                  self.state[name], self.steps)


class Hearsay:
    """A rank whose collectives read in a dict that all ranks share."""

    def __init__(self, rank, shared):
        self.rank, self.shared, self.calls = rank, shared, 0

    def __getattr__(self, name):
        return getattr(self.rank, name)

    def of_all(self, x):
        self.calls += 1
        self.shared[self.calls, self.rank.index] = x.copy()
        self.rank.barrier()
        return [self.shared[self.calls, r] for r in range(self.rank.size)]

    def reduce_scatter(self, x):
        return expected.ring_sum(self.of_all(x))[solutions.own_part(self.rank, len(x))].copy()

    def all_gather(self, x, length):
        return np.concatenate(self.of_all(x))[:length]


class SeeingFSDP(solutions.FSDP):
    """Shards, but passes arrays around without messages."""

    shared: ClassVar = {}

    def __init__(self, rank, module, optimizer):
        super().__init__(rank, module, optimizer)
        self.rank = Hearsay(rank, self.shared)


class Stepping(solutions.DataParallel):
    """Does the optimizer's work too."""

    def forward_backward(self, x, target):
        loss, mean = super().forward_backward(x, target)
        for name, w in self.module.parameters.items():
            w -= mean[name]
        return loss, mean


class Lazy(solutions.ShardedOptimizer):
    def step(self, gradients):
        pass


LENGTH = sum(adapters.LENGTHS)
MUST_COME = "have to travel: what one rank knows of another's data must come in a message, and be updated by its owner"


@pytest.mark.parametrize(("name", "answer", "said"), [
    ("get_ddp", SeeingDDP, f"On N=2 the ranks sent 0 bytes in all where {4 * 7 * LENGTH:,} {MUST_COME}"),
    ("get_ddp", HalfSeeingDDP,
     f"On N=2 the ranks sent {4 * LENGTH:,} bytes in all where {4 * 7 * LENGTH:,} {MUST_COME}"),
    ("get_sharded_optimizer", ReplicatedOptimizer,
     f"On N=2 the ranks sent 0 bytes in all where {4 * 3 * LENGTH:,} {MUST_COME}"),
    ("get_fsdp", SeeingFSDP, f"On N=2 the ranks sent 0 bytes in all where {4 * 5 * LENGTH:,} {MUST_COME}"),
    ("get_ddp", Stepping, "On N=1 forward_backward changed module.parameters; return the mean gradients, with which "
     "the grader makes the update."),
    ("get_sharded_optimizer", Lazy, "On N=1 after step 0 rank 0 has all parameters as they were before; nothing was "
     "updated: element [0, 0] of ")], ids=lambda value: getattr(value, "__name__", ""))
def test_who_has_the_right_values_without_their_messages_or_leaves_work_undone_is_refused(name, answer, said):
    score = adapters.GRADERS[name](answer)
    assert score.verdict == "refused", score
    assert score.sentence.startswith(said)


# -- files and the page about grading ---------------------------------------------------------------------------------


def test_the_page_about_grading_runs_as_it_stands():
    page = (ROOT / "docs/puzzles_in_class.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    space = {}
    exec(compile("\n".join(blocks), "page.py", "exec"), space)
    assert space["score"].passed
    assert space["refused"].sentence in " ".join(page.split())


@pytest.mark.parametrize(("text", "code", "said"), [
    ("from zerosim.course.puzzles.solutions import get_sharded_optimizer as theirs\n\n"
     "get_sharded_optimizer = theirs\n\n\ndef get_ddp(rank, module):\n    return module\n", 1,
     ["get_ddp: not yet\n  On N=2 after get_ddp rank 1 did not take rank 0's first values",
      "get_sharded_optimizer: passed ★★★"]),
    ("from zerosim.course.puzzles.solutions import ShardedOptimizer as get_sharded_optimizer\n", 0,
     ["get_sharded_optimizer: passed"]),
    ("def get_ddp(rank, module)\n    return module\n", 2,
     ["homework.py cannot be graded: line 1 is not Python: expected ':'"]),
    ("class get_ddp: pass\nraise RuntimeError('at import')\n", 1,
     ["rank 0 raised RuntimeError in line 2 of <module>: at import."]),
    ("", 2, ["defines none of get_ddp, get_sharded_optimizer, get_fsdp; write at least one"])])
def test_a_file_is_graded_from_the_command_line(text, code, said, tmp_path):
    file = tmp_path / "homework.py"
    file.write_text(text)
    done = ask("puzzles", "--grade", str(file))
    assert done.exit_code == code, done.output
    assert all(words in done.output for words in said), done.output
    if code < 2:
        assert '"grades": [' in ask("puzzles", "--grade", str(file), "--json").stdout


def test_what_cannot_be_graded_is_one_line_and_exit_code_2():
    for arguments, said in ((["--grade", "nowhere.py"], "no file 'nowhere.py' to grade"),
                            (["ring", "--grade", "x.py"], "--grade takes a file and nothing else")):
        done = ask("puzzles", *arguments)
        assert (done.exit_code, done.output.count("\n")) == (2, 1)
        assert said in done.output
