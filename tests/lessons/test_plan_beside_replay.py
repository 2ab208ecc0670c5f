"""A plan's seconds beside the replay of the engine's own trace on the same machine."""

import pytest

import zerosim as zs
from zerosim.lessons.measured import gpt_of
from zerosim.planning.asking import question
from zerosim.planning.plan import plan
from zerosim.planning.recording import record
from zerosim.planning.timeline import Machine, replay


def replayed(asked, stage):
    """The step of a null rank that stands for all, overlapped and prefetched, on the plan's machine."""
    gpt = gpt_of(asked.model)

    def program(rank):
        engine = zs.Engine(rank, gpt, asked.optimizer, stage=stage, policy=asked.policy, recompute="block",
                           overlap=True, prefetch=1)
        tokens = rank.xp.empty((asked.batch, asked.sequence), "int64")
        with rank.trace.span("step"):
            engine.step([(tokens, tokens)] * asked.micro_batches)

    cluster = zs.NullCluster(asked.ranks, representative=0)
    cluster.run(program)
    machine = Machine(asked.device, asked.network, efficiency=asked.utilization)
    return replay(record(cluster.trace).inside("step").on_ranks(asked.ranks), machine)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_plans_communication_is_the_replays_and_its_other_seconds_bound_it(stage, micro_batches):
    """Control messages, a flag and a norm, are in the replay alone: 14 latencies of 3.4 µs. Products are what a plan
    computes; layers that memory bounds and the head's second use are the replay's alone, so it computes longer."""
    asked = question("gpt2", ranks=8, batch=4, stage=stage, recompute="block", micro_batches=micro_batches,
                     optimizer=zs.optim.AdamW())
    (row,), timeline = plan(asked).rows, replayed(asked, stage)
    usage = timeline.usage[0]
    assert usage.communication_seconds == pytest.approx(row.communication_seconds, abs=14 * 3.4e-6 + 1e-9)
    assert usage.exposed_seconds <= row.exposed_communication_seconds + 14 * 3.4e-6 + 1e-9
    assert row.compute_seconds < usage.compute_seconds < 2 * row.compute_seconds
    assert timeline.step_seconds == pytest.approx(usage.compute_seconds + usage.exposed_seconds, rel=1e-9)
