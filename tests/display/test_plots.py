"""What plot() and show_ring() draw is what ledgers, traces and plans say, found another way; and it can be read."""

import base64
import re

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import zerosim as zs
from tests.cases import chosen
from tests.display import seen
from zerosim.display.drawing import DARK, LIGHT
from zerosim.display.plots import PARTS, ledger_data, ledgers_data, plan_bars_data
from zerosim.display.traffic_plots import ring_traffic_data, trace_order_data
from zerosim.ranks.trace import Held


def program(rank, stage=3):
    data = np.random.default_rng(rank.index)
    engine = zs.Engine(rank, zs.models.MLP([12, 12, 12]), zs.optim.Adam(), stage=stage, policy=zs.Policy("fp16"))
    engine.step([(data.normal(size=(4, 12)), data.normal(size=(4, 12)))])
    return engine


def run(ranks: int, stage: int = 3, **options) -> zs.Cluster:
    cluster = zs.Cluster(ranks, **options)
    cluster.run(program, stage)
    return cluster


def plotted(cluster: zs.Cluster) -> list:
    plan = zs.plan("gpt2-xl", ranks=4, device="h100-80", link="nvlink4")
    return [cluster.trace, cluster.trace[0], cluster.memory, cluster.memory[0], plan]


# -- what comes back ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dark", chosen([True], [False, True]))
def test_every_plot_is_a_matplotlib_figure_with_its_words_that_jupyter_shows(dark):
    cluster = run(3)
    figures = [thing.plot(dark=dark) for thing in plotted(cluster)] + [cluster.show_ring(dark=dark)]
    for figure in figures:
        assert isinstance(figure, Figure)
        assert figure.drawing.style is (DARK if dark else LIGHT)
        shown = figure._repr_html_()
        assert figure.drawing.description.split(".")[0][:20] in shown
        svg = base64.b64decode(re.search(r"base64,([^\"]+)", shown)[1]).decode()
        assert 'role="img"' in svg
        assert figure.drawing.svg() == svg


@pytest.mark.parametrize("ranks", chosen([1, 3, 17], [1, 2, 3, 5, 8, 17]))
def test_no_words_of_a_plot_lie_on_others_or_leave_the_page_or_are_small(ranks):
    cluster = run(ranks, capacity_nbytes=10_000)
    for thing in plotted(cluster):
        drawing = thing.plot().drawing
        assert seen.misplaced(drawing) == []
        assert min(text.get_fontsize() for text in seen.texts(drawing)) >= 11
    drawing = cluster.show_ring().drawing
    assert seen.misplaced(drawing) == []


def test_every_axis_of_a_plot_has_a_unit():
    cluster = run(2)
    for thing in plotted(cluster):
        for axes in thing.plot().axes:
            for label in filter(None, (axes.get_xlabel(), axes.get_ylabel())):
                assert re.search(r"\((bytes|kB|MB|GB|events|changes|its number)\)$", label), label
            assert axes.get_xlabel() or not any(label.get_visible() for label in axes.get_xticklabels())


def test_what_was_changed_in_a_figure_afterwards_is_shown_too():
    figure = run(2).memory.plot()
    before = figure._repr_html_()
    figure.axes[0].set_title("mine")
    assert figure._repr_html_() != before


# -- the ring -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_what_leaves_a_rank_on_the_ring_is_what_its_trace_sent(ranks):
    cluster = run(ranks)
    data = ring_traffic_data(cluster.trace, ranks)
    left = [sum(nbytes for (source, _), nbytes in data.links.items() if source == rank) for rank in range(ranks)]
    assert left == cluster.trace.sent_nbytes()
    assert data.collectives == len(cluster.trace[0].collectives())
    assert set(data.links) <= {(rank, (rank + 1) % ranks) for rank in range(ranks)}
    assert data.around == data.links  # the link from the last rank to the first too


