"""What plot() and show_ring() draw is what memories, traces and plans say, found another way; and it can be read."""

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import zerosim as zs
from tests.cases import chosen
from tests.display import seen
from tests.support import assert_refused
from zerosim.display import drawing, memory_plots, trace_plots
from zerosim.planning import recording
from zerosim.ranks import trace


def program(rank, stage=3):
    data = np.random.default_rng(rank.index)
    engine = zs.Engine(rank, zs.models.MLP([12, 12, 12]), zs.optim.Adam(), stage=stage, policy=zs.Policy("fp16"))
    engine.step([(data.normal(size=(4, 12)), data.normal(size=(4, 12)))])
    return engine


def run(ranks: int, stage: int = 3, **options) -> zs.Cluster:
    cluster = zs.Cluster(ranks, **options)
    cluster.run(program, stage)
    return cluster


def run_of(asked) -> zs.Cluster:
    cluster = zs.Cluster(3)
    cluster.run(asked)
    return cluster


# -- every plot ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ranks", chosen([3], [1, 2, 3, 5, 8, 17]))
def test_every_plot_is_a_figure_with_words_and_units_that_can_be_read_and_that_jupyter_shows(ranks):
    cluster, dark = run(ranks, capacity_nbytes=10_000), ranks < 4
    plan = zs.plan("gpt2-xl", ranks=4, device="h100-80", link="nvlink4")
    things = (cluster.trace, cluster.trace[0], cluster.memory, cluster.memory[0], plan)
    for figure in [*(thing.plot(dark=dark) for thing in things), cluster.show_ring(dark=dark)]:
        assert isinstance(figure, Figure)
        drawn, (shown, about) = figure.drawing, figure._repr_png_()
        assert drawn.style is (drawing.DARK if dark else drawing.LIGHT)
        assert repr(figure) == f"{drawn.title}. {drawn.description}"
        assert about == {"width": round(96 * figure.get_size_inches()[0]), "alt": drawn.title}
        page = tuple(int(drawn.style.background[at:at + 2], 16) for at in (1, 3, 5))
        assert tuple(seen.pixels_of(shown)[1][0, 0]) == pytest.approx(page, abs=4)  # 64 colors, of which this is one
        seen.assert_readable(drawn)
        assert seen.repeated_in_a_legend(drawn) == []
        for axes in (axes for axes in figure.axes if axes.axison):
            for label in filter(None, (axes.get_xlabel(), axes.get_ylabel())):
                assert re.search(r"\((bytes|kB|MB|GB|events|changes|its number)\)$", label), label
            assert axes.get_xlabel() or not any(label.get_visible() for label in axes.get_xticklabels())


def test_what_was_changed_in_a_figure_afterwards_is_shown_too_and_a_trace_alone_is_not_said_to_be_rank_0s():
    figure = run(2).trace[1].plot()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["this rank"]
    assert "rank 0" not in figure.drawing.description
    before, _ = figure._repr_png_()
    figure.axes[0].set_title("mine")
    assert figure._repr_png_()[0] != before


# -- the ring -----------------------------------------------------------------------------------------------------

def mixed(rank):
    half = rank.split(rank.index % 2)
    _ = half.all_reduce(np.zeros(4, np.float32))
    _ = rank.all_reduce(np.zeros(5, np.float32), algorithm="naive")
    if rank.index < 2:
        out = np.zeros(3, np.float32)
        rank.exchange(out + 1, 1 - rank.index, out, 1 - rank.index)


def loop(rank):
    for _ in range(7):
        _ = rank.all_reduce(rank.xp.empty(6, "float32"))


