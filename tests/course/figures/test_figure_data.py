"""What figures draw is what runs did: their data against traces, ledgers and pencil, found another way."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer

import zerosim as zs
from tests.display import seen
from zerosim.course.figures.memory import memory, memory_data
from zerosim.course.figures.ring import Cell, ring, ring_data
from zerosim.course.measured import measured_step
from zerosim.display.colors import KIND_COLORS
from zerosim.planning import closed_forms

WORLDS = (2, 3, 4, 5)
SMALL = {"worlds": (1, 3, 4), "widths": (12, 12, 12), "rows": 2}


# -- the ring -----------------------------------------------------------------------------------------------------

def traced(ranks, length, dtype=np.float32):
    """The trace of a ring that brings other numbers than the figure's."""
    cluster = zs.Cluster(ranks)
    cluster.run(lambda rank: rank.all_gather(rank.reduce_scatter(np.full(length, rank.index, dtype)), length=length))
    return cluster.trace


@pytest.mark.parametrize("length", [0, 1, 7, 8])
@pytest.mark.parametrize("ranks", WORLDS)
def test_the_rings_messages_are_the_hops_of_the_trace(ranks, length):
    found, trace = ring_data(ranks, length), traced(ranks, length)
    hops = [(row.call.operation, offset + hop.step + 1, hop.source, hop.destination, hop.chunks, hop.nbytes)
            for row, offset in zip(trace[0].collectives(), (0, ranks - 1), strict=True) for hop in row.hops()]
    assert [(m.operation, m.step, m.source, m.destination, (m.chunk,), m.nbytes) for m in found.messages] == hops
    assert list(found.sent_nbytes) == trace.sent_nbytes()
    assert sum(m.nbytes for m in found.messages) == sum(found.sent_nbytes) == 2 * (ranks - 1) * 4 * length
    assert sum(found.chunk_nbytes) == 4 * length


@pytest.mark.parametrize("ranks", WORLDS)
def test_the_rings_additions_are_made_in_ring_order(ranks):
    """Chunk c starts on rank c+1 and goes once round: its addends are c+1, c+2, ..., c."""
    found = ring_data(ranks, 2 * ranks)
    rings = [tuple((chunk + 1 + i) % ranks for i in range(ranks)) for chunk in range(ranks)]
    for message in found.messages:
        made = message.step if message.operation == "reduce_scatter" else ranks
        assert message.addends == rings[message.chunk][:made]
    assert found.boards[0] == tuple(tuple(Cell((rank,)) for _ in range(ranks)) for rank in range(ranks))
    scattered, gathered = found.boards[ranks - 1], found.boards[-1]
    assert [[cell.needed for cell in of_rank] for of_rank in scattered] == np.eye(ranks, dtype=bool).tolist()
    assert [scattered[rank][rank].addends for rank in range(ranks)] == rings
    assert gathered == tuple(tuple(map(Cell, rings)) for _ in range(ranks))


@pytest.mark.parametrize("ranks", WORLDS)
def test_the_sheet_shows_every_message_once_and_nothing_overlaps(ranks):
    data = ring_data(ranks, 3 * ranks - 1)
    drawing = ring(data)
    shown = sorted(text.get_text() for text in seen.texts(drawing) if text.get_text().endswith(" B"))
    assert shown == sorted(f"c{m.chunk}: {m.nbytes} B" for m in data.messages)
    digits = [text.get_text() for text in seen.texts(drawing) if text.get_text().isdigit()]
    assert digits == [str(rank) for board in data.boards for cells in board for cell in cells if cell.needed
                      for rank in cell.addends]
    assert seen.misplaced(drawing) == []


def test_the_rings_words_tell_every_hop():
    description = ring(ring_data(4, 8)).description
    assert "Step 2, reduce-scatter: rank 0 sends chunk 2 (8 bytes, the sum of ranks 3 + 0) to rank 1" in description
    assert description.count(" sends chunk ") == 24
    assert description.endswith("Every rank sends 3 + 3 messages, 48 bytes in all: 2 · 3/4 of the vector's 32.")
    assert ring(ring_data(2, 3)).description.endswith("12 bytes in all: 2 · 1/2 of the vector's 12.")
    assert ring(ring_data(3, 7)).description.endswith("32 to 40 bytes in all; the vector has 28.")


@pytest.mark.parametrize("format", ["fp16", "bf16", "fp32"])
def test_the_ring_is_told_in_any_format_that_holds_its_sums(format):
    assert ring_data(4, 8, format).messages[0].nbytes == 2 * zs.FORMATS[format].nbytes
    assert [m.addends for m in ring_data(4, 8, format).messages] == [m.addends for m in ring_data(4, 8).messages]


