"""Plans: the issue's numbers, what must hold of any, and what cannot be asked."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from zerosim.planning import STAGES, explained, plan_config
from zerosim.planning.plan import whole_number

LLAMA = {"ranks": 8, "device": "h100-80", "link": "nvlink4", "batch": 4, "tokens": 2048}
FIELDS = {
    "stage",
    "recompute",
    "convention",
    "parameters_nbytes",
    "gradients_nbytes",
    "optimizer_nbytes",
    "states_nbytes",
    "activations_nbytes",
    "gathered_nbytes",
    "buckets_nbytes",
    "transient_nbytes",
    "overhead_nbytes",
    "total_nbytes",
    "capacity_nbytes",
    "fits",
    "sent_nbytes_per_step",
    "flops_per_step",
    "compute_seconds",
    "exposed_communication_seconds",
    "step_seconds",
}


@pytest.mark.parametrize(("parameters", "ranks", "gigabytes"), [
    ("7.5e9", 64, [120.0, 31.40625, 16.640625, 1.875]), ("7e9", 8, [112.0, 38.5, 26.25, 14.0])])
def test_a_number_of_parameters_alone_gives_the_papers_states_and_traffic(parameters, ranks, gigabytes):
    found = zs.plan(parameters=parameters, ranks=ranks)
    assert [row.states_nbytes / 1e9 for row in found.rows] == gigabytes
    assert {row.activations_nbytes + row.gathered_nbytes + row.buckets_nbytes for row in found.rows} == {0}
    psi = 2 * int(float(parameters))
    shares = [row.sent_nbytes_per_step / (psi * (ranks - 1) / ranks) for row in found.rows]
    assert shares == pytest.approx([2, 2, 2, 3], abs=1e-6)  # and a few bytes of control


def test_the_plan_as_data_has_the_named_fields_as_exact_integers():
    data = json.loads(json.dumps(zs.plan("llama-2-7b", **LLAMA).as_dict()))
    assert data["model"]["parameters"] == 6_738_415_616
    assert len(data["rows"]) == 12
    for row in data["rows"]:
        assert row.keys() >= FIELDS
        assert all(isinstance(row[name], int) for name in FIELDS if name.endswith("nbytes"))
        assert row["total_nbytes"] == sum(row[f"{part}_nbytes"] for part in ("states", "transient", "overhead"))
        parts, tokens = [row[f"{part}_nbytes"] for part in ("activations", "gathered", "buckets")], 4 * 2048
        assert max(parts) <= row["transient_nbytes"] <= sum(parts) + 16 * tokens
        assert row["fits"] == (row["total_nbytes"] <= row["capacity_nbytes"])
    assert data["verdict"] == "ZeRO-3 fits with 2.37 GB to spare; ZeRO-2 misses by 8.21 GB."


def test_the_usual_policies_are_three_and_all_are_five():
    usual, every = (zs.plan("gpt2", stage=3, recompute=text) for text in ("usual", "all"))
    assert [row.recompute for row in usual.rows] == ["none", "selective", "block"]
    assert [row.recompute for row in every.rows] == ["none", "selective", "tiled", "sub_block", "block"]


def test_the_verdict_says_what_misses_least_where_nothing_fits():
    text = zs.plan("gpt3-175b", ranks=2, device="t4", link="pcie3", compute="fp16").verdict
    assert text.startswith("Nothing fits: ZeRO-3 with block recomputation holds least and misses by ")


@given(
    name=st.sampled_from(["gpt2", "gpt2-xl", "llama-2-7b", "llama-3-8b", "qwen2-7b", "bloom-7b1"]),
    ranks=st.integers(1, 64),
    batch=st.integers(1, 4),
    k=st.integers(1, 4),
    compute=st.sampled_from(["bf16", "fp32"]),
)
def test_more_sharding_holds_no_more_and_every_number_is_computed(name, ranks, batch, k, compute):
    found = zs.plan(name, ranks=ranks, batch=batch, micro_batches=k, compute=compute, tokens=512, recompute="block")
    zero, one, two, three = (row.states_nbytes for row in found.rows)
    assert zero >= one >= two >= three
    for row in found.rows:
        assert 0 <= row.exposed_communication_seconds <= row.communication_seconds * (1 + 1e-12)
        assert row.step_seconds >= row.compute_seconds > 0
        assert 0 < row.model_flops_utilization <= found.config.utilization
        assert all(formula and value for _, formula, value in explained(found.config, row))


def test_a_faster_link_a_faster_device_and_a_higher_utilization_take_no_longer():
    def seconds(**changed):
        (row,) = zs.plan("gpt2-xl", **{**LLAMA, "tokens": 1024, "stage": 3, "recompute": "block", **changed}).rows
        return row.step_seconds

    assert seconds(link="nvlink5") < seconds() < seconds(link="pcie3")
    assert seconds(device="b200") < seconds()
    assert seconds(utilization=0.9) < seconds() < seconds(utilization=0.2)
    assert seconds(nodes=4) > seconds()


def test_offload_moves_the_optimizers_states_to_the_host_and_pays_on_its_link():
    here, there = (zs.plan("gpt2-xl", **{**LLAMA, "tokens": 1024}, offload=offload) for offload in (False, True))
    for row, moved in zip(here.rows, there.rows, strict=True):
        assert (moved.optimizer_nbytes, moved.host_nbytes) == (0, row.optimizer_nbytes)
        assert moved.total_nbytes == row.total_nbytes - row.optimizer_nbytes
    slow = zs.plan("gpt2-xl", **{**LLAMA, "tokens": 1024}, offload=True, host_link="pcie3")
    assert slow.rows[0].step_seconds > there.rows[0].step_seconds


@pytest.mark.parametrize(("prefetch", "blocks"), [(0, 0), (1, 1), (2, 2)])
def test_units_ahead_are_in_the_bytes_and_the_explanation_says_how_many_elements_that_makes(prefetch, blocks):
    """The tied table stays, one block computes, and each one ahead is gathered beside it."""
    found, shape = zs.plan("gpt2-xl", ranks=8, stage=3, recompute="block", prefetch=prefetch), zs.planning.model_shape
    (row,), units = found.rows, shape("gpt2-xl").units
    assert row.gathered_nbytes == 2 * (units[0].parameters + (1 + blocks) * units[1].parameters)
    (text,) = [formula for what, formula, _ in explained(found.config, row) if what == "gathered units"]
    assert text == (f"2 · {row.gathered_nbytes // 2:,} elements at once: a unit, its tied weights, and "
                    f"{prefetch} ahead; the largest has {units[0].parameters:,}")


@pytest.mark.parametrize("batch", [1, 40])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_explained_fullest_moment_adds_up_to_what_comes_and_goes(overlap, batch):
    found = zs.plan("gpt2", ranks=8, overlap=overlap, batch=batch)
    for row in found.rows:
        (text,) = [text for what, text, _ in explained(found.config, row) if what == "all that comes and goes"]
        addends = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", text.partition(" of activ")[0])]
        *fixed, sequences, each = addends
        assert sum(fixed) + sequences * each == row.transient_nbytes
        assert sequences == batch


@given(name=st.sampled_from(["gpt2", "llama-2-7b"]), ranks=st.integers(1, 64), batch=st.integers(1, 4),
       k=st.integers(1, 2), link=st.sampled_from(["nvlink4", "pcie3"]), prefetch=st.integers(0, 2))
def test_options_cost_bytes_and_spare_seconds_and_never_the_other_way_round(name, ranks, batch, k, link, prefetch):
    asked = {"ranks": ranks, "batch": batch, "micro_batches": k, "tokens": 256, "link": link, "recompute": "block"}
    plain, pulled = (zs.plan(name, **asked, overlap=overlap, prefetch=ahead)
                     for overlap, ahead in ((False, 0), (True, prefetch)))
    for without, row in zip(plain.rows, pulled.rows, strict=True):
        assert row.total_nbytes >= without.total_nbytes
        assert row.step_seconds <= without.step_seconds * (1 + 1e-9)
        assert without.exposed_communication_seconds == pytest.approx(without.communication_seconds, rel=1e-9)
        assert row.sent_nbytes_per_step == without.sent_nbytes_per_step


def test_the_largest_batch_is_smaller_where_options_take_room():
    batches = [plan_config("llama-2-7b", **LLAMA, stage=3, recompute="block", overlap=overlap,
                           prefetch=prefetch).largest_batch() for overlap, prefetch in ((False, 0), (True, 4))]
    assert batches[1] < batches[0]


def test_of_a_number_of_parameters_alone_no_lever_changes_anything():
    """Without units nothing goes beside anything, and nothing of it is known."""
    plain, pulled = (zs.plan(parameters=10**9, overlap=overlap, prefetch=prefetch).rows
                     for overlap, prefetch in ((False, 0), (True, 2)))
    assert plain == pulled


# -- the inverse questions --------------------------------------------------------------------------------------------


def test_the_largest_batch_fits_and_one_more_does_not():
    asked = plan_config("llama-2-7b", **LLAMA)
    most = asked.largest_batch()
    assert most > 4
    assert any(row.fits for row in replace(asked, batch=most).plan().rows)
    assert not any(row.fits for row in replace(asked, batch=most + 1).plan().rows)


def test_the_fewest_ranks_fit_and_half_of_them_do_not():
    asked = plan_config("gpt3-175b", ranks=1024, nodes=128, device="a100-80", link="nvlink3")
    fewest = asked.fewest_ranks()
    network = replace(asked.network, between=None, ranks_per_node=None)
    fits = [any(row.fits for row in replace(asked, ranks=n, network=network).plan().rows)
            for n in (fewest // 2, fewest)]
    assert fits == [False, True]
    assert plan_config("gpt3-175b", ranks=8, stage=0).fewest_ranks() is None


@pytest.mark.parametrize("stage", STAGES)
def test_the_largest_model_fits_and_one_more_parameter_does_not(stage):
    asked = plan_config("gpt2", ranks=64)
    most = asked.largest_model(stage)
    spare = asked.device.reported_nbytes - asked.plan().rows[0].overhead_nbytes
    nbytes = [
        zs.planning.estimate_nbytes(parameters, 64, STAGES[stage], "zero-paper") for parameters in (most, most + 1)
    ]
    assert nbytes[0] <= spare < nbytes[1]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("optimizer", [zs.optim.SGD(lr=0.1), zs.optim.Lion(), zs.optim.AdamW(), zs.optim.Adan()])
@pytest.mark.parametrize("convention", ["zero-paper", "megatron-fp16", "fp32", "zerosim"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_largest_model_is_of_the_optimizer_convention_and_offload_that_are_asked_for(
        stage, convention, optimizer, offload):
    """A plan of so many parameters on one rank, where nothing is padded, fits, and one of one more does not."""
    asked = {"ranks": 1, "stage": stage, "convention": convention, "optimizer": optimizer, "offload": offload}
    most = plan_config("gpt2", **asked).largest_model(stage)
    assert [zs.plan(parameters=count, **asked).rows[0].fits for count in (most, most + 1)] == [True, False]


def test_the_explained_states_are_the_formulas_value_whatever_the_optimizer():
    for optimizer, state in ((zs.optim.SGD(lr=0.1), 0), (zs.optim.Lion(), 4), (zs.optim.AdamW(), 8),
                             (zs.optim.Adan(), 14)):
        found = zs.plan(parameters=10**9, ranks=8, stage=1, optimizer=optimizer)
        _, formula, value = explained(found.config, found.rows[0])[1]
        assert formula == f"(4 + {4 + state}/N) bytes, N = 8, {state} of them the optimizer's own state"
        assert value == f"{4 * 10**9 + (4 + state) * 10**9 // 8:,}"


@given(name=st.sampled_from(["gpt2", "gpt2-xl", "llama-2-7b"]), ranks=st.integers(1, 16), batch=st.integers(1, 64),
       offload=st.booleans())
def test_what_fits_is_what_the_rows_say(name, ranks, batch, offload):
    asked = plan_config(name, ranks=ranks, batch=batch, tokens=1024, offload=offload)
    assert [row.fits for row in asked.plan().rows] == [
        asked.fits(stage, policy) for stage in asked.stages for policy in asked.policies]


def test_the_cheapest_that_fits_sends_least():
    asked = plan_config("llama-2-7b", **LLAMA)
    cheapest = asked.plan().cheapest
    assert cheapest.sent_nbytes_per_step == min(row.sent_nbytes_per_step for row in asked.plan().rows if row.fits)
    assert zs.plan("gpt3-175b", ranks=1).cheapest is None


# -- what cannot be asked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "name one of the two, as gpt2-xl or 7.5e9"),
        ({"model": "gpt2", "parameters": 5}, "name one of the two"),
        ({"model": "gpt2-xxl"}, "no model is called 'gpt2-xxl'"),
        ({"model": "gpt2", "largest_layer": 5}, "largest_layer goes with a number of parameters"),
        ({"parameters": "7.5.9"}, "parameters='7.5.9' is no number"),
        ({"parameters": "-3"}, "whole number above 0"),
        ({"parameters": "1.5"}, "whole number above 0"),
        ({"parameters": "inf"}, "whole number above 0"),
        ({"model": "gpt2", "ranks": 0}, "ranks"),
        ({"model": "gpt2", "batch": -1}, "batch"),
        ({"model": "gpt2", "micro_batches": 0}, "micro_batches"),
        ({"model": "gpt2", "stage": 4}, "found 4"),
        ({"model": "gpt2", "stage": "x"}, "stage='x' must be all, or some of 0, 1, 2, 3"),
        ({"model": "gpt2", "recompute": "some"}, "names no recomputation policy"),
        ({"model": "gpt2", "device": "h1000"}, "h100"),
        ({"model": "gpt2", "link": "nvlink"}, "nvlink"),
        ({"model": "gpt2", "nodes": 3}, "do not spread evenly over 3 nodes"),
        ({"model": "gpt2", "tokens": 0}, "tokens"), ({"model": "gpt2", "ranks": 10**9}, "take 8,192 at most"),
    ({"model": "gpt2", "tokens": 4096}, "learned places for 1024"),
        ({"model": "gpt2", "convention": "zero"}, "zero-paper"),
        ({"model": "gpt2", "utilization": 0}, "utilization must be a finite number above 0, got 0"),
        ({"model": "gpt2", "compute": "fp8_e4m3"}, "do not rest in 8 bits"),
        ({"model": "gpt2", "compute": "bf16", "device": "t4"}, "no rate in bf16"),
        ({"model": "gpt2", "stage": []}, "a plan has rows for each stage, and none was asked for; name one at least"),
        ({"model": "gpt2", "recompute": []}, "for each recomputation policy, and none was asked for"),
        ({"model": "gpt2", "stage": [1.7]}, "stage=[1.7] must be all, or some of 0, 1, 2, 3"),
        ({"model": "gpt2", "stage": None}, "stage=None must be all, or some of 0, 1, 2, 3"),
        ({"model": "gpt2", "recompute": 3}, "recompute=3 must be usual, all, or some policies, as in block,tiled"),
        ({"model": "gpt2", "optimizer": "adamw"}, "take one of zs.optim's, as zs.optim.AdamW() is"),
        ({"model": "gpt2", "utilization": 1.5}, "is the share of the peak that products reach, above 0 and at most 1"),
        ({"model": "gpt2", "utilization": 1e-320}, "the plan: utilization must be between 1e-30 and 1e+30"),
        ({"model": "gpt2", "utilization": "0.5"}, "utilization must be a finite number above 0, got '0.5'"),
        ({"model": "gpt2", "offload": "no"}, "offload='no' must be True or False"),
        ({"model": "gpt2", "overlap": 1}, "overlap=1 must be True or False"),
        ({"model": "gpt2", "prefetch": -1}, "prefetch must be at least 0, got -1"),
        ({"model": "gpt2", "overheads": 5}, "overheads are bytes by name, as {'matmul workspace': 0}, got 5"),
        ({"model": "gpt2", "hardware": 5}, "hardware=5 must be a name or the path of a file, as a text"),
        ({"model": 5}, "model=5 must be a name or the path of a file, as a text"),
        ({"model": "gpt2", "convention": []}, "no accounting convention is called []; there are zero-paper"),
        ({"model": "gpt2", "convention": "zero-sim"}, "scaling-book, and zerosim, the engine's own"),
        ({"model": "gpt2", "batch": 10**400}, "batch must be below 2^62, got a number of 1329 bits"),
        ({"model": "gpt2", "nodes": 2, "between": ""}, "no link is called ''"),
        ({"parameters": "7,5e9"}, "parameters='7,5e9' has a comma that is not between thousands; write 7.5e9"),
        ({"parameters": "1,2,3"}, "has a comma that is not between thousands"),
        ({"parameters": 7e9, "optimizer": zs.optim.Muon()}, "what Muon keeps depends on the shapes of tensors, and of "
         "7,000,000,000 parameters none is known; name a model, or an optimizer such as AdamW"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_told_in_one_sentence(asked, text):
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        zs.plan(**asked)
    assert "\n" not in str(error.value)


def test_numbers_are_read_as_one_writes_them():
    assert {whole_number(text, "n") for text in ("7.5e9", "7_500_000_000", "7,500,000,000", 7.5e9)} == {7_500_000_000}
