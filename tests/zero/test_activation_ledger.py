"""The engine's ledger of activations and their gradients, beside the moments in pencil: equal to the byte."""

import pytest

import zerosim as zs
from tests.models.gpt_runs import batch_of
from zerosim.models import GPT
from zerosim.numerics.policy import Policy
from zerosim.optim import Adam
from zerosim.planning.activations import Block
from zerosim.planning.moments import moments
from zerosim.zero import Engine

KINDS = ["activation", "checkpointed_input", "activation_gradient"]
POLICIES = ["none", "block", "segment(2)", "sub_block", "selective", "tiled", "segment(2)+tiled"]


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize(("units", "parts"), [("block", 2), ("sub_block", 1), (2, 4)])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("output", [None, "fp32"])
def test_the_largest_moment_of_a_ranks_ledger_is_the_one_in_pencil(recompute, units, parts, stage, output):
    def program(rank: zs.Rank) -> int:
        model = GPT("gpt-nano", units=units)
        engine = Engine(rank, model, Adam(lr=1e-3), stage=stage, policy=Policy("bf16", output=output),
                        recompute=recompute)
        engine.step([batch_of(model, batch=3, seed=rank.index)])
        assert not any(rank.memory.now_nbytes_by_kind.get(kind) for kind in KINDS)
        return rank.memory.peak_nbytes_of(KINDS)

    pencil = moments(Block(batch=3, tokens=8, channels=12, heads=3), 2, 17, recompute, parts_per_unit=parts,
                     output_itemsize=4 if output else None)
    assert list(zs.Cluster(2).run(program)) == [max(moment.total_nbytes for moment in pencil)] * 2
