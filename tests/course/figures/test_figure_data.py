"""What figures draw is what runs did: each figure's data, found another way by formulas, traces, memories or NumPy."""

import itertools
import re
from collections import Counter

import numpy as np
import pytest

import zerosim as zs
from tests.display import seen
from tests.support import assert_refused
from zerosim.course import figures, precision_runs, published_runs
from zerosim.display import replayed
from zerosim.planning import activations, cost, hardware, recording, timeline

RINGS = (2, 3, 4, 5)


def test_the_rings_messages_are_the_hops_of_the_trace_in_any_format_that_holds_its_sums():
    def program(rank, length, dtype):  # whose numbers are others than the figure's
        return rank.all_gather(rank.reduce_scatter(np.full(length, rank.index, dtype)), length=length)

    for ranks, (length, name) in itertools.product(RINGS, ((0, "fp32"), (1, "fp32"), (7, "fp16"), (8, "fp32"))):
        found, cluster = figures.ring_data(ranks, length, name), zs.Cluster(ranks)
        cluster.run(program, length, zs.format_of(name).dtype)
        traced = cluster.trace
        hops = [(row.call.operation, offset + hop.step + 1, hop.source, hop.destination, hop.chunks, hop.nbytes)
                for row, offset in zip(traced[0].collectives(), (0, ranks - 1), strict=True) for hop in row.hops()]
        assert [(m.operation, m.step, m.source, m.destination, (m.chunk,), m.nbytes) for m in found.messages] == hops
        assert list(found.sent_nbytes) == traced.sent_nbytes()
        assert sum(found.chunk_nbytes) == zs.format_of(name).nbytes * length
        assert [m.addends for m in found.messages] == [m.addends for m in figures.ring_data(ranks, 8).messages]


def test_the_rings_additions_are_made_in_ring_order():
    """Chunk c starts on rank c+1 and goes once round: its addends are c+1, c+2, ..., c."""
    for ranks in RINGS:
        found = figures.ring_data(ranks, 2 * ranks)
        rings = [tuple((chunk + 1 + i) % ranks for i in range(ranks)) for chunk in range(ranks)]
        for message in found.messages:
            made = message.step if message.operation == "reduce_scatter" else ranks
            assert message.addends == rings[message.chunk][:made]
        start, scattered, gathered = ([[(cell.addends, cell.needed) for cell in cells] for cells in found.boards[step]]
                                      for step in (0, ranks - 1, -1))
        assert start == [[((rank,), True)] * ranks for rank in range(ranks)]
        assert [[needed for _, needed in cells] for cells in scattered] == np.eye(ranks, dtype=bool).tolist()
        assert [scattered[rank][rank][0] for rank in range(ranks)] == rings
        assert gathered == [[(ring, True) for ring in rings]] * ranks
    assert figures.ring(figures.ring_data(3, 7)).description.endswith("32 to 40 bytes in all; the vector has 28.")


def test_the_memory_figure_shows_what_every_rank_of_each_measured_step_holds_beside_its_formula():
    data = figures.memory_data((1, 3), (5, 7, 3), rows=2)
    assert [(step.ranks, step.stage) for step in data.steps] == list(itertools.product((1, 3), zs.STAGES))
    for step in data.steps:
        for shown, of_ranks in ((data.resting(step), step.resting_nbytes), (data.peak(step), step.peak_nbytes)):
            assert [{kind: nbytes / data.parameter_count for kind, nbytes in held.items()}
                    for held in of_ranks] == [shown] * step.ranks


def test_the_papers_numbers_stand_in_the_committed_figure_of_memory_and_its_vectors_in_that_of_traffic():
    """120, 31.4, 16.6 and 1.9 GB for 7.5e9 parameters on 64 ranks; 2Ψ and 3Ψ.

    Source: Rajbhandari et al. 2020 (ZeRO), figure 1 and section 7.
    """
    of_n, _, of_optimizer = seen.data_of("memory-scaling").panels
    assert [round(column[of_n.names.index("64")] / 1e9, 1) for column in of_n.resting_nbytes] == [
        120.0, 31.4, 16.6, 1.9]
    assert [(name, round(16 * nbytes / of_n.resting_nbytes[0][0], 1)) for name, nbytes in zip(
        of_optimizer.names, of_optimizer.resting_nbytes[0], strict=True)] == [("SGD", 8), ("Lion", 12), ("Adam", 16)]
    traffic = seen.data_of("traffic")
    for stage, row in enumerate(traffic.sent):
        wanted = [(3 if stage > 2 else 2) * 2 * (ranks - 1) / ranks for ranks in traffic.worlds]
        assert row == pytest.approx(wanted, rel=1e-12)


