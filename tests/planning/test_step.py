"""A step's events: what must hold of any, where closed forms say the same, and what the engine gathers."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import chosen
from zerosim.models import GPT, GPTConfig
from zerosim.options import StepOptions
from zerosim.planning import STAGES, Job, Network, hardware, sent_nbytes, step_events, step_folds

NETWORK = Network(hardware.link("nvlink4"))


@st.composite
def jobs(draw, *, plain=False):
    """Jobs of any stage, with tied ends or not, in any formats."""
    units = draw(st.lists(st.integers(1, 40), min_size=2, max_size=7))
    tied = draw(st.booleans())
    compute = draw(st.sampled_from(["bf16", "fp32"]))
    policy = zs.Policy(compute, accumulate=draw(st.sampled_from([None, "fp32"])))
    return Job(tuple(units), draw(st.integers(1, 6)), STAGES[draw(st.sampled_from([0, 1, 2, 3]))], policy=policy,
               micro_batches=draw(st.integers(1, 3)), recompute_units=draw(st.sampled_from([None, 1, 2, 3])),
               kept_gathered=[0] * tied, tied=[[len(units) - 1, 0]] * tied, tied_lengths=[units[0]] * tied,
               options=StepOptions(
                   overlap=not plain and draw(st.booleans()), prefetch=0 if plain else draw(st.integers(0, 3))))


def steps(job):
    """The events of all micro-batches, and of what follows them."""
    parts = [list(step_events.micro_batch(job, number)) for number in range(job.micro_batches)]
    parts.append(list(step_events.after_backward(job)))
    assert list(step_events.step_events(job)) == [event for part in parts for event in part]
    return parts


@given(job=jobs(), seconds=st.floats(0, 1e-3))
def test_all_that_is_issued_is_waited_for_and_what_stands_still_is_between_nothing_and_all_of_it(job, seconds):
    """It is what the closed form sends: a ring over N equal chunks sends (N-1)/N of its vector, an all-reduce twice."""
    vectors, sent = 0, sent_nbytes(job)
    for events in steps(job):
        issued = [event for event in events if isinstance(event, step_events.CollectiveIssue)]
        for key in {event.key for event in issued}:
            own = [type(event) for event in events
                   if isinstance(event, step_events.CollectiveIssue | step_events.CollectiveWait) and event.key == key]
            assert own == [step_events.CollectiveIssue, step_events.CollectiveWait] * (len(own) // 2)
        vectors += sum((1 + (event.operation == "all_reduce")) * event.nbytes for event in issued)
        places = {(event.phase, event.unit): seconds for event in events if isinstance(event, step_events.At)}
        communication, exposed = step_folds.communication_seconds(events, places, NETWORK)
        assert 0 <= exposed <= communication * (1 + 1e-9)
        assert step_folds.communication_seconds(events, {}, NETWORK)[1] == pytest.approx(communication, rel=1e-9)
    assert (job.ranks - 1) * vectors == job.ranks * sum(nbytes[0] for nbytes in sent.values())


@given(job=jobs(plain=True))
def test_without_options_each_wait_follows_its_issue(job):
    for events in steps(job):
        for event, following in zip(events, [*events[1:], None], strict=True):
            issued = isinstance(event, step_events.CollectiveIssue)
            assert not issued or following == step_events.CollectiveWait(event.key)


@pytest.mark.parametrize("ahead", chosen([0, 2], [0, 1, 2, 9]))
def test_gathered_tied_and_kept_units_peak_in_the_engine_where_the_events_say(ahead):
    model = GPT(GPTConfig(layers=3, channels=12, heads=3, context=8, vocabulary=17))
    names = [unit.name for unit in model.units]
    for keep, recompute in product(((), ("embed",), ("embed", "block1")), ("none", "block", "segment(2)")):
        options = {"stage": 3, "policy": zs.Policy("bf16"), "prefetch": ahead, "keep_gathered": keep,
                   "recompute": recompute}
        cluster = zs.NullCluster(3)
        cluster.run(lambda rank: zs.Engine(rank, model, zs.optim.SGD(lr=0.1), **options).step(  # noqa: B023, runs here
            [(rank.xp.zeros((2, 8), np.int64),) * 2]))
        (most,) = {memory.peak_nbytes_of(("gathered_parameter",)) for memory in cluster.memory}
        job = Job(tuple(unit.parameter_count for unit in model.units), 3, STAGES[3], policy=options["policy"],
                  recompute_units=zs.models.Recompute.parse(recompute).units_per_segment,
                  kept_gathered=tuple(map(names.index, keep)), tied=((len(names) - 1, 0),),
                  options=StepOptions(prefetch=ahead))
        assert most == step_folds.transient_memory(job).gathered_nbytes, (keep, recompute)
