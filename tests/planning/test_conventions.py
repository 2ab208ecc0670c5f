"""Accounting conventions: what each counts, that zerosim's own is the engine's, and any optimizer's state."""

import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from zerosim.models import GPT, GPTConfig
from zerosim.numerics.policy import Policy
from zerosim.planning.closed_forms import STAGES, Job, ShardedStates, resting_nbytes
from zerosim.planning.conventions import (
    ADAM,
    CONVENTIONS,
    StatePerElement,
    convention_of,
    estimate_nbytes,
    formula,
    state_nbytes,
    states_nbytes,
    whole_tensor_cut,
)
from zerosim.planning.shapes import ModelShape, TensorShape, Transformer, UnitShape, model_of, model_of_parameters

ALL_STATES = [ShardedStates(*choice) for choice in product((False, True), repeat=3)]
POLICIES = [Policy("fp32"), Policy("bf16"), Policy("fp16", accumulate="fp32"), Policy("bf16", master="bf16"),
            Policy("bf16", state="bf16"), Policy("fp8_e5m2", reduce="bf16", accumulate="fp32")]
NANO = Transformer(12, 2, 3, 17, positions=8, fused_qkv=True)


def model_of_lengths(lengths: list[int]) -> ModelShape:
    return ModelShape("m", tuple(UnitShape(f"u{i}", (TensorShape(f"u{i}.w", (n,)),)) for i, n in enumerate(lengths)))


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), ranks=st.integers(1, 9),
       states=st.sampled_from(ALL_STATES), policy=st.sampled_from(POLICIES), slots=st.integers(0, 3),
       layout=st.sampled_from(["per_unit", "contiguous"]))
def test_zerosims_own_convention_is_the_closed_form_for_any_indicators(
        lengths: list[int], ranks: int, states: ShardedStates, policy: Policy, slots: int, layout: str) -> None:
    found = states_nbytes(model_of_lengths(lengths), ranks, states, policy, optimizer=StatePerElement(slots),
                          layout=layout)
    assert resting_nbytes(Job(tuple(lengths), ranks, states, layout, policy, slots)) == [found] * ranks


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_zerosims_own_convention_is_the_ledger_of_the_engine(stage: int, policy: Policy) -> None:
    cluster = zs.Cluster(3)
    model = GPT(GPTConfig(layers=2, channels=12, heads=3, context=8, vocabulary=17))
    engines = cluster.run(lambda rank: zs.Engine(rank, model, zs.optim.Adam(), stage=stage, policy=policy))
    assert len(engines) == 3
    found = states_nbytes(model_of("nano", NANO), 3, STAGES[stage], policy, optimizer=zs.optim.Adam())
    assert [memory.now_nbytes_by_kind for memory in cluster.memory] == [found] * 3


