"""Plans of a model of 10¹² parameters on 1024 ranks: by closed forms, and by running the engine without data.

Seconds of this machine beside those of a floor in the same run: importing the package in a fresh interpreter. The most
memory that the process has held stands in the last line.
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


def main() -> None:
    asked = plan_config("megatron-1t", ranks=1024, nodes=128, optimizer=zs.optim.AdamW())
    floor = best_seconds(lambda: subprocess.run([sys.executable, "-c", "import zerosim"], check=True, cwd=ROOT))
    planned = best_seconds(lambda: asked.plan())
    print(f"import zerosim                     {floor:6.2f} s")
    print(f"estimates, 4 stages x 3 policies   {planned:6.2f} s   {planned / floor:5.2f} imports")
    total = 0.0
    for row in asked.plan().rows:
        seconds = _once(lambda row=row: measured_row(asked, row.stage, row.recompute))
        total += seconds
        print(f"measured, {row.title:40s} {seconds:6.2f} s")
    print(f"measured, all                      {total:6.2f} s   {total / floor:5.2f} imports")
    print(f"most memory of this process        {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:6.0f} MB")


if __name__ == "__main__":
    main()
