"""Plans of a model of 10¹² parameters on 1024 ranks: by closed forms, and by running the engine without data.

Seconds of this machine beside those of a floor in the same run: a fresh interpreter that imports NumPy and ml_dtypes.
The imports of zerosim stand beside it too. The most memory that the process has held stands in the last line.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from timing import best_seconds

import zerosim as zs
from zerosim.course.measured import measured_row
from zerosim.planning.plan import plan_config

ROOT = Path(__file__).parents[1]


def _once(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _fresh(program: str) -> float:
    """Seconds of a fresh interpreter that runs one line."""
    return best_seconds(lambda: subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT))


def main() -> None:
    asked = plan_config("megatron-1t", ranks=1024, nodes=128, optimizer=zs.optim.AdamW(), runtime="zerosim")
    floor = _fresh("import numpy, ml_dtypes")

    def line(name: str, seconds: float) -> None:
        print(f"{name:50s} {seconds:6.2f} s   {seconds / floor:6.2f} of the floor")

    line("the floor: import numpy, ml_dtypes", floor)
    line("import zerosim", _fresh("import zerosim"))
    line("import zerosim, with each of its names", _fresh("from zerosim import *"))
    line("estimates, 4 stages x 3 policies", best_seconds(lambda: asked.plan()))
    measured = [(row.title, _once(lambda row=row: measured_row(asked, row.stage, row.recompute)))
                for row in asked.plan().rows]
    for title, seconds in measured:
        line(f"measured, {title}", seconds)
    line("measured, all", sum(seconds for _, seconds in measured))
    print(f"most memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