def test_rings_that_no_sheet_can_hold_are_refused():
    for ranks in (1, 6):
        with pytest.raises(ValueError, match=f"a ring of {ranks} ranks cannot be drawn on one sheet; ask for 2 to 5"):
            ring_data(ranks)
    with pytest.raises(ValueError, match=r"fp8_e5m2 cannot tell the sums of 4 ranks' .* ask for at most 3 ranks"):
        ring_data(4, 8, "fp8_e5m2")


# -- memory -------------------------------------------------------------------------------------------------------

def ledger(ranks, stage):
    """What the fullest rank holds at rest and at its peak, in bytes, from a run of its own."""
    rng, cluster = np.random.default_rng(7), zs.Cluster(ranks)
    batches = [(rng.standard_normal((2, 12)), rng.standard_normal((2, 12))) for _ in range(ranks)]

    def program(rank):
        model = zs.models.MLP((12, 12, 12), seed=3)
        engine = zs.Engine(rank, model, zs.optim.Adam(), stage=stage, policy=zs.Policy("fp16"))
        engine.step([batches[rank.index]])
        return engine

    engines = cluster.run(program)
    assert len(engines) == ranks
    return (max((memory.now_nbytes_by_kind for memory in cluster.memory), key=lambda held: sum(held.values())),
            max((memory.peak_nbytes_by_kind for memory in cluster.memory), key=lambda held: sum(held.values())))


def test_the_memory_figures_data_are_what_other_runs_ledgers_say():
    data = memory_data(**SMALL)
    assert [(bars.ranks, bars.stage) for bars in data.bars] == list(itertools.product((1, 3, 4), zs.STAGES))
    assert data.parameter_count == 2 * 12 * 13
    for bars in data.bars:
        for drawn, nbytes in zip((bars.resting, bars.peak), ledger(bars.ranks, bars.stage), strict=True):
            in_bytes = {kind: held * data.parameter_count for kind, held in drawn.items()}
            assert in_bytes == pytest.approx(nbytes, rel=1e-12)
        assert sum(bars.resting.values()) == pytest.approx(bars.formula_value, rel=1e-12)  # 12 is a multiple of every N
        assert sum(bars.peak.values()) > sum(bars.resting.values())


def test_the_bars_are_as_high_as_the_data_and_in_the_colors_of_their_kinds():
    data = memory_data(**SMALL)
    kinds = {color: kind for kind, color in KIND_COLORS.items()}
    for axes, ranks in zip(memory(data).figure.axes, data.worlds, strict=True):
        drawn = {}
        for bar in (bar for container in axes.containers if isinstance(container, BarContainer) for bar in container):
            place = round(bar.get_x() + bar.get_width() / 2, 2)
            drawn.setdefault(place, {})[kinds[to_hex(bar.get_facecolor()).upper()]] = bar.get_height()
        expected = [held for bars in data.of_world(ranks) for held in (bars.resting, bars.peak)]
        assert [drawn[place] for place in sorted(drawn)] == [pytest.approx(dict(held)) for held in expected]
        markers = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == ">"]
        assert markers == [bars.formula_value for bars in data.of_world(ranks)]


def test_the_memory_figures_words_give_every_height():
    description = memory(memory_data((4,), (12, 12, 12), rows=2)).description
    for words in ("stage 0 rests at 16 (by formula 16)", "stage 1 rests at 7 (by formula 4 + 12/N)",
                  "stage 2 rests at 5.5 (by formula 2 + 14/N)", "stage 3 rests at 4 (by formula 16/N)"):
        assert words in description


# -- pencil and ledger --------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("compute", "optimizer", "formulas"), [
    ("fp16", zs.optim.Adam(), ["16", "4 + 12/N", "2 + 14/N", "16/N"]),
    ("bf16", zs.optim.SGD(lr=0.1), ["8", "4 + 4/N", "2 + 6/N", "8/N"]),
    ("fp32", zs.optim.Adam(), ["16", "8 + 8/N", "4 + 12/N", "16/N"])], ids=["Adam", "SGD", "fp32"])
def test_a_measured_step_knows_its_formula(compute, optimizer, formulas):
    found = [measured_step((8, 8), optimizer, ranks=4, stage=stage, policy=zs.Policy(compute), rows=1)
             for stage in zs.STAGES]
    assert [step.formula for step in found] == formulas
    for step in found:
        assert step.formula_nbytes == Fraction(sum(step.resting_nbytes[0].values()), step.parameter_count)


def test_a_measured_step_that_differs_from_pencil_is_no_measurement(monkeypatch):
    right = closed_forms.resting_nbytes
    monkeypatch.setattr(closed_forms, "resting_nbytes", lambda job: [*right(job)[:-1], {"parameter": 1}])
    with pytest.raises(AssertionError, match="the ledger differs from the closed forms"):
        measured_step((4, 4), zs.optim.Adam(), ranks=2, stage=1, policy=zs.Policy("fp16"), rows=1)
