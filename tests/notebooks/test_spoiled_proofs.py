"""Every notebook's proof refuses planted mistakes: the text is changed in one place, and the last cell must notice."""

import re
from dataclasses import dataclass
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import zerosim as zs
from tests.architecture.source import ROOT
from tests.backends.worlds import mpi_missing
from tests.notebooks.cells import cells, changed, executed, needed_by_proof

TEXTS = {text.name[:2]: text for text in sorted((ROOT / "notebooks").glob("[0-9]*.py"))}


@dataclass(frozen=True)
class Mistake:
    """A mistake planted in a notebook, what it is, and the error in which the proof must end.

    An AssertionError must be the proof's own; another error comes from the package and has ``words`` in it.
    """

    notebook: str
    name: str
    changes: tuple[tuple[str, str], ...]
    error: type[Exception] = AssertionError
    words: str = ""


def planted(notebook: str, name: str, *changes: tuple[str, str], **error: Any) -> Mistake:
    return Mistake(notebook, name, changes, **error)


MISTAKES = [
    planted("01", "no mean", ("/ 2  # the sum", "# the sum")),
    planted("01", "an fp32 factor", ("(1 - 0.999) *", "(1 - np.float32(0.999)) *")),
    planted("01", "another rate", ("LEARNING_RATE * (m", "0.10001 * (m")),

    planted("02", "ties to odd", ("(kept % 2 == 1)", "(kept % 2 == 0)")),
    planted("02", "ties away from 0", ("(rest > half)", "(rest >= half)")),
    planted("02", "no subnormal numbers", (" + np.maximum(0, fmt.min_exponent - exponent)", "")),
    planted("02", "no overflow", ("rounded > fmt.largest, np.inf, rounded", "False, 0, rounded")),
    planted("02", "no mean", ("(total / np.float32(rank.size))", "total")),
    planted("02", "a master after all", ("            master = round_by_hand(master, name)\n        losses",
                                         "            pass\n        losses")),

    planted("03", "shrinks too far", ("scale, good = scale / 2, 0", "scale, good = scale / 4, 0")),
    planted("03", "grows too late", ("if good == WINDOW:", "if good == WINDOW + 1:")),
    planted("03", "counts skipped steps", ("taken, good = taken + 1, good + 1", "taken, good = step + 1, good + 1")),
    planted("03", "not divided by S", ("np.float32(scale * rank.size)", "np.float32(rank.size)")),
    planted("03", "no mean", ("np.float32(scale * rank.size)", "np.float32(scale)")),

    planted("04", "a reduction is forgotten", ("reduce_scatter_by_hand(rank, x), len(x))",
                                               "chunks_of(x, rank.size)[rank.index], len(x))")),
    planted("04", "the ranks' order of additions", (
        "    return all_gather_by_hand(rank, reduce_scatter_by_hand(rank, x), len(x))",
        "    return sum(rank.all_gather(x, length=rank.size * len(x)).reshape(rank.size, -1))")),
    planted("04", "the last step of the all-gather is left out", (
        "in range(rank.size - 1):\n        rank.exchange", "in range(rank.size - 2):\n        rank.exchange")),
    planted("04", "chunks rounded down", ("-(-len(x) // ranks)", "len(x) // ranks")),
    planted("04", "the other way round", ("(partial, right, arrived, left)", "(partial, left, arrived, right)"),
            error=zs.MismatchError, words="rank 1 sends ((1,), float32) to rank 0, which expects ((0,), float32)"),

    planted("05", "times the reciprocal", ("total / np.float32(rank.size)", "total * np.float32(1 / rank.size)")),
    planted("05", "no mean", ("average=True):", "average=False):")),
    planted("05", "the ranks' order of additions", ("for name in unit.names]))",
                                                    'for name in unit.names]), algorithm="naive")')),

    planted("06", "the last all-gather is left out", (
        'rank.all_gather(mine, out=vector[where], purpose="parameters")', "pass")),
    planted("06", "another's weights", ("rank.size)[rank.index][...]", "rank.size)[rank.index - 1][...]")),
    planted("06", "an all-reduce, and then a slice", (
        'rank.reduce_scatter(gradient[where], purpose="gradients")',
        'np.split(rank.all_reduce(gradient[where], purpose="gradients"), rank.size)[rank.index]')),
    planted("06", "a master that is not in the rank's memory", ('hold(shard, np.float32, "master")',
                                                         "np.empty(shard, np.float32)")),

    planted("07", "the whole gradient stays", ("del whole[unit.name], _, mine", "del _, mine")),
    planted("07", "not divided by k", ("np.float32(rank.size * k)", "np.float32(rank.size)")),
    planted("07", "the last micro-batch alone", ("owned += mine", "owned[...] = mine")),

    planted("08", "gathered weights stay", ("self.rank.memory.free(whole)", "pass")),
    planted("08", "whole gradients stay", ("        del places[unit]", "        pass")),
    planted("08", "a reduction is forgotten", (
        'self.rank.reduce_scatter(whole, out=self.gradient[self.owned(unit)], purpose="gradients")',
        "self.gradient[self.owned(unit)] = np.split(whole, self.rank.size)[self.rank.index]")),
    planted("08", "one gather too many", ("for unit in segment[:-1]:", "for unit in segment:"),
            ("unit.forward(ctx, w, x)[1] if unit is segment[-1] else kept.pop()", "kept.pop()")),

    planted("09", "two buffers on one rank too", ("ring = min(2, ranks - 1) * 2", "ring = 2 * 2")),
    planted("09", "a freed input is counted", ("(LAYERS - 2) * row", "(LAYERS - 1) * row")),
    planted("09", "gathered weights shrink", ('"gathered_parameter": 2 * u *',
                                              '"gathered_parameter": 2 * u // ranks *')),

    planted("10", "what the first forward kept stays", ("        del kept\n    kept_by_loss", "    kept_by_loss")),
    planted("10", "a reduction is forgotten", ("rank.all_reduce(gradient[lies])", "gradient[lies]")),
    planted("10", "one reduction for all units", (
        "    for lies in layout.units.values():\n        gradient[lies] = rank.all_reduce(gradient[lies])",
        "    gradient[...] = rank.all_reduce(gradient)")),

    planted("11", "half a ring", ("return 2 * (ranks - 1) *", "return (ranks - 1) *")),
    planted("11", "waits at once", ("under_way += [found] if overlap else []", "found.wait() if overlap else None")),
    planted("11", "a gradient stays after its reduction", ("whole.pop(unit.name)", "whole[unit.name]")),

    planted("12", "the norms of pieces", ("train_by_hand(rank, together=True)", "train_by_hand(rank, together=False)")),
    planted("12", "squares in fp32", (".astype(np.float64)**2", "**2")),
    planted("12", "an all-reduce, and then a slice", (
        'self.rank.reduce_scatter(gradient[where], purpose="gradients")',
        'np.split(self.rank.all_reduce(gradient[where], purpose="gradients"), self.rank.size)[self.rank.index]')),

    planted("13", "no padding", ("-(-length // ranks) * ranks for", "length for")),
    planted("13", "stage 2 without a master", ("(2, 14)", "(2, 10)")),
    planted("13", "a lever that changes bits", ('"recompute": "block"}):\n            for',
                                                '"recompute": "block+tiled"}):\n            for')),

    planted("14", "no mean", ("g / np.float32(rank.size)", "g")),
    planted("14", "another's slice", ("(rank.all_reduce(gradient[where]), rank.size)[rank.index]",
                                      "(rank.all_reduce(gradient[where]), rank.size)[rank.index - 1]")),
    planted("14", "an all-reduce in both ways", (
        "rank.reduce_scatter(gradient[where])",
        "np.split(rank.all_reduce(gradient[where]), rank.size)[rank.index]")),

    planted("15", "the last step is left out", ("in range(ranks - 1):\n        rank.exchange",
                                                "in range(ranks - 2):\n        rank.exchange")),
    planted("15", "the ring turned round", (
        "left, right = rank.size, (rank.index - 1) % rank.size, (rank.index + 1)",
        "left, right = rank.size, (rank.index + 1) % rank.size, (rank.index - 1)"),
        ("rank.index - 2 - step", "rank.index + 2 + step"),
        ("chunks[(rank.index - 1 - step) % ranks], right, arrived",
         "chunks[(rank.index + 1 + step) % ranks], right, arrived"),
        ("chunks[(rank.index - step) % ranks], right, chunks[(rank.index - 1 - step)",
         "chunks[(rank.index + step) % ranks], right, chunks[(rank.index + 1 + step)")),
    planted("15", "data without a seed, on processes", ("data = np.random.default_rng(rank.index)",
                                                        "data = np.random.default_rng()")),
]
FIRST = [next(mistake for mistake in MISTAKES if mistake.notebook == number) for number in TEXTS]


