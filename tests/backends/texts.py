"""Every CUDA text that the tests of the kernels launch, and the lines of the package from which they are launched.

``python -m tests.backends.texts OUT`` runs these tests on the stand-in for CuPy and writes what was launched.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.architecture.source import ROOT
from tests.backends import fake_cupy

# The kernels' own tests, and of the one suite what runs on a double of one GPU.
SUITE = ("tests/backends/test_kernels.py", "tests/backends/test_cupy.py", "tests/backends/test_one_suite.py",
         "-k", "not test_one_suite or (double and not doubles)", "-m", "not gpu", "-q", "-p", "no:cacheprovider")
# What launches, and what is called with a function that is written into a kernel; NumPy's own loops aside.
LAUNCHES = re.compile(r"launch|launch_typed|run_fused|(self|k)\.apply|"
                      r"(\w+\.)*kernels\.(step_blocks|elementwise)")
CALLERS = ("backends/cupy/kernels.py", "numerics/layer_kernels.py", "numerics/kernels.py", "optim", "models")


@dataclass(frozen=True)
class Launched:
    """CUDA texts, and (file, line) of the package's calls that stood on the stack when one of them was launched."""

    texts: list[str]
    lines: set[tuple[str, int]]


@cache
def launched() -> Launched:
    """All that the tests launch, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "launched.json"
        done = subprocess.run([sys.executable, "-m", "tests.backends.texts", out], cwd=ROOT, text=True,
                              capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(out.read_text())
    return Launched(found["texts"], {(file, line) for file, line in found["lines"]})


def launch_sites() -> Iterator[tuple[str, int, int]]:
    """(file, first line, last line) of every call in the package that launches a kernel."""
    for caller in CALLERS:
        path = ROOT / "zerosim" / caller
        for file in [path] if path.is_file() else sorted(path.glob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and LAUNCHES.fullmatch(ast.unparse(node.func)):
                    yield str(file.relative_to(ROOT)), node.lineno, node.end_lineno or node.lineno


def record(out: Path) -> int:
    """Runs the tests, writes what they have launched, and returns pytest's exit code."""
    texts, lines = set[str](), set[tuple[str, int]]()
    load, call, package = fake_cupy.Module.load, fake_cupy.Function.__call__, str(ROOT / "zerosim")

    def noted_load(self: fake_cupy.Module, binary: bytes) -> None:
        texts.add(binary.decode())
        load(self, binary)

    def noted_call(self: fake_cupy.Function, *arguments: object) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(package):
                lines.add((str(Path(frame.f_code.co_filename).relative_to(ROOT)), frame.f_lineno))
            frame = frame.f_back
        call(self, *arguments)

    with patch.object(fake_cupy.Module, "load", noted_load), patch.object(fake_cupy.Function, "__call__", noted_call):
        code = pytest.main(list(SUITE))
    out.write_text(json.dumps({"texts": sorted(texts), "lines": sorted(lines)}))
    return int(code)


if __name__ == "__main__":
    sys.exit(record(Path(sys.argv[1])))
