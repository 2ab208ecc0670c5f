"""The oracle names every mistake that is planted in a step written by hand, or says that the step cannot show it."""

import functools
import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.support import ask, assert_refused, literally
from zerosim.oracle import HYPOTHESES, Record, Settings, judge, read

SHAPES = {"embed": (3, 4), "head": (7,)}
N_ELEMENTS, CLIP = 19, 0.05


def drawn(seed, **changed):
    """The settings of a step, its recorded gradients and the state before it."""
    rng = np.random.default_rng(seed)
    asked = {"ranks": 3, "parameters": SHAPES, "optimizer": "adamw", "lr": 0.01, "micro_batches": 2, "step": 3,
             "layout": "flat", "compute": "bf16", "epsilon": 1e-3, "weight_decay": 0.1, "loss_scale": 64.0} | changed
    settings = Settings(**asked)
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
    divisor *= {"no average": 1 / s.ranks, "two averages": s.ranks, "loss scale": 1 / s.loss_scale}.get(mistake, 1)
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
         "wrong divisor of tokens": {"tokens": [[5, 1], [2, 2], [9, 4]]}, "another order": {"ranks": 4, "order": "ring to the owner", "compute": "fp32"}}


@pytest.mark.parametrize("mistake", ["none", *(row.name for row in HYPOTHESES)])
@given(st.integers(0, 2**32 - 1))
def test_a_right_step_matches_in_every_bit_and_a_mistake_is_named(mistake, seed):
    settings, gradients, before = drawn(seed, **NEEDS.get(mistake, {}))
    if mistake == "unshared overflow":
        gradients[1][0][-1] = np.inf
    found = judge(recorded(settings, gradients, before, mistake))
    if mistake == "none":
        assert ("added first, in fp32", "cast_then_divide", "ring to the owner", "zerosim") in found.ways
        return
    assert not found.matches
    assert mistake in [cause.name for cause in found.causes], (found.causes, found.nearest)
