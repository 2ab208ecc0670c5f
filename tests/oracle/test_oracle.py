"""The oracle names every mistake that is planted in a step written by hand, or says that the step cannot show it."""

import functools
import json
import shutil
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import covering
from tests.support import ask, assert_refused, literally
from zerosim.numerics import policy
from zerosim.oracle import HYPOTHESES, Record, StepSettings, candidates, judge, read

SHAPES = {"embed": (3, 4), "head": (7,)}
N_ELEMENTS, CLIP = 19, 0.05


def drawn(seed, **changed):
    """The settings of a step, its recorded gradients and the state before it."""
    rng = np.random.default_rng(seed)
    asked = {"ranks": 3, "parameters": SHAPES, "optimizer": "adamw", "lr": 0.01, "micro_batches": 2, "step": 3,
             "layout": "flat", "compute": "bf16", "epsilon": 1e-3, "weight_decay": 0.1, "loss_scale": 64.0} | changed
    settings = StepSettings(**asked)
    gradients = [[(rng.standard_normal(N_ELEMENTS) * settings.loss_scale).astype(zs.format_of(settings.compute).dtype)
                  for _ in range(settings.micro_batches)] for _ in range(settings.ranks)]
    before = {"master": rng.standard_normal(N_ELEMENTS).astype(np.float32)}
    for slot in settings.slots[1:]:
        before[slot] = (rng.random(N_ELEMENTS) * 0.1 * (settings.step > 1)).astype(np.float32)
    return settings, gradients, before


