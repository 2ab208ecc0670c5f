"""Gradients that are added in the order of micro-batches: bits that no number of ranks changes.

What they cost is compared with a plan's estimate: `tests/course/test_measured.py`.
"""

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest

import zerosim as zs
from tests.cases import THOROUGH, chosen
from tests.twin import Twin
from tests.zero.drawn import drawn, made
from tests.zero.training import ADAM, BF16, MODELS, assert_equals_twin, batches, bits, flat_state, rules_of, run
from zerosim.numerics import kernels
from zerosim.zero import REPLICATED, SHARDED
from zerosim.zero import micro_batch_order as exact

LAMB = zs.optim.LAMB()
ORDERED = {"reduction": "micro_batch"}
STAGES = (2, 3, zs.Stage(REPLICATED, SHARDED, REPLICATED), zs.Stage(SHARDED, SHARDED, REPLICATED))
LAYOUTS = ("per_unit", "contiguous", "whole_matrices")


def dealt(data, ranks):
    """The micro-batches of each step among so many ranks: number j·N + r is the j-th of rank r."""
    return [[step[rank::ranks] for rank in range(ranks)] for step in data]


@pytest.mark.parametrize("case", drawn(3))
def test_on_any_number_of_ranks_training_has_the_bits_of_the_twin_that_adds_one_micro_batch_after_the_other(case):
    model, _, options = made(case)
    together = (6, 2, 3, 4, 1)[case["ranks"] % 5] * (1 + THOROUGH * case["k"] % 2)
    data = [step[0] for step in batches(model, 1, together, 2, seed=case["seed"])]
    policy, groups, optimizer = (options[key] for key in ("policy", "groups", "optimizer"))
    twin = Twin(model, optimizer, 1, policy, "per_unit", "micro_batch", rules_of(groups, model, optimizer, policy))
    said = [twin.step([step], options["clip_norm"]) for step in data]
    worlds = [ranks for ranks in range(1, together + 1) if together % ranks == 0]
    for index, ranks in enumerate(worlds):
        _, own = options["runs"][index % len(options["runs"])]
        cluster = zs.Cluster(ranks, debug=options["debug"], seed=options["seed"])
        results = run(model, dealt(data, ranks), cluster, optimizer=optimizer, policy=policy, groups=groups,
                      gather=True, clip_norm=options["clip_norm"], stage=STAGES[(index + case["k"]) % 4],
                      layout=LAYOUTS[(index + case["seed"]) % 3], **own, **ORDERED)
        assert_equals_twin(results, twin, [
            one | {"losses": [one["losses"][0][rank::ranks] for rank in range(ranks)]} for one in said])


@pytest.mark.parametrize(("there", "here"), chosen([(2, 3), (6, 1)], permutations((1, 2, 3, 6), 2)))
def test_training_goes_on_from_a_checkpoint_on_other_ranks_as_if_it_had_never_been_interrupted(tmp_path, there, here):
    """In another stage and layout too, with state on the host. By rank bits differ, and the report says why."""
    model = MODELS["dropout"]()
    data = [step[0] for step in batches(model, 1, 6, 2)]

    def train(rank, steps, options, load=False, save=False):
        engine = zs.Engine(rank, model, ADAM, policy=BF16, clip_norm=0.05, **options)
        report = engine.load(tmp_path / "a").differences if load else None
        norms = [engine.step(step[rank.index]).norm for step in dealt(steps, rank.size)]
        if save:
            engine.save(tmp_path / "a")
        return {key: bits(value) for key, value in flat_state(engine).items()}, norms, report

    elsewhere = {"stage": 3, "layout": "contiguous", "overlap": True, "offload": "host"}
    for options, other in ((ORDERED | {"stage": 2}, ORDERED | elsewhere), ({"stage": 2}, {"stage": 2})):
        whole = zs.Cluster(there).run(train, data, options)[0]
        zs.Cluster(there).run(train, data[:1], options, False, True)
        for state, norms, report in zs.Cluster(here).run(train, data[1:], other, True):
            same = "reduction" in options
            assert ((state, norms) == (whole[0], whole[1][1:])) is same
            assert (report == ()) is same
    assert any(line.startswith(f"ranks: saved with {there}, here {here}") for line in report)


def test_ranks_with_unequally_many_micro_batches_are_refused_by_name():
    data = [step[0] for step in batches(MODELS["odd"](), 1, 3, 1)]
    with pytest.raises(zs.MismatchError, match="micro-batch 1"):
        run(MODELS["odd"](), dealt(data, 2), stage=2, **ORDERED)


# -- sums of squares that nothing rounds -------------------------------------------------------------------------------

KERNELS = kernels.NumpyKernels()
EDGES = np.array([0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 1.0, -1.0, 3.4028235e38, 1.5e-30], np.float32)


def numbers(count):
    """Codes of all exponents, without inf and NaN, and the edges."""
    codes = np.random.default_rng(count).integers(0, 2**32, count, np.uint32)
    found = np.concatenate([EDGES, codes.view(np.float32)])
    return found[np.isfinite(found)]


@pytest.mark.parametrize("divisor", [1.0, 3.0, 1024.0])
def test_the_sum_is_that_of_fractions_in_any_order_and_cut(divisor):
    x = numbers(300)
    with np.errstate(all="ignore"):
        quotients = x / np.float32(divisor)
    expected = sum(Fraction(float(q)) ** 2 for q in quotients)
    found = exact.sum_of_squares(KERNELS, x, divisor)
    assert Fraction(found, 2**exact.UNIT_BITS) == expected
    for cut in (0, 1, 100):
        parts = [exact.sum_of_squares(KERNELS, part, divisor) for part in (x[cut:][::-1].copy(), x[:cut])]
        assert exact.root(map(exact.to_bytes, parts)) == exact.root([exact.to_bytes(found)])


def test_a_sum_of_more_than_a_block_is_rounded_once_and_then_its_root():
    x = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    found = exact.root([exact.to_bytes(exact.sum_of_squares(KERNELS, x))])
    assert found == math.sqrt(math.fsum(x.astype(np.float64) ** 2))


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_the_root_is_nan_where_a_number_is_not_finite(odd):
    x = np.full(3, 3.4e38, np.float32)
    x[1] = odd
    spoiled = exact.to_bytes(exact.sum_of_squares(KERNELS, x))
    assert math.isnan(exact.root([exact.to_bytes(1), spoiled, spoiled]))
    assert math.isfinite(exact.root([exact.to_bytes(exact.sum_of_squares(KERNELS, x[::2].copy()))] * 1000))
