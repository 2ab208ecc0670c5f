"""zerosim.testing, as users have it: its doc page runs, its reference is right, and its checks can fail."""

import math
import re
import sys
import tomllib
import tracemalloc
from functools import partial, reduce
from itertools import repeat

import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

import zerosim as zs
from tests.architecture.source import ROOT
from tests.support import assert_refused, fresh, literally
from tests.zero.training import assert_runs_equal_the_twin
from zerosim import testing
from zerosim.models import GPT, MLP, CrossEntropy, LinearUnit, Model, autodiff
from zerosim.testing import (
    SingleDevice,
    assert_agrees,
    assert_runs_agree,
    assert_same_bits,
    batches,
    cases,
    check_gradients,
    check_memory,
    check_sharded,
    gradients,
    models,
    policies,
    splits,
    ulps_apart,
    vectors,
    worlds,
)

pytest_plugins = ["pytester"]

PAGE = ROOT / "docs/check_your_own_update.md"
SGD = zs.optim.SGD(lr=1.0)


def page_code(old="", new=""):
    """The page's names, perhaps of a program in which one replacement breaks something."""
    check, program, own, by_hand = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    text = "\n".join([program, check, own, by_hand])
    assert text.count(old) == 1 or not old
    names: dict = {}
    exec(text.replace(old, new) if old else text, names)
    return names


def test_the_checks_on_the_doc_page_pass_and_a_step_by_hand_is_what_it_says():
    names = page_code()
    assert names["w"].tolist() == [0.5, -1.5]
    for ranks in (1, 3):
        names["test_my_sharded_adam_is_adam"](ranks)
        names["test_my_sharded_adam_is_8_ulps_from_torchs_order"](ranks)


def test_a_reference_of_ones_own_in_another_order_that_is_wrong_or_held_too_close_is_found():
    for broken in (("ulps=8", "ulps=0.5"), ("1 - beta2**step) + epsilon", "1 - beta1**step) + epsilon")):
        names = page_code(*broken)
        names["check_sharded"] = partial(check_sharded, examples=300)
        with pytest.raises(AssertionError, match="the weights differ from step"):
            names["test_my_sharded_adam_is_8_ulps_from_torchs_order"](3)


GATHER, SUM = "rank.all_gather(own, length=len(weights))", "rank.reduce_scatter(gradient)"
SLICE = "[rank.index * chunk:(rank.index + 1) * chunk]"
LATE = (f"yield {GATHER}", f"late, weights = weights, {GATHER}\n"
        "        yield late if (rank.index, step) == (2, 3) else weights")
# A mistake, the most ranks, elements and steps of a case that shows it, and what the report says of it.
PLANTED = [
    ((" / np.float32(rank.size)", ""), (4, 2, 3), "step  rank 0  rank 1"),
    (("enumerate(gradients, 1)", "enumerate(gradients, 2)"), (1, 1, 1),
     "weights: [1.0]\ngradients of step 1: rank 0 [1.0]"),
    ((SUM, "gradient" + SLICE), (4, 4, 3), "the elements that differ:\nstep  rank 0  rank 1"),
    ((SUM, f"rank.all_reduce(gradient, algorithm='naive'){SLICE}"), (4, 12, 3), "ULP apart"),
    (("(rank.kernels), own, mean, state, step)", "(rank.kernels), own, mean, state, 1)"), (1, 1, 2),
     "step  rank 0\n2     0\nweights"),
    ((f"yield {GATHER}", f"own *= np.float32(1 + (step == 2 and rank.index == 1))\n        yield {GATHER}"), (2, 2, 2),
     "step  rank 0  rank 1\n2     1       1"),
    (LATE, (3, 1, 3), "the elements that differ:\nstep  rank 2\n3     0\nweights: [1.0]\n"),
]


@pytest.fixture
def same_cases():
    """The same drawn cases in every run: of a mistake that Adam's rounding hides, a few in a hundred stay larger."""
    before = settings.get_current_profile_name()
    settings.register_profile("same cases", settings.get_profile(before), derandomize=True)
    settings.load_profile("same cases")
    yield
    settings.load_profile(before)


