"""ZeRO in one file has the engine's bits and sends its bytes, and is what it says: small, alone, and on its page."""

import io
import re
import runpy
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import zerosim as zs
from tests.architecture.source import ROOT
from tests.cases import covering
from tests.support import fresh
from tests.zero.training import batches, bits, run
from zerosim import tiny
from zerosim.models import Constants, LinearUnit, Model

STAGES = (tiny.DDP, tiny.ZeRO1, tiny.ZeRO2, tiny.ZeRO3)
FORMATS = {"fp32": (np.float32, 1.0), "bf16": (ml_dtypes.bfloat16, 1.0), "fp16": (np.float16, 1024.0)}  # and loss scale
SHAPES = ((5, 7), (7, 3), (3, 2))  # 35, 21 and 6 elements: with padding on 2, 3, 4 and 8 ranks
MICRO_BATCHES = (1, 2, 1)  # of each step
AT_REST = ("parameter", "gradient", "master", "optimizer_state")
FILE, PAGE = ROOT / "zerosim/tiny.py", ROOT / "docs/zero_in_one_file.md"


def matrices(seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 1 / shape[0]**0.5, shape).astype(np.float32) for shape in SHAPES]


def layers() -> Model:
    """The same matrices as units of the engine's."""
    return Model([LinearUnit(f"layer{i}", *w.shape, "relu" if i < len(SHAPES) - 1 else None, bias=False, first=i == 0,
                             initializers={"weight": Constants(tuple(w.reshape(-1).tolist()))})
                  for i, w in enumerate(matrices())])


def whole(trainers: list[tiny.DDP], rank: int, name: str, sharded: bool) -> np.ndarray:
    """One kind of state as one vector without padding: as this rank has it, or its ranks' chunks one after another."""
    vectors = []
    for index, shape in enumerate(SHAPES):
        held = trainers if sharded else [trainers[rank]]
        vectors.append(np.concatenate([getattr(one.parameters[index], name) for one in held])[:shape[0] * shape[1]])
    return np.concatenate(vectors)


@pytest.mark.parametrize(("ranks", "compute"), covering([1, 2, 3, 4, 8], FORMATS, turn=1))
def test_every_stage_has_the_engines_bits_and_sends_and_holds_its_bytes(ranks: int, compute: str) -> None:
    dtype, scale = FORMATS[compute]
    model, first = layers(), [matrix.astype(np.float64) for matrix in matrices()]  # masters have fp32 all the same
    data = [step for seed, k in enumerate(MICRO_BATCHES) for step in batches(model, ranks, k, 1, seed=seed)]
    for number, stage in enumerate(STAGES):
        cluster = zs.Cluster(ranks)
        expected = run(model, data, cluster, stage=number, policy=zs.Policy(compute, loss_scale=scale))
        found = tiny.train(stage, first, data, dtype, lr=0.01, loss_scale=scale)
        for rank, engine in enumerate(expected):
            assert found[rank].losses == [loss for losses in engine["losses"] for loss in losses]
            for name, of_engine, kind in (("weights", "parameter", "weights"), ("master", "master", "optimizer"),
                                          ("m", "m", "optimizer"), ("v", "v", "optimizer")):
                ours = whole(found, rank, name, kind in stage.sharded)
                assert ours.dtype == engine[of_engine].dtype
                assert bits(ours) == bits(engine[of_engine])
            sent = sum(cluster.trace[rank].sent_nbytes(purpose) for purpose in ("parameters", "gradients"))
            assert found[rank].rank.sent_nbytes == sent
            assert not any(found[rank].rank.inboxes)
            at_rest = sum(engine["held"].get(kind, 0) for kind in AT_REST)
            if compute != "fp32":  # there the engine's weights are the master, and tiny keeps both
                assert held_nbytes(found[rank]) == at_rest
        losses = [loss for one in found for loss in one.losses]
        assert len(set(losses)) == len(losses) == ranks * sum(MICRO_BATCHES)  # different data everywhere


def held_nbytes(trainer: tiny.DDP) -> int:
    """A chunk that keeps a whole vector alive holds all of it."""
    arrays = [x for p in trainer.parameters for x in (p.weights, p.gradients, p.master, p.m, p.v, p.data, p.gradient)]
    return sum((x if x.base is None else x.base).nbytes for x in arrays)


def test_a_rank_with_fewer_messages_than_the_others_is_an_error() -> None:
    data = batches(layers(), 2, 2, 1)
    del data[0][1][1]
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        tiny.train(tiny.ZeRO2, [np.ones((5, 2))], data, np.float32, lr=0.01)