def test_what_leaves_a_rank_on_the_ring_and_in_a_report_is_what_its_trace_sent():
    found = {}
    for ranks, made in ((1, program), (2, program), (5, program), (3, loop), (4, mixed), (5, mixed)):
        cluster = zs.Cluster(ranks)
        cluster.run(made)
        data = found[made] = trace_plots.ring_traffic_data(cluster.trace, ranks)
        assert [sum(nbytes for (source, _), nbytes in data.links.items() if source == rank) for rank in range(ranks)
                ] == cluster.trace.sent_nbytes()
        assert data.links == recording.links(recording.record(cluster.trace))
        # Also the link from the last rank to the first is one of the ring, on which alone its collectives send.
        assert (data.around == data.links) == (made is not mixed)
        # To split, one of each half, and one of all.
        collectives = 4 if made is mixed else len(cluster.trace[0].collectives())
        assert (data.collectives, data.messages) == (collectives, 2 * (made is mixed))
    assert set(found[loop].links.values()) == {7 * 4 * 8}
    assert found[mixed].links[1, 3] == 16  # the ring of its half of the ranks
    cluster = zs.NullCluster(3, representative=0)  # one stands for all
    cluster.run(loop)
    assert trace_plots.ring_traffic_data(cluster.trace, 3).links == found[loop].links


# -- memory -------------------------------------------------------------------------------------------------------

def test_a_memorys_curve_begins_peaks_and_ends_as_its_trace_says():
    cluster = run(3, 1)
    for stage in (1, 3):  # the second run begins with what the first has left
        kept = cluster.run(program, stage)
        for memory in cluster.memory:
            data = memory_plots.memory_curve_data(memory)
            first, last = ({kind: column[at] for kind, column in data.nbytes.items() if column[at]} for at in (0, -1))
            assert (first, last) == (memory.trace.held_at_start, memory.now_nbytes_by_kind)
            assert max(data.totals) == memory.peak_nbytes
            assert len(data.totals) == 1 + sum(isinstance(row, trace.Held) for row in memory.trace.rows)
    assert len(kept) == 3


def test_a_memorys_picture_says_in_which_phase_the_program_was():
    data = memory_plots.memory_curve_data(run(3, 3).memory[0])
    assert [name for name, *_ in data.phases] == ["forward", "loss", "backward", "update"]
    ends = [end for _, *both in data.phases for end in both]
    assert ends == sorted(ends)
    (_, begun, ended), = [phase for phase in data.phases if phase[0] == "backward"]
    unit_gradients = data.nbytes["unit_gradient"]
    assert max(unit_gradients[begun:ended + 1]) == max(unit_gradients) > 0
    assert max(unit_gradients[:begun + 1]) == 0
    assert max(data.nbytes["gathered_parameter"][:data.phases[0][1] + 1]) == 0


def test_memories_show_now_and_the_peak_of_at_most_sixteen_ranks_and_a_capacity_only_where_it_is_near():
    cluster = run(17)
    tops = Counter()
    for bar in cluster.memory.plot().axes[0].patches:
        tops[round(bar.get_x() + bar.get_width() / 2, 1)] += round(bar.get_height() * 1e3)
    assert tops == {round(rank + side, 1): held[rank] for rank in range(16) for side, held in (
        (-0.2, cluster.memory.now_nbytes), (0.2, cluster.memory.peak_nbytes))}
    far, near = (run(2, capacity_nbytes=nbytes).memory[0].plot() for nbytes in (10**9, 5_000))
    assert [any(text.get_text() == "capacity" for text in figure.axes[0].texts) for figure in (far, near)] == [
        False, True]


# -- traces and plans ---------------------------------------------------------------------------------------------

def test_the_order_of_a_trace_has_every_collective_once_sums_to_what_was_sent_and_the_busiest_sends_most_in_all():
    cluster = run(3, 2)
    data = trace_plots.trace_order_data(cluster.trace)
    for place, traced in enumerate(cluster.trace):
        purposes = [row.purpose for row in traced.collectives()]
        assert [what for what in data.whats[place] if what in ("parameters", "gradients", "control")] == purposes
        assert sum(data.sent_nbytes[place]) == traced.sent_nbytes()
        for purpose, curve in data.by_purpose(place).items():
            assert curve[-1] == traced.sent_nbytes(purpose)
            assert curve == sorted(curve)
        arithmetic = [(what, after) for what, after in pairwise(data.whats[place]) if what not in trace.PURPOSES]
        assert all(what != after for what, after in arithmetic), "what nothing interrupts is one event"
    assert len(trace_plots.trace_order_data([*cluster.trace] * 6).names) == trace_plots.MOST_LANES == 16
    whats, sent = (("state",) * 3,) * 3, ((32, 0, 0), (0, 0, 0), (16, 16, 16))
    assert trace_plots.TraceOrder(whats, sent, ("rank 0", "rank 1", "rank 2")).busiest == 2