def each(mistake: Mistake):
    """A test's parameter: the first mistake of each notebook is always planted, the others when slow tests are run."""
    return pytest.param(mistake, id=f"{mistake.notebook}: {mistake.name}",
                        marks=() if mistake in FIRST else pytest.mark.slow)


def test_every_notebook_has_mistakes_planted_in_it():
    for number in TEXTS:
        assert len({mistake.name for mistake in MISTAKES if mistake.notebook == number}) >= 2, number
    assert {mistake.notebook for mistake in MISTAKES} == set(TEXTS)


@pytest.fixture
def namespace(mistake, monkeypatch):
    """Where a notebook's cells run: without processes, unless the mistake shows between processes only.

    A folder that the last cell would remove is removed.
    """
    if not mistake.name.endswith("on processes"):
        monkeypatch.setattr("zerosim.course.running.LAUNCHERS", ("no-such-launcher",))
    elif (reason := mpi_missing()) is not None:
        pytest.skip(f"MPI: {reason}")
    names: dict[str, Any] = {"__name__": "__main__"}
    yield names
    for value in names.values():
        if isinstance(value, TemporaryDirectory):
            value.cleanup()


def must_have_noticed(mistake: Mistake, caught: pytest.ExceptionInfo, proof: str) -> None:
    """An assertion of the cell of this name has failed, or the package has said what is wrong."""
    assert mistake.words in str(caught.value)
    if mistake.error is AssertionError:
        assert caught.traceback[-1].frame.code.raw.co_filename == proof


