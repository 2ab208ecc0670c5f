"""What the real CuPy says of arrays, and NVRTC makes of kernels, where they are installed; no GPU is needed.

An array over memory of the host that is said to be a device's knows its base, its address and its views as any other.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from zerosim.backends.cupy.tracing import OPTIONS, PRELUDE, _plan
from zerosim.numerics import arrays
from zerosim.numerics.formats import FORMATS
from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim import AdamW

cupy = pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'zerosim[gpu]'")
MEMORY = np.zeros(4096, np.uint8)


def made(shape: Any, dtype: Any, offset: int = 0) -> Any:
    memory = cupy.cuda.UnownedMemory(MEMORY.ctypes.data, MEMORY.nbytes, MEMORY, 0)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, offset))


@pytest.mark.parametrize("name", FORMATS)
def test_arrays_of_every_format_are_told_apart_and_have_a_base(name: str) -> None:
    x = made((4, 6), FORMATS[name].dtype)
    assert arrays.is_array(x)
    assert arrays.on_device(x)
    assert arrays.is_writable(x)
    assert arrays.has_data(x)
    assert arrays.base_of(x) is x
    assert arrays.base_of(x[1:].reshape(-1)[2:].T) is x
    assert arrays.base_of(arrays.words(x)[:, ::2]) is x
    assert arrays.words(x).dtype == f"u{x.dtype.itemsize}"
    assert arrays.start(x[1:, 2:]) == arrays.start(x) + 8 * x.dtype.itemsize
    assert arrays.contiguous(x) is x
    assert weakref.ref(x)() is x


def test_shared_memory_is_found_as_numpy_finds_it() -> None:
    x, same = made((8, 8), np.float32), np.zeros((8, 8), np.float32)
    keys = [(slice(0, 3),), (slice(3, 8),), (slice(None), 0), (slice(None), 7), (slice(2, 2),),
            (slice(None, None, -1),), (slice(None), slice(None, None, 2)), (slice(None), slice(1, None, 2))]
    for a in keys:
        for b in keys:
            assert arrays.may_share_memory(x[a], x[b]) == np.may_share_memory(same[a], same[b]), (a, b)
            assert arrays.is_same_memory(x[a], x[b]) == arrays.is_same_memory(same[a], same[b]), (a, b)
    assert not arrays.may_share_memory(x, same)


def test_numpy_refuses_to_convert_in_silence() -> None:
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(made(3, np.float32))


def compiled(text: str, options: tuple[str, ...]) -> str:
    """The PTX that NVRTC makes of a text for an H100's kind; needs NVRTC, and no GPU."""
    nvrtc = cupy.cuda.nvrtc
    try:
        nvrtc.getVersion()
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, "-arch=compute_90"))
        found = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return found.decode() if isinstance(found, bytes) else found


def adams(options: tuple[str, ...]) -> str:
    """Adam's fused step, written and compiled."""
    texts: list[str] = []

    class Traced(NumpyKernels):
        def _step(self, rows: Any, function: Any, scratch: int) -> None:
            kinds = ((np.dtype(np.float32), False, False),) * len(rows)
            texts.append(_plan(function, kinds, np.dtype(np.float32), True, 1 + scratch).text)

    rows = np.zeros((4, 8), np.float32)
    Traced().step_blocks(AdamW(0.1, 0.9, 0.99, 1e-8, 0.1).block(1), *rows, scratch=2)
    return compiled(PRELUDE + texts[0], options)


def test_the_compiler_keeps_subnormals_and_fuses_no_multiply_add() -> None:
    ptx = adams(OPTIONS)
    assert ".ftz" not in ptx
    assert "fma." not in ptx
    assert "mul.rn.f32" in ptx
    assert "ld.global.v4" in ptx, "four elements in one load"
    assert ".local" not in ptx, "nothing is put aside in memory"


def test_the_option_that_cupy_adds_to_raw_kernels_would_flush_subnormals() -> None:
    """Why kernels are not compiled by cupy.RawKernel: the last of two contradictory options wins."""
    assert ".ftz" in adams((*OPTIONS, "-ftz=true"))
