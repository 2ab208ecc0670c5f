"""What the timeline's picture shows is what a replay says, found another way."""

import numpy as np
import pytest
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.colors import to_hex

import zerosim as zs
from tests.display import seen
from zerosim.course.figures.timeline import (
    MACHINE,
    OPTIONS,
    PHASES,
    PURPOSES,
    _peak,
    timeline,
    timeline_data,
    timeline_of,
)
from zerosim.display.colors import KIND_COLORS
from zerosim.planning.recording import record
from zerosim.planning.timeline import replay

WIDTHS, ROWS = (16, 16, 16), 4


def replayed(ranks, stage, options):
    """The step of a real run, with data, of another batch than the figure's."""

    def program(rank):
        engine = zs.Engine(rank, zs.models.MLP(WIDTHS, bias=False), zs.optim.Adam(), stage=stage,
                           policy=zs.Policy("fp16"), **options)
        with rank.trace.span("step"):
            engine.step([(np.ones((ROWS, 16), np.float32), np.zeros((ROWS, 16), np.float32))])
        return engine

    cluster = zs.Cluster(ranks)
    cluster.run(program)
    return replay(record(cluster.trace).inside("step"), MACHINE), cluster.memory[0].peak_nbytes


@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), (3, 3), (4, 1), (4, 2), (4, 3)])
def test_the_timelines_data_are_what_a_replay_of_a_real_run_says(ranks, stage):
    data = timeline_data(WIDTHS, ROWS, ranks=ranks, stage=stage)
    for shown, options in zip(data.replays, OPTIONS.values(), strict=True):
        found, peak = replayed(ranks, stage, options)
        usage = found.usage[0]
        assert shown.step_microseconds == pytest.approx(1e6 * found.step_seconds, rel=1e-12)
        assert shown.exposed_microseconds == pytest.approx(1e6 * usage.exposed_seconds, rel=1e-12)
        assert shown.communication_microseconds == pytest.approx(1e6 * usage.communication_seconds, rel=1e-12)
        assert _peak(shown) == peak
        for stream, seconds in (("compute", usage.compute_seconds), ("communication", usage.communication_seconds)):
            bars = shown.bars[stream]
            assert sum(end - start for _, _, start, end in bars) == pytest.approx(1e6 * seconds, rel=1e-9)
            assert {what for what, *_ in bars} <= set(PHASES if stream == "compute" else PURPOSES)
        assert sum(end - start for start, end in shown.waits) == pytest.approx(1e6 * usage.exposed_seconds, rel=1e-9)


def test_the_bars_are_as_long_as_the_data_and_in_the_colors_of_what_they_are():
    data = timeline_data(WIDTHS, ROWS)
    colors = {**PHASES, **PURPOSES}
    for shown, axes in zip(data.replays, timeline(data).figure.axes[::2], strict=True):
        drawn = sorted((round(bar.get_x(), 6), round(bar.get_width(), 6), to_hex(bar.get_facecolor()).upper())
                       for bar in axes.patches if not bar.get_hatch())
        assert drawn == sorted((round(start, 6), round(end - start, 6), colors[what])
                               for bars in shown.bars.values() for what, _, start, end in bars)
        assert sum(bool(bar.get_hatch()) for bar in axes.patches) == len(shown.waits)


def test_the_areas_are_what_is_held_over_time():
    data = timeline_data(WIDTHS, ROWS)
    kinds = {color: kind for kind, color in KIND_COLORS.items()}
    for shown, axes in zip(data.replays, timeline(data).figure.axes[1::2], strict=True):
        times = np.array([*shown.microseconds, shown.step_microseconds])
        for area in (one for one in axes.collections if isinstance(one, FillBetweenPolyCollection)):
            kind = kinds[to_hex(area.get_facecolor()[0]).upper()]
            x, y = area.get_paths()[0].vertices.T if area.get_paths() else (np.zeros(1), np.zeros(1))
            byte_microseconds = abs(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1))) / 2 * 1e6
            assert byte_microseconds == pytest.approx(np.dot(shown.nbytes[kind], np.diff(times)), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 2), (8, 3)])
def test_other_timelines_keep_their_words_apart(ranks, stage):
    found = timeline(timeline_data(WIDTHS, ROWS, ranks=ranks, stage=stage))
    assert seen.misplaced(found) == []


def test_the_timelines_words_tell_what_overlap_brings_and_what_it_costs():
    data = timeline_data()
    plain, overlapped, prefetched = data.replays
    # A gather waits behind the reduction before it: overlap without prefetch gains nothing, and holds more.
    assert plain.step_microseconds == pytest.approx(overlapped.step_microseconds)
    assert prefetched.step_microseconds < 0.75 * plain.step_microseconds
    assert _peak(plain) < _peak(overlapped) < _peak(prefetched)
    description = timeline(data).description
    assert f"No overlap: the step takes {plain.step_microseconds:.1f} µs." in description
    assert description.endswith(f"At most {_peak(prefetched):,} bytes are held.")


def test_a_timeline_has_the_panels_that_were_asked_for():
    ways = {"In buckets of 100 B": {"bucket_nbytes": 100}, "No overlap": {}}
    data = timeline_data(WIDTHS, ROWS, stage=2, options=ways)
    assert [one.title for one in data.replays] == [*ways]
    for shown, options in zip(data.replays, ways.values(), strict=True):
        assert shown.step_microseconds == pytest.approx(1e6 * replayed(4, 2, options)[0].step_seconds, rel=1e-12)
    assert data.replays[1] == timeline_data(WIDTHS, ROWS, stage=2).replays[0]
    drawn = timeline(data)
    assert len(drawn.figure.axes) == 4
    assert seen.misplaced(drawn) == []


def test_a_timeline_of_ones_own_runs_is_drawn_and_what_has_no_color_is_refused():
    def program(rank, purpose):
        with rank.trace.span("step"), rank.trace.span("backward"):
            rank.trace.compute(flops=10**6)
            rank.reduce_scatter(np.full(64, rank.index, np.float32), purpose=purpose)

    cluster = zs.Cluster(3)
    cluster.run(program, "gradients")
    shown, = timeline_of("a program", {"Mine": cluster.trace}).replays
    found = replay(record(cluster.trace).inside("step"), MACHINE)
    assert shown.step_microseconds == pytest.approx(1e6 * found.step_seconds)
    assert [what for what, *_ in shown.bars["communication"]] == ["gradients"]
    assert "Mine: the step takes" in timeline(timeline_of("a program", {"Mine": cluster.trace})).description
    cluster.run(program, "state")
    with pytest.raises(ValueError, match="'Mine' has bars of 'state', which have no color here; put arithmetic into a"):
        timeline_of("a program", {"Mine": cluster.trace})
    with pytest.raises(ValueError, match="a timeline was asked for of no runs"):
        timeline_of("nothing", {})


def test_a_step_in_which_nothing_takes_time_is_refused_and_one_that_holds_nothing_is_drawn():
    def step(rank, flops):
        with rank.trace.span("step"), rank.trace.span("forward"):
            rank.trace.compute(flops=flops)

    cluster = zs.Cluster(3)
    cluster.run(step, 0)
    with pytest.raises(ValueError, match="'idle' does nothing in its step that takes time, so there is nothing to dra"):
        timeline_of("nothing", {"idle": cluster.trace})
    cluster.run(step, 1_000_000)
    assert _peak(timeline_of("arithmetic", {"busy": cluster.trace}).replays[0]) == 0
    assert "At most 0 bytes are held." in timeline(timeline_of("arithmetic", {"busy": cluster.trace})).description