@pytest.mark.usefixtures("same_cases")
@pytest.mark.parametrize(("broken", "most", "said"), PLANTED, ids=[broken[1][:40] for broken, *_ in PLANTED])
def test_a_planted_mistake_is_shown_by_a_small_case_with_its_step_rank_and_elements(broken, most, said):
    with pytest.raises(AssertionError) as caught:
        check_sharded(page_code(*broken)["my_training"], zs.optim.Adam(lr=0.01), examples=200)
    text = str(caught.value)
    sizes = re.match(r"my_training on (\d) ranks?, (\d+) elements?, (\d) steps?: the weights differ from step", text)
    assert sizes, text
    assert all(int(size) <= least for size, least in zip(sizes.groups(), most, strict=True)), text
    assert said in text
    if broken is LATE:
        assert f"```text\n{text}\n```" in PAGE.read_text()


def test_drawn_numbers_shrink_to_ones_and_zeros_but_for_those_that_show_a_mistake():
    quick = settings(database=None, derandomize=True, max_examples=100)
    assert find(vectors(8), lambda x: np.any(x > 50), settings=quick).tolist().count(1.0) >= 7
    shrunk = find(gradients(9, 9), lambda g: np.any(g[2] < 0), settings=quick)
    assert [g[0] for rank, g in enumerate(shrunk) if rank != 2] == [1, 2, 4, 5, 6, 7, 8, 9]
    assert find(cases(most_elements=12), lambda case: np.any(case.gradients[0][-1] < 0),
                settings=quick).weights.tolist() == [1.0]
    (x, target), = find(batches(MLP([2, 1]), 1), lambda drawn: drawn[0][0][0].min() < 0, settings=quick)[0]
    assert sorted(x.reshape(-1).tolist())[1:] == [1, 1, 1]
    assert target.tolist() == [[2], [2]]


def test_a_long_report_is_cut_with_what_was_left_out():
    right = [np.zeros(20, np.float32)] * 9
    wrong = [np.float32(np.arange(20) % 3 == 0)] * 9
    text = ("the run: the weights differ from step 2 on\nfirst at step 2, rank 1, element 0: found np.float32(1.0) "
            "...\nthe elements that differ:\nstep  rank 1 ... rank 8\n2     0, 3, 6, ... (7)  0, 3, 6, ... (7)...\n"
            "3 ...\n4 ...\n5 ...\n6 ...\n7     0...\n2 more steps\n1 more ranks that differ$")
    assert_refused(lambda: assert_runs_agree([right, *[[*right[:1], *wrong[1:]]] * 9], right), literally(text),
                   AssertionError)
    assert_refused(lambda: assert_runs_agree([right, right[1:]], right), "rank 1 has the weights after 8 steps, expe"
                   "cted after 9; return, or yield, the weights after each step", AssertionError)
    for call, said in ((lambda: check_sharded(print, SGD, ranks=()), "numbers of ranks, 1 or more, found ranks="),
                       (lambda: check_sharded(print, zs.optim.Adam), "found <class .*; write zs.optim.Adam")):
        assert_refused(call, said)
    assert_refused(lambda: check_sharded(lambda rank, weights, gradients: repeat(weights), SGD), literally(
        "rank 0 has the weights after 2 steps, expected after 1; return, or yield"), AssertionError)
    with pytest.raises(TypeError) as raised:
        check_sharded(lambda rank, weights, gradients: None, SGD)
    assert "<lambda> on 1 rank, 0 elements, 1 step\nweights: []" in "\n".join(raised.value.__notes__)