def test_messages_groups_and_other_algorithms_are_on_the_ring_between_the_right_ranks():
    def mixed(rank):
        half = rank.split(rank.index % 2)
        half.all_reduce(np.zeros(4, np.float32))
        rank.all_reduce(np.zeros(5, np.float32), algorithm="naive")
        if rank.index < 2:
            out = np.zeros(3, np.float32)
            rank.exchange(out + 1, 1 - rank.index, out, 1 - rank.index)

    cluster = zs.Cluster(4)
    cluster.run(mixed)
    data = ring_traffic_data(cluster.trace, 4)
    assert data.messages == 2
    assert data.links[2, 0] == 16 + 20  # half of its group's ring, and the whole vector to the root
    assert data.links[1, 3] == 16
    assert data.links[0, 1] >= 12
    assert sum(data.links.values()) == sum(cluster.trace.sent_nbytes())


def test_the_same_collective_many_times_is_counted_as_often():
    def loop(rank):
        for _ in range(7):
            rank.all_reduce(np.zeros(6, np.float32))

    cluster = zs.Cluster(3)
    cluster.run(loop)
    assert ring_traffic_data(cluster.trace, 3).links == {(r, (r + 1) % 3): 7 * 4 * 8 for r in range(3)}


def test_a_ring_of_a_representative_has_all_ranks():
    cluster = zs.NullCluster(16, representative=0)
    cluster.run(lambda rank: rank.all_reduce(rank.xp.empty(32, "float32")))
    data = ring_traffic_data(cluster.trace, 16)
    assert len(data.links) == 16
    assert set(data.links.values()) == set(cluster.trace.sent_nbytes())


def test_rings_that_cannot_be_drawn_are_refused_in_words():
    failed = zs.Cluster(2)
    with pytest.raises(ZeroDivisionError):
        failed.run(lambda rank: (rank.barrier(), 1 / rank.index))
    for never in (zs.Cluster(2), failed):
        with pytest.raises(ValueError, match="has run nothing to its end yet, so its ring has carried nothing; call"):
            never.show_ring()
    cluster = zs.Cluster(33)
    cluster.run(lambda rank: rank.barrier())
    with pytest.raises(ValueError, match=r"a page holds a ring of 32 ranks, found 33; cluster\.trace\.sent_nbytes"):
        cluster.show_ring()


# -- ledgers ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_memorys_curve_peaks_and_ends_as_its_ledger_says(stage):
    cluster = run(3, stage)
    for memory in cluster.memory:
        data = ledger_data(memory)
        assert max(data.totals) == memory.peak_nbytes
        at = data.totals.index(memory.peak_nbytes)
        assert {kind: column[at] for kind, column in data.nbytes.items() if column[at]} == memory.peak_nbytes_by_kind
        assert {kind: column[-1] for kind, column in data.nbytes.items() if column[-1]} == memory.now_nbytes_by_kind
        assert len(data.totals) == 1 + sum(isinstance(row, Held) for row in memory.trace.rows)


def test_a_memorys_picture_says_in_which_phase_the_program_was():
    data = ledger_data(run(3, 3).memory[0])
    assert [name for name, *_ in data.phases] == ["forward", "loss", "backward", "update"]
    ends = [end for _, *both in data.phases for end in both]
    assert ends == sorted(ends)
    (_, begun, ended), = [phase for phase in data.phases if phase[0] == "backward"]
    unit_gradients = data.nbytes["unit_gradient"]
    assert max(unit_gradients[begun:ended + 1]) == max(unit_gradients) > 0
    assert max(unit_gradients[:begun + 1]) == 0
    assert max(data.nbytes["gathered_parameter"][:data.phases[0][1] + 1]) == 0


def test_a_second_run_begins_with_what_the_first_left():
    cluster = run(2)
    cluster.run(lambda rank: rank.memory.alloc(4, np.float32, "workspace"))
    data = ledger_data(cluster.memory[1])
    assert {kind: column[0] for kind, column in data.nbytes.items() if column[0]} == cluster.trace[1].held_at_start
    assert data.totals[0] > 0


