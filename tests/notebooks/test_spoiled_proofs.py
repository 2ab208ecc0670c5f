"""Every notebook's proof refuses planted mistakes: the text is changed in one place, and the last cell must notice."""

from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.architecture.source import ROOT
from tests.backends.worlds import mpi_missing
from tests.notebooks.cells import changed, needed_by_proof

TEXTS = {text.name[:2]: text for text in sorted((ROOT / "notebooks").glob("[0-9]*.py"))}
MISTAKES = {  # by notebook: what each is, and what it changes in the text
    "01": {
        "no mean": [("/ 2  # the sum", "# the sum")],
        "an fp32 factor": [("(1 - 0.999) *", "(1 - np.float32(0.999)) *")]},
    "02": {
        "ties to odd": [("(kept % 2 == 1)", "(kept % 2 == 0)")],
        "no subnormal numbers": [(" + np.maximum(0, fmt.min_exponent - exponent)", "")],
        "no overflow": [("rounded > fmt.largest, np.inf, rounded", "False, 0, rounded")],
        "a master after all": [("            master = round_by_hand(master, name)\n        losses",
                                "            pass\n        losses")]},
    "03": {
        "shrinks too far": [("scale, good = scale / 2, 0", "scale, good = scale / 4, 0")],
        "grows too late": [("if good == WINDOW:", "if good == WINDOW + 1:")],
        "not divided by S": [("np.float32(scale * rank.size)", "np.float32(rank.size)")]},
    "04": {
        "a reduction is forgotten": [("reduce_scatter_by_hand(rank, x), len(x))",
                                      "chunks_of(x, rank.size)[rank.index], len(x))")],
        "the ranks' order of additions": [
            ("    return all_gather_by_hand(rank, reduce_scatter_by_hand(rank, x), len(x))",
             "    return sum(rank.all_gather(x, length=rank.size * len(x)).reshape(rank.size, -1))")],
        "chunks rounded down": [("-(-len(x) // ranks)", "len(x) // ranks")]},
    "05": {
        "times the reciprocal": [("total / np.float32(rank.size)", "total * np.float32(1 / rank.size)")],
        "no mean": [("average=True):", "average=False):")]},
    "06": {
        "the last all-gather is left out": [
            ('rank.all_gather(mine, out=vector[where], purpose="parameters")', "pass")],
        "an all-reduce, and then a slice": [
            ('rank.reduce_scatter(gradient[where], purpose="gradients")',
             'np.split(rank.all_reduce(gradient[where], purpose="gradients"), rank.size)[rank.index]')],
        "a master that is not in the rank's memory": [
            ('hold(shard, np.float32, "master")', "np.empty(shard, np.float32)")]},
    "07": {
        "the whole gradient stays": [("del whole[unit.name], _, mine", "del _, mine")],
        "the last micro-batch alone": [("owned += mine", "owned[...] = mine")]},
    "08": {
        "gathered weights stay": [("self.rank.memory.free(whole)", "pass")],
        "a reduction is forgotten": [
            ('self.rank.reduce_scatter(whole, out=self.gradient[self.owned(unit)], purpose="gradients")',
             "self.gradient[self.owned(unit)] = np.split(whole, self.rank.size)[self.rank.index]")],
        "one gather too many": [
            ("for unit in segment[:-1]:", "for unit in segment:"),
            ("unit.forward(ctx, w, x)[1] if unit is segment[-1] else kept.pop()", "kept.pop()")]},
    "09": {
        "two buffers on one rank too": [("ring = min(2, ranks - 1) * 2", "ring = 2 * 2")],
        "gathered weights shrink": [
            ('"gathered_parameter": 2 * u *', '"gathered_parameter": 2 * u // ranks *')]},
    "10": {
        "what the first forward kept stays": [("        del kept\n    kept_by_loss", "    kept_by_loss")],
        "a reduction is forgotten": [("rank.all_reduce(gradient[lies])", "gradient[lies]")]},
    "11": {
        "half a ring": [("return 2 * (ranks - 1) *", "return (ranks - 1) *")],
        "waits at once": [("under_way += [found] if overlap else []", "found.wait() if overlap else None")],
        "a gradient stays after its reduction": [("whole.pop(unit.name)", "whole[unit.name]")]},
    "12": {
        "the norms of pieces": [("train_by_hand(rank, together=True)", "train_by_hand(rank, together=False)")],
        "squares in fp32": [(".astype(np.float64)**2", "**2")]},
    "13": {
        "no padding": [("-(-length // ranks) * ranks for", "length for")],
        "stage 2 without a master": [("(2, 14)", "(2, 10)")],
        "an option that changes bits": [('"recompute": "block"}):\n            for',
                                         '"recompute": "block+tiled"}):\n            for')]},
    "14": {
        "no mean": [("g / np.float32(rank.size)", "g")],
        "an all-reduce in both ways": [
            ("rank.reduce_scatter(gradient[where])",
             "np.split(rank.all_reduce(gradient[where]), rank.size)[rank.index]")]},
    "15": {
        "the last step is left out": [
            ("in range(ranks - 1):\n        rank.exchange", "in range(ranks - 2):\n        rank.exchange")],
        "data without a seed, on processes": [
            ("data = np.random.default_rng(rank.index)", "data = np.random.default_rng()")]},
}


def each_mistake() -> list[Any]:
    """Notebook and mistake: the first of each notebook is always planted, the others when slow tests are run."""
    return [pytest.param(notebook, mistake, id=f"{notebook}: {mistake}", marks=pytest.mark.slow if place else ())
            for notebook, mistakes in MISTAKES.items() for place, mistake in enumerate(mistakes)]


def run_proof(text: str, names: dict[str, Any]) -> None:
    """Runs a notebook's last cell, and before it what that needs; a folder that the cell would remove is removed."""
    needed, proof = needed_by_proof(text)
    try:
        exec(compile(needed, "before the proof", "exec"), names)
        exec(compile(proof, "the proof", "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, TemporaryDirectory):
                value.cleanup()


def test_every_notebook_has_mistakes_planted_in_it():
    assert MISTAKES.keys() == TEXTS.keys()
    assert min(map(len, MISTAKES.values())) >= 2


@pytest.mark.parametrize(("notebook", "mistake"), each_mistake())
def test_the_proof_refuses(notebook, mistake, monkeypatch):
    if not mistake.endswith("on processes"):  # what shows without them is shown without them
        monkeypatch.setattr("zerosim.course.running.LAUNCHERS", ("no-such-launcher",))
    elif (reason := mpi_missing()) is not None:
        pytest.skip(f"MPI: {reason}")
    with pytest.raises(AssertionError) as caught:
        run_proof(changed(TEXTS[notebook], *MISTAKES[notebook][mistake]), {"__name__": "__main__"})
    assert caught.traceback[-1].frame.code.raw.co_filename == "the proof"


@pytest.mark.slow
@pytest.mark.parametrize("notebook", TEXTS)
def test_with_the_cells_that_it_needs_the_proof_accepts_the_text_as_it_stands(notebook):
    run_proof(changed(TEXTS[notebook]), {"__name__": "__main__"})
