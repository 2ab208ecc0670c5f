"""A plan's seconds beside the replay of the engine's own trace on the same machine, with the same options."""

from collections import Counter
from itertools import product

import pytest

import zerosim as zs
from tests.cases import covering
from zerosim.course.measured import gpt_of
from zerosim.planning.cost import curve
from zerosim.planning.plan import plan_config
from zerosim.planning.recording import record
from zerosim.planning.step import after_backward, communication_seconds, micro_batch
from zerosim.planning.timeline import Machine, replay

OPTIONS = [{"overlap": False, "prefetch": 0}, {"overlap": True, "prefetch": 0}, {"overlap": False, "prefetch": 1},
          {"overlap": True, "prefetch": 1}, {"overlap": True, "prefetch": 2}]
CONTROL = (1, 8)  # bytes of a rank: whether a gradient overflowed, and its norm's sum of squares


def replayed(asked, stage):
    """The step of a null rank that stands for all, with the question's options, on the plan's machine."""
    gpt, (policy,) = gpt_of(asked.model), asked.recompute

    def program(rank):
        engine = zs.Engine(rank, gpt, asked.optimizer, stage=stage, policy=asked.policy, recompute=policy,
                           overlap=asked.overlap, prefetch=asked.prefetch)
        tokens = rank.xp.empty((asked.batch, asked.sequence), "int64")
        with rank.trace.span("step"):
            engine.step([(tokens, tokens)] * asked.micro_batches)

    cluster = zs.NullCluster(asked.ranks, representative=0)
    cluster.run(program)
    machine = Machine(asked.device, asked.network, efficiency=asked.utilization)
    return replay(record(cluster.trace).inside("step").on_ranks(asked.ranks), machine)


def control_seconds(asked, stage):
    """Flag and norm go round in rings, waited for at once, where each rank updates a part."""
    ring = curve("all_gather", "ring", asked.ranks, asked.network)
    return sum(ring.seconds(asked.ranks * nbytes) for nbytes in CONTROL) if stage else 0.0


def computed(asked, timeline):
    """Seconds of the replay's own arithmetic at each place of a micro-batch, from the spans in which it stands."""
    units, found = [unit.name for unit in gpt_of(asked.model).units], Counter()
    for event in timeline.computed(0):
        phase = {"recompute": "again"}.get(event.path[1], event.path[1])
        if phase in ("forward", "again", "backward"):
            place = "again" if event.path[-1] == "recompute" else phase
            found[place, units.index(event.path[2])] += event.seconds / asked.micro_batches
    return found


@pytest.mark.parametrize(("row", "micro_batches"), covering(product(zs.STAGES, OPTIONS), [1, 3]), ids=str)
def test_a_plans_communication_is_the_replays_and_its_other_seconds_bound_it(row, micro_batches):
    """Products are what a plan computes; layers that memory bounds and the head's second use are the replay's alone, so
    it computes longer, and stands still no longer than the plan says."""
    stage, options = row
    asked = plan_config("gpt2", ranks=8, batch=4, stage=stage, recompute="block", micro_batches=micro_batches,
                     optimizer=zs.optim.AdamW(), **options)
    (row,), timeline, control = asked.plan().rows, replayed(asked, stage), control_seconds(asked, stage)
    usage = timeline.usage[0]
    assert usage.communication_seconds == pytest.approx(row.communication_seconds + control, rel=1e-9)
    assert usage.exposed_seconds <= row.exposed_communication_seconds + control + 1e-12
    assert row.compute_seconds + row.update_seconds < usage.compute_seconds < 2 * row.compute_seconds
    assert timeline.step_seconds == pytest.approx(usage.compute_seconds + usage.exposed_seconds, rel=1e-9)
    if options == OPTIONS[0]:
        assert row.exposed_communication_seconds == pytest.approx(row.communication_seconds, rel=1e-12)


@pytest.mark.parametrize(("row", "link", "policy"), covering(
    product(zs.STAGES, OPTIONS), ["nvlink4", "pcie3"], ["none", "block", "segment(4)"]), ids=str)
def test_given_the_replays_own_arithmetic_the_plan_stands_still_exactly_as_long(row, link, policy):
    """So what a plan exposes differs from the replay by what a plan leaves out of the arithmetic, and by nothing else:
    the update's seconds are the plan's own."""
    stage, options = row
    asked = plan_config("gpt2", ranks=8, link=link, batch=4, stage=stage, recompute=policy, micro_batches=2,
                     optimizer=zs.optim.AdamW(), **options)
    timeline, job = replayed(asked, stage), asked.job(stage, policy)
    update = asked.update_seconds(job)
    _, in_passes = communication_seconds(micro_batch(job), computed(asked, timeline), asked.network)
    _, after = communication_seconds(after_backward(job), update, asked.network)
    expected = 2 * in_passes + after + control_seconds(asked, stage)
    assert timeline.usage[0].exposed_seconds == pytest.approx(expected, rel=1e-9)
    found = sum(event.seconds for event in timeline.computed(0) if event.path[1] == "update")
    assert found == pytest.approx(sum(update.values()), rel=1e-9)
