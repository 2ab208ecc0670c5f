"""A step on paper in the engine's order: what must hold of any, and where closed forms say the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from zerosim.planning.activations import Block, fullest_nbytes
from zerosim.planning.closed_forms import STAGES, Job, States, gradient_peak_nbytes, sent_nbytes
from zerosim.planning.hardware import Network, link
from zerosim.planning.plan import communicated
from zerosim.planning.step import At, Flow, Issued, Waited, after_backward, gathered_nbytes, micro_batch, passing

NETWORK = Network(link("nvlink4"))


@st.composite
def jobs(draw, *, overlap=None, prefetch=None):
    """Jobs of any stage, with tied ends or not, in any formats."""
    units = draw(st.lists(st.integers(1, 40), min_size=2, max_size=7))
    tied = draw(st.booleans())
    compute = draw(st.sampled_from(["bf16", "fp32"]))
    policy = zs.Policy(compute, accumulate=draw(st.sampled_from([None, "fp32"])))
    return Job(tuple(units), draw(st.integers(1, 6)), STAGES[draw(st.sampled_from([0, 1, 2, 3]))], policy=policy,
               micro_batches=draw(st.integers(1, 3)), recompute_units=draw(st.sampled_from([None, 1, 2, 3])),
               kept_gathered=(0,) * tied, borrows=((len(units) - 1, 0),) * tied,
               borrowed_lengths=(units[0],) * tied, overlap=draw(st.booleans()) if overlap is None else overlap,
               prefetch=draw(st.integers(0, 3)) if prefetch is None else prefetch)


def steps(job):
    """The walks of all micro-batches, and of what follows them."""
    return [*(list(micro_batch(job, first=not index)) for index in range(job.micro_batches)), list(after_backward(job))]


@given(job=jobs())
def test_all_that_is_issued_is_waited_for_before_it_is_issued_again(job):
    for events in steps(job):
        issued = [event.key for event in events if isinstance(event, Issued)]
        assert sorted(issued) == sorted(event.key for event in events if isinstance(event, Waited))
        for key in set(issued):
            own = [type(event) for event in events if isinstance(event, Issued | Waited) and event.key == key]
            assert own == [Issued, Waited] * issued.count(key)


@given(job=jobs(overlap=False, prefetch=0))
def test_without_levers_each_wait_follows_its_issue(job):
    for events in steps(job):
        for event, following in zip(events, [*events[1:], None], strict=True):
            assert not isinstance(event, Issued) or following == Waited(event.key)


@given(job=jobs())
def test_a_program_issues_what_the_closed_form_sends(job):
    """A ring over N equal chunks sends (N-1)/N of its vector, an all-reduce twice as much."""
    issued = [event for events in steps(job) for event in events if isinstance(event, Issued)]
    vectors = sum((1 + (event.operation == "all_reduce")) * event.nbytes for event in issued)
    sent = sent_nbytes(job)
    assert (job.ranks - 1) * vectors == job.ranks * (sent["gradients"][0] + sent["parameters"][0])


@given(job=jobs())
def test_what_is_gathered_is_the_closed_form_with_as_many_units_ahead(job):
    assert passing(job).gathered_nbytes == gathered_nbytes(job, job.prefetch)


@given(job=jobs(overlap=False))
def test_gradients_in_flight_without_overlap_are_the_closed_form(job):
    rests = job.policy.accumulate_dtype.itemsize * job.held(job.states.gradients_sharded)
    assert passing(job).gradients_nbytes == gradient_peak_nbytes(job)[0] - rests


@pytest.mark.parametrize(("stage", "nbytes"), [(0, 0), (1, 2 * 2400 * 3 // 2), (2, 2 * 2400 * 3 // 2),
                                               (3, 2 * 2400)])
def test_overlap_and_prefetch_hold_buffers_by_stage(stage, nbytes):
    """On two ranks, 2400 elements of 2 bytes: the overlapped refresh lands all of them beside the own halves; at stage
    3 one unit ahead is landing while another is reduced, which takes a half that arrives and one that lands; at stage 0
    nothing overlaps, and half a unit arrives."""
    job = Job((1200, 1200), 2, STAGES[stage], policy=zs.Policy("bf16"), overlap=True, prefetch=1)
    hops = 2 * 600
    assert passing(job).buffers_nbytes == max(nbytes, hops)


def test_the_fullest_moment_of_a_flow_is_linear_between_what_grows_with_the_batch_and_what_does_not():
    job, flow = Job((400, 600, 200), 2, STAGES[2], overlap=True), Flow(Block(1, 8, 12, 3), 1, 19, "none")
    found = passing(job, flow)
    assert found.fullest_nbytes(1) >= passing(job).in_flight_nbytes
    fullest = found.fullest(10**9)
    assert found.fullest_nbytes(10**9) == fullest.fixed_nbytes + 10**9 * fullest.sequence_nbytes
    assert fullest.place == ("backward", 1)
    most = fullest_nbytes(flow.block, flow.blocks, flow.vocabulary)
    assert fullest.sequence_nbytes == most + 8 * 8  # and the tokens; the targets are gone
    assert len(found.moments) == len(set(found.moments)) > 1


@given(job=jobs(), seconds=st.floats(0, 1e-3))
def test_what_stands_still_is_between_nothing_and_all_communication(job, seconds):
    for events in steps(job):
        places = {(event.phase, event.unit): seconds for event in events if isinstance(event, At)}
        communication, exposed = communicated(events, places, NETWORK)
        assert 0 <= exposed <= communication * (1 + 1e-9)
        assert communicated(events, {}, NETWORK)[1] == pytest.approx(communication, rel=1e-9)


@pytest.mark.parametrize("job", [Job((4, 6), 2, STAGES[2], layout="contiguous"),
                                 Job((4, 6), 2, States(False, True, False))], ids=["layout", "states"])
def test_what_is_no_stage_of_equal_chunks_has_no_program(job):
    for walk in (micro_batch, after_backward):
        with pytest.raises(ValueError, match="a program is of ZeRO's stages and of the layout per_unit"):
            list(walk(job))