def cut(settings):
    """DeepSpeed's: an N-th of an even number each."""
    each = 2 * -(-N_ELEMENTS // (2 * settings.ranks))
    return tuple(min(N_ELEMENTS, each * rank) for rank in range(settings.ranks + 1))


def step_by_hand(rank, s, gradients, before, mistake):
    """ZeRO-1 by hand: this rank's masters, state and copies after the step, each whole."""
    low, high = cut(s)[rank.index:rank.index + 2]
    local = [g.astype(np.float32) for g in gradients[rank.index]]
    if mistake == "missing micro-batch" and rank.index == 1:
        local[1] = np.zeros_like(local[1])
    if mistake == "repeated micro-batch" and rank.index == 1:
        local[1] = local[1] * 2
    if s.tokens is not None and mistake != "wrong divisor of tokens":
        mean = np.sum(s.tokens) / np.size(s.tokens)
        local = [np.float32(count / mean) * g for count, g in zip(s.tokens[rank.index], local, strict=True)]
    total = functools.reduce(np.add, local)
    if mistake == "another order":
        total = rank.all_reduce(total, algorithm="tree")
    elif mistake == "no reduction":
        total = total * np.float32(s.ranks)
    else:
        total = rank.all_reduce(total, splits=cut(s))
    divisor = s.ranks * s.micro_batches * s.loss_scale
    divisor *= {"no average": 1 / s.ranks, "two averages": s.ranks, "loss scale": 1 / s.loss_scale,
                "scaled gradient": 0.8}.get(mistake, 1)
    g = (total / np.float32(divisor))[low:high]
    norm = np.sqrt(float(rank.all_reduce(np.array([np.sum(g.astype(np.float64)**2)]))[0]))
    if mistake == "clipped by a local norm":
        norm = np.sqrt(np.sum(g.astype(np.float64)**2))
    if s.clip_norm is not None and mistake != "clipped at another place":
        g = g * np.float32(min(1, s.clip_norm / norm))
    overflowed = not np.isfinite(total[low:high] if mistake == "unshared overflow" else total).all()
    state = {slot: x[low:high].copy() for slot, x in before.items()}
    if mistake == "forgotten state":
        state |= {slot: np.zeros_like(x) for slot, x in state.items() if slot != "master"}
    if mistake == "masters from 16 bits":
        state["master"] = state["master"].astype(zs.format_of(s.compute).dtype).astype(np.float32)
    if not overflowed and not (mistake == "stale shard" and rank.index == 1):
        adam(s, state, g, mistake)
    whole = {slot: rank.all_gather(x, splits=cut(s)) for slot, x in state.items()}
    return whole, whole["master"].astype(zs.format_of(s.compute).dtype)


def adam(s, state, g, mistake):
    """Kingma and Ba's algorithm 1 with decoupled decay, in the order of zerosim's optimizer."""
    f32, (w, m, v) = np.float32, (state[slot] for slot in ("master", "m", "v"))
    step = 1 if mistake == "bias correction" else s.step
    epsilon = f32(1e-5 if mistake == "wrong epsilon" else s.epsilon)
    s = replace(s, **{"wrong learning rate": {"lr": 0.0137}, "wrong beta": {"beta1": 0.8},
                     "wrong weight decay": {"weight_decay": 0.07}}.get(mistake, {}))
    g = -g if mistake == "wrong sign" else g
    if mistake == "weight decay":
        g = g + f32(s.weight_decay) * w
    m[:] = f32(s.beta1) * m + f32(1 - s.beta1) * g
    v[:] = f32(s.beta2) * v + f32(1 - s.beta2) * (g * g)
    unbiased = v / f32(1 - s.beta2**step)
    root = np.sqrt(unbiased + epsilon) if mistake == "epsilon inside the root" else np.sqrt(unbiased) + epsilon
    if mistake != "weight decay":
        w *= f32(1 - s.lr * s.weight_decay)
    w -= m / f32(1 - s.beta1**step) * f32(s.lr) / root


def recorded(settings, gradients, before, mistake="none"):
    """The record of that step."""
    found = zs.Cluster(settings.ranks).run(step_by_hand, settings, gradients, before, mistake)
    return Record(settings, gradients, before, {slot: [whole[slot] for whole, _ in found] for slot in before},
                  [copy for _, copy in found])


# What a step must have, beside what is drawn, so that a mistake can show.
NEEDS = {"clipped by a local norm": {"clip_norm": CLIP}, "clipped at another place": {"clip_norm": CLIP},
         "wrong divisor of tokens": {"tokens": [[5, 1], [2, 2], [9, 4]]},
         "another order": {"ranks": 4, "order": "ring to the owner", "compute": "fp32"}}


MISTAKES = ["none", *(row.name for row in HYPOTHESES)]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_right_step_matches_in_every_bit_and_a_mistake_is_named(mistake):
    assert judged(mistake, 0).matches == (mistake == "none")


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
@hypothesis.settings(max_examples=100)  # a judgement takes a fifth of a second
@given(st.integers(0, 2**32 - 1))
def test_in_any_step_a_mistake_is_named_or_said_to_be_one_that_the_step_cannot_tell(mistake, seed):
    judged(mistake, seed)


def judged(mistake, seed):
    """The judgement of the step of this seed, which names the mistake."""
    settings, gradients, before = drawn(seed, **NEEDS.get(mistake, {}))
    if mistake == "unshared overflow":
        gradients[1][0][-1] = np.inf
    found = judge(recorded(settings, gradients, before, mistake))
    if mistake == "none":
        assert "zerosim" in {way[3] for way in found.ways}
    else:
        causes = found.causes or found.indistinguishable
        assert mistake in [cause.name for cause in causes], (causes, found.nearest)
    return found


def test_a_mistake_that_the_step_cannot_show_is_said_to_be_one_that_it_cannot_tell():
    settings, gradients, before = drawn(1, ranks=2, micro_batches=1, step=1, weight_decay=0.0, epsilon=0.0,
                                        compute="fp32")
    record = recorded(settings, gradients, before)
    for slot in ("m", "v"):
        record.after.pop(slot)  # Adam's first step has one length, whatever the gradient's
    found = judge(record)
    assert found.matches
    assert {"no average", "two averages", "loss scale"} <= {cause.name for cause in found.indistinguishable}


def test_a_record_is_read_as_it_was_written_and_the_command_says_what_python_does(tmp_path):
    asked = drawn(2, ranks=2)
    record, wrong = recorded(*asked), recorded(*asked, mistake="stale shard").write(tmp_path / "wrong")
    assert judge(record.write(tmp_path / "right")) == judge(record)
    assert ask("oracle", str(tmp_path / "right")).exit_code == 0
    assert json.loads(ask("oracle", str(wrong), "--json").stdout)["causes"][0]["name"] == "stale shard"
    found, done = zs.oracle.judge(wrong), ask("oracle", str(wrong), columns=1000)
    assert "<table" in found._repr_html_()
    assert done.exit_code == 1
    assert "rank 1's shard was not updated" in done.stdout
    assert str(found).splitlines() == [line.rstrip() for line in done.stdout.splitlines()]


CHANGES = {  # of the settings, and what is said
    "ranks=4": ({"ranks": 4}, "has 0 files of rank 3, asked for one: rank3.safetensors or rank3.npz; record the step"),
    "an unknown name": ({"momemtum": 0.9}, "no setting is called 'momemtum'; choose one of ...mean 'momentum'?"),
    "a shape": ({"parameters": {"embed": [4, 3], "head": [7]}},
                "gradient/0/embed is bfloat16 (3, 4), asked for floating point (4, 3); record it whole"),
    "a parameter": ({"parameters": {"tail": [7]}}, "has no gradient/0/tail; record gradient of every parameter"),
    "a layout": ({"layout": "round"}, "was given layout='round'; choose one of whole, rows, tensors, flat"),
    "tokens": ({"tokens": [[1, 2]]}, "they are 3 lists, one for each rank, of 2 counts, not all 0"),
    "compute": ({"compute": "fp16"}, "after/weights/embed is bfloat16 (3, 4), asked for float16 (3, 4)"),
    "lr": ({"lr": -1}, "was given lr=-1; lr is a finite number, 0 or more"),
    "fewer micro-batches": ({"micro_batches": 1}, "has gradient/1/embed, of which record.json says nothing: look at"),
    "an order": ({"order": "rinng"}, "3 ranks of layout flat have no order 'rinng'; choose one of ...mean 'ring'?"),
    "a step": ({"step": 10**400}, "step is a whole number, from 1 on, below 2^63"),
    "many tokens": ({"tokens": [[10**400, 1], [1, 1], [1, 1]]}, "tokens are lists of counts")}


@pytest.mark.parametrize("change", CHANGES)
def test_settings_that_do_not_fit_the_arrays_are_refused_by_their_name(tmp_path, change):
    folder = recorded(*drawn(4)).write(tmp_path)
    settings = json.loads((folder / "record.json").read_bytes())
    changed, said = CHANGES[change]
    (folder / "record.json").write_text(json.dumps(settings | changed))
    assert_refused(lambda: judge(folder), literally(said))


RECORDS = {  # another array than the settings ask for, in a record that is an object
    "a short gradient": lambda of: {"gradients": [[g[:3] for g in of.gradients[0]], *of.gradients[1:]]},
    "a lost rank": lambda of: {"gradients": of.gradients[:2]}, "no rank": lambda of: {"gradients": []},
    "one rank's format": lambda of: {"gradients": [*of.gradients[:2], [g.astype(np.float16) for g in of.gradients[2]]]},
    "ints": lambda of: {"gradients": [[g.astype(int) for g in row] for row in of.gradients]},
    "a list": lambda of: {"before": of.before | {"m": of.before["m"].tolist()}},
    "no state": lambda of: {"before": {"master": of.before["master"]}},
    "fp64": lambda of: {"after": {"master": [x.astype(float) for x in of.after["master"]]}},
    "an unknown slot": lambda of: {"after": of.after | {"vv": of.after["v"]}},
    "weights of two ranks": lambda of: {"weights": of.weights[:2]}}


@pytest.mark.parametrize("change", RECORDS)
def test_a_record_that_does_not_fit_its_settings_is_refused(change):
    record = recorded(*drawn(4))
    assert_refused(lambda: replace(record, **RECORDS[change](record)),
                   literally("Record of 3 ranks, 2 micro-batches and 19 elements was given ... asked for"))


def test_a_replica_that_differs_in_one_element_does_not_match_and_the_ulps_are_those_of_what_was_added():
    """Of what was before, where that is larger than the sum, and of lr in a master that was 0."""
    settings, gradients, before = drawn(6, layout="whole")
    before["m"][6], before["master"][6] = 1, 0  # so that either becomes smaller
    record = recorded(settings, gradients, before)
    for slot, size in (("m", 1), ("master", settings.lr)):
        x = record.after[slot][2] = record.after[slot][2].copy()
        assert abs(x[6]) < size
        x[6] += 4 * np.spacing(np.float32(size))
    found = judge(record)
    assert not found.matches
    assert [cause.which for cause in found.causes] == [("master of embed[1, 2] on rank 2 and rank 0",)]
    assert (found.nearest.elements, found.nearest.ulps, found.nearest.first.rank) == (1, 4, 2)


def test_sums_that_many_addends_share_are_those_of_an_all_reduce_of_each():
    """In each order, averaging rule and place where micro-batches are added, of each rank that may begin a sum."""
    settings, gradients, before = drawn(7, ranks=4, reduce="bf16")
    record, weights, divisor = recorded(settings, gradients, before), ((1.0, 1.0),) * 4, settings.mean_divisor
    found, in_orders = candidates.reductions(record, weights, divisor), candidates.orders(settings)
    wide = {"added first": False, "added first, in fp32": True, "each is reduced": True,
            "each is reduced, added as sent": False}

    def program(rank, way, splits):
        place, average, order = way
        sent = [g.astype(np.float32 if place == "added first, in fp32" else g.dtype)
                for g in gradients[3 - rank.index if order == "ring backwards" else rank.index]]
        addends = sent if place.startswith("each") else [sent[0] + sent[1]]
        mean = {} if average == "cast_then_divide" else {"op": "mean", "average": average}
        _, options = in_orders["ring" if order == "ring to the owner" else order]
        sums = [rank.all_reduce(x.astype(gradients[0][0].dtype), splits=splits,
                                **mean, **options) for x in addends]
        total = functools.reduce(np.add, [x.astype(np.float32) if wide[place] else x for x in sums])
        return total.astype(np.float32) / np.float32(divisor / (4 if mean else 1))

    begins = [tuple(N_ELEMENTS * (rank > owner) for rank in range(5)) for owner in range(4)]
    for way in covering(wide, policy.AVERAGES, [*in_orders, "ring to the owner"]):
        all_splits = ([cut(settings)] if way[2] == "ring to the owner" else begins if in_orders[way[2]][0] > 1
                      else [None])
        expected = [zs.Cluster(4).run(program, way, splits)[0] for splits in all_splits]
        assert [x.tobytes() for x in found[way]] == [x.tobytes() for x in expected], way


def test_ranks_that_had_drifted_apart_before_the_step_are_told_so(tmp_path):
    settings, gradients, before = drawn(5)
    folder = recorded(settings, gradients, before).write(tmp_path / "run")
    before["master"][6] += 1
    other = recorded(settings, gradients, before).write(tmp_path / "other")
    shutil.copy(other / "rank2.safetensors", folder)
    assert_refused(lambda: read(folder), literally("before/master differs from rank 0's, first at embed[1, 2]: the "
                                                   "ranks had drifted apart before this step; record an earlier one"))
    assert_refused(lambda: read(tmp_path / "none"), literally("asked for the record ... record.json: No such file"))
