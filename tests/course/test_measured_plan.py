"""Estimates equal measurements to the byte, part by part, on models that run; and the command that shows both."""

import io
import json
import re
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import zerosim as zs
from tests.cases import covering
from zerosim.cli import app
from zerosim.course.measured import gpt_of, measured_row
from zerosim.course.plan_view import plan_view
from zerosim.display.terminal import as_text
from zerosim.planning import Transformer, model_of, model_shape
from zerosim.planning.plan import PlanConfig, plan_config


def ask(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=True)


@given(blocks=st.integers(1, 4), heads=st.integers(1, 3), width=st.integers(1, 6), tokens=st.integers(1, 9),
       vocabulary=st.integers(2, 40), tied=st.booleans(), ranks=st.integers(1, 9), batch=st.integers(1, 3),
       k=st.integers(1, 3), stage=st.sampled_from([0, 1, 2, 3]), compute=st.sampled_from(["fp32", "bf16", "fp16"]),
       policy=st.sampled_from(["none", "block", "segment(2)", "segment(3)", "sub_block", "selective", "tiled"]),
       optimizer=st.sampled_from([zs.optim.AdamW(), zs.optim.SGD(lr=0.1), zs.optim.Adan(), zs.optim.Lion(),
                                  zs.optim.LAMB(), zs.optim.LARS()]),
       overlap=st.booleans(), prefetch=st.integers(0, 2), wider=st.sampled_from([None, "accumulate", "reduce", "wire"]))
def test_an_estimate_is_the_measurement_to_the_byte_for_any_gpt_stage_policy_and_levers(
        blocks, heads, width, tokens, vocabulary, tied, ranks, batch, k, stage, compute, policy, optimizer, overlap,
        prefetch, wider):
    """The peak too: not the sum of parts at their fullest, but what is held at the fullest moment."""
    formats = {wider: "fp32"} if wider and compute != "fp32" else {}
    model = model_of("any", Transformer(heads * width, blocks, heads, vocabulary, positions=9, tied=tied,
                                        fused_qkv=True))
    base = plan_config("gpt2", ranks=1)
    asked = PlanConfig(model, ranks, base.device, base.network, zs.Policy(compute, **formats), batch=batch,
                       tokens=tokens, micro_batches=k, optimizer=optimizer, overlap=overlap, prefetch=prefetch)
    lines = measured_row(asked, stage, policy)
    assert {line.name: line.difference_nbytes for line in lines} == {line.name: 0 for line in lines}
    assert lines[-1].name == "peak"
    assert lines[-1].measured_nbytes > 0


OPTIONS = [{"overlap": False, "prefetch": 0}, {"overlap": True, "prefetch": 1}]


@pytest.mark.parametrize(("row", "policy"), covering(
    product(zs.STAGES, OPTIONS), ["none", "selective", "tiled", "sub_block", "block", "segment(4)"]), ids=str)
def test_what_a_plan_says_that_a_device_must_hold_the_engine_holds(row, policy):
    """The runtime's overheads apart, in the engine's own convention."""
    stage, options = row
    asked = plan_config("gpt2", ranks=8, batch=8, stage=stage, recompute=policy, convention="zerosim",
                     optimizer=zs.optim.AdamW(), **options)
    (row,), peak = asked.plan().rows, measured_row(asked, stage, policy)[-1]
    assert row.total_nbytes - row.overhead_nbytes == peak.estimated_nbytes == peak.measured_nbytes


@pytest.mark.parametrize(("row", "ranks"), covering(
    product(zs.STAGES, [*OPTIONS, {"overlap": True, "prefetch": 2}]), [3, 2, 6, 1]), ids=str)
def test_a_run_with_data_peaks_on_every_rank_where_its_plan_says(row, ranks):
    stage, options = row
    asked = small(ranks, stage, **options)
    (row,), gpt = asked.plan().rows, gpt_of(asked.model)

    def program(rank):
        engine = zs.Engine(rank, gpt, asked.optimizer, stage=stage, policy=asked.policy, recompute="block", **options)
        tokens = (np.arange(16).reshape(2, 8) + rank.index) % 19
        engine.step([(tokens, tokens)] * 2)

    cluster = zs.Cluster(ranks)
    cluster.run(program)
    assert cluster.memory.peak_nbytes == [row.total_nbytes - row.overhead_nbytes] * ranks


