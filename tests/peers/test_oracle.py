"""The oracle on PyTorch's and DeepSpeed's own steps on gloo: right ones match in every bit, broken ones are named."""

import pytest

from tests.peers.launcher import launch
from zerosim.oracle import judge

RANKS = 4
MISTAKES = ("no average", "clipped by a local norm", "missing micro-batch", "wrong epsilon", "stale shard")
RIGHT = [("ddp", "fp32"), ("fsdp2", "fp32"), ("fsdp2", "bf16"), *((f"deepspeed-{stage}", compute)
                                                                for stage in (1, 2, 3) for compute in ("fp32", "bf16"))]
BROKEN = [("ddp", "fp32"), ("fsdp2", "fp32"), ("deepspeed-2", "fp32"), ("deepspeed-3", "bf16")]
# What a mistake comes to, where it is not a rank's shard or a rank's sum.
WHICH = {"no average": "over the 4 ranks", "missing micro-batch": "micro-batch 1 of rank 1", "stale shard": "rank 1",
         "clipped by a local norm": "", "wrong epsilon": "0.01, not 0.0001"}


REFUSED = ["NAdam, and", "RMSprop, and", "SGD has param groups", "NoneType, and", "AdamW has param groups"]


@pytest.mark.slow
def test_a_step_whose_rule_the_oracle_does_not_know_is_not_recorded():
    pytest.importorskip("torch")
    (said,) = launch("tests.peers.recorded_steps:refused", 1)
    assert [text for text, wanted in zip(said, REFUSED, strict=True) if wanted not in text] == []


@pytest.mark.slow
@pytest.mark.peer
def test_right_steps_match_in_every_bit_and_each_broken_one_is_named_by_its_mistake(tmp_path, installed):
    cases = [(*run, "right") for run in RIGHT] + [(*run, mistake) for run in BROKEN for mistake in MISTAKES]
    launch("tests.peers.recorded_steps:record", RANKS, str(tmp_path), cases)
    said, wrong = [], []
    for case in cases:
        found, mistake = judge(tmp_path / "-".join(case)), case[2]
        names = [cause.name for cause in found.causes]
        said.append(f"{' '.join(case)}: " + (f"matches, {found.ways or found.nearest}" if found.matches else
                                             f"{found.nearest.first}; {'; '.join(map(str, found.causes))}"))
        right = bool(found.ways) if mistake == "right" else (
            names == [mistake] and any(WHICH[mistake] in one for one in found.causes[0].which))
        wrong += [] if right else [said[-1]]
    print("\n".join(said))
    assert wrong == []
