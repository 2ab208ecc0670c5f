"""Training by DeepSpeed itself, on processes of this machine and gloo: started by `test_deepspeed.py`, one a rank.

    python deepspeed_job.py FOLDER RANK

reads configurations, first weights and batches from FOLDER/job.pickle, and rank 0 writes what the weights come to into
FOLDER/found.pickle: for each configuration those that compute, by name, as fp32.
"""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist


def main(folder: Path, rank: int) -> None:
    """Trains under one configuration after the other."""
    job = pickle.loads((folder / "job.pickle").read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=job["ranks"])
    found = [trained(config, job["weights"], [step[rank] for step in job["data"]]) for config in job["configs"]]
    if rank == 0:
        (folder / "found.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # an ordinary end aborts now and then: "terminate called without an active exception"


def trained(config: dict[str, Any], weights: dict[str, np.ndarray], data: list) -> dict[str, np.ndarray]:
    """The weights of two linear layers and a ReLU after these steps of micro-batches (x, target)."""
    (inputs, hidden), (_, outputs) = weights["layer0.weight"].shape, weights["layer1.weight"].shape
    model = torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, outputs))
    names = {"0.weight": "layer0.weight", "0.bias": "layer0.bias", "2.weight": "layer1.weight", "2.bias": "layer1.bias"}
    model.load_state_dict({there: torch.from_numpy(weights[here].T.copy()) for there, here in names.items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in data:
        for x, target in step:
            y = engine(torch.from_numpy(x).to(next(engine.module.parameters()).dtype)).float()
            engine.backward(0.5 * ((y - torch.from_numpy(target)) ** 2).sum() / len(x))
            engine.step()
    sharded = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=sharded):
        return {names[name]: parameter.detach().float().numpy().T.copy()
                for name, parameter in engine.module.named_parameters()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
