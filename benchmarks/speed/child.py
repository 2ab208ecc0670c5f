"""One side of one row, in this process: prepares, acts once uncounted, then prints the seconds of each repetition.

    python -m benchmarks.speed.child NAME ours
"""

import json
import os
import sys

import numpy as np  # noqa: F401 - loads the BLAS of which `blas` speaks
from threadpoolctl import threadpool_info

from . import rows


def seconds_of(name: str, side: str) -> list[float]:
    """Of each repetition."""
    row = rows()[name]
    if "torch" in row.needs:
        import torch

        torch.set_num_threads(row.threads)
    action = getattr(row, side)(False)
    if row.theirs:
        action()
    seconds = []
    for _ in range(row.repetitions if row.theirs else 1):
        start = row.clock()
        action()
        seconds.append(row.clock() - start)
    return seconds


def blas() -> str:
    """NumPy's BLAS and the kernels that it runs: ``openblas 0.3.31 SkylakeX``."""
    found = next((one for one in threadpool_info() if one["user_api"] == "blas"), {})
    return " ".join(str(found[part]) for part in ("internal_api", "version", "architecture") if found.get(part))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["machine"]:
            said = {"blas": blas()}
        case [name, side]:
            said = {"seconds": seconds_of(name, side)}
    print("\n" + json.dumps(said), flush=True)
    if "RANK" in os.environ:
        os._exit(0)  # an ordinary end of gloo's threads aborts now and then
