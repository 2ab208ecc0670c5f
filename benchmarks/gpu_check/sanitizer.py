"""Every kernel, on a small number of elements that no power of two divides: what compute-sanitizer watches.

Run as ``compute-sanitizer --tool memcheck python -m benchmarks.gpu_check.sanitizer``. Each array is an allocation of
its own, since inside CuPy's pool nothing lies outside of anything.
"""

from __future__ import annotations

import re

from benchmarks.gpu_check.processes import Ended

TOOLS = ("memcheck", "racecheck", "initcheck")
ELEMENTS = 10_007
FOUND = 9  # exit code
MISSING = ("compute-sanitizer is not installed: it comes with CUDA's toolkit, and is looked for on the PATH, in "
           "CUDA_HOME and in /usr/local/cuda")


def words_of(program: str, tool: str) -> list[str]:
    """The tool, before the words of what it watches."""
    return [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]


def judged(ended: Ended) -> str:
    """Wrong where the tool found something, or did not come to its summary."""
    said = ended.stdout + ended.stderr
    if ended.code is None:
        return f"did not end within {ended.seconds:.0f} seconds"
    summary = re.search(r"SUMMARY: (\d+) (?:error|hazard).*", said)
    if ended.code == 0 and summary and int(summary[1]) == 0:
        return ""
    shown = [line for line in said.splitlines() if line.startswith("=========")] or said.splitlines()
    return f"exit code {ended.code}: " + "\n".join([*shown[:12], *([summary[0]] if summary else ["no summary"])])


def main() -> None:
    """Runs all of them once."""
    import cupy

    cupy.cuda.set_allocator(None)
    from benchmarks.gpu_check.speed import calls
    from zerosim.backends.cupy.kernels import CupyKernels

    names = []
    for call in calls(CupyKernels(), ELEMENTS):
        call.run()
        names.append(call.name)
    cupy.cuda.Device().synchronize()
    print(f"{len(names)} kernels ran")


if __name__ == "__main__":
    main()
