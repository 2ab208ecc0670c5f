"""Accounting conventions: what each counts, that zerosim's own is the engine's, and any optimizer's state."""

from itertools import accumulate, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import zerosim as zs
from zerosim import Policy
from zerosim.models import LinearUnit, Model
from zerosim.planning import (
    CONVENTIONS,
    STAGES,
    Job,
    ModelShape,
    ShardedStates,
    Transformer,
    estimate_nbytes,
    formula,
    model_of,
    model_of_parameters,
    resting_nbytes,
    shapes,
    states_nbytes,
)

ALL_STATES = [ShardedStates(*choice) for choice in product((False, True), repeat=3)]
POLICIES = [Policy("fp32"), Policy("bf16"), Policy("fp16", accumulate="fp32"), Policy("bf16", master="bf16"),
            Policy("bf16", state="bf16"), Policy("fp8_e5m2", reduce="bf16", accumulate="fp32")]
OPTIMIZERS = [zs.optim.Muon(), zs.optim.Shampoo(), zs.optim.SOAP(), zs.optim.Adafactor(), zs.optim.Adan(),
              zs.optim.Lion(), zs.optim.SGD(lr=1.0)]
NANO = model_of("nano", Transformer(12, 2, 3, 17, positions=8, fused=True))


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), ranks=st.integers(1, 9),
       states=st.sampled_from(ALL_STATES), policy=st.sampled_from(POLICIES), slots=st.integers(0, 2))
def test_zerosims_own_convention_is_the_closed_form_for_any_indicators(lengths, ranks, states, policy, slots):
    model = ModelShape("m", tuple(shapes.UnitShape(f"u{i}", (shapes.TensorShape("w", (n,)),))
                                  for i, n in enumerate(lengths)))
    optimizer = (zs.optim.SGD(lr=0.1), zs.optim.Lion(), zs.optim.Adam())[slots]
    found = states_nbytes(model, ranks, states, policy, optimizer=optimizer)
    assert resting_nbytes(Job(tuple(lengths), ranks, states, policy=policy, slots=slots)) == [found] * ranks


@pytest.mark.parametrize("stage", STAGES)
def test_zerosims_own_convention_is_what_the_engine_holds_for_any_policy_and_optimizer(stage):
    """Where ranks own whole tensors, the memory of the fullest."""
    model = zs.models.GPT(zs.models.GPTConfig(layers=2, channels=12, heads=3, context=8, vocabulary=17))
    for policy, optimizer in [*((policy, zs.optim.Adam()) for policy in POLICIES),
                              *((Policy("bf16"), optimizer) for optimizer in OPTIMIZERS)]:
        layout = "per_unit" if optimizer.cut == "anywhere" else "whole_matrices"
        cluster = zs.Cluster(3)
        engines = cluster.run(lambda rank: zs.Engine(
            rank, model, optimizer, stage=stage, policy=policy, layout=layout))  # noqa: B023, runs here
        assert len(engines) == 3
        found = states_nbytes(NANO, 3, STAGES[stage], policy, optimizer=optimizer)
        held = [memory.now_nbytes_by_kind for memory in cluster.memory]
        assert found == max(held, key=lambda kinds: sum(kinds.values())), (policy, optimizer)
        assert layout != "per_unit" or held == [found] * 3


@pytest.mark.parametrize(("convention", "formulas"), [
    ("zero-paper", ["16", "4 + 12/N", "2 + 14/N", "16/N"]),
    ("fp32-accumulate", ["18", "6 + 12/N", "2 + 16/N", "18/N"]),
    ("megatron-bf16", ["18", "6 + 12/N", "2 + 16/N", "18/N"]),
    ("megatron-fp16", ["20", "4 + 16/N", "2 + 18/N", "20/N"]),
    ("deepspeed-zero2", ["20", "4 + 16/N", "2 + 18/N", "20/N"]),
    ("deepspeed-zero3", ["18", "2 + 16/N", "2 + 16/N", "18/N"]),
    ("zero-infinity", ["20", "4 + 16/N", "2 + 18/N", "20/N"]),
    ("fp32", ["16", "8 + 8/N", "4 + 12/N", "16/N"]),
    ("scaling-book", ["10", "2 + 8/N", "2 + 8/N", "10/N"]),
])
def test_each_convention_counts_by_its_own_formula_and_what_is_cut_further_never_takes_more(convention, formulas):
    assert [formula(states, convention) for states in STAGES.values()] == formulas
    held = [estimate_nbytes(10**9, 64, states, convention) for states in STAGES.values()]
    assert held == sorted(held, reverse=True)


@given(parameters=st.integers(1, 10**12), ranks=st.integers(1, 2048), states=st.sampled_from(ALL_STATES),
       convention=st.sampled_from(list(CONVENTIONS)))
def test_padding_makes_the_whole_difference_between_held_and_estimated_bytes(parameters, ranks, states, convention):
    held = sum(states_nbytes(model_of_parameters(parameters), ranks, states, convention).values())
    assert held == estimate_nbytes(parameters + -parameters % ranks, ranks, states, convention)
    assert 0 <= held - estimate_nbytes(parameters, ranks, states, convention) <= 20 * ranks


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12), ranks=st.integers(1, 9))
@example(lengths=[2], ranks=2)
def test_borders_of_whole_tensors_are_the_nearest_to_equal_shares(lengths, ranks):
    """Of two that are as near, the lower one."""
    model = Model([LinearUnit(str(number), length, 1, bias=False) for number, length in enumerate(lengths)])
    borders, total = sorted({0, *accumulate(lengths)}), sum(lengths)
    assert zs.layout_of(model, ranks, "whole_matrices").regions[0].bounds == (
        *(min(borders, key=lambda border: abs(border * ranks - rank * total)) for rank in range(ranks)), total)
