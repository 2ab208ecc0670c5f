"""Every kernel, on a small number of elements that no power of two divides, watched by compute-sanitizer.

``python -m benchmarks.gpu_check.sanitizer`` is what is watched. Each array is an allocation of its own, since inside
CuPy's pool nothing lies outside of anything. Initcheck does not see what cuBLAS stores on an H200 (2026-11-26), and
would report every product as memory that nobody has written. So each product's memory is filled with NaN before cuBLAS
is called, and no NaN may be left afterwards.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu_check.processes import Ended, run
from benchmarks.gpu_check.report import BUDGET_SECONDS, Machine, Writer, Wrong
from benchmarks.gpu_check.speed import calls
from zerosim.backends.cupy.kernels import CupyKernels

TOOLS = ("memcheck", "racecheck", "initcheck")
ELEMENTS = 10_007
FOUND = "9"  # exit code
MISSING = ("compute-sanitizer is not installed: it comes with CUDA's toolkit, and is looked for on the PATH, in "
           "CUDA_HOME and in /usr/local/cuda")


def check_sanitizer(report: Writer, machine: Machine) -> None:
    """Every kernel once under each tool."""
    homes = [os.environ[variable] for variable in ("CUDA_HOME", "CUDA_PATH") if variable in os.environ]
    folders = [os.path.join(home, "bin") for home in (*homes, "/usr/local/cuda")]
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    for tool in TOOLS:
        words = [program or "", "--tool", tool, "--error-exitcode", FOUND, "--print-limit", "20", sys.executable, "-m",
                 "benchmarks.gpu_check.sanitizer"]
        report.check(f"compute-sanitizer, {tool}", partial(run, words, BUDGET_SECONDS / len(TOOLS)),
                     "" if program else MISSING, remark=remark)


def remark(ended: Ended) -> str:
    """Wrong where the tool found something, or did not come to its summary."""
    said = ended.stdout + ended.stderr
    if ended.code is None:
        raise Wrong(f"did not end within {ended.seconds:.0f} seconds")
    summary = re.search(r"SUMMARY: (\d+) (?:error|hazard).*", said)
    if ended.code or not summary or int(summary[1]):
        lines = said.splitlines()
        shown = [line for line in lines if line.startswith("=========")][:12]
        if ended.code not in (0, int(FOUND)) or not shown:  # the program's own error, which it says at its end
            shown = lines[-12:]
        raise Wrong(f"exit code {ended.code}: " + "\n".join([*shown, summary[0] if summary else "no summary"]))
    return ""


class CheckedKernels(CupyKernels):
    """Those that look whether cuBLAS has written every element."""

    def _gemm(self, a: Any, b: Any, product: Any) -> None:
        product.fill(np.nan)
        super()._gemm(a, b, product)
        unwritten = self.count_nan(product)
        assert not unwritten, f"cuBLAS left {unwritten} of {product.size} elements of a product unwritten"


def main() -> None:
    """Runs all of them once."""
    import cupy

    cupy.cuda.set_allocator(None)
    names = []
    for call in calls(CheckedKernels(), ELEMENTS):
        call.run()
        names.append(call.name)
    cupy.cuda.Device().synchronize()
    print(f"{len(names)} kernels ran")


if __name__ == "__main__":
    main()
