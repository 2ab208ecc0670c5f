"""DeepSpeed itself, on gloo, beside the engine of the settings that `zs.from_deepspeed` reads: the same bits."""

import importlib.util
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import zerosim as zs
from tests.zero.training import batches

MODEL = zs.models.MLP((12, 16, 6), activation="relu", seed=5)
OPTIMIZER = zs.optim.AdamW(lr=0.01, weight_decay=0.01)


def config_of(compute, stage):
    found = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
             "zero_allow_untested_optimizer": True,
             "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    return found if compute == "fp32" else found | {compute: {"enabled": True}}


def by_deepspeed(folder, job):
    """What the weights come to under each configuration, in processes of their own."""
    (folder / "job.pickle").write_bytes(pickle.dumps(job))
    there = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(job["ranks"]), "WORLD_SIZE": str(job["ranks"]),
             "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = Path(__file__).with_name("deepspeed_job.py")
    started = [subprocess.Popen([sys.executable, script, folder, str(rank)], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, env=os.environ | there | {
                                    "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(job["ranks"])]
    said = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0] * job["ranks"], "\n".join(said)
    return pickle.loads((folder / "found.pickle").read_bytes())


def by_zerosim(settings, data):
    """The same by the engine of these settings."""
    def program(rank):
        engine = settings.engine(rank, MODEL, OPTIMIZER)
        for step in data:
            engine.step(step[rank.index])
        return {name: engine.state(name)["parameter"].astype(np.float32) for name in MODEL.shapes}
    return zs.Cluster(settings.ranks).run(program)[0]


@pytest.mark.slow
def test_deepspeed_on_gloo_has_the_engines_bits_in_16_bits_from_first_weights_of_32_under_every_stage(tmp_path):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is an optional peer, and not installed here")
    data = batches(MODEL, 2, 2, 4, rows=4)
    weights = {name: unit.initial(name, 0, int(np.prod(shape))).reshape(shape)
               for unit in MODEL.units for name, shape in unit.shapes.items()}
    assert any((x.astype(zs.format_of("bf16").dtype).astype(np.float32) != x).mean() > 0.9 for x in weights.values())
    cases = [(compute, stage) for compute in ("bf16", "fp32") for stage in (1, 2, 3)]
    configs = [config_of(*case) for case in cases]
    found = by_deepspeed(tmp_path, {"ranks": 2, "weights": weights, "data": data, "configs": configs})
    for (compute, stage), config, there in zip(cases, configs, found, strict=True):
        settings = zs.from_deepspeed(config, model=MODEL, ranks=2)
        here = by_zerosim(settings, data)
        otherwise = by_zerosim(replace(settings, policy=replace(settings.policy, master_from="first_values")), data)
        for name in MODEL.shapes:
            if compute == "fp32":
                assert np.abs(here[name] - there[name]).max() < 1e-6, (stage, name)
            else:
                assert np.array_equal(here[name], there[name]), (stage, name)
        differ = sum(np.count_nonzero(otherwise[name] != there[name]) for name in MODEL.shapes)
        assert compute == "fp32" or differ > MODEL.parameter_count / 10