def test_what_is_used_twice_receives_both_gradients() -> None:
    """loss of (x w) w: dw = xᵀ(dy wᵀ) + (x w)ᵀ dy, and dx = dy wᵀ wᵀ; whole numbers, so that no sum is rounded."""
    x = tiny.Tensor(np.array([[1, -2], [3, 1]], np.float32), tape=[])
    w = tiny.Tensor(np.array([[2, -1], [1, 3]], np.float32), tape=[])
    target = np.array([[1, 2], [-3, 4]], np.float32)
    loss = ((x @ w) @ w).half_squared_error(target)
    y = x.data @ w.data @ w.data
    assert float(loss.data) == 0.5 * np.sum((y - target)**2) / 2
    loss.gradient[...] = 2
    loss.flow_back(to=x)
    dy = y - target
    assert np.array_equal(w.gradient, x.data.T @ (dy @ w.data.T) + (x.data @ w.data).T @ dy)
    assert np.array_equal(x.gradient, dy @ w.data.T @ w.data.T)


def test_relu_lets_nothing_through_at_zero_and_hides_no_nan() -> None:
    x = tiny.Tensor(np.array([-1, 0, -0.0, 2, np.nan], np.float32), tape=[])
    y = x.relu()
    y.gradient[:] = 5
    y.flow_back(to=x)
    assert bits(y.data[:4]) == bits(np.array([0, 0, 0, 2], np.float32))
    assert np.isnan(y.data[4])
    assert x.gradient.tolist() == [0, 0, 0, 5, 5]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_collectives_are_right_also_where_the_sender_writes_over_what_it_sent(ranks: int) -> None:
    found = {}

    async def program(rank: tiny.RingRank) -> None:
        vector = np.arange(2.0 * ranks) * 10**rank.index
        total = await tiny.all_reduce(rank, vector)
        chunk = (await tiny.reduce_scatter(rank, vector)).copy()
        vector[:] = np.nan
        found[rank.index] = total, await tiny.all_gather(rank, chunk)

    inboxes: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    programs = [program(tiny.RingRank(index, inboxes)).__await__() for index in range(ranks)]
    for _ in zip(*programs, strict=True):
        pass
    for total, again in found.values():
        assert total.tolist() == again.tolist() == [i * int("1" * ranks) for i in range(2 * ranks)]


# -- The file itself ---------------------------------------------------------------------------------------------------

def test_the_file_has_at_most_260_lines_and_imports_numpy_and_ml_dtypes_alone() -> None:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 260
    imported = {line.split()[1].partition(".")[0] for line in lines if re.match(r" *(import|from) ", line)}
    assert imported - set(sys.stdlib_module_names) == {"numpy", "ml_dtypes"}


def test_a_copy_of_the_file_prints_what_the_module_prints_and_its_page_shows(tmp_path: Path) -> None:
    shutil.copy(FILE, tmp_path / "tiny.py")
    of_copy, of_module = fresh("-P", "tiny.py", folder=tmp_path), fresh("-m", "zerosim.tiny")
    assert of_copy == of_module
    page = PAGE.read_text(encoding="utf-8")
    # Another BLAS adds in another order: the losses' last digits are its own.
    assert f"```text\n{losses_masked(of_module)}```\n" in losses_masked(page)


def losses_masked(text: str) -> str:
    return re.sub(r"loss \d\.\d{9} -> \d\.\d{9} on", "loss ... -> ... on", text)


@pytest.mark.parametrize(("ranks", "encoding"), [(1, "utf-8"), (3, "ascii")])
def test_the_printed_closed_forms_are_what_every_rank_holds_and_sends_on_any_terminal(
        ranks: int, encoding: str, tmp_path: Path) -> None:
    text = fresh(str(FILE), str(ranks), folder=tmp_path, PYTHONIOENCODING=encoding)
    rows = re.findall(r"^  bytes .* = +([\d,]+), measured on each rank:((?: \d+)+)$", text, re.M)
    assert len(rows) == 8
    for closed_form, measured in rows:
        assert [int(value) for value in measured.split()] == [int(closed_form.replace(",", ""))] * ranks
    assert len(set(re.findall(r"loss .*$", text, re.M))) == 1  # the same under every stage


def test_a_notebook_whose_output_is_no_file_is_printed_to_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tiny", "1"])
    monkeypatch.setattr(sys, "stdout", printed := io.StringIO())
    runpy.run_path(str(FILE), run_name="__main__")
    assert "ZeRO3: loss" in printed.getvalue()


def test_its_page_shows_the_stages_as_they_are() -> None:
    page, text = (path.read_text(encoding="utf-8") for path in (PAGE, FILE))
    shown = re.search(r"^```python\n(class DDP:\n.*?)^```$", page, re.DOTALL | re.M)
    assert shown
    head, _, methods = shown[1].strip().partition("    ...\n\n")
    assert head in text
    assert methods in text
    assert all(f"class {stage.__name__}(" in methods for stage in STAGES[1:])
