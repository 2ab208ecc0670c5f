"""CUDA kernels compiled for the CPU: the same text behind a shim, every thread one after the other.

exp, log and tanh are NumPy's, called back; all else is the text's own arithmetic, each operation rounded (SSE2 has no
fused multiply-add, and the compiler is told to make none).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

COMPILER = shutil.which("g++") or shutil.which("clang++")
MISSING = "there is no C++ compiler (g++ or clang++) that could run the kernels' CUDA text on the CPU"
FLAGS = ("-std=c++14", "-Og", "-ffp-contract=off", "-fno-fast-math", "-fno-strict-aliasing", "-shared", "-fPIC", "-w",
         "-nostdlib")
# Python has libm and libc loaded, and to read them takes an eighth of the time; macOS's linker wants them named.
LIBRARIES = ("-lSystem",) if sys.platform == "darwin" else ()

SHIM = Path(__file__).with_name("shim.h").read_text("utf-8")

RUN = """
extern "C" void shim_run(unsigned grid, unsigned block, {parameters}) {{
  blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) {name}({names});
}}
"""

C_TYPES = {"f4": ctypes.c_float, "f8": ctypes.c_double} | {
    f"{kind}{n}": getattr(ctypes, f"c_{'u' if kind == 'u' else ''}int{8 * n}") for kind in "iu" for n in (1, 2, 4, 8)
}
FUNCTIONS = (np.exp, np.log, np.tanh)


@ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int, ctypes.c_int, ctypes.c_double)
def _numpys(function: int, wide: int, x: float) -> float:
    return float(FUNCTIONS[function](x if wide else np.float32(x)))


@cache
def kernel(code: str, name: str) -> Callable[[int, int, list[Any]], None]:
    """A function of (blocks, threads of a block, arguments): NumPy arrays for pointers, NumPy numbers for the rest."""
    parameters = parameters_of(code, name)
    names = ", ".join(re.findall(r"\w+$", parameter)[0] for parameter in parameters)
    library = _library(SHIM + code + RUN.format(parameters=", ".join(parameters), name=name, names=names))
    run = library.shim_run

    def call(grid: int, block: int, arguments: list[Any]) -> None:
        with np.errstate(all="ignore"):  # of what is called back
            run(ctypes.c_uint(grid), ctypes.c_uint(block), *map(_passed, arguments))

    return call


def parameters_of(code: str, name: str) -> list[str]:
    """A kernel's parameters, as its text declares them."""
    found = re.search(rf"void {name}\((.*?)\)\s*\{{", code, re.S)
    assert found, f"no kernel {name} in the text"
    return " ".join(found[1].split()).split(", ")


def _passed(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return ctypes.c_void_p(x.ctypes.data)
    return C_TYPES[x.dtype.str[1:]](x.item())


def _library(source: str) -> ctypes.CDLL:
    assert COMPILER is not None, MISSING
    key = hashlib.sha256(" ".join((COMPILER, *FLAGS, source)).encode()).hexdigest()[:24]
    user = getattr(os, "getuid", int)()
    folder = Path(tempfile.gettempdir()) / f"zerosim-kernels-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"{key}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            text, made = Path(work) / "kernel.cpp", Path(work) / "kernel.so"
            text.write_text(source)
            command = [COMPILER, *FLAGS, "-o", made, text, *LIBRARIES]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            made.replace(built)
    library = ctypes.CDLL(str(built))
    ctypes.c_void_p.in_dll(library, "shim_function").value = ctypes.cast(_numpys, ctypes.c_void_p).value
    return library


def at(address: int, dtype: np.dtype, count: int) -> np.ndarray:
    """The elements at an address, as NumPy sees them."""
    if not count:
        return np.empty(0, dtype)
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), np.uint8).view(dtype)
