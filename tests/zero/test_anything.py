"""Any model, layout, policy, optimizer, groups and options, drawn together: the twin's bits."""

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import zerosim as zs
from tests.twin import Rule
from tests.zero.optimizers import Spectral, Trusting
from tests.zero.test_gpt import token_batches
from tests.zero.training import assert_equals_twin, batches, run, twin_of
from tests.zero.units import gained, odd, tied
from zerosim.models import GPT, MLP

MODELS = {"mlp": lambda: MLP((3, 5, 2), activation="gelu", seed=1), "tiny": lambda: MLP((1, 1), seed=3), "tied": tied,
          "odd": odd, "gained": gained, "gpt": lambda: GPT("gpt-nano"), "untied": lambda: GPT("gpt-nano", tied=False)}
WIDE = {"gained": "scale.*", "gpt": "*ln_*", "untied": "*ln_*"}  # parameters that may rest in fp32 beside 16-bit ones
OPTIMIZERS = [zs.optim.Adam(lr=0.01), zs.optim.SGD(lr=0.05), zs.optim.Adan(), Trusting(), Spectral()]
FORMATS = st.sampled_from(["fp32", "bf16", "fp16"])


@st.composite
def cases(draw):
    name = draw(st.sampled_from(sorted(MODELS)))
    model, optimizer = MODELS[name](), draw(st.sampled_from(OPTIMIZERS))
    compute = draw(FORMATS)
    policy = zs.Policy(compute, reduce=draw(st.none() | FORMATS), accumulate=draw(st.none() | FORMATS),
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
    return model, optimizer, policy, groups, rules


@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink a training run takes minutes
@given(case=cases(), ranks=st.integers(1, 6), stage=st.sampled_from([0, 1, 2, 3]), k=st.integers(1, 2),
       layout=st.sampled_from(["per_unit", "contiguous", "whole_matrices"]), overlap=st.booleans(),
       bucket=st.none() | st.integers(1, 300), prefetch=st.integers(0, 2), keep=st.sampled_from([None, (), "all"]),
       recompute=st.sampled_from(["none", "block", "segment(2)"]), clip=st.none() | st.floats(0.01, 10),
       debug=st.booleans(), seed=st.integers(0, 9))
def test_anything_equals_the_twin(
        case, ranks, stage, k, layout, overlap, bucket, prefetch, keep, recompute, clip, debug, seed):
    model, optimizer, policy, groups, rules = case
    data = (token_batches if isinstance(model, GPT) else batches)(model, ranks, k, 2, seed=seed)
    common = {"policy": policy, "layout": layout, "clip_norm": clip}
    twin, said = twin_of(model, data, optimizer, order="local_first" if stage < 2 else "reduce_first", rules=rules,
                         **common)
    results = run(model, data, zs.Cluster(ranks, debug=debug, seed=seed), optimizer=optimizer, stage=stage,
                  groups=groups, gather=optimizer.cut == "matrix", overlap=overlap, bucket_nbytes=bucket,
                  prefetch=prefetch, keep_gathered=keep, recompute=recompute, **common)
    assert_equals_twin(results, twin, said)
