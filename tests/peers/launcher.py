"""Jobs in processes of this machine that talk over gloo, one process a rank: what PyTorch and DeepSpeed do themselves.

A job is a function of a module that may import torch at its top, since only the processes import it. It is called on
each rank with what ``launch`` was given, inside a gloo group of all ranks, and what it returns is pickled back:

    def averaged(vectors):                              # in tests/peers/jobs.py
        mine = torch.from_numpy(vectors[dist.get_rank()])
        dist.all_reduce(mine)
        return mine.numpy() / dist.get_world_size()

    first, second = launch("tests.peers.jobs:averaged", 2, vectors)     # by rank, in a test

What a process needs of NumPy goes in as NumPy; one job may run many cases, since to import torch takes seconds. Raises
AssertionError with what the ranks have printed where one of them fails, or does not end.
"""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
# DeepSpeed's, which asks for them also where the group exists; and no card, whatever the machine has.
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
               "TRANSFORMERS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def launch(job: str, ranks: int, *arguments: Any, timeout: float = 500, **named: Any) -> list[Any]:
    """What ``job``, "module:function", returns on each rank."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job").write_bytes(pickle.dumps((job, ranks, arguments, named)))
        started = []
        for rank in range(ranks):
            there = ENVIRONMENT | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                                   "LOCAL_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            with open(Path(folder, f"said{rank}"), "wb") as said:
                started.append(subprocess.Popen([sys.executable, "-m", "tests.peers.launcher", folder, str(rank)],
                                                stdout=said, stderr=subprocess.STDOUT, env=os.environ | there))
        try:
            codes = [process.wait(timeout) for process in started]
        except subprocess.TimeoutExpired:
            codes = [process.poll() for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        if codes != [0] * ranks:
            said = [f"-- rank {rank} ended with {code} --\n{Path(folder, f'said{rank}').read_text()[-6000:]}"
                    for rank, code in enumerate(codes)]
            raise AssertionError(f"{job} on {ranks} ranks\n" + "\n".join(said))
        return [pickle.loads(Path(folder, f"found{rank}").read_bytes()) for rank in range(ranks)]


def main(folder: Path, rank: int) -> None:
    """One rank: joins the group, runs the job, leaves what it returns."""
    import torch
    import torch.distributed as dist

    job, ranks, arguments, named = pickle.loads((folder / "job").read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    module, function = job.split(":")
    found = getattr(importlib.import_module(module), function)(*arguments, **named)
    (folder / f"found{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # an ordinary end aborts now and then: "terminate called without an active exception"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