@pytest.mark.parametrize("optimizer", [zs.optim.Muon(), zs.optim.Shampoo(), zs.optim.SOAP(), zs.optim.Adafactor(),
                                       zs.optim.Adan(), zs.optim.Lion(), zs.optim.SGD(lr=1.0)],
                         ids=lambda optimizer: type(optimizer).__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_any_optimizers_state_is_the_ledger_of_the_engine(stage: int, optimizer: zs.optim.Optimizer) -> None:
    layout = "per_unit" if optimizer.cut == "anywhere" else "whole_matrices"
    cluster = zs.Cluster(3)
    model = GPT(GPTConfig(layers=2, channels=12, heads=3, context=8, vocabulary=17))
    engines = cluster.run(lambda rank: zs.Engine(rank, model, optimizer, stage=stage, policy=Policy("bf16"),
                                                 layout=layout))
    assert len(engines) == 3
    found = states_nbytes(model_of("nano", NANO), 3, STAGES[stage], Policy("bf16"), optimizer=optimizer)
    fullest = max((memory.now_nbytes_by_kind for memory in cluster.memory), key=lambda kinds: sum(kinds.values()))
    assert found == fullest


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
def test_each_convention_counts_by_its_own_formula(convention: str, formulas: list[str]) -> None:
    assert [formula(states, convention) for states in STAGES.values()] == formulas


@given(parameters=st.integers(1, 10**12), ranks=st.integers(1, 2048), states=st.sampled_from(ALL_STATES),
       convention=st.sampled_from(list(CONVENTIONS)))
def test_padding_makes_the_whole_difference_between_held_and_estimated_bytes(
        parameters: int, ranks: int, states: ShardedStates, convention: str) -> None:
    held = sum(states_nbytes(model_of_parameters(parameters), ranks, states, convention).values())
    padded = parameters + -parameters % ranks
    assert held == estimate_nbytes(padded, ranks, states, convention)
    assert 0 <= held - estimate_nbytes(parameters, ranks, states, convention) <= 20 * ranks


def test_what_is_cut_further_never_takes_more() -> None:
    for convention in CONVENTIONS:
        held = [estimate_nbytes(10**9, 64, states, convention) for states in STAGES.values()]
        assert held == sorted(held, reverse=True)


def test_zeros_saving_differs_by_optimizer_but_for_stage_3() -> None:
    """At stage 1 on 64 ranks 2.91 times for Lion, 3.82 for Adam, 5.14 for Adan; at stage 3 64 times for all."""
    model = model_of_parameters(64 * 10**6)
    found = []
    for optimizer in (zs.optim.Lion(), zs.optim.Adam(), zs.optim.Adan()):
        whole, first, third = (sum(states_nbytes(model, 64, STAGES[stage], optimizer=optimizer).values())
                               for stage in (0, 1, 3))
        assert whole == 64 * third
        found.append(round(whole / first, 2))
    assert found == [2.91, 3.82, 5.14]


def test_an_optimizers_bytes_are_those_that_it_declares() -> None:
    for optimizer in (zs.optim.Adam(), zs.optim.Adan(), zs.optim.Shampoo(), zs.optim.Adafactor()):
        assert state_nbytes(optimizer, (6, 10)) == zs.optim.state_nbytes(optimizer, (6, 10))
    assert state_nbytes(ADAM, (7,)) == zs.optim.state_nbytes(zs.optim.Adam(), (7,))


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12), ranks=st.integers(1, 9))
def test_borders_of_whole_tensors_are_the_nearest_to_equal_shares(lengths: list[int], ranks: int) -> None:
    cut, borders = whole_tensor_cut(lengths, ranks), {0, *np.cumsum(lengths).tolist()}
    total = sum(lengths)
    assert set(cut) <= borders
    assert list(cut) == sorted(cut)
    for rank, border in enumerate(cut[:-1]):
        assert abs(border - rank * total / ranks) <= min(abs(b - rank * total / ranks) for b in borders) + 1e-9


def test_an_unknown_convention_is_refused_with_the_nearest() -> None:
    said = "no accounting convention is called 'megatron'; there are zero-paper, fp32-accumulate, megatron-bf16, "
    with pytest.raises(ValueError, match=re.escape(said)):
        convention_of("megatron")
    with pytest.raises(ValueError, match=r"did you mean 'zero-paper'\?$"):
        convention_of("zero_paper")


@pytest.mark.parametrize(("call", "said"), [
    (lambda: states_nbytes(model_of_parameters(9), 0, STAGES[1]), "ranks must be at least 1, got 0"),
    (lambda: estimate_nbytes(0, 4, STAGES[1]), "parameters must be at least 1, got 0"),
    (lambda: estimate_nbytes(9, 4, STAGES[1], largest_layer=-1), "largest_layer must be at least 0, got -1"),
    (lambda: StatePerElement(-1), "count must be at least 0, got -1"),
    (lambda: states_nbytes(model_of_parameters(9), 2, STAGES[1], layout="per-unit"), "no layout is called 'per-unit'"),
])
def test_what_cannot_be_counted_is_refused(call, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        call()


def test_a_models_parameters_are_counted_as_often_on_a_thousand_ranks_as_on_one(monkeypatch):
    """A matrix optimizer's shares differ from rank to rank, the model does not: 8192 ranks once took half a minute."""
    counted, count = [], ModelShape.parameters.fget
    monkeypatch.setattr(ModelShape, "parameters", property(lambda model: counted.append(model.name) or count(model)))
    for ranks in (1, 1024):
        states_nbytes(model_of("nano", NANO), ranks, STAGES[1], optimizer=zs.optim.Muon())
    assert len(counted) == 2