PLUGIN = {
    "test_with": """
        import pytest
        from hypothesis import given, strategies

        def test_cluster(zerosim_cluster, zerosim_ranks):
            assert zerosim_cluster.run(lambda rank: rank.size)[0] == zerosim_ranks

        @given(drawn=strategies.booleans())
        def test_drawn(zerosim_ranks, drawn):
            assert zerosim_ranks in (1, 3)

        @pytest.mark.zerosim_ranks(2, 3)
        def test_marked(zerosim_ranks):
            assert zerosim_ranks in (2, 3)""",
    "test_without": """
        import pytest

        @pytest.mark.parametrize("ranks", [7])
        def test_own(ranks):
            assert ranks == 7"""}


@pytest.fixture
def run_plugin(pytester, monkeypatch):
    """A function that runs tests with the plugin and hypothesis's, whichever others are installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.syspath_prepend(ROOT)
    pytester.makepyfile(**PLUGIN)
    return lambda *options: pytester.runpytest_inprocess(
        "-p", "_zerosim_pytest", "-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider", *options)


def test_the_plugin_runs_a_test_once_for_each_number_and_leaves_others_alone(run_plugin, pytester):
    asked = run_plugin("-rs", "-v", "--strict-markers", "--zerosim-ranks", "1, 3")
    asked.assert_outcomes(passed=6)
    asked.stdout.fnmatch_lines([*(f"*{test} PASSED*" for test in (
        "cluster?1-ranks?", "cluster?3-ranks?", "drawn?1-ranks?", "marked?3-ranks?", "own?7?"))])
    skipped = run_plugin("-rs", "--zerosim-ranks", "1", "-k", "marked")
    skipped.stdout.fnmatch_lines(["SKIPPED*none of its numbers of ranks, 2, 3, is in --zerosim-ranks"])
    pytester.makeini("[pytest]\nzerosim_ranks = 1,3")
    run_plugin("-k", "cluster or marked").assert_outcomes(passed=4, deselected=3)


@pytest.mark.parametrize("wrong", ["0", "two", "1,1", "", "-1", "1.5", "1,,2"])
def test_the_plugin_refuses_what_is_no_number_of_ranks(run_plugin, wrong):
    found = run_plugin(f"--zerosim-ranks={wrong}")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    words = ", ".join(wrong.split(","))
    found.stderr.fnmatch_lines([
        f"ERROR: --zerosim-ranks takes different numbers of ranks, 1 or more, as 1,2,3,4; found '{words}'"])


def test_a_marker_of_no_number_is_said_by_the_name_of_its_test(run_plugin, pytester):
    pytester.makepyfile(test_odd="import pytest\n@pytest.mark.zerosim_ranks(2, 0)\ndef test_odd(zerosim_ranks): 0")
    found = run_plugin("test_odd.py")
    found.stdout.fnmatch_lines(["@pytest.mark.zerosim_ranks of test_odd.py::test_odd takes different*; found '2, 0'"])
    assert "Traceback" not in str(found.stdout)


def test_the_plugin_costs_other_projects_no_import_of_the_package():
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["entry-points"]["pytest11"] == {"zerosim": "_zerosim_pytest"}
    loaded = "import pytest, sys, _zerosim_pytest; print({'zerosim', 'numpy', 'hypothesis'} & {*sys.modules})"
    assert fresh("-c", loaded, PYTHONPATH=str(ROOT)) == "set()\n"


@given(worlds(), st.lists(st.integers(0, 6), min_size=1, max_size=2), st.data())
def test_the_reference_adds_in_the_rings_order_whatever_the_weights_shape(ranks, shape, data):
    """The cut counts the elements of a matrix, too, and not its rows."""
    length = math.prod(shape)
    cut = data.draw(splits(length, ranks))
    drawn = data.draw(gradients(ranks, length, "bf16"))
    reference = SingleDevice(SGD, np.zeros(shape), ranks, cut)
    expected = zs.Cluster(ranks).run(lambda rank: rank.all_reduce(drawn[rank.index], splits=cut))[0]
    assert_same_bits(reference.step([g.reshape(shape) for g in drawn]),
                     (0 - expected.astype(np.float32) / np.float32(ranks)).reshape(shape))


def test_a_mean_of_ones_own_is_taken_as_it_is_and_a_function_keeps_its_own_type():
    """Rank order, which the algorithm "naive" has; a float64 reference is rounded where it is handed out."""
    def program(rank, w, gradients):
        for g in gradients:
            w = w - rank.all_reduce(g, algorithm="naive") / np.float32(rank.size)
            yield w

    check_sharded(program, lambda: lambda w, g, step: w - g, mean=lambda g: reduce(np.add, g) / np.float32(len(g)))
    kept = []
    for dtype in (np.float32, np.float64):
        reference = SingleDevice(lambda w, g, step: kept.append((w.dtype, step)) or w - g, np.zeros(2, dtype), 2,
                                 mean=lambda g, dtype=dtype: sum(g).astype(dtype))
        assert [reference.step([ONES, TWO]).dtype for _ in range(2)] == [np.float32] * 2
    assert kept == [(np.float32, 1), (np.float32, 2), (np.float64, 1), (np.float64, 2)]
    assert reference.state == {}


@pytest.mark.parametrize("optimizer", [
    zs.optim.Adam(lr=0.1), zs.optim.Adan(lr=0.1), zs.optim.LAMB(lr=0.1), zs.optim.LARS(), zs.optim.Muon(),
    zs.optim.Adafactor()], ids=lambda optimizer: type(optimizer).__name__)
def test_a_stepper_and_a_reference_have_an_engines_bits_also_with_norms_matrices_and_state_in_16_bit(optimizer):
    model = Model([LinearUnit("a", 3, 2, first=True)])
    first = zs.models.first_weights(model)

    def program(rank):
        engine = zs.Engine(rank, model, optimizer)
        by_hand = {name: zs.optim.Stepper(optimizer, w.copy()) for name, w in first.items()}
        references = {name: SingleDevice(optimizer, w, 1) for name, w in first.items()}
        for seed in range(3):
            x, target = (np.random.default_rng([seed, width]).standard_normal((4, width)) for width in (3, 2))
            engine.backward(engine.forward(x, target))
            engine.reduce()
            handed = {}
            for name, stepper in by_hand.items():
                gradient = engine.state(name)["gradient"]
                stepper.step(gradient)
                handed[name] = references[name].step([gradient])
            engine.update()
        for name, stepper in by_hand.items():
            expected = engine.state(name)
            assert np.abs(expected["master"] - first[name]).max() > 1e-6
            assert_same_bits(stepper.weights, expected["master"])
            assert_same_bits(handed[name], expected["master"])
            assert stepper.steps_taken == 3
            for slot, kind in optimizer.slots(first[name].shape).items():
                assert_same_bits(stepper.state[slot], references[name].state[slot])
                assert_same_bits(stepper.state[slot], expected.get(slot, stepper.state[slot]))  # not rows and columns
                assert stepper.state[slot].dtype == zs.format_of(kind.format).dtype
            references[name].step([np.ones_like(handed[name])])
            assert_same_bits(handed[name], expected["master"], "it hands out copies")

    zs.Cluster(1).run(program)


@settings(max_examples=8)
@given(models(), worlds(5), policies(), st.sampled_from([0, 1, 2, 3]), st.sampled_from(["per_unit", "contiguous"]),
       st.integers(1, 3), st.data())
def test_any_model_policy_stage_and_layout_equals_the_twin(model, ranks, policy, stage, layout, micro_batches, data):
    drawn = [data.draw(batches(model, ranks, micro_batches)) for _ in range(2)]
    assert_runs_equal_the_twin(model, drawn, runs=[(stage, {})], policy=policy, layout=layout)


@given(worlds(), st.integers(0, 50), st.sampled_from(["fp32", "fp16", "bf16", "fp8_e4m3"]), st.data())
def test_vectors_have_the_length_and_format_asked_for_and_gradients_differ_on_every_rank(ranks, length, format, data):
    drawn = data.draw(vectors(length, format))
    assert (drawn.shape, drawn.dtype) == ((length,), zs.format_of(format).dtype)
    assert len({g.tobytes() for g in data.draw(gradients(ranks, length + 9))}) == ranks


def test_equal_bits_pass_with_nan_and_in_low_precision():
    for format in zs.FORMATS:
        values = np.array([np.nan, 1.0, -0.0], zs.format_of(format).dtype)
        assert_same_bits(values, values.copy())


ONES, TWO = np.ones(2, np.float32), np.float32([1.0, 2.0])


@pytest.mark.parametrize(("call", "error", "text"), [
    *((lambda a=a, b=b: assert_same_bits(a, b), AssertionError, text) for a, b, text in [
        (np.float32([0.0, 1.0]), np.float32([-0.0, 1.0]), "1 of 2 elements differ; first at 0"),
        (ONES, ONES.astype(np.float64), "found float32 of shape"), (ONES[:1], ONES, "shape"),
        (TWO, np.nextafter(TWO, np.float32([1, 3])), "first at 1")]),
    *((lambda a=a, b=b, most=most: assert_agrees(a, b, **most), AssertionError, text) for a, b, most, text in [
        (np.float32([[0, 1, 2]]), np.float32([[0, 1 + 2**-22, 3]]), {}, r"2 of 3 elements differ; first at \(0, 1\): "
         r".*; farthest, by 4.19e\+06 ULP, at \(0, 2\): .*\. Another order of operations differs by some ULPs and"),
        (TWO, np.nextafter(TWO, np.float32([1, 3])), {"ulps": 0.9}, r"farthest, by 1 ULP, at 1: .*\(0x40000001\)$"),
        (np.float32([1e-9]), np.float32([0]), {"ulps": 1, "scale": 1e-3}, "by 8.59 ULP"),
        (np.float32([1e-9]), np.float32([0]), {"ulps": 99}, "by 7.14e\\+35 ULP"),
        (np.float32([np.nan]), ONES[:1], {"ulps": 1e9}, "by inf ULP"),
        (np.float32([np.inf]), ONES[:1], {"ulps": 1e9}, "by inf ULP")]),
    (lambda: assert_same_bits(np.arange(3), np.arange(1, 4)), AssertionError, r"expected np.int64\(1\) \(0x1\)$"),
    *((lambda pair=pair: assert_agrees(*pair), ValueError, f"assert_agrees needs {name} as a NumPy array, got {kind};")
      for pair, name, kind in ((([1.0], [1.0]), "found", "list"), ((TWO, 2.0), "expected", "float"))),
    (lambda: ulps_apart(TWO, ONES[:1]), ValueError, "takes two arrays of one of the formats and of one shape"),
    (lambda: ulps_apart(TWO, TWO * np.float32("nan")), ValueError, "found a NaN, which lies nowhere among the numbers"),
    (lambda: SingleDevice(zs.optim.Adam, TWO, 2), ValueError, "found <class .*Adam'>; write zs.optim.Adam"),
    (lambda: SingleDevice("adam", TWO, 2), ValueError, "found 'adam'; write zs.optim.Adam"),
    (lambda: SingleDevice(SGD, TWO, 2, mean="rank"), ValueError, "mean='rank' must be 'ring', or a function of the "),
    (lambda: SingleDevice(SGD, TWO, 2, (0, 1, 2), sum), ValueError, "mean= adds in an order of its own; leave one of"),
    (lambda: SingleDevice(lambda w, g, step: None, TWO, 1).step([TWO]), ValueError,
     r"the reference returned NoneType of shape \(\), and the weights have \(2,\); return the new weights"),
    (lambda: zs.optim.Stepper(zs.optim.Adam, TWO), ValueError, "found <class .*; write zs.optim.Adam"),
    (lambda: zs.optim.Stepper(SGD, np.ones(2)), ValueError, "weights of float32 in place, found float64; pass np.asc"),
    (lambda: zs.optim.Stepper(SGD, [1.0]), ValueError, "in place, found list; pass np.ascontiguousarray"),
    (lambda: zs.optim.Stepper(zs.optim.KFAC(), np.ones((2, 2), np.float32)), ValueError, "train it by an Engine"),
    (lambda: zs.optim.Stepper(SGD, TWO).step(np.ones(3)), ValueError, r"shape \(2,\), and found \(3,\); it has an "),
    *((lambda wrong=wrong: SingleDevice(SGD, np.zeros(2), 3).step(wrong), ValueError, rf"one gradient from each of 3 "
       rf"ranks, of shape \(2,\) and one dtype, found {len(wrong)}") for wrong in (
           [ONES] * 2, [np.ones(3, np.float32)] * 3, [ONES, ONES, np.ones(2)])),
    (lambda: SingleDevice(SGD, np.zeros(2), 0), ValueError, "at least one rank, found ranks=0")])
def test_a_difference_of_one_bit_is_named_and_what_does_not_fit_is_refused(call, error, text):
    assert_refused(call, text, error)


# -- check_gradients ---------------------------------------------------------------------------------------------------

X, TARGET = np.random.default_rng(0).standard_normal((2, 4, 3))
WIDE = np.ones((4, 5))
NANO = GPT("gpt-nano")
TOKENS, CLASSES = np.random.default_rng(0).integers(0, NANO.config.vocabulary, (2, 2, NANO.config.context))
WHOLE = {"mlp": (MLP([3, 5, 3], activation="gelu"), X, TARGET), "gpt": (NANO, TOKENS, CLASSES)}


class Changed(LinearUnit):
    """A linear unit in which ``before`` changes what forward is handed, and ``after`` what backward returns."""

    def forward(self, ctx, w, x):
        self.before(w, x)
        return super().forward(ctx, w, x)

    def backward(self, ctx, w, saved, dy):
        return self.after(*super().backward(ctx, w, saved, dy))


def changed(after=lambda dx, found: (dx, found), before=lambda w, x: None):
    unit = Changed("one", 3, 5)
    object.__setattr__(unit, "before", before)
    object.__setattr__(unit, "after", after)
    return unit


class SavesItsWeight(LinearUnit):
    def forward(self, ctx, w, x):
        return super().forward(ctx, w, x)[0], (x, w["one.weight"].T)

    def backward(self, ctx, w, saved, dy):
        return dy @ saved[1], super().backward(ctx, w, (saved[0], None), dy)[1]


def test_a_target_in_float64_is_rounded_by_the_audit_as_by_an_engine():
    check_memory(MLP([3, 3]), X, TARGET)


def test_a_factor_that_is_0_has_a_bound_of_what_it_multiplies():
    unit = autodiff.AutodiffUnit("u", {"gain": (3,), "scale": ()}, lambda w, x: x * w["gain"] + x * w["scale"])
    worst = check_gradients(unit, X, elements=None)
    assert worst.bound > 1e-14
    assert abs(worst.expected) > 0.1


@pytest.mark.parametrize("case", WHOLE.values(), ids=list(WHOLE))
def test_gradients_that_are_right_are_far_within_their_bound(case):
    worst = check_gradients(*case, elements=1)
    assert worst.name in case[0].shapes
    assert worst.error * worst.bound == pytest.approx(abs(worst.found - worst.expected))  # a quotient, rounded
    assert worst.error < 0.1


@given(st.sampled_from(["one.weight", "one.bias", "the input"]), st.data(), st.floats(-5, -1), st.booleans())
def test_one_wrong_element_of_any_gradient_is_found_and_named_with_both_values(name, data, exponent, absolute):
    """A thousandth of a percent is enough: a wrong formula is never so near."""
    place = data.draw(st.integers(0, {"one.weight": 14, "one.bias": 4, "the input": 11}[name]))
    seen = []

    def spoil(dx, gradients):
        row = (dx if name == "the input" else gradients[name]).reshape(-1)
        row[place] += 10 ** exponent * (1 if absolute else row[place])
        seen.append(row[place])
        return dx, gradients

    with pytest.raises(AssertionError) as caught:
        check_gradients(changed(spoil), X, elements=None)
    shape = {"one.weight": (3, 5), "one.bias": (5,), "the input": X.shape}[name]
    index = ", ".join(map(str, np.unravel_index(place, shape)))
    assert f"unit 'one': the gradient of {name}[{index}] is {seen[0]:.12g} where central differences give " in str(
        caught.value)
    assert re.search(r"a bound of \d\.\de-\d\d; 1 of the \d+ elements that were tried are wrong$", str(caught.value))


@pytest.mark.parametrize(("name", "operand"), [
    (name, operand) for name, rule in autodiff.ELEMENTWISE.items()
    for operand, derivative in enumerate(rule.derivatives) if derivative])
def test_a_spoiled_derivative_of_any_operation_is_found(name, operand, monkeypatch):
    rule = autodiff.ELEMENTWISE[name]

    def wrong(*arrays):
        rule.derivatives[operand].formula(*arrays)
        arrays[-1][...] *= 1.00001

    derivatives = list(rule.derivatives)
    derivatives[operand] = autodiff.Derivative(wrong, rule.derivatives[operand].needs)
    constant = 3.0 if name == "power" else None
    unit = autodiff.AutodiffUnit("one", {"a": (3,), "b": (3,)}, lambda w, x: autodiff._elementwise(
        name, *[(w["a"] * x).exp(), constant or (w["b"] + x).exp()][:len(derivatives)]))
    weights = {"one.a": X[0], "one.b": X[1]}
    check_gradients(unit, X, weights=weights, elements=2)
    monkeypatch.setattr(autodiff, "ELEMENTWISE", autodiff.ELEMENTWISE | {
        name: autodiff.ElementwiseRule(rule.forward, tuple(derivatives))})
    with pytest.raises(AssertionError, match="central differences give"):
        check_gradients(unit, X, weights=weights, elements=2)


def test_at_a_kink_within_a_step_a_smaller_step_is_taken(monkeypatch):
    unit, weights, x = LinearUnit("one", 1, 1, "relu", bias=False), {"one.weight": np.ones((1, 1))}, np.array([[3e-5]])
    check_gradients(unit, x, weights=weights)
    monkeypatch.setattr(testing, "STEPS", testing.STEPS[:1])
    with pytest.raises(AssertionError, match=r"the gradient of the input\[0, 0\]"):
        check_gradients(unit, x, weights=weights)


REFUSED = [
    (lambda: check_gradients(SavesItsWeight("one", 3, 5, bias=False), X),
     "the gradient of the input[0, 0] is nan where ...; 12 of the 12 elements that were tried are wrong; a gradient "
     "that is not written is NaN, and so are weights between forward and backward", AssertionError),
    (lambda: check_gradients(changed(before=lambda w, x: w["one.weight"].fill(2)), X),
     "forward of 'one' writes to its weight one.weight", AssertionError),
    (lambda: check_gradients(changed(before=lambda w, x: x.fill(2)), X), "forward of 'one' writes to its input",
     AssertionError),
    (lambda: check_gradients(changed(lambda dx, found: (dx, {})), X),
     "one for each parameter, ... missing or unknown: one.bias, one.weight$", AssertionError),
    (lambda: check_gradients(changed(lambda dx, found: (dx, found | {"one.bias": found["one.bias"][:2]})), X),
     "the gradient of one.bias has the shape (2,), and one.bias (5,)", AssertionError),
    (lambda: check_gradients(changed(lambda dx, found: (dx, found | {"one.bias": None})), X),
     "the gradient of one.bias[0] is 0 where central", AssertionError),
    (lambda: check_gradients(Model([LinearUnit("a", 3, 3), changed(lambda _, found: (None, found))]), X, WIDE),
     "'a' needs the gradient of its output", AssertionError),
    (lambda: check_gradients(MLP([3, 3]), X), "takes x and a target for a model, ...; found no target", ValueError),
    (lambda: check_gradients(LinearUnit("a", 3, 3), X, X), "x alone for a unit; found a target", ValueError),
    (lambda: check_gradients(CrossEntropy(), X), "takes a Model or a Unit, found CrossEntropy", ValueError),
    (lambda: check_memory(CrossEntropy(), X), "check_memory takes a Model or a Unit, found CrossEntropy", ValueError),
    (lambda: check_memory(MLP([3, 3]), X.tolist()), "check_memory needs x as a NumPy array, got list; w", ValueError),
    (lambda: check_memory(MLP([3, 3]), X, X.tolist()), "check_memory needs target as a NumPy array, got l", ValueError),
    (lambda: check_gradients(MLP([3, 3]), X, X.tolist()), "check_gradients needs target as a NumPy arra", ValueError),
    (lambda: check_gradients(LinearUnit("a", 3, 3), X * np.nan), "was given inf or NaN in x, where", ValueError),
    (lambda: check_gradients(autodiff.AutodiffUnit("a", {}, lambda _, x: x + x), X[:, :0]),
     "no parameter and no input has an element", ValueError),
    (lambda: check_gradients(MLP([3, 3]), X, X, weights={}), "no weights for layer0.weight, layer0.bias", ValueError),
]


@pytest.mark.parametrize(("call", "text", "error"), REFUSED, ids=[text[:30] for _, text, _ in REFUSED])
def test_what_is_no_gradient_or_cannot_be_checked_is_said(call, text, error):
    assert_refused(call, literally(text), error)


# -- check_memory ------------------------------------------------------------------------------------------------------


class ByItself(LinearUnit):
    """A linear layer whose arrays NumPy makes: y lives on, what backward makes does not."""

    def forward(self, ctx, w, x):
        y = x @ w[f"{self.name}.weight"]
        y += w[f"{self.name}.bias"]
        return y, (x, None)

    def backward(self, ctx, w, saved, dy):
        padded = np.pad(dy, 1)  # NumPy's own lines make it, for this one
        del padded
        return super().backward(ctx, w, saved, dy)


class InItsMemory(LinearUnit):
    """The same numbers, in arrays that the context makes."""

    def forward(self, ctx, w, x):
        y = ctx.empty((len(x), self.outputs))
        np.matmul(x, w[f"{self.name}.weight"], out=y)
        np.add(y, w[f"{self.name}.bias"], out=y)
        return y, (x, None)


def test_arrays_that_a_layer_makes_by_itself_are_noticed_to_the_byte_with_the_lines_that_made_them():
    """y (7, 5) of 140 bytes, and with it the padded dy (9, 7) of 252; in a model y is let go before that."""
    x, target, line = np.ones((7, 3), np.float32), np.ones((7, 2), np.float32), ByItself.forward.__code__.co_firstlineno
    unit = ByItself("b", 3, 5)
    model = Model([unit, LinearUnit("c", 5, 2)])
    assert_refused(lambda: check_memory(unit, x), literally(
        "peaks are too small by 392 bytes in the backward of 'b', of arrays that no memory counts: test_testing.py:"
        f"{line + 6} makes 252 of them, test_testing.py:{line + 1} makes 140 of them. Make arrays by ctx.empty(shape)"),
        AssertionError)
    for policy, nbytes in (("fp32", 252), ("fp64", 504)):
        assert_refused(lambda policy=policy: check_memory(model, x, target, policy=policy),
                       f"too small by {nbytes} bytes in the backward of 'b'", AssertionError)
    check_memory(InItsMemory("b", 3, 5), x)


@pytest.mark.parametrize("keep", ["all", "sub_block"])
def test_the_packages_own_layers_make_no_arrays_beside_the_memory_and_tracing_is_left_as_it_was(keep):
    before = sys.gettrace()
    tokens = np.random.default_rng(0).integers(0, 17, (2, 2, 8))
    check_memory(GPT("gpt-nano"), *tokens, policy="bf16", keep=keep)
    assert (sys.gettrace(), tracemalloc.is_tracing()) == (before, False)