def replay_of(cluster):
    """Rank 0 of the replay of what a cluster did in its span "step"."""
    return replayed.replayed_rank(
        timeline.replay(recording.record(cluster.trace).inside("step"), replayed.MACHINE), 0)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), (3, 3), (4, 1), (2, 0), (4, 2)])
def test_a_step_over_time_is_the_replay_of_a_run_with_data_however_it_overlaps(ranks, stage):
    widths, rows = (16, 16, 16), 4

    def program(rank, **options):  # on data that differ from rank to rank
        data = np.random.default_rng(rank.index)
        model = zs.models.MLP(widths, seed=3, bias=False)
        engine = zs.Engine(rank, model, zs.optim.Adam(), policy=zs.Policy("fp16"), stage=stage, **options)
        with rank.trace.span("step"):
            engine.step([(data.normal(size=(rows, widths[0])), data.normal(size=(rows, widths[-1])))])

    ways = {"No overlap": {}, "In buckets of 100 B": {"bucket_nbytes": 100}, "Overlap": {"overlap": True},
            **({"Ahead": {"overlap": True, "prefetch": 1}} if stage == 3 else {})}
    found = {}
    for way, options in ways.items():
        cluster = zs.Cluster(ranks)
        cluster.run(lambda rank, options=options: program(rank, **options))
        found[way] = replay_of(cluster)
        assert found[way].peak_nbytes == cluster.memory[0].peak_nbytes
    assert figures.timeline_data(widths, rows, ranks=ranks, stage=stage, options=ways).replays == found
    data = figures.liveness_data((stage,), widths, rows, ranks)
    assert (data.lives, data.parameters) == ({stage: found["No overlap"]}, 2 * 256)
    assert data.held(stage) == [sum(of_kinds) / 512 for of_kinds in zip(
        *(found["No overlap"].nbytes[kind] for kind in found["No overlap"].nbytes if kind in (
            "gradient", "unit_gradient", "communication_buffer")), strict=True)]


def said_of(found: figures.TimelineData) -> dict[str, str]:
    """What the description of a timeline says of each way between its seconds and its communication."""
    text = figures.timeline(found).description
    return {title: re.search(rf"{re.escape(title)}: the step takes [\d.]+ µs\. (.*?) ?Of [\d.]+ µs of", text)[1]
            for title in found.replays}


def test_a_timeline_says_why_overlap_alone_wins_nothing_where_gathers_come_after_reductions_and_only_there():
    found, alone = figures.timeline_data(), "Reductions overlap"
    assert found.replays[alone].step_microseconds == found.replays["No overlap"].step_microseconds
    why = said_of(found)
    assert [title for title, said in why.items() if said] == [alone]
    assert why[alone].startswith("Nothing is won: behind 3 reductions stands the next unit's gather")
    at_stage_2 = figures.timeline_data(stage=2, options={"No": {}, "Yes": {"overlap": True}})  # nothing to gather
    assert not any(said_of(at_stage_2).values())


