"""Every notebook's proof refuses planted mistakes: the text is changed in one place, and the last cell must notice."""

from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.architecture.source import ROOT
from tests.backends.worlds import mpi_missing
from tests.notebooks.cells import changed, needed_by_proof

TEXTS = {text.name[:2]: text for text in sorted((ROOT / "notebooks/texts").glob("[0-9]*.py"))}
MISTAKES = {  # by notebook: what each is, and what it changes in the text
    "01": {
        "no mean": [("divisor=2):", "divisor=1):")],
        "the first step's correction": [("update(master, m, v, g, step)", "update(master, m, v, g, 1)")],
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
        "times the reciprocal": [("/ np.float32(rank.size if average else 1)", "* np.float32(1 / rank.size)")],
        "no mean": [("average=True):", "average=False):")]},
    "06": {
        "the last all-gather is left out": [
            ('rank.all_gather(master[i].astype(BF16), out=weights[i].reshape(-1), purpose="parameters")', "pass")],
        "an all-reduce, and then a slice": [
            ('rank.reduce_scatter(local.ravel(), purpose="gradients")',
             'np.split(rank.all_reduce(local.ravel(), purpose="gradients"), rank.size)[rank.index]')],
        "a master that begins rounded": [("[chunk(w, rank) for w", "[wide(chunk(w.astype(BF16), rank)) for w")]},
    "07": {
        "the whole gradient stays": [("        del whole, dw  # before", "        # before")],
        "the last micro-batch alone": [("gradient[i] += rank", "gradient[i][:] = rank")]},
    "08": {
        "gathered weights stay": [("    rank.memory.free(whole)\n", "")],
        "a reduction is forgotten": [
            ('rank.reduce_scatter(dw.ravel(), purpose="gradients")', "np.split(dw.ravel(), rank.size)[rank.index]")],
        "an all-gather after the update": [
            ("            weights[i] = master[i].astype(BF16)\n",
             "            weights[i] = master[i].astype(BF16)\n"
             '            rank.all_gather(weights[i], purpose="parameters")\n')]},
    "09": {
        "two buffers on one rank too": [("ring = min(2, ranks - 1) * 2", "ring = 2 * 2")],
        "gathered weights shrink": [
            ('"gathered_parameter": 2 * u *', '"gathered_parameter": 2 * u // ranks *')]},
    "10": {
        "gathered once too often": [("again = [inputs.pop()]", "weights(start)\n        again = [inputs.pop()]")],
        "a reduction is forgotten": [
            ('rank.reduce_scatter(dw.ravel(), purpose="gradients")', "np.split(dw.ravel(), rank.size)[rank.index]")]},
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
            ("rank.reduce_scatter(local.ravel())", "np.split(rank.all_reduce(local.ravel()), rank.size)[rank.index]")]},
    "15": {
        "the last step is left out": [
            ("in range(ranks - 1):\n        last, next_", "in range(ranks - 2):\n        last, next_")],
        "data without a seed, on processes": [
            ("data = np.random.default_rng(rank.index)", "data = np.random.default_rng()")]},
    "16": {
        "the sum, not the mean": [('purpose="gradients") / np.float32(self.rank.size)', 'purpose="gradients")')],
        "the root is gathered again": [
            ("(reshard_after_forward is None and not is_root)", "reshard_after_forward is None")],
        "a reduction is forgotten": [('self.rank.reduce_scatter(addends, purpose="gradients")',
                                      "np.split(addends, self.rank.size)[self.rank.index]")]},
    "17": {
        "flips in what is kept too": [
            ("messages[rank] = flipped(messages[rank], bit)",
             "messages[rank] = held[rank][sent[rank]] = flipped(messages[rank], bit)")],
        "adds in the other order of hops": [("(r - 1 - step if adds", "(r + 1 + step if adds")],
        "the next bit": [("^= 1 << bit", "^= 2 << bit")]},
    "18": {
        "no mean": [(".astype(np.float32) / np.float32(rank.size)", ".astype(np.float32)")],
        "a delay of no step": [("        if not delayed:\n", "        if True:\n")],
        "a gradient that does not cross": [
            ('cross(rank.reduce_scatter(dw.ravel(), purpose="gradients"), "to host")',
             'rank.reduce_scatter(dw.ravel(), purpose="gradients")')]},
    "19": {
        "the count of steps is not read": [('= int(file["step"]), ', "= 0, ")],
        "masters of 16 bits": [("= file[kind][first - start:last - start]",
                                "= file[kind][first - start:last - start].astype(BF16)")],
        "micro-batches in the order of ranks": [
            ("range(rank.index, MICRO_BATCHES, rank.size):\n", "np.split(np.arange(12), rank.size)[rank.index]:\n")]},
    "20": {
        "chunks stay node by node": [(".swapaxes(0, 1).reshape", ".reshape")],
        "nodes do not add": [
            ('across.all_reduce(sums, purpose="gradients")', "sums")],
        "a secondary shard outlives the update": [
            ("gathered(owners, shard, bits)  # for forward",
             'gathered(*(inside, second) if "hpz" in way and step > 1 else (owners, shard, bits))')],
        "one more integer": [("np.float32(2**(bits - 1) - 1)", "np.float32(2**(bits - 1))")]},
    "21": {
        "keys are not turned": [
            ("turned(every[:, :H + S]), every[:, H + S:]", "turned(every[:, :H]), every[:, H:]")],
        "gradients are not turned back": [("turned(dq, -1), turned(dk, -1)", "turned(dq), turned(dk)")],
        "one of the heads that share": [("sum(x[:, i::share] for i in range(share))", "x[:, ::share]")],
        "the norm's weight is forgotten": [("normal, g = x * scale, dy * w", "normal, g = x * scale, dy")]}
}


def each_mistake() -> list[Any]:
    """Notebook and mistake: the first of every fourth notebook is always planted, all others where slow tests run."""
    return [pytest.param(notebook, mistake, id=f"{notebook}: {mistake}",
                         marks=pytest.mark.slow if place or int(notebook) % 4 else ())
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
