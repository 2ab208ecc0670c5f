"""A step's events: what must hold of any, where closed forms say the same, and what the engine gathers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from zerosim.models import GPT, MLP, GPTConfig
from zerosim.planning import STAGES, Job, Network, activations, gradient_peak_nbytes, hardware, sent_nbytes, step

NETWORK = Network(hardware.link("nvlink4"))


@st.composite
def jobs(draw, *, overlap=None, prefetch=None):
    """Jobs of any stage, with tied ends or not, in any formats."""
    units = draw(st.lists(st.integers(1, 40), min_size=2, max_size=7))
    tied = draw(st.booleans())
    compute = draw(st.sampled_from(["bf16", "fp32"]))
    policy = zs.Policy(compute, accumulate=draw(st.sampled_from([None, "fp32"])))
    return Job(tuple(units), draw(st.integers(1, 6)), STAGES[draw(st.sampled_from([0, 1, 2, 3]))], policy=policy,
               micro_batches=draw(st.integers(1, 3)), recompute_units=draw(st.sampled_from([None, 1, 2, 3])),
               kept_gathered=(0,) * tied, tied=((len(units) - 1, 0),) * tied,
               tied_lengths=(units[0],) * tied, overlap=draw(st.booleans()) if overlap is None else overlap,
               prefetch=draw(st.integers(0, 3)) if prefetch is None else prefetch)


def steps(job):
    """The events of all micro-batches, and of what follows them."""
    parts = [list(step.micro_batch(job, first=not index)) for index in range(job.micro_batches)]
    parts.append(list(step.after_backward(job)))
    assert list(step.step_events(job)) == [event for part in parts for event in part]
    return parts


@given(job=jobs(), seconds=st.floats(0, 1e-3))
def test_all_that_is_issued_is_waited_for_and_what_stands_still_is_between_nothing_and_all_of_it(job, seconds):
    """It is what the closed form sends: a ring over N equal chunks sends (N-1)/N of its vector, an all-reduce twice."""
    vectors, sent = 0, sent_nbytes(job)
    for events in steps(job):
        issued = [event for event in events if isinstance(event, step.RingIssue)]
        for key in {event.key for event in issued}:
            own = [type(event) for event in events
                   if isinstance(event, step.RingIssue | step.RingWait) and event.key == key]
            assert own == [step.RingIssue, step.RingWait] * (len(own) // 2)
        vectors += sum((1 + (event.operation == "all_reduce")) * event.nbytes for event in issued)
        places = {(event.phase, event.unit): seconds for event in events if isinstance(event, step.At)}
        communication, exposed = step.communication_seconds(events, places, NETWORK)
        assert 0 <= exposed <= communication * (1 + 1e-9)
        assert step.communication_seconds(events, {}, NETWORK)[1] == pytest.approx(communication, rel=1e-9)
    assert (job.ranks - 1) * vectors == job.ranks * (sent["gradients"][0] + sent["parameters"][0])


@given(job=jobs(overlap=False, prefetch=0))
def test_without_options_each_wait_follows_its_issue(job):
    for events in steps(job):
        for event, following in zip(events, [*events[1:], None], strict=True):
            assert not isinstance(event, step.RingIssue) or following == step.RingWait(event.key)


@given(job=jobs(overlap=False))
def test_gradients_in_flight_without_overlap_are_the_closed_form(job):
    rests = job.policy.accumulate_dtype.itemsize * job.held(job.states.gradients_sharded)
    assert step.transient_memory(job).gradients_nbytes == gradient_peak_nbytes(job)[0] - rests


@pytest.mark.parametrize(("stage", "nbytes"), [(0, 0), (1, 2 * 2400 * 3 // 2), (2, 2 * 2400 * 3 // 2),
                                               (3, 2 * 2400)])
def test_overlap_and_prefetch_hold_buffers_by_stage(stage, nbytes):
    """On two ranks, 2400 elements of 2 bytes: the overlapped all-gather of parameters lands all of them beside the own
    halves; at stage 3 one unit ahead is landing while another is reduced, which takes a half that arrives and one
    that lands; at stage 0 nothing overlaps, and half a unit arrives."""
    job = Job((1200, 1200), 2, STAGES[stage], policy=zs.Policy("bf16"), overlap=True, prefetch=1)
    hops = 2 * 600
    assert step.transient_memory(job).buffers_nbytes == max(nbytes, hops)


def test_the_fullest_moment_of_a_flow_is_linear_between_what_grows_with_the_batch_and_what_does_not():
    job = Job((400, 600, 200), 2, STAGES[2], overlap=True)
    flow = step.Flow(activations.Block(1, 8, 12, 3), 1, 19, "none")
    found = step.transient_memory(job, flow)
    assert found.fullest_nbytes(1) >= step.transient_memory(job).in_flight_nbytes
    fullest = found.fullest(10**9)
    assert found.fullest_nbytes(10**9) == fullest.fixed_nbytes + 10**9 * fullest.sequence_nbytes
    assert fullest.place == ("backward", 1)
    most = activations.fullest_nbytes(flow.block, flow.blocks, flow.vocabulary)
    assert fullest.sequence_nbytes == most + 8 * 8  # and the tokens; the targets are gone
    assert len(found.snapshots) == len(set(found.snapshots)) > 1


# -- beside the engine ------------------------------------------------------------------------------------------------


POLICY = zs.Policy("bf16")
WIDTHS = [5, 9, 4, 11, 3, 7, 6]


def assert_gathered_units_peak_where_the_events_say(model, batch, keep=(), ranks=2, recompute="none", prefetch=0):
    names = [unit.name for unit in model.units]
    tied = tuple((index, names.index(owner)) for index, unit in enumerate(model.units)
                 for owner in dict.fromkeys(unit.tied_weights.values()))
    job = Job(tuple(unit.parameter_count for unit in model.units), ranks, STAGES[3], policy=POLICY,
              recompute_units=zs.models.Recompute.parse(recompute).units_per_segment,
              kept_gathered=tuple(map(names.index, keep)), tied=tied, prefetch=prefetch)
    cluster = zs.Cluster(ranks)
    cluster.run(lambda rank: zs.Engine(rank, model, zs.optim.SGD(lr=0.1), policy=POLICY, stage=3, keep_gathered=keep,
                                       recompute=recompute, prefetch=prefetch).step([batch]) and None)
    found = {memory.peak_nbytes_of(("gathered_parameter",)) for memory in cluster.memory}
    assert found == {step.transient_memory(job).gathered_nbytes}, (recompute, prefetch, keep, ranks)


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_gathered_units_peak_where_the_events_say(ahead):
    batch = np.ones((2, WIDTHS[0]), np.float32), np.ones((2, WIDTHS[-1]), np.float32)
    for recompute in ("none", "block", "segment(2)", "segment(4)"):
        for ranks in (2, 3):
            assert_gathered_units_peak_where_the_events_say(MLP(WIDTHS), batch, ranks=ranks, recompute=recompute,
                                                            prefetch=ahead)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_tied_and_kept_units_are_gathered_beside_their_users(ahead):
    model = GPT(GPTConfig(layers=3, channels=12, heads=3, context=8, vocabulary=17))
    tokens = np.arange(16).reshape(2, 8) % 17
    for keep in ((), ("embed",), ("embed", "block1")):
        assert_gathered_units_peak_where_the_events_say(model, (tokens, tokens), keep, prefetch=ahead)
