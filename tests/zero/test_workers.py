"""A training computed on threads leaves what it leaves on one: states, losses, every row of its traces, every byte."""

import pytest

import zerosim as zs
from tests.cases import THOROUGH, named
from tests.zero.drawn import drawn, made
from tests.zero.training import outcome
from zerosim.ranks import hub


@pytest.mark.filterwarnings("ignore::zerosim.SkippedStepWarning")  # of fp16, now and then
@pytest.mark.parametrize("case", drawn(60 if THOROUGH else 3), ids=named)
def test_any_training_is_the_same_on_threads(case, monkeypatch) -> None:
    monkeypatch.setattr(hub, "WORTH_A_THREAD", 0)
    model, data, options = made(case)
    debug, runs = options.pop("debug"), options.pop("runs")
    for stage, own in runs:
        left = []
        for count in (1, 3):
            cluster = zs.Cluster(len(data[0]), debug=debug, workers=count)
            seen = slice(None)
            try:
                found = outcome(model, data, cluster, stage=stage, **options, **own)
            except zs.NonFiniteGradients as error:  # of fp16 under a static scale
                found, seen = (str(error), error.__notes__), slice(1)  # the other ranks may be at a later wait
            left.append((found, cluster.memory.peak_nbytes[seen],
                         [list(trace.all_rows()) for trace in cluster.trace[seen]]))
        assert left[0] == left[1]