def test_memories_show_now_and_the_peak_of_at_most_sixteen_ranks():
    cluster = run(17)
    data = ledgers_data(cluster.memory)
    assert len(data.owners) == 16
    assert [sum(held.values()) for held in data.now] == cluster.memory.now_nbytes[:16]
    assert [sum(held.values()) for held in data.peak] == cluster.memory.peak_nbytes[:16]


def test_a_capacity_far_above_is_no_line_and_one_near_is():
    far, near = (run(2, capacity_nbytes=nbytes).memory[0].plot() for nbytes in (10**9, 5_000))
    assert [any(text.get_text() == "capacity" for text in figure.axes[0].texts) for figure in (far, near)] == [
        False, True]


def test_what_held_or_did_nothing_is_refused_in_words():
    cluster = zs.Cluster(2)
    cluster.run(lambda rank: None)
    for thing, words in ((cluster.memory[1], "rank 1 held nothing in its last run"),
                         (cluster.memory, "no rank has held"), (cluster.trace, "neither arithmetic nor messages"),
                         (cluster.trace[0], "neither arithmetic")):
        with pytest.raises(ValueError, match=words):
            thing.plot()


# -- traces and plans ---------------------------------------------------------------------------------------------

def test_the_order_of_a_trace_has_every_collective_once_and_sums_to_what_was_sent():
    cluster = run(3, 2)
    data = trace_order_data(cluster.trace)
    for place, trace in enumerate(cluster.trace):
        purposes = [row.purpose for row in trace.collectives()]
        assert [what for what in data.whats[place] if what in ("parameters", "gradients", "control")] == purposes
        assert sum(data.sent_nbytes[place]) == trace.sent_nbytes()
        for purpose, curve in data.by_purpose(place).items():
            assert curve[-1] == trace.sent_nbytes(purpose)
            assert curve == sorted(curve)


def test_the_busiest_rank_is_that_which_sends_most_in_all_and_not_at_once():
    def program(rank):
        for _ in range(3 if rank.index == 2 else 1):
            if rank.index == 2:
                rank.send(np.zeros(2), 1)
            elif rank.index == 0:
                rank.send(np.zeros(4), 1)
            else:
                rank.recv(np.empty(4), 0)
                for _ in range(3):
                    rank.recv(np.empty(2), 2)

    cluster = zs.Cluster(3)
    cluster.run(program)
    assert cluster.trace.sent_nbytes() == [32, 0, 48]
    assert trace_order_data(cluster.trace).busiest == 2


def test_a_trace_alone_is_not_said_to_be_rank_0s():
    figure = run(2).trace[1].plot()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["this rank"]
    assert "rank 0" not in figure.drawing.description


def test_a_plans_bars_are_its_rows_and_add_up():
    plan = zs.plan("llama-2-7b", ranks=8, device="a100-40", link="nvlink4", stage="2,3", recompute="block,none")
    data = plan_bars_data(plan)
    assert [sum(held.values()) for held in data.bars.values()] == [row.total_nbytes for row in plan.rows]
    assert list(data.bars) == ["ZeRO-2 block", "ZeRO-2", "ZeRO-3 block", "ZeRO-3"]
    figure = plan.plot()
    axes: Axes = figure.axes[0]
    drawn = [round(sum(bar.get_width() for bar in axes.patches if abs(bar.get_y() + 0.36 - place) < 0.01), 6)
             for place in range(4)]
    assert drawn == [round(row.total_nbytes / 1e9, 6) for row in plan.rows]
    assert set(data.parts) <= set(PARTS)
    missing = [text.get_text() for text in axes.texts if "misses" in text.get_text()]
    assert len(missing) == sum(not row.fits for row in plan.rows)
