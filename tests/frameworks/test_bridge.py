"""The page of PyTorch and DeepSpeed: its settings give engines and plans, its code is what runs, its figures hold.

docs/from_pytorch_and_deepspeed.md has code of zerosim, which is run here from top to bottom, code of PyTorch, which is
that of benchmarks/torch_step.py, and configurations of DeepSpeed.
"""

import importlib.util
import json
import re

import numpy as np
import pytest

import zerosim as zs
from tests.architecture.source import ROOT
from tests.support import assert_refused
from tests.zero.training import batches, flat_state

PAGE = (ROOT / "docs/from_pytorch_and_deepspeed.md").read_text(encoding="utf-8")
SCRIPT = (ROOT / "benchmarks/torch_step.py").read_text(encoding="utf-8")
WAYS = re.findall(r'"([^"]+)": (?:partial|\w+,)', SCRIPT[SCRIPT.index("WAYS: "):SCRIPT.index("def rule_of")])


def blocks(language: str, text: str = PAGE) -> list[str]:
    """The code of the page's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.M)


def test_the_pages_own_code_runs_and_its_code_of_pytorch_is_that_which_was_run(capsys):
    code = blocks("python")
    of_torch = [block for block in code if "torch" in block]
    assert len(of_torch) == 4
    assert [block for block in of_torch if block not in SCRIPT] == []
    exec("".join(block for block in code if block not in of_torch), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert "DeepSpeed: stage=3, " in printed
    assert "steps_per_print" in printed
    assert printed.count("fits with") == 2


def test_the_refusal_on_the_page_is_the_one_that_is_raised():
    asked, said = blocks("py")[0], blocks("text")[0]
    assert_refused(lambda: exec(asked, {"zs": zs}), "^" + re.escape(said.removeprefix("ValueError: ").rstrip()) + "$")


def test_deepspeeds_configurations_give_plans_and_engines_that_train_to_the_same_bits():
    model, found = zs.models.MLP((6, 5, 3)), []
    data = batches(model, 2, 1, 2)
    for config in map(json.loads, blocks("json")):
        settings = zs.from_deepspeed(config, ranks=2, model=model)
        options = settings.engine_arguments()

        def program(rank, options=options):
            engine = zs.Engine(rank, model, zs.optim.AdamW(), **options)
            for step in data:
                engine.step(step[rank.index])
            return flat_state(engine)["parameter"]

        found.append(zs.Cluster(2).run(program)[0])
        assert {row.stage for row in zs.plan("gpt2", **settings.plan_arguments()).rows} == {settings.stage} == \
            {config["zero_optimization"]["stage"]}
    assert len(found) == 4
    assert all(np.array_equal(found[0], weights) for weights in found)


def test_every_way_has_a_row_of_recorded_figures_on_two_and_three_ranks():
    for ranks, text in zip((2, 3), blocks("text")[1:], strict=True):
        assert text.splitlines()[0].endswith(f"one step on {ranks} ranks")
        assert [line[:36].rstrip() for line in text.splitlines()[4:]] == WAYS
    assert len(WAYS) == 8


def skip_without_torch():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is an optional peer, and not installed here")


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own modules, while they are imported
def test_torchs_own_objects_are_read_as_their_names_are():
    skip_without_torch()
    import torch
    from torch.distributed import fsdp

    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # A DeviceMesh needs processes; like a tensor it has a shape, a tuple.
    mixed = fsdp.MixedPrecision(param_dtype=torch.float16, keep_low_precision_grads=True)
    named = {"param_dtype": "float16", "keep_low_precision_grads": True}
    for own, names in (
            ({"mp_policy": policy}, {"mp_policy": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}),
            ({"offload_policy": fsdp.CPUOffloadPolicy()}, {"offload_policy": "cpu"}),
            ({"offload_policy": fsdp.OffloadPolicy()}, {}),
            ({"sharding_strategy": fsdp.ShardingStrategy.HYBRID_SHARD, "mesh": torch.empty(2, 4), "mp_policy": mixed},
             {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 4), "mp_policy": named})):
        assert zs.from_fsdp(**own).engine_arguments() == zs.from_fsdp(**names).engine_arguments()


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own modules, while they are imported
@pytest.mark.parametrize("ranks", [2, 3])
def test_torch_on_gloo_has_the_engines_bits_on_exact_data_and_is_within_the_bound_on_random_data(ranks):
    """On three ranks gloo adds in an order of its own, which shows where sums round."""
    skip_without_torch()
    from benchmarks import torch_step

    rows = torch_step.compared(ranks, WAYS)
    for row in rows:
        assert row.is_of_some_order, row
        assert row.share is None or 0 < row.share < 1, row
        if row.way.startswith("fully_shard"):
            assert row.torch_calls == row.calls, row
    rounds = {"DDP", "ZeroRedundancyOptimizer", "fully_shard, bf16"} if ranks > 2 else set()
    assert {row.way for row in rows if not row.is_equal} == rounds
