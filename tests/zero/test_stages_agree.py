"""All stages compute the same bits, those of the twin, and hold and send the closed forms' bytes, whatever is drawn."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import covering
from tests.optim.papers import ELEMENTWISE, MATRIX, NORMED
from tests.twin import Rule
from tests.zero.training import ADAM, BF16, MODELS, SGD, assert_runs_equal_the_twin, batches, bits, outcome
from tests.zero.units import OwnerUnit, OwnGradients, TiedUnit, gained
from zerosim.models import GPT, MLP, PRESETS, LinearUnit, Model
from zerosim.zero import PARTIAL, REPLICATED, SHARDED

FORMATS, LAYOUTS = ("fp32", "fp16", "bf16"), ("per_unit", "contiguous")
ROWS = [zs.Stage(p, g, o) for p, g, o in product(
    (REPLICATED, SHARDED), (PARTIAL, REPLICATED, SHARDED), (REPLICATED, SHARDED))]
OPTIONS = [{"bucket_nbytes": 1}, {"overlap": True}, {"bucket_nbytes": 14}, {"prefetch": 1}, {"bucket_nbytes": 10**4},
           {"prefetch": 3}, {"bucket_nbytes": 64, "keep_gathered": "all"}, {"keep_gathered": ()},
           {"bucket_nbytes": 50, "overlap": True, "prefetch": 2}]
RECOMPUTE = ("none", "block", "segment(2)", "segment(5)")
BIAS_ADAM = zs.optim.Adam(lr=0.5)
FIRST_ADAM = zs.optim.Adam(lr=0.2, beta1=0.5)
ADAMW = zs.optim.AdamW(lr=0.01)
SOAP, LARS = zs.optim.SOAP(every=2), zs.optim.LARS()
LAST = ("wte", "wpe", "*ln_*", "*.bias")  # of a GPT's parameters those that Muon is not for


def case(model, ranks=3, k=2, steps=2, **options):
    """One item of the table: a model, the shape of its data, and the options of assert_runs_equal_the_twin."""
    return MODELS[model] if isinstance(model, str) else model, ranks, k, steps, {"policy": BF16, **options}


def ruled(model, matches, rule):
    """This rule for the parameters whose names match."""
    return {name: rule for name in MODELS[model]().shapes if matches(name)}


def thrice_used():
    """A weight in three units."""
    return Model([OwnerUnit("enc", 3, 5, "relu", first=True), TiedUnit("dec", "enc", 5), LinearUnit("mid", 3, 5),
                  TiedUnit("again", "enc", 5), LinearUnit("out", 3, 2)])


CASES = {
    **{f"{ranks} ranks, {compute}, {layout}": case("odd", ranks, 1, 10 if ranks == 3 else 3, policy=zs.Policy(compute),
                                                   layout=layout)
       for ranks, compute, layout in covering((1, 2, 3, 4, 5, 8), FORMATS, LAYOUTS)},
    **{f"more ranks than parameters, {compute}, {layout}": case("fewer_than_ranks", 5, 3, 3, policy=zs.Policy(compute),
                                                                layout=layout)
       for compute, layout in covering(FORMATS, LAYOUTS)},
    **{f"{compute} reduced in {reduce}, accumulated in {accumulate}": case("odd", 3, 2, 3, policy=zs.Policy(
        compute, reduce=reduce, accumulate=accumulate)) for compute, reduce, accumulate in [
            ("bf16", "fp32", "fp32"), ("bf16", "bf16", "fp32"), ("fp16", "fp32", "fp16"), ("fp16", "bf16", "fp32"),
            ("fp32", "bf16", "fp32"), ("bf16", "fp32", "bf16")]},
    **{f"{row}, {compute}, {layout}": case("odd", 3, 2, 3, runs=[(row, {})], policy=zs.Policy(compute), layout=layout)
       for row, compute, layout in covering(ROWS, ["fp32", "bf16"], LAYOUTS)},
    **{f"options, {layout}": case("wide", 3, 2, 1, layout=layout, recompute="segment(2)", runs=[
        *covering(zs.STAGES, OPTIONS, turn=turn)], policy=zs.Policy("bf16", reduce="fp16", accumulate="fp32"))
       for turn, layout in enumerate(["per_unit", "contiguous", "whole_matrices"])},
    "recomputation": case("deep", policy=zs.Policy("fp16"), runs=[
        (stage, {"recompute": recompute}) for stage, recompute in product((1, 3), RECOMPUTE)]),
    "debug mode": case("deep", 5, debug=True, seed=8), "another schedule of ranks": case("deep", 5, seed=7),
    "clipping": case("odd", 3, 1, 3, optimizer=SGD, clip_norm=0.5, policy=zs.Policy()),
    # -- groups: the first match decides
    "groups of other hyperparameters": case("odd", groups=(zs.Group("*.bias", lr=0.5), zs.Group(
        "layer1.*", optimizer=FIRST_ADAM)), optimizer=zs.optim.Adam(lr=0.01), rules={
            "layer0.bias": Rule(BIAS_ADAM, "bf16"), "layer1.bias": Rule(BIAS_ADAM, "bf16"),
            "layer1.weight": Rule(FIRST_ADAM, "bf16")}),
    "a group of another state": case("odd", groups=(zs.Group("layer0.*", optimizer=SGD),), rules=ruled(
        "odd", lambda name: "layer0" in name, Rule(SGD, "bf16"))),
    **{f"frozen weights, {layout}": case("deep", layout=layout, groups=(zs.Group("*.weight", frozen=True),),
                                         rules=ruled("deep", lambda name: "weight" in name, Rule(None, "bf16")))
       for layout in LAYOUTS},
    **{f"fp32 beside {compute}": case("gained", policy=zs.Policy(compute), rules={"scale.gain": Rule(ADAM, "fp32")},
                                      groups=(zs.Group("scale.*", compute="fp32"),)) for compute in ("bf16", "fp16")},
    "norms in fp32": case("gpt", 3, 1, runs=[(3, {})], groups=[zs.Group("*ln_*", compute="fp32")], rules=ruled(
        "gpt", lambda name: "ln_" in name, Rule(ADAM, "fp32"))),
    # -- weights that are tied, unused, without elements, without dimensions
    **{f"tied, {compute}, {layout}": case("tied", policy=zs.Policy(compute), layout=layout)
       for compute, layout in product(("fp32", "bf16"), LAYOUTS)},
    "tied, options": case("tied", 3, 2, 2, runs=[(3, options) for options in (*OPTIONS, {"recompute": "block"},
                                                                              {"recompute": "segment(2)"})]),
    "tied by two units": case(thrice_used), "unused": case(lambda: gained(used=False)),
    "gradients of a unit's own making": case(lambda: Model([OwnGradients("a", 3, 5, "relu", first=True), LinearUnit(
        "b", 5, 2)])),
    **{f"a scalar and an empty one, {layout}": case("scalars", layout=layout) for layout in LAYOUTS},
    # -- GPT
    **{f"GPT on {ranks}, {compute}, k={k}": case("gpt", ranks, k, optimizer=ADAMW, clip_norm=1.0, policy=zs.Policy(
        compute, loss_scale=1024.0 if compute == "fp16" else 1.0))
       for ranks, compute, k in covering([1, 2, 3, 4], ["fp32", "bf16", "fp16"], [1, 3], turn=1)},
    **{f"GPT with {options}": case(lambda options=options: GPT("gpt-nano", **options), clip_norm=1.0, runs=[
        (1, {}), (3, {})]) for options in (
            {"tied": False}, {"units": "sub_block"}, {"units": 2}, {"normalization": "global"})},
    "GPT with dropout": case(lambda: GPT(replace(PRESETS["gpt-nano"], dropout=0.25)), runs=[
        (stage, {"recompute": recompute}) for stage, recompute in (
            *covering(zs.STAGES, (*RECOMPUTE[:3], "sub_block")), (3, "selective"))]),
    # -- optimizers: elements, matrices that one rank owns or all gather, norms of tensors, several in one model
    **{f"optimizer {number} {type(optimizer).__name__}": case("wide", 3 + number % 2, optimizer=optimizer)
       for number, optimizer in enumerate((*ELEMENTWISE, *NORMED))},
    **{f"optimizer {number} {type(optimizer).__name__}, {layout}": case(
        "wide", 3, 2, 3, optimizer=optimizer, layout=layout, gather=layout == "per_unit")
       for (number, optimizer), layout in product(
           enumerate((*MATRIX, zs.optim.Adafactor())), ("whole_matrices", "per_unit"))},
    "matrices gathered from weights that are their own masters": case(
        "wide", 3, 2, 3, optimizer=SOAP, gather=True, policy=zs.Policy("fp32")),
    **{f"clipped SOAP on {ranks}, {layout}": case("wide", ranks, 2, 3, optimizer=SOAP, layout=layout, clip_norm=0.5,
                                                  gather=layout != "whole_matrices")
       for ranks, layout in [(1, "whole_matrices"), (9, "whole_matrices"), (3, "per_unit"), (3, "contiguous")]},
    "norms of a tensor of several blocks": case(lambda: MLP((300, 300), seed=1), 1, 1, optimizer=LARS, runs=[(0, {})]),
    "three optimizers": case("wide", 3, 2, 3, optimizer=SOAP, layout="whole_matrices", clip_norm=0.5, groups=[
        zs.Group("*.bias", optimizer=ADAM), zs.Group("layer1.weight", optimizer=LARS)], rules=ruled(
            "wide", lambda name: "bias" in name, Rule(ADAM, "bf16")) | {"layer1.weight": Rule(LARS, "bf16")}),
    "Muon and AdamW": case("gpt", 3, 1, optimizer=zs.optim.Muon(), layout="whole_matrices", groups=[
        zs.Group(*LAST, optimizer=ADAMW)], rules=ruled("gpt", zs.Group(*LAST).matches, Rule(ADAMW, "bf16"))),
    **{f"{type(optimizer).__name__} at rest in 16 bits, {policy}": case(
        "wide", 3, 2, 3, optimizer=optimizer, layout="whole_matrices", policy=policy)
       for policy, optimizer in covering(
           [zs.Policy("bf16", master="bf16"), zs.Policy("fp16", state="fp16"), zs.Policy("bf16", master="bf16",
            state="bf16"), zs.Policy("bf16", master="fp16", state="bf16")], [ADAM, SOAP, LARS])},
}


@pytest.mark.parametrize("name", CASES)
def test_every_stage_equals_the_twin_and_holds_and_sends_the_closed_forms_bytes(name):
    make, ranks, k, steps, options = CASES[name]
    model = make()
    _, said = assert_runs_equal_the_twin(model, batches(model, ranks, k, steps), **options)
    assert len({step["norm"] for step in said}) == steps  # it trained on something


# -- drawn together ---------------------------------------------------------------------------------------------------

WIDE = {"gained": "scale.*", "gpt": "*ln_*", "untied": "*ln_*"}  # parameters that may rest in fp32 beside 16-bit ones
FORMAT = st.sampled_from(FORMATS)


@st.composite
def cases(draw):
    name = draw(st.sampled_from(sorted(MODELS)))
    model, optimizer = MODELS[name](), draw(st.sampled_from([ADAM, SGD, zs.optim.Adan(), LARS, zs.optim.Muon()]))
    compute = draw(FORMAT)
    policy = zs.Policy(compute, reduce=draw(st.none() | FORMAT), accumulate=draw(st.none() | FORMAT),
                       master=draw(st.sampled_from(["fp32", "fp32", compute])))
    groups, rules = [], {}
    if draw(st.booleans()):
        frozen = draw(st.sampled_from(sorted(model.shapes)))
        groups.append(zs.Group(frozen, frozen=True))
        rules[frozen] = Rule(None, policy.compute)
    if name in WIDE and policy.master == "fp32" and draw(st.booleans()):
        group = zs.Group(WIDE[name], compute="fp32")
        rules |= {n: Rule(optimizer, "fp32") for n in model.shapes if group.matches(n) and n not in rules}
        groups.append(group)
    if len(rules) == len(model.shapes):
        groups, rules = [], {}
    return {"model": model, "optimizer": optimizer, "policy": policy, "groups": groups, "rules": rules,
            "gather": optimizer.cut == "matrix"}


@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink a training run takes minutes
@given(case=cases(), ranks=st.integers(1, 6), stage=st.sampled_from([0, 1, 2, 3]), k=st.integers(1, 2),
       buckets=st.integers(0, 40), layout=st.sampled_from([*LAYOUTS, "whole_matrices"]),
       overlap=st.sampled_from([{}, {"overlap": True}, {"overlap": True, "copy_in_flight": True}]),
       prefetch=st.integers(0, 2), keep=st.sampled_from([None, (), "all"]), recompute=st.sampled_from(RECOMPUTE),
       clip=st.none() | st.floats(0.01, 10), debug=st.booleans(), seed=st.integers(0, 9))
def test_anything_equals_the_twin(case, ranks, stage, k, buckets, layout, overlap, prefetch, keep, recompute, clip,
                                  debug, seed):
    data = batches(case["model"], ranks, k, 2, seed=seed)
    bucket = {"bucket_nbytes": 1 + 4 * case["model"].parameter_count // buckets} if buckets else {}
    assert_runs_equal_the_twin(
        data=data, runs=[(stage, {})], layout=layout, prefetch=prefetch, keep_gathered=keep, recompute=recompute,
        clip_norm=clip, debug=debug, seed=seed, **case, **bucket, **overlap)


def test_a_rank_that_overlaps_and_one_that_does_not_still_agree_on_what_they_reduce():
    """The option is each rank's own affair: no collective differs."""
    model, data = MODELS["wide"](), batches(MODELS["wide"](), 2, 1, 2)

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=2, overlap=rank.index == 0)
        for step in data:
            engine.step(step[rank.index])
        return b"".join(bits(engine.state(name)["master"]) for name in model.shapes)

    assert list(zs.Cluster(2).run(program)) == [result["master"] for result in outcome(model, data, stage=2)]
