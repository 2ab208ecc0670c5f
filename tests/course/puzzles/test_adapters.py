"""The grader of a course's three functions: right ones pass bit for bit, wrong ones are refused with the reason."""

import inspect

import pytest
from typer.testing import CliRunner

import zerosim as zs
from tests.architecture.source import ROOT
from zerosim.cli import app
from zerosim.course.puzzles import solutions
from zerosim.course.puzzles.adapters import GRADERS, grade_ddp, grade_fsdp

TEXT = inspect.getsource(solutions)
KEEPS_ALL = ("state = {name: new_state(rank, optimizer, own.stop - own.start) "
             "for name, own in self.own.items()}",
             "state = {name: new_state(rank, optimizer, len(w)) for name, w in self.parameters.items()}")
WITH_ALL = ("self.state[name], self.steps)\n            self.rank.all_gather(w[own]",
            "{k: v[own] for k, v in self.state[name].items()}, self.steps)\n"
            "            self.rank.all_gather(w[own]")
IN_A_BUCKET = ("        for gradient in gradients.values():\n"
               "            self.rank.all_reduce(gradient, out=gradient)\n",
               "        flat = np.concatenate([g.reshape(-1) for g in gradients.values()])\n"
               "        self.rank.all_reduce(flat, out=flat)\n        start = 0\n"
               "        for gradient in gradients.values():\n"
               "            gradient.reshape(-1)[...] = flat[start:start + gradient.size]\n"
               "            start += gradient.size\n")
WRONG = [
    ("get_ddp", [("            gradient /= self.rank.size\n", "")],
     "On N=2 in step 0 rank 0 has the sum over ranks, and not the mean: element [0, 0] of layer"),
    ("get_ddp", [
      ("self.rank.all_reduce(gradient, out=gradient)", "pass"),
      ("gradient /= self.rank.size", "pass")], "On N=2 in step 0 rank 0 has its own gradients; nothing was added: "),
    ("get_ddp", [("self.rank.all_reduce(gradient, out=gradient)", "pass")],
     "divided its own gradients; nothing was added: "),
    ("get_ddp", [("rank.broadcast(parameter, out=parameter)", "pass")],
     "On N=2 after get_ddp rank 1 did not take rank 0's first values: element [0, 0] of layer0.weight is "),
    ("get_ddp", [IN_A_BUCKET],
     "has the mean, added or rounded in another order; reduce each parameter by a ring of its own"),
    ("get_ddp", [
      ("            self.rank.all_reduce(gradient, out=gradient)\n            gradient /= self.rank.size",
       "            gradient /= self.rank.size\n            self.rank.all_reduce(gradient, out=gradient)")],
     "On N=3 in step 0 rank 0 has the mean, added or rounded in another order"),
    ("get_ddp", [("        return loss, gradients\n", "")],
     "forward_backward must return (loss, gradients), found NoneType"),
    ("get_ddp", [("        return loss, gradients\n", "        return loss * 2, gradients\n")], "has another loss: "),
    ("get_ddp", [("        return loss, gradients\n", "        return loss, list(gradients.values())\n")],
     "the mean gradients must be a dict of arrays by name, found list"),
    ("get_ddp", [("        return loss, gradients\n", "        return loss, {'w': 1}\n")],
     "must be by the names layer0.weight, "),
    ("get_ddp", [("return DataParallel(rank, module)", "DataParallel(rank, module)")],
     "On N=1 get_ddp returned NoneType, which has no method forward_backward."),
    ("get_ddp", [
      ("            self.rank.all_reduce(gradient, out=gradient)\n",
       "            if self.rank.index: self.rank.all_reduce(gradient, out=gradient)\n")],
     "On N=2 no rank can go on: "),
    ("get_sharded_optimizer", [KEEPS_ALL, WITH_ALL],
     "On N=2 rank 0 holds 1,712 bytes of optimizer state where 1,240 are enough: it keeps the state of what others "
     "update."),
    ("get_sharded_optimizer", [
      ("rank.memory.alloc(slot.shape, np.float32, \"optimizer_state\", name)",
       "np.empty(slot.shape, np.float32)")],
     "On N=1 the ledgers know of 0 bytes of optimizer state where the ranks together"),
    ("get_sharded_optimizer", [("            self.rank.all_gather(w[own], out=w, length=len(w))\n", "")],
     "parameters as they were before; what other ranks updated did not arrive: element ["),
    ("get_sharded_optimizer", [
      ("        \"\"\"One step, with mean gradients.\"\"\"\n        self.steps += 1",
       "        self.steps = 1")], "On N=1 after step 1 rank 0 has other parameters: "),
    ("get_sharded_optimizer", [("return ShardedOptimizer(rank, parameters, optimizer)", "return optimizer")],
     "get_sharded_optimizer returned Adam, which has no method step."),
    ("get_fsdp", [("            means[name] /= self.rank.size\n", "")],
     "rank 0 has parameters that are right but for their rounding; is the mean missing, which Adam hides, or do "
     "the additions"),
    ("get_fsdp", [
      ("            kept.append(keep)",
       "            kept.append(keep); leak.append(self.gathered(name))"),
      ("kept: list[Any] = []", "kept: list[Any] = []; leak = self.leak = []")],
     "On N=1 rank 0 holds 3,424 bytes after a step where 2,760 are enough: between steps only shards of weights "
     "and state may stay."),
    ("get_fsdp", [
      ("            kept.append(keep)",
       "            kept.append(keep); leak.append(self.gathered(name))"),
      ("kept: list[Any] = []", "kept: list[Any] = []; leak = []")],
     "On N=1 a rank holds 4,618 bytes at its fullest where 4,570 are enough: free each layer's weights and "
     "gradient as soon as they are used."),
    ("get_fsdp", [
      ("self.rank.reduce_scatter(gradient.reshape(-1))",
       "gradient.reshape(-1)[own_part(self.rank, gradient.size)].copy()")],
     "On N=2 after step 0 rank 0 has other parameters: "),
    ("get_fsdp", [("        return loss\n", "")], "in step 0 rank 0 has another loss: None where "),
    ("get_fsdp", [("self.shards[name][...] = whole[own]", "self.shards[name][...] = 0")],
     "On N=1 in step 0 rank 0 has another loss"),
    ("get_fsdp", [("length=shape[0] * shape[1])", "length=shape[0] * shape[1] + 1)")],
     "On N=1 rank 0 raised ValueError in line "),
]