def test_under_every_stage_the_losses_have_the_same_bits_and_the_bytes_are_the_closed_forms():
    found = figures.stages_data(ranks=3, steps=2)
    assert len(set(found.losses)) == 1
    assert found.losses[0][1] < found.losses[0][0]
    parameters = sum(found.peaks[0][kind] for kind in ("parameter",)) // 2
    assert [held["optimizer_state"] for held in found.peaks] == [8 * parameters, *[8 * parameters // 3] * 3]
    assert [held["parameter"] for held in found.peaks] == [*[2 * parameters] * 3, 2 * parameters // 3]
    once = 2 * parameters * 2 // 3  # a ring of 3 sends two thirds of the vector, of 2 bytes per parameter
    assert [(sent["parameters"], sent["gradients"]) for sent in found.sent] == [
        (0, 2 * once), (once, once), (once, once), (2 * once, once)]


def test_a_timeline_of_ones_own_runs_is_drawn_and_what_has_no_color_or_takes_no_time_is_refused():
    def program(rank, flops, purpose=None, span="backward"):
        with rank.trace.span("step"), rank.trace.span(span):
            rank.trace.compute(flops=flops)
            if purpose:
                _ = rank.reduce_scatter(np.full(64, rank.index, np.float32), purpose=purpose)

    def of(*given):
        cluster = zs.Cluster(3)
        cluster.run(program, *given)
        return figures.timeline_of("a program", {"Mine": cluster.trace}), cluster

    found, cluster = of(10**6, "gradients")
    assert found.replays == {"Mine": replay_of(cluster)}
    assert "Mine: the step takes" in figures.timeline(found).description
    silent = figures.timeline(of(10**6)[0])
    assert not {"gather parameters", "reduce gradients"} & {text.get_text() for text in seen.texts(silent)}
    assert_refused(lambda: of(1, "state"), "'Mine' has bars of 'state', which have no color here; put arithmetic")
    assert_refused(lambda: of(1, "gradients", "mine"), "'Mine' has bars of 'other arithmetic', which have no color")
    assert_refused(lambda: of(0), "'Mine' does nothing in its step that takes time, so there is nothing to draw")


def test_each_weight_of_a_path_is_the_one_before_and_one_rounded_addition():
    data = figures.lost_updates_data((1e-5, 6e-4), (300, 40))
    for run in data.runs:
        for name, path in zip(("fp32", *data.formats), (run.master, *run.alone), strict=True):
            dtype = zs.format_of(name).dtype
            delta = np.array(run.update).astype(dtype).astype(np.float32)
            w = np.array(data.weight).astype(dtype)
            for found in path:
                assert found == float(w)
                w = (w.astype(np.float32) + delta).astype(dtype)
        for name, copy in zip(data.formats, run.copies, strict=True):
            assert np.array_equal(copy, np.float32(run.master).astype(zs.format_of(name).dtype).astype(np.float64))


def test_the_published_example_stands_in_the_committed_figure_and_marks_lie_on_lines():
    """939.5 and 1073.7 MB per block, 64.4 GB in 32 of them: the figure's model holds its logits beside that."""
    data = seen.data_of("activations")
    linear = sum(nbytes for name, nbytes in data.tensors.items() if not re.search("statistics|probabilities", name))
    assert round(linear / 1e6, 1) == 939.5
    assert round(data.tensors["probabilities"] / 1e6, 1) == 1073.7
    of = {one.policy: (one, more) for one, more in zip(data.policies, data.arithmetic, strict=True)}
    (none, nothing), (block, a_third) = of["none"], of["block"]
    logits = 2 * 4 * 2048 * 32_000
    assert none.peak_nbytes - activations.peak_nbytes(activations.EXAMPLE, 32).nbytes == pytest.approx(
        2 * logits, rel=0.1)
    assert block.peak_nbytes < none.peak_nbytes / 10
    assert (nothing, a_third) == (0, pytest.approx(1 / 3, abs=1e-3))
    assert sum(data.tensors.values()) == activations.kept(activations.EXAMPLE).nbytes
    for policy, column in data.marks.items():
        assert column == data.lines[policy][::3]
        assert data.marked == data.lengths[::3]


ALPHA, BETA = 3e-6, 20e9
WIRE = hardware.Link("wire", BETA, ALPHA, "made up for a test", "2025-01-01")


def test_the_walls_marks_lie_on_lines_that_meet_the_rings_two_parts_where_it_stands():
    """At N·α·β bytes, and at n/(α·β) ranks."""
    sizes, worlds, nbytes = (2**14, 2**18, 2**22, 2**26, 2**30), (2, 4, 16, 64), 2**20
    data = figures.latency_wall_data(WIRE, 16, nbytes, sizes, worlds, most_run=16)
    assert (data.by_nbytes.marked, data.by_ranks.marked) == (sizes[::4], worlds[:3])
    assert data.by_nbytes.wall == pytest.approx(16 * ALPHA * BETA)
    assert data.by_ranks.wall == pytest.approx(nbytes / (ALPHA * BETA))
    for panel, points in ((data.by_nbytes, [(16, size) for size in sizes]),
                          (data.by_ranks, [(ranks, nbytes) for ranks in worlds])):
        for name, line in panel.lines.items():
            assert line == pytest.approx([1e3 * cost.curve("all_reduce", name, ranks, hardware.Network(WIRE)).seconds(
                size) for ranks, size in points])
            assert panel.marks[name] == pytest.approx([line[panel.values.index(value)] for value in panel.marked])
        assert list(map(sum, zip(panel.latency, panel.transfer, strict=True))) == pytest.approx(panel.lines["ring"])
        latency_rules = [a > b for a, b in zip(panel.latency, panel.transfer, strict=True)]
        assert latency_rules == [(value < panel.wall) is (panel is data.by_nbytes) for value in panel.values]


def test_a_curve_of_losses_is_the_means_of_the_latest_steps():
    data = seen.data_of("format-losses")
    assert set(data.runs) == set(precision_runs.POLICIES)
    losses = data.runs["fp32"].losses
    assert data.curve("fp32") == pytest.approx([np.mean(losses[end - data.window:end])
                                                for end in range(data.window, len(losses) + 1)], rel=1e-12)


def test_the_loss_scale_is_what_the_scaler_makes_of_the_skips_and_every_skip_is_marked_once_by_where_it_was():
    data = figures.loss_scale_data(steps=40)
    for place, (rule, run) in enumerate(zip(data.rules, data.runs, strict=True)):
        scaler, skips = rule.start(), data.skips(place)
        for scale, skipped in zip(run.scales, run.skipped, strict=True):
            assert scale == scaler.scale
            scaler.update(skipped)
        assert sorted(step for steps in skips.values() for step in steps) == [
            number for number, skipped in enumerate(run.skipped, 1) if skipped]
        for (where, steps), counts in zip(skips.items(), ({3}, {1, 2}, {0}), strict=True):  # of the ranks that overflow
            assert steps, where
            assert {len(run.overflowed[step - 1]) for step in steps} <= counts, where
        assert not any(ranks for ranks, skipped in zip(run.overflowed, run.skipped, strict=True) if not skipped)


@pytest.mark.parametrize(("compute", "ranks"), [("fp16", 1), ("bf16", 2), ("fp16", 3), ("bf16", 5)])
def test_a_step_passes_what_the_formulas_say(compute, ranks):
    """4 + 2 + 2 + 8 bytes per parameter with Adam. Source: Rajbhandari et al. 2020, section 3.1; the all-reduce sends
    2(N - 1)/N of the gradient, here cut into N equal chunks."""
    widths, rows, passed = (30, 60, 60, 30), 7, figures.Passed
    p = 30 * 60 + 60 * 60 + 60 * 30
    found = figures.mixed_precision_data(compute, widths, rows, ranks=ranks, scale=8.0)
    assert (found.parameter_count, found.ranks, found.scale, found.skipped) == (p, ranks, 8.0, False)
    assert found.master == passed("fp32", 4 * p)
    assert found.weights == found.gradient == passed(compute, 2 * p)
    assert found.state == passed("fp32", 8 * p)
    assert found.wide_gradient == passed("fp32", 4 * p)
    assert found.block_nbytes == 4 * 60 * 60
    assert found.output == found.output_gradient == passed(compute, 2 * rows * 30)
    assert found.kept == passed(compute, 2 * rows * (30 + 60 + 60))
    assert found.signs_nbytes == 2 * -(-rows * 60 // 8)
    assert found.sent_nbytes == 2 * p * 2 * (ranks - 1) // ranks
    assert found.gradient_divisor == 8 * ranks


def test_a_large_gradient_is_widened_block_by_block_and_steps_in_fp32_or_that_overflow_are_not_watched():
    found = figures.mixed_precision_data(widths=(300, 300), rows=2)
    assert (found.wide_gradient.nbytes, found.block_nbytes) == (4 * 90_000, 4 * 65_536)
    assert_refused(lambda: figures.mixed_precision_data("fp32", (4, 4), 2),
                   r"computes in fp32, which has one copy .*; take compute=.fp16. or .bf16.")
    assert_refused(lambda: figures.mixed_precision_data("fp16", (4, 4), 2, scale=1e9),
                   "a step was skipped on every rank .*, and the loss scale 1e.09 stays as it is")


# What a run has beside what is counted: statistics of LayerNorm, softmax; many ranks that are not infinitely many; and
# a number of blocks is whole.
BESIDE = {"linear": 2e-4, "scores": 0.02, "vectors": 1e-3, "best segment": 0.04}


def test_what_a_run_measures_is_what_the_formulas_say_and_not_what_does_not_close():
    checked = list(published_runs.checked())
    for one in checked:
        tolerance = max(one.row.tolerance, BESIDE.get(one.row.quantity, 0) * one.estimated)
        assert abs(one.measured - one.estimated) <= tolerance, one.row.name
        assert abs(one.measured - one.row.expected) <= 2 * tolerance, one.row.name
        agrees = abs(one.measured - one.row.stated) <= max(one.row.tolerance, 1e-3 * one.measured * one.row.closes)
        assert agrees == one.row.closes, one.row.name
    assert Counter(one.row.closes for one in checked)[False] > 10 < len(checked) - 90
    assert {one.row.quantity for one in checked} == published_runs.MEASURES.keys()
    assert published_runs.measured_quantity("days", model="gpt2") is None
    megatron = {"parameters": 8, "ranks": 1, "stage": 0, "convention": "megatron-bf16"}
    assert published_runs.measured_quantity("states", **megatron) is None