def test_the_last_event_of_a_trace_is_drawn_whole_and_what_it_sent_with_it():
    def sends_last(rank):
        rank.all_reduce(np.zeros(4 * rank.size, np.float32), purpose="parameters")
        rank.all_gather(np.zeros(12, np.float32), purpose="gradients")

    figure = run_of(sends_last).trace.plot()
    order, sent = figure.axes
    (lane,) = {path.get_extents().x1 for path in order.collections[0].get_paths()} - {1.0}
    assert order.get_xlim() == sent.get_xlim() == (0, lane) == (0, 2)
    one, other = (area.get_paths()[0] for area in sent.collections)  # parameters, and above them gradients
    low, high = one.get_extents().y1, other.get_extents().y1
    assert high - low == pytest.approx(96)  # two of three chunks of 48 bytes
    assert other.contains_point((1.9, low + 0.8 * (high - low))), "what the last event sends is sent within it"
    assert not other.contains_point((1.1, low + 0.2 * (high - low)))


def test_a_plans_bars_are_its_rows_and_add_up():
    plan = zs.plan("llama-2-7b", ranks=8, device="a100-40", link="nvlink4", stage="2,3", recompute="block,none")
    axes: Axes = plan.plot().axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["ZeRO-2 block", "ZeRO-2", "ZeRO-3 block", "ZeRO-3"]
    drawn = [round(sum(bar.get_width() for bar in axes.patches if abs(bar.get_y() + 0.36 - place) < 0.01), 6)
             for place in range(4)]
    assert drawn == [round(row.total_nbytes / 1e9, 6) for row in plan.rows]
    missing = [text.get_text() for text in axes.texts if "misses" in text.get_text()]
    assert len(missing) == sum(not row.fits for row in plan.rows)
    # Its verdict is a long one.
    unfused = zs.plan("llama-2-7b", batch=4, sequence=2048, attention="unfused", runtime="zerosim").plot()
    words = max(unfused.texts, key=lambda text: len(text.get_text()))
    assert " ".join(words.get_text().split()).startswith("ZeRO-3 with selective recomputation is the fastest")
    assert unfused.bbox.x0 < words.get_window_extent().x0 < words.get_window_extent().x1 < unfused.bbox.x1


# -- what cannot be drawn -----------------------------------------------------------------------------------------

def test_what_held_did_or_ran_nothing_and_rings_of_many_ranks_are_refused_in_words():
    idle, failed, large = zs.Cluster(2), zs.Cluster(2), zs.Cluster(33)
    idle.run(lambda rank: None)
    large.run(lambda rank: rank.barrier())
    assert_refused(lambda: failed.run(lambda rank: (rank.barrier(), 1 / rank.index)), "division", ZeroDivisionError)
    for draw, words in (
            (idle.memory[1].plot, "rank 1 held nothing in its last run"), (idle.memory.plot, "no rank has held"),
            (idle.trace.plot, "neither arithmetic nor messages"), (idle.trace[0].plot, "neither arithmetic"),
            (zs.Cluster(2).show_ring, "has run nothing to its end yet, so its ring has carried nothing; call"),
            (failed.show_ring, "has run nothing to its end yet, so its ring has carried nothing; call"),
            (large.show_ring, r"a page holds a ring of 32 ranks, found 33; cluster\.trace\.sent_nbytes")):
        assert_refused(draw, words)
