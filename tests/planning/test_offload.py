"""Offload on paper: what rests on the host, what goes over its link, and what of it the inverse questions know."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.planning.recorded_runs import recorded
from zerosim.planning import STAGES, Job, explained, plan_config
from zerosim.planning.conventions import CONVENTIONS
from zerosim.planning.hardware import device, link, parse, presets
from zerosim.planning.plan import host_traffic, on_device
from zerosim.planning.timeline import Machine, replay

GPT2 = {"ranks": 8, "stage": 2, "recompute": "block", "offload": True}


@pytest.mark.parametrize(("stage", "elements"), [(0, 1000), (1, 250), (2, 250), (3, 250)])
def test_a_rank_moves_the_gradients_and_the_parameters_that_its_optimizer_updates(stage, elements):
    moved = host_traffic(Job((1000,), 4, STAGES[stage]), link("pcie4"))
    assert (moved.elements, moved.nbytes) == (elements, 4 * elements)  # Ren et al. 2021: 2 bytes there, 2 back


def test_gradients_go_in_the_format_in_which_they_rest_and_a_parameter_that_is_the_master_goes_too():
    sent = {(compute, accumulate): host_traffic(
        Job((1000,), 1, STAGES[2], policy=zs.Policy(compute, accumulate=accumulate)), link("pcie4")).nbytes_formula
        for compute, accumulate in (("bf16", None), ("bf16", "fp32"), ("fp32", None))}
    assert sent == {("bf16", None): "(2 there + 2 back) · 1,000", ("bf16", "fp32"): "(4 there + 2 back) · 1,000",
                    ("fp32", None): "(8 there + 4 back) · 1,000"}


def test_the_transfers_of_a_step_take_two_latencies_and_their_bytes():
    (row,) = zs.plan("gpt2", **GPT2, overlap=False).rows
    pcie5, nbytes = link("pcie5"), 4 * 124_439_808 // 8
    assert row.host_transfer_nbytes_per_step == nbytes
    assert row.host_transfer_seconds == pytest.approx(2 * 5.7e-6 + nbytes / pcie5.bytes_per_second, rel=1e-12)
    (here,) = zs.plan("gpt2", **GPT2 | {"offload": False}, overlap=False).rows
    assert (here.host_transfer_nbytes_per_step, here.host_transfer_seconds) == (0, 0.0)
    updated = (2 + 2 * 12 + 4 + 2) * 124_439_808 // 8 / device("h100-80").memory_bytes_per_second  # by the host, now
    assert row.step_seconds == pytest.approx(here.step_seconds - updated + row.host_transfer_seconds, rel=1e-12)


def test_with_offload_no_all_gather_of_parameters_goes_beside_an_update_that_the_device_does_not_make():
    (here,), (row,) = (zs.plan("gpt2", **GPT2 | {"offload": offload}).rows for offload in (False, True))
    assert row.exposed_communication_seconds > here.exposed_communication_seconds
    assert row.transient_nbytes == here.transient_nbytes

def test_the_plans_transfers_are_those_of_a_replay_on_the_same_link():
    asked = plan_config("gpt2", **GPT2)
    (row,), share = zs.plan("gpt2", **GPT2).rows, 2 * 124_439_808 // 8

    class Transfer(SimpleNamespace):
        """A row of a trace, as an engine with offload would note it."""

    class TransferWait(SimpleNamespace):
        """The wait for it."""

    def program(rank):
        for number, way in enumerate(("to host", "to device")):
            moved = SimpleNamespace(direction=way, kind="shard", nbytes=share, number=number)
            rank.trace.rows += [Transfer(transfer=moved, span=()), TransferWait(transfer=moved)]

    machine = Machine(asked.device, asked.network, host_link=asked.host_link)
    found = replay(recorded(1, program), machine)
    assert found.step_seconds == pytest.approx(row.host_transfer_seconds, rel=1e-12)


def test_explain_fills_in_the_bytes_the_link_and_what_is_not_counted():
    asked = plan_config("gpt2", **GPT2)
    lines = {what: (formula, value) for what, formula, value in explained(asked, zs.plan("gpt2", **GPT2).rows[0])}
    assert lines["to the host and back"] == ("(2 there + 2 back) · 15,554,976", "62,219,904")
    formula, value = lines["of that the seconds"]
    assert formula.startswith("2 · 5.7e-06 + 62,219,904 / 6.3015e+10 over pcie5, beside nothing")
    assert "the host's own arithmetic is not in it" in formula
    assert value == "0.0009988 s"
    assert lines["step"][0] == "compute + exposed + update + host"
    plain = {what for what, _, _ in explained(replace(asked, offload=False), zs.plan("gpt2", ranks=8, stage=2).rows[0])}
    assert "to the host and back" not in plain


# -- the link to the host ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "generation"), [
    ("t4", 3), ("rtx-3090", 4), ("rtx-4090", 4), ("a100-40", 4), ("a100-80", 4), ("l40s", 4), ("h100-80", 5),
    ("h200", 5), ("b200", 5), ("mi300x", 5)])
def test_every_device_knows_the_pcie_by_which_it_hangs_on_its_host(name, generation):
    assert presets().host_link(name) == link(f"pcie{generation}")


def test_without_another_word_the_link_is_the_devices_own():
    assert plan_config("gpt2", device="a100-80", offload=True).host_link == link("pcie4")
    assert plan_config("gpt2", device="a100-80", offload=True, host_link="pcie3").host_link == link("pcie3")
    assert plan_config("gpt2", device="a100-80").host_link is None


OWN = """
[device.mine]
capacity_nbytes = 96e9
reported_nbytes = 95_000_000_000
memory_bytes_per_second = 4e12
flops_per_second = { bf16 = 1e15 }
source = "a data sheet"
date = "2025-06"
"""


def test_a_device_of_ones_own_may_leave_its_host_link_out_until_something_is_offloaded(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    assert zs.plan("gpt2", device="mine", hardware=path).rows
    with pytest.raises(ValueError, match="the device mine does not say by which link it hangs on its host; name one"):
        zs.plan("gpt2", device="mine", hardware=path, offload=True)
    assert zs.plan("gpt2", device="mine", hardware=path, offload=True, host_link="pcie5").rows
    path.write_text(OWN + 'host_link = "pcie6"\n')
    with pytest.raises(ValueError, match="no link is called 'pcie6'"):
        zs.plan("gpt2", device="mine", hardware=path, offload=True)
    with pytest.raises(ValueError, match="device 'mine': host_link must be"):
        parse(OWN + "host_link = 5\n", "own.toml")


# -- the inverse questions --------------------------------------------------------------------------------------------


@given(stage=st.sampled_from([*STAGES]), ranks=st.integers(1, 64), convention=st.sampled_from([*CONVENTIONS]))
def test_a_larger_model_fits_when_its_optimizers_states_lie_on_the_host(stage, ranks, convention):
    here = plan_config(parameters=10**9, ranks=ranks, convention=convention)
    there = replace(here, offload=True, host_link=link("pcie5"))
    assert there.largest_model(stage) > here.largest_model(stage)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_the_largest_model_with_offload_holds_what_the_row_holds_on_the_device(convention):
    asked = plan_config(parameters=10**9, ranks=8, convention=convention, offload=True, stage=2)
    (row,), kept = zs.plan(parameters=10**9, ranks=8, convention=convention, offload=True, stage=2).rows, on_device
    replicated, shared = kept(CONVENTIONS[convention]).per_parameter(STAGES[2], 0)
    assert row.states_nbytes == replicated * 10**9 + shared * 10**9 // 8
    spare = asked.device.reported_nbytes - row.overhead_nbytes
    most = asked.largest_model(2)
    assert replicated * most + shared * most // 8 <= spare < replicated * (most + 1) + shared * (most + 1) // 8