def small(ranks, stage, **options):
    """A question about a GPT that runs in no time, in the engine's own convention."""
    model = model_of("small", Transformer(12, 3, 3, 19, positions=8, tied=True, fused_qkv=True))
    base, policy = plan_config("gpt2", ranks=1), zs.Policy("bf16")
    return PlanConfig(model, ranks, base.device, base.network, policy, (stage,), ("block",), batch=2, tokens=8,
                    micro_batches=2, optimizer=zs.optim.AdamW(), convention=policy, **options)


@pytest.mark.parametrize(("stage", "options"), [(0, OPTIONS[0]), (1, OPTIONS[0]), (1, OPTIONS[1]), (2, OPTIONS[1]),
                                               (3, OPTIONS[0]), (3, OPTIONS[1])], ids=str)
def test_what_fits_runs_and_with_one_byte_less_runs_out_of_memory(stage, options):
    """gpt2-xl with the plan's total as capacity: the plan's `fits` is the engine's, with the options of its seconds."""
    asked = plan_config("gpt2-xl", ranks=8, stage=stage, recompute="block", convention="zerosim",
                        optimizer=zs.optim.AdamW(), **options)
    (row,), gpt = asked.plan().rows, gpt_of(asked.model)

    def program(rank):
        engine = zs.Engine(rank, gpt, asked.optimizer, stage=stage, policy=asked.policy, recompute="block", **options)
        tokens = rank.xp.empty((1, asked.sequence), "int64")
        engine.step([(tokens, tokens)])

    capacity = row.total_nbytes - row.overhead_nbytes
    zs.NullCluster(8, representative=0, capacity_nbytes=capacity).run(program)
    with pytest.raises(zs.OutOfMemoryError):
        zs.NullCluster(8, representative=0, capacity_nbytes=capacity - 1).run(program)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_overlapped_all_gather_of_parameters_is_the_fullest_moment_and_holds_the_parameters_a_second_time(stage):
    """Beside a copy of the own chunk of each unit and, at stage 1, the reduced gradients: 12.5 GB for gpt2-xl."""
    (row,) = zs.plan("gpt2-xl", ranks=8, stage=stage, recompute="block").rows
    eighths = 8 + 1 + (stage == 1)
    assert row.transient_nbytes == eighths * row.parameters_nbytes // 8
    assert round((row.total_nbytes - row.overhead_nbytes) / 1e9, 1) == {1: 12.5, 2: 9.3}[stage]


def test_a_model_that_the_package_cannot_build_is_planned_and_not_measured():
    done = ask("--model", "llama-2-7b", "--measure")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "llama-2-7b cannot be measured: zerosim's layers make models of GPT-2's kind" in done.stderr
    assert ask("--model", "llama-2-7b").exit_code == 0
    with pytest.raises(ValueError, match="cannot be measured"):
        gpt_of(zs.planning.model_of_parameters(10**9))


def test_a_gpt_on_paper_becomes_the_packages_own_tied_or_not():
    assert gpt_of(model_shape("gpt2")).parameter_count == 124_439_808


def test_the_command_prints_the_verdict_first_then_rows_formulas_and_ledgers():
    done = ask("--model", "gpt2", "--ranks", "4", "--stage", "2,3", "--recompute", "block", "--explain", "--measure")
    assert done.exit_code == 0, done.output
    words = " ".join(done.stdout.split())
    assert words.startswith("ZeRO-3 with block recomputation fits with") or words.startswith("ZeRO-2 with block")
    for part in ("2 block", "3 block", "Fewest ranks", "Largest micro-batch", "model states (zero-paper)", "estimated"):
        assert part in words, part


def test_json_is_alone_on_the_output_and_has_what_was_asked():
    done = ask("--model", "gpt2", "--ranks", "4", "--stage", "3", "--recompute", "tiled", "--measure", "--json")
    data = json.loads(done.stdout)
    (row,) = data["rows"]
    assert (row["stage"], row["recompute"]) == (3, "tiled")
    assert {line["difference_nbytes"] for line in row["measured"]} == {0}
    assert (data["overlap"], data["prefetch"]) == (True, 1)
    assert row["explained"][0]["value"] == "124,439,808"