@pytest.mark.parametrize("mistake", [each(mistake) for mistake in MISTAKES])
def test_the_proof_refuses(mistake, namespace):
    needed, proof = needed_by_proof(changed(TEXTS[mistake.notebook], *mistake.changes))
    exec(compile(needed, "before the proof", "exec"), namespace)
    with pytest.raises(mistake.error) as caught:
        exec(compile(proof, "the proof", "exec"), namespace)
    must_have_noticed(mistake, caught, "the proof")


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [Mistake(number, "none", ()) for number in TEXTS], ids=TEXTS)
def test_with_the_cells_that_it_needs_the_proof_accepts_the_text_as_it_stands(mistake, namespace):
    needed, proof = needed_by_proof(changed(TEXTS[mistake.notebook]))
    for code in (compile(needed, "before the proof", "exec"), compile(proof, "the proof", "exec")):
        exec(code, namespace)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [each(mistake) for mistake in MISTAKES])
def test_no_cell_before_the_proof_notices(mistake, namespace):
    text = changed(TEXTS[mistake.notebook], *mistake.changes)
    run = executed(re.sub(r"^figures\..*$", "None", text, flags=re.M), namespace)
    before = sum(cell.kind == "code" for cell in cells(text)) - 1
    assert len(list(islice(run, before))) == before
    with pytest.raises(mistake.error) as caught:
        next(run)
    must_have_noticed(mistake, caught, f"cell {len(cells(text)) - 1}")
