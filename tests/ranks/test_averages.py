"""A mean can overflow, underflow or be biased, by where it divides; each rule is known by its numbers."""

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.ranks import oracles
from tests.ranks.asking import KINDS, REDUCTIONS, WORLDS, allowed, ask, bits, ceil_cut
from tests.ranks.data import FLOATS, NARROW, normals
from zerosim.ranks.call import AVERAGES, split_factors

# The division factors before and after the sum, as PyTorch's and fairscale's FSDP have them.
SPLITS = {1: (1, 1), 2: (2, 1), 3: (2, 1.5), 4: (2, 2), 5: (2, 2.5), 6: (4, 1.5), 7: (2, 3.5), 8: (4, 2), 12: (4, 3),
          15: (2, 7.5), 16: (4, 4), 24: (8, 3), 48: (8, 6), 64: (8, 8), 96: (16, 6), 128: (16, 8), 1000: (16, 62.5),
          1023: (2, 511.5), 1024: (32, 32)}


def divided(x: np.ndarray, divisor: float) -> np.ndarray:
    """x / divisor in fp32 (fp64 in its own type), rounded once."""
    wide = np.float64 if x.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        return (x.astype(wide) / wide(divisor)).astype(x.dtype)


def multiplied(x: np.ndarray, factor: float) -> np.ndarray:
    wide = np.float64 if x.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        return (x.astype(wide) * wide(factor)).astype(x.dtype)


def oracle(rule: str, operation: str, algorithm: str, x: list[np.ndarray]) -> np.ndarray:
    """The mean (n,) by this rule."""
    ranks, dtype = len(x), x[0].dtype
    before, after = {"sum_then_divide": (1, ranks), "divide_then_sum": (ranks, 1), "split": split_factors(ranks),
                     "premultiply": (1, 1)}[rule]
    scaled = [divided(v, before) for v in x]
    if rule == "premultiply":
        inverse = 1 / ranks if dtype == np.float64 else float(np.float32(1 / ranks).astype(dtype))
        scaled = [multiplied(v, inverse) for v in x]
    return divided(oracles.reduced(operation, algorithm, scaled, ceil_cut(len(x[0]), ranks)), after)


def mean(rule: str | None, x: list[np.ndarray], operation: str = "all_reduce", algorithm: str = "ring",
         **kind) -> np.ndarray:
    results = zs.Cluster(len(x), **kind).run(
        lambda rank: ask(rank, operation, algorithm, x[rank.index], op="mean", average=rule))
    return np.concatenate(list(results)) if operation == "reduce_scatter" else results[0]


@pytest.mark.parametrize(("ranks", "factors"), SPLITS.items())
def test_split_divides_by_a_power_of_two_near_the_root_of_n_and_by_the_rest(ranks, factors) -> None:
    assert split_factors(ranks) == factors
    assert factors[0] * factors[1] == ranks


@pytest.mark.parametrize("rule", AVERAGES)
@pytest.mark.parametrize(("operation", "algorithm"), REDUCTIONS)
def test_every_rule_divides_where_it_says_in_every_format(operation, algorithm, rule) -> None:
    worlds = [n for n in (*WORLDS, 7) if allowed(operation, algorithm, n)]
    turn = REDUCTIONS.index((operation, algorithm)) + list(AVERAGES).index(rule)
    for ranks, dtype, kind in covering(worlds, FLOATS.values(), ("plain", "debug"), turn=turn):
        x = normals(ranks, 2 * ranks + 3, dtype)
        found = mean(rule, x, operation, algorithm, **KINDS[kind])
        assert bits(found) == bits(oracle(rule, operation, algorithm, x)), (ranks, dtype, kind)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_the_default_mean_sums_and_then_divides(dtype: np.dtype) -> None:
    x = normals(5, 20, dtype)
    assert bits(mean(None, x)) == bits(mean("sum_then_divide", x))
    assert bits(mean(None, x)) == bits(divided(oracles.ring(x, ceil_cut(20, 5)), 5))


@pytest.mark.parametrize("rule", AVERAGES)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_the_mean_over_one_rank_is_the_input_in_bits(rule: str, dtype: np.dtype) -> None:
    x = normals(1, 30, dtype)
    for operation, algorithm in REDUCTIONS:
        assert bits(mean(rule, x, operation, algorithm)) == bits(x[0])


def test_the_rules_differ_where_n_is_no_power_of_two() -> None:
    x = normals(6, 500, NARROW["bf16"])
    found = {rule: bits(mean(rule, x)) for rule in AVERAGES}
    # What split divides by before is a power of two, which is exact where nothing overflows or becomes subnormal.
    assert found.pop("split") == found["sum_then_divide"]
    assert len(set(found.values())) == 3
    assert len({bits(mean(rule, normals(4, 500, NARROW["bf16"]))) for rule in AVERAGES}) == 1


