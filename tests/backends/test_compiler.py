"""Every kernel text, compiled by CUDA's compiler without a GPU: no warning, no spill, no contraction."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import zerosim as zs
from tests.backends import nvrtc, texts
from zerosim.backends.cupy.tracing import OPTIONS, PRELUDE, Kind
from zerosim.backends.cupy.tracing import _plan as plan_of
from zerosim.optim import AdamW

pytestmark = [pytest.mark.slow, *([] if nvrtc.library() else [pytest.mark.skip(reason=nvrtc.MISSING)])]
ARCHITECTURES = (80, 90)  # an A100's and an H100's


def test_every_kernel_compiles_without_warning_spill_or_contraction(compiler: None) -> None:
    found = texts.launched().texts
    assert len(found) > 200
    wrong = {(architecture, text.removeprefix(PRELUDE)): faults for architecture, text in product(ARCHITECTURES, found)
             if (faults := nvrtc.faults(text, architecture, OPTIONS))}
    assert not wrong


def test_every_place_that_launches_is_among_those_whose_kernels_are_compiled(compiler: None) -> None:
    lines = texts.launched().lines
    unreached = [f"{file}:{first}" for file, first, last in texts.launch_sites()
                 if not any((file, line) in lines for line in range(first, last + 1))]
    assert not unreached, "test_kernels.py or test_cupy.py should come here"


PLANTED = {
    "int unused; out[i] = x[i];": "never referenced",
    "float at[64]; for (int j = 0; j < 99; ++j) at[(int)x[j] & 63] = x[j]; out[i] = at[i & 63];": "256 bytes of stack",
    "out[i] = x[i] * x[i] + x[0];": "fma.rn.f32",
    "out[i] = __fdividef(x[i], x[0]);": "div.approx"}


def test_each_fault_is_seen_where_it_is_planted() -> None:
    for body, said in PLANTED.items():
        text = f"""{PRELUDE}extern "C" __global__ void zs_planted(const float* x, float* out, int i) {{ {body} }}"""
        fusing = tuple("--fmad=true" if option == "--fmad=false" else option for option in OPTIONS)
        assert said in "; ".join(nvrtc.faults(text, 90, fusing)), body


def test_eight_addends_are_loaded_before_one_is_added(compiler: None) -> None:
    """A thread that waited for each of its loads would leave most of the memory's speed unused."""
    sums = [text for text in texts.launched().texts if "void zs_fold(" in text or "void zs_add_rows(" in text]
    assert len(sums) > 20
    for text in sums:
        ptx = nvrtc.compiled(text, *OPTIONS, "-arch=compute_90").ptx
        assert ptx.partition("add.rn.f")[0].count("ld.global") >= 8, text.removeprefix(PRELUDE)


@pytest.mark.parametrize(("name", "each", "of_many"), [("fp32", 4, 4), ("bf16", 8, 4), ("fp8_e4m3", 16, 8)])
def test_a_thread_loads_its_elements_of_an_array_at_once_and_fewer_of_many_arrays(
        name: str, each: int, of_many: int) -> None:
    for arrays, elements in ((2, each), (9, each), (17, of_many)):
        plan = plan_of(added, (Kind(zs.FORMATS[name].dtype),) * arrays, np.dtype(np.float32), True, 0)
        assert plan.per_thread == elements
        words = "v4.u16" if elements < each else "v4.f32" if name == "fp32" else "v4.u32"
        ptx = nvrtc.compiled(PRELUDE + plan.text, *OPTIONS, "-arch=compute_90").ptx
        assert ptx.count(f"ld.global.{words}") == arrays - 1


def test_two_elements_of_fp8_are_added_and_compared_by_one_instruction(compiler: None) -> None:
    """One by one, the sum of eight would take longer than its bytes."""
    found = [nvrtc.compiled(text, *OPTIONS, "-arch=compute_90").ptx for text in texts.launched().texts
             if "v0 = zs_widen2_" in text]
    assert {kind for ptx in found for kind in ("e4m3x2", "e5m2x2") if kind in ptx} == {"e4m3x2", "e5m2x2"}
    for instruction in ("add.rn", "max.NaN", "min.NaN"):
        assert any(f"{instruction}.f16x2" in ptx for ptx in found)
    assert not any(".f32" in ptx for ptx in found)


def added(*arrays: Any) -> None:
    first, *rest, out = arrays
    np.copyto(out, sum(rest, first))


def test_subnormals_are_kept() -> None:
    """And why kernels are not compiled by cupy.RawKernel, which adds -ftz=true: of two such options the last wins."""
    kinds = (Kind(np.dtype(np.float32)),) * 4
    adam = PRELUDE + plan_of(partial(AdamW(lr=0.1).update_block, 1), kinds, np.dtype(np.float32), True, 2).text
    kept, flushed = (nvrtc.compiled(adam, *OPTIONS, *more, "-arch=compute_90").ptx for more in ((), ("-ftz=true",)))
    assert ".ftz" not in kept
    assert ".ftz" in flushed