@pytest.mark.parametrize(("arguments", "note"), [
    (["--no-overlap", "--prefetch", "0"], "those of the engine with nothing overlapped."),
    (["--prefetch", "2"], "those of the engine with overlap and 2 units ahead."),
    (["--optimizer", "muon", "--ranks", "1"], "What Muon works in while it updates whole tensors is not in the total")])
def test_a_plan_says_which_options_it_counts_and_what_it_leaves_out(arguments, note):
    assert note in " ".join(ask("--model", "gpt2", "--stage", "3", *arguments).stdout.split())


def test_measure_runs_the_engine_with_the_options_that_are_asked_for():
    """Its measurement changes with them, and the estimate with it."""
    peaks = []
    for arguments in (["--no-overlap", "--prefetch", "0"], ["--prefetch", "1"], ["--prefetch", "2"]):
        done = ask("--model", "gpt2", "--stage", "3", "--recompute", "block", "--measure", "--json", *arguments)
        (row,) = json.loads(done.stdout)["rows"]
        assert not any(line["difference_nbytes"] for line in row["measured"])
        peaks.append(row["measured"][-1]["measured_nbytes"])
    assert peaks[0] < peaks[1] < peaks[2]


@pytest.mark.parametrize(("arguments", "text"), [
    ([], "name one of the two"), (["--model", "gpt2-xxl"], "no model is called 'gpt2-xxl'"),
    (["--model", "nowhere/config.json"], "nowhere/config.json"), (["--params", "x"], "is no number"),
    (["--model", "gpt2", "--optimizer", "adamm"], "no optimizer is called 'adamm'"),
    (["--model", "gpt2", "--ranks", "0"], "ranks"), (["--model", "gpt2", "--device", "h999"], "h999"),
    (["--params", "1e9", "--measure"], "cannot be measured")], ids=str)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, text):
    done = ask(*arguments, "--json")
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert text in done.stderr


@cache
def of_gpt2(*switch):
    """A plan's JSON."""
    return json.loads(ask("--model", "gpt2", "--json", *switch).stdout)


@pytest.mark.parametrize("switch", [
    ["--ranks", "16"], ["--device", "b200"], ["--link", "pcie5"], ["--nodes", "2"], ["--stage", "3"],
    ["--recompute", "tiled"], ["--batch", "3"], ["--sequence", "512"], ["--micro-batches", "4"], ["--compute", "fp16"],
    ["--optimizer", "lion"], ["--convention", "megatron-bf16"], ["--utilization", "0.4"], ["--offload"],
    ["--no-overlap"], ["--prefetch", "2"]], ids=" ".join)
def test_every_switch_changes_what_comes_out(switch):
    assert of_gpt2() != of_gpt2(*switch)


def test_the_former_name_of_the_convention_still_works_and_says_what_it_is_called_now():
    former, now = (ask("--model", "gpt2", name, "fp32", "--json") for name in ("--dialect", "--convention"))
    assert former.stdout == now.stdout
    assert (former.stderr, now.stderr) == (
        "zerosim plan: DeprecationWarning: --dialect is now called --convention\n", "")
    both = ask("--model", "gpt2", "--dialect", "fp32", "--convention", "zerosim")
    assert both.exit_code == 2
    assert "are one option; leave --dialect out" in both.stderr


@pytest.mark.parametrize("model", ["gpt2", "llama-3.1-405b"])
@pytest.mark.parametrize(("columns", "shown", "hidden"), [
    (80, ["states", "spare", "step"], ["optimizer", "gathered"]), (130, ["gathered", "MFU"], ["optimizer"]),
    (170, ["parameters", "gradients", "optimizer", "states", "MFU"], [])])
def test_a_wider_terminal_shows_more_columns_and_no_line_is_broken(columns, shown, hidden, model):
    out = io.StringIO()
    Console(file=out, width=columns).print(as_text(plan_view(zs.plan(model, ranks=512, nodes=64, batch=4), columns)))
    table = re.split(r"\n *\n", out.getvalue())[2].splitlines()
    assert set(shown) <= set(table[0].split())
    assert not set(hidden) & set(table[0].split())
    assert [line.split()[:2] for line in table[1:]] == [
        [stage, policy] for stage in "0123" for policy in ("none", "selective", "block")]
