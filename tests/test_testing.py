"""zerosim.testing, as users have it: its doc page runs, its reference is right, and its checks can fail."""

import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import zerosim as zs
from tests.twin import Twin
from zerosim.numerics import kernels
from zerosim.testing import (
    SingleDevice,
    assert_same_bits,
    batches,
    gradients,
    models,
    policies,
    splits,
    vectors,
    worlds,
)

PAGE = Path(__file__).parent.parent / "docs" / "check_your_own_update.md"


@contextmanager
def only_generated():
    """Properties that are defined in here end at their first counterexample, which is wanted and need not be small."""
    name = settings.get_current_profile_name()
    settings.register_profile("generated", settings(phases=[Phase.generate]))
    settings.load_profile("generated")
    try:
        yield
    finally:
        settings.load_profile(name)


def page_code(break_with=None):
    """The page's code, imports and program first, perhaps with one replacement that breaks the program."""
    test, program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    old, new = break_with or ("", "")
    assert old in program
    names: dict = {}
    exec(program.replace(old, new, 1) + "\n" + test, names)
    return names["test_my_sharded_adam_is_adam"]


def test_the_check_on_the_doc_page_passes():
    page_code()()


@pytest.mark.parametrize(
    "broken",
    [
        (" / np.float32(rank.size)", ""),
        ("enumerate(steps, 1)", "enumerate(steps, 2)"),
        ("of_all_ranks[rank.index]", "of_all_ranks[0]"),
    ],
    ids=str,
)
def test_the_check_on_the_doc_page_finds_broken_programs(broken):
    with only_generated(), pytest.raises((AssertionError, ExceptionGroup)) as caught:  # a group where it found several
        page_code(broken)()
    found = caught.value.exceptions if isinstance(caught.value, ExceptionGroup) else [caught.value]
    assert all(isinstance(error, AssertionError) and "differ" in str(error) for error in found)


def test_the_ten_lines_are_ten():
    assert len(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0].splitlines()) == 10


@given(worlds(), st.integers(0, 20), st.data())
def test_the_single_device_reference_adds_in_ring_order(ranks, length, data):
    cut = data.draw(splits(length, ranks))
    drawn = data.draw(gradients(ranks, length, "bf16"))
    reference = SingleDevice(zs.optim.SGD(lr=1.0), np.zeros(length, np.float32), ranks, cut)
    expected = zs.Cluster(ranks).run(lambda rank: rank.all_reduce(drawn[rank.index], splits=cut))[0]
    assert_same_bits(reference.step(drawn), 0 - expected.astype(np.float32) / np.float32(ranks))


@given(models(), worlds(5), policies(), st.sampled_from([0, 1, 2, 3]), st.sampled_from(["per_unit", "contiguous"]),
       st.integers(1, 3), st.data())
def test_any_model_policy_stage_and_layout_equals_the_twin(model, ranks, policy, stage, layout, micro_batches, data):
    drawn = [data.draw(batches(model, ranks, micro_batches)) for _ in range(2)]
    twin = Twin(model, zs.optim.AdamW(lr=0.01), ranks, policy, layout, "local_first" if stage < 2 else "reduce_first")
    for step in drawn:
        twin.step(step)

    def program(rank):
        engine = zs.Engine(rank, model, zs.optim.AdamW(lr=0.01), stage=stage, policy=policy, layout=layout)
        for step in drawn:
            engine.step(step[rank.index])
        return np.concatenate([engine.state(name)["master"].reshape(-1) for name in model.shapes])

    for master in zs.Cluster(ranks).run(program):
        assert_same_bits(master, twin.master, f"master of {model.shapes} on {ranks} ranks")


@given(st.integers(0, 50), st.sampled_from(["fp32", "fp16", "bf16", "fp8_e4m3"]), st.data())
def test_vectors_have_the_length_and_format_asked_for(length, format, data):
    drawn = data.draw(vectors(length, format))
    assert (drawn.shape, drawn.dtype) == ((length,), zs.format_of(format).dtype)


@given(worlds(), st.integers(1, 20), st.data())
def test_gradients_differ_on_every_rank(ranks, length, data):
    drawn = [g.tobytes() for g in data.draw(gradients(ranks, length + 8))]
    assert len(set(drawn)) == ranks


@pytest.mark.parametrize(
    ("found", "expected", "text"),
    [
        (np.float32([0.0, 1.0]), np.float32([-0.0, 1.0]), "1 of 2 elements differ; first at 0"),
        (np.float32([1.0]), np.float64([1.0]), "found float32 of shape"),
        (np.float32([1.0]), np.float32([1.0, 2.0]), "shape"),
        (np.float32([1.0, 2.0]), np.float32([1.0, np.nextafter(np.float32(2), np.float32(3))]), "first at 1"),
    ],
)
def test_a_difference_of_one_bit_is_named(found, expected, text):
    with pytest.raises(AssertionError, match=text):
        assert_same_bits(found, expected)


def test_equal_bits_pass_with_nan_and_in_low_precision():
    for format in zs.FORMATS:
        values = np.array([np.nan, 1.0, -0.0], zs.format_of(format).dtype)
        assert_same_bits(values, values.copy())


def test_a_missing_gradient_is_refused():
    with pytest.raises(ValueError, match=r"one gradient from each of 3 ranks, of shape \(2,\) and one dtype, found 2"):
        SingleDevice(zs.optim.SGD(lr=1.0), np.zeros(2), 3).step([np.zeros(2, np.float32)] * 2)


def test_the_reference_hands_out_copies_and_refuses_gradients_that_do_not_fit():
    device = SingleDevice(zs.optim.SGD(lr=1.0), np.zeros(2), 2)
    ones = [np.ones(2, np.float32)] * 2
    assert [device.step(ones).tolist() for _ in range(2)] == [[-1, -1], [-2, -2]]
    for wrong in ([np.ones(3, np.float32)] * 2, [np.ones(2, np.float32), np.ones(2, np.float64)]):
        with pytest.raises(ValueError, match="one dtype, found 2"):
            device.step(wrong)
    with pytest.raises(ValueError, match="at least one rank, found ranks=0"):
        SingleDevice(zs.optim.SGD(lr=1.0), np.zeros(2), 0)


@pytest.mark.parametrize("optimizer", [zs.optim.Adan(lr=0.1), zs.optim.LAMB(lr=0.1), zs.optim.LARS(), zs.optim.Muon()],
                         ids=lambda optimizer: type(optimizer).__name__)
def test_the_reference_steps_every_optimizer_also_with_norms_and_state_in_16_bit(optimizer):
    """The state rests in its own formats between the steps, and a tensor's norms are those of the whole vector."""
    data = [np.random.default_rng(step).standard_normal(5).astype(np.float32) for step in range(3)]
    reference = SingleDevice(optimizer, np.ones(5), 1)
    for g in data:
        found = reference.step([g])
    assert np.abs(found - 1).max() > 1e-4
    assert {name: slot.dtype for name, slot in reference.state.items()} == {
        name: zs.format_of(slot.format).dtype for name, slot in optimizer.slots((5,)).items()}
    w, state = np.ones(5, np.float32), {name: np.zeros(5, np.float32) for name in optimizer.slots((5,))}
    for step, g in enumerate(data, 1):
        ctx = zs.optim.with_norms(optimizer, zs.optim.UpdateContext(kernels.NumpyKernels()), w, g, state, step)
        optimizer.update(ctx, w, g, state, step)
        for name, slot in optimizer.slots((5,)).items():
            state[name][...] = zs.round_to(state[name], slot.format)
    assert_same_bits(found, w)
