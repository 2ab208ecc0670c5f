"""NVRTC, CUDA's compiler, from its wheel: what it makes of a text, and what is wrong with that; no GPU is needed."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata

WHEELS = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")  # of CUDA 12, and of CUDA 13
MISSING = "NVRTC, CUDA's compiler, is not installed; pip install 'zerosim[nvrtc]' brings it, without a GPU"

LIBRARY = re.compile(r"return (?:exp|log|tanh)##f\(a\);")
OPAQUE = "__device__ float zs_library(float);\n__device__ double zs_library(double);\n"
SAID = re.compile(r"ptxas info .*|ptxas +\. .*|\s*")  # what is no warning
USED = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# A multiply-add; what the assembler may contract into one, as no rounding is named; and what rounds in another way.
CONTRACTED = re.compile(r"\b(?:(?:fma|mad)\.[\w.]*f(?:32|64)|(?:add|sub|mul)\.f(?:32|64)|"
                        r"[\w.]*\.(?:ftz|approx|full)\b[\w.]*)")


@dataclass(frozen=True)
class Made:
    """A compiled text: the assembler's and the compiler's words, and PTX."""

    log: str
    ptx: str


@cache
def library() -> ctypes.CDLL | None:
    """NVRTC; None where no wheel of it is installed."""
    for wheel in WHEELS:
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if re.fullmatch(r"libnvrtc\.so\.\d+|nvrtc64_\d+_0\.dll", file.name):
                return ctypes.CDLL(str(file.locate()))
    return None


def compiled(text: str, *options: str) -> Made:
    """A CUDA text with these options. Raises RuntimeError with NVRTC's log where it refuses."""
    nvrtc = library()
    assert nvrtc is not None, MISSING
    program = ctypes.c_void_p()
    _called("CreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    try:
        words = [option.encode() for option in options]
        refused = nvrtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
        log = _text(program, "ProgramLog")
        if refused:
            raise RuntimeError(log)
        return Made(log, _text(program, "PTX"))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def faults(text: str, architecture: int, options: tuple[str, ...]) -> list[str]:
    """Faults in the code of a kernel for GPUs of an architecture (90: an H100's): a warning, registers that
    spill into memory, operations that are not rounded one by one to nearest even.

    CUDA's own exp, log and tanh multiply and add as they like: in the PTX that is looked at they are calls.
    """
    log = compiled(text, *options, f"-arch=sm_{architecture}", "--ptxas-options=-v").log
    found = [line for line in log.splitlines() if not SAID.fullmatch(line)]
    used = USED.findall(log)
    found += [f"{frame} bytes of stack, {stored} spilled, {loaded} loaded again" for frame, stored, loaded in used
              if any(map(int, (frame, stored, loaded)))] or [log] * (not used)
    opaque = OPAQUE + LIBRARY.sub("return zs_library(a);", text)
    ptx = compiled(opaque, *options, f"-arch=compute_{architecture}", "--relocatable-device-code=true").ptx
    return found + sorted(set(CONTRACTED.findall(ptx)))


def _text(program: ctypes.c_void_p, name: str) -> str:
    size = ctypes.c_size_t()
    _called(f"Get{name}Size", program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    _called(f"Get{name}", program, text)
    return text.value.decode()


def _called(name: str, *arguments: object) -> None:
    code = getattr(library(), f"nvrtc{name}")(*arguments)
    assert code == 0, f"nvrtc{name} answered {code}"
