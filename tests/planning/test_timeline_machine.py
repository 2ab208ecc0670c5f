"""A machine refuses numbers that mean nothing, and what the run does not have."""

import pytest

from tests.planning.recorded_runs import FAST, MACHINE, device, step
from zerosim.planning.hardware import Network
from zerosim.planning.timeline import Machine, SlowLink, SlowRank, replay


@pytest.mark.parametrize(("options", "message"), [
    ({"format": "fp8"}, "the device made up has no rate in fp8; it has fp16"),
    ({"efficiency": 0}, "the machine: efficiency must be a finite number above 0, got 0"),
    ({"efficiency": 1.5}, "efficiency must be a share of the peak, above 0 and at most 1, got 1.5"),
    ({"slow_ranks": [SlowRank(1, 2), SlowRank(1, 3)]}, "the rank 1 is slow twice; give it one factor"),
    ({"slow_links": [SlowLink(0, 1, 2)] * 2}, r"the link \(0, 1\) is slow twice; give it one factor"),
])
def test_machines_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Machine(**{"device": device(), "network": Network(FAST), "format": "fp16"} | options)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: SlowRank(-1, 2), "rank must be at least 0, got -1"),
    (lambda: SlowRank(0, 0), "the slow rank 0: factor must be a finite number above 0, got 0"),
    (lambda: SlowRank(0, 2, -1.0), "the slow rank 0: from_seconds must be a finite number that is not negative, got -"),
    (lambda: SlowLink(0, -1, 2), "destination must be at least 0, got -1"),
    (lambda: SlowLink(0, 1, float("inf")), "the slow link from 0 to 1: factor must be a finite number above 0, got i"),
])
def test_stragglers_and_slow_links_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_stragglers_and_slow_links_that_the_run_does_not_have_are_refused():
    for options, message in (({"slow_ranks": [SlowRank(3, 2)]}, "rank 3 is to be slow, but the run has 3 ranks"),
                             ({"slow_links": [SlowLink(0, 4, 2)]}, "the link from 0 to 4 is to be slow, but the run")):
        with pytest.raises(ValueError, match=message):
            replay(step(3), Machine(device(), Network(FAST), "fp16", **options))


def test_a_machine_that_says_nothing_else_runs_at_its_peak_and_no_rank_is_slow():
    assert (MACHINE.efficiency, MACHINE.slow_ranks, MACHINE.slow_links) == (1.0, (), ())
    assert MACHINE.peak_flops_per_second == 1e9