def function(name, changes=()):
    """A function of the solutions, its text changed."""
    text = TEXT
    for old, new in changes:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    space = {"__name__": "answers"}
    exec(compile(text, "answers.py", "exec"), space)
    return space[name]


@pytest.mark.parametrize("name", list(GRADERS))
def test_a_right_function_equals_the_engine_on_every_world_and_meets_its_bytes(name):
    score = GRADERS[name](function(name))
    assert score.passed, score
    assert score.stars == "★★★", score
    assert [row.ranks for row in score.rows] == [1, 2, 3, 4, 5, 8]
    assert "Equal to the engine on N = 1, 2, 3, 4, 5, 8, bit for bit, in 3 steps." in repr(score)


@pytest.mark.parametrize(("name", "changes", "said"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_function_is_refused_with_the_reason(name, changes, said):
    score = GRADERS[name](function(name, changes))
    assert score.verdict == "refused", score
    assert said in score.sentence
    assert score.sentence.endswith(".")
    assert score.sentence.startswith("On N=")
    assert "\n" not in score.sentence


def test_a_function_with_a_hole_is_open_and_what_is_none_is_refused():
    score = grade_ddp(lambda rank, module: zs.puzzles.hole("wrap the module"))
    assert (score.verdict, score.sentence) == ("open", "A hole is open: wrap the module.")
    with pytest.raises(ValueError, match="get_fsdp must be a function, found 3; hand it over without calling it"):
        grade_fsdp(3)


def test_the_page_about_grading_runs_as_it_stands():
    page = (ROOT / "docs/puzzles_in_class.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    space = {}
    exec(compile("\n".join(blocks), "page.py", "exec"), space)
    assert space["score"].passed
    assert space["refused"].sentence in " ".join(page.split())


def ask(*arguments):
    return CliRunner().invoke(app, ["puzzles", *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_a_file_is_graded_from_the_command_line(tmp_path):
    file = tmp_path / "homework.py"
    file.write_text("from zerosim.course.puzzles.solutions import get_sharded_optimizer as theirs\n\n"
                    "get_sharded_optimizer = theirs\n\n\ndef get_ddp(rank, module):\n    return module\n")
    done = ask("--grade", str(file))
    assert done.exit_code == 1
    assert "get_ddp: not yet\n  On N=2 after get_ddp rank 1 did not take rank 0's first values" in done.stdout
    assert "get_sharded_optimizer: passed ★★★" in done.stdout
    assert '"grades": [' in ask("--grade", str(file), "--json").stdout


@pytest.mark.parametrize(("arguments", "said"), [
    (["--grade", "nowhere.py"], "no file 'nowhere.py' to grade"),
    (["ring", "--grade", "x.py"], "--grade takes a file and nothing else"),
    (["--grade", __file__], "defines none of get_ddp, get_sharded_optimizer, get_fsdp; write at least one")])
def test_a_file_that_cannot_be_graded_is_one_line_and_exit_code_2(arguments, said):
    done = ask(*arguments)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize("grade", GRADERS.values())
def test_a_function_that_exits_is_refused_and_ends_nothing(grade):
    def leaves(*given):
        raise SystemExit(0)

    assert grade(leaves).sentence.startswith("On N=1 rank 0 raised SystemExit in line ")


def test_an_imported_function_is_graded_and_no_python_is_one_line(tmp_path):
    file = tmp_path / "handed_in.py"
    file.write_text("from zerosim.course.puzzles.solutions import ShardedOptimizer as get_sharded_optimizer\n")
    done = ask("--grade", str(file))
    assert (done.exit_code, "get_sharded_optimizer: passed" in done.stdout) == (0, True), done.output
    file.write_text("def get_ddp(rank, module)\n    return module\n")
    done = ask("--grade", str(file))
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert "handed_in.py cannot be graded: line 1 is not Python: expected ':'" in done.output
    file.write_text("class get_ddp: pass\nraise RuntimeError('at import')\n")
    done = ask("--grade", str(file))
    assert (done.exit_code, "rank 0 raised RuntimeError in line 2 of <module>: at import." in done.stdout) == (1, True)