@pytest.mark.parametrize("rule", ["sum_then_divide", "split", "premultiply"])
def test_an_asynchronous_mean_and_one_in_place_are_the_same_mean(rule: str) -> None:
    x = normals(5, 13, np.float16)

    def program(rank):
        own, mine = x[rank.index].copy(), x[rank.index].copy()
        work = rank.all_reduce(own, op="mean", average=rule, async_op=True, out=own)
        return [work.wait(), rank.all_reduce(mine, op="mean", average=rule, out=mine),
                rank.all_reduce(x[rank.index], op="mean", average=rule)]

    wanted = bits(oracle(rule, "all_reduce", "ring", x))
    assert all(bits(found) == wanted for results in zs.Cluster(5).run(program) for found in results)


@pytest.mark.parametrize(("ranks", "wanted"), [
    (1024, [(100, "sum_then_divide", np.inf), (100, "divide_then_sum", 107.125), (100, "split", 107.125),
            (2e-5, "sum_then_divide", 1.94e-5), (2e-5, "divide_then_sum", 0.0), (2e-5, "split", 1.68e-5),
            (200, "split", 214.25)]),
    (1023, [(200, "split", np.inf)])], ids=["1024", "1023"])
def test_a_thousand_equal_fp16_gradients_overflow_or_vanish_by_the_rule(ranks, wanted) -> None:
    """All contributions are equal here, so that the ring and rank order make the same additions. 107.125 for a true
    100 is what rounding after each of 1023 additions costs."""
    found = zs.Cluster(ranks).run(lambda rank: [
        rank.reduce(np.full(1, g, np.float16), algorithm="naive", op="mean", average=rule) for g, rule, _ in wanted])
    for mean_of_all, (g, _, value) in zip(found[0], wanted, strict=True):
        assert float(mean_of_all[0]) == pytest.approx(value, rel=0.003 if g < 1 else 0)


@pytest.mark.parametrize(("ranks", "finite"), [(678, True), (679, False)])
def test_the_fp16_sum_of_hundreds_is_infinite_from_the_679th_addend_on(ranks: int, finite: bool) -> None:
    total = zs.Cluster(ranks).run(lambda rank: rank.reduce(np.full(1, 100, np.float16), algorithm="naive"))[0]
    assert np.isfinite(total[0]) == finite


@pytest.mark.parametrize(("ranks", "bias"), [(2, 0), (3, 0.00195), (4, 0), (5, 0.00098), (6, 0.00195), (7, -0.00195)])
def test_premultiplying_by_a_rounded_inverse_biases_bf16(ranks: int, bias: float) -> None:
    """The factor is 1/N rounded to bf16: every mean is off by the same share, before any other rounding."""
    factor = float(np.float32(1 / ranks).astype(NARROW["bf16"]))
    assert factor * ranks - 1 == pytest.approx(bias, abs=6e-6)
    # In one addition's worth of data: 192 · factor is exact in bf16, and so is its sum over ranks of zeros.
    x = [np.full(3, 192 if rank == 0 else 0).astype(NARROW["bf16"]) for rank in range(ranks)]
    exact = np.float32(192) * np.float32(factor)
    assert mean("premultiply", x).astype(np.float32).tolist() == [exact.astype(NARROW["bf16"]).astype(np.float32)] * 3


def test_the_bias_of_premultiplying_shows_in_the_mean_of_many_elements_and_the_default_has_none() -> None:
    x = [np.abs(v) + 1 for v in normals(3, 20_000)]
    cast = [v.astype(NARROW["bf16"]) for v in x]
    true = np.mean([v.astype(np.float64) for v in cast], axis=0)
    shift = {rule: float(np.mean(mean(rule, cast).astype(np.float64) / true - 1)) for rule in AVERAGES}
    assert shift["premultiply"] == pytest.approx(0.00195, abs=2e-4)
    assert shift["sum_then_divide"] == pytest.approx(0, abs=2e-4)
    assert shift["split"] == pytest.approx(0, abs=2e-4)


@pytest.mark.parametrize(("options", "text"), [
    ({"op": "mean", "average": "splt"}, r"no averaging rule 'splt'; choose one of sum_then_divide, divide_then_sum, "
     r"split, premultiply; did you mean 'split'\?"),
    ({"op": "mean", "average": 3}, "no averaging rule 3; choose one of sum_then_divide"),
    ({"average": "split"}, "average='split' says how to take a mean, but op='sum'; pass op='mean'"),
    ({"op": "avg"}, "no reduction op='avg'; choose one of sum, mean, max, min")])
def test_a_wrong_rule_is_refused_with_what_there_is(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        zs.Cluster(2).run(lambda rank: rank.all_reduce(np.full(2, rank.index, np.float32), **options))


def test_a_mean_of_integers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"op='mean' of int64 would need rounding rules .* sum, or cast to a float"):
        zs.Cluster(2).run(lambda rank: rank.reduce_scatter(np.arange(4) + rank.index, op="mean"))
