"""The engine used rightly and wrongly: its pieces, its errors, what debug mode shows, and how it goes on."""

import cProfile
import pstats
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import zerosim as zs
from tests.zero.training import MODELS, alone, batches, bits, flat_state, run, train
from zerosim.models.units import LinearUnit, Model
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.trace import Compute

SGD = zs.optim.SGD(lr=0.1)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_the_pieces_written_out_are_the_step(stage):
    model, data = MODELS["odd"](), batches(MODELS["odd"](), 3, 2, 2)

    def by_hand(rank):
        engine = zs.Engine(rank, model, zs.optim.Adam(lr=0.01), stage=stage)
        for step in data:
            for x, target in step[rank.index]:
                engine.backward(engine.forward(x, target))
            engine.reduce()
            engine.update()
            engine.all_gather_parameters()
        return flat_state(engine)

    hand, whole = zs.Cluster(3).run(by_hand), run(model, data, stage=stage)
    assert all(bits(a[key]) == bits(b[key]) for a, b in zip(hand, whole, strict=True) for key in a)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_state_shows_the_mean_gradient_between_reduce_and_update_only(stage):
    model, data = MODELS["odd"](), batches(MODELS["odd"](), 3, 1, 1)
    name = next(iter(model.shapes))

    def program(rank):
        engine = zs.Engine(rank, model, SGD, stage=stage)
        seen = [engine.state(name)["gradient"]]
        engine.backward(engine.forward(*data[0][rank.index][0]))
        engine.reduce()
        before = engine.state(name)
        engine.update()
        engine.all_gather_parameters()
        after = engine.state(name)
        return [*seen, after["gradient"]], before, after

    for absent, before, after in zs.Cluster(3).run(program):
        assert absent == [None, None]
        moved = before["master"] - np.float32(0.1) * before["gradient"]
        assert bits(after["master"]) == bits(moved)
        assert before["gradient"].shape == model.shapes[name]


def test_an_optimizer_that_needs_whole_tensors_is_refused_where_the_layout_cuts_inside_them():
    class Tensorwise(zs.optim.SGD):
        cut = "tensor"

    def made(rank, **options):
        return zs.Engine(rank, MODELS["odd"](), Tensorwise(lr=0.1), **options) and None

    text = (r"Tensorwise needs all of layer0.weight \(3, 5\), which the layout 'per_unit' lays on several ranks; take "
            "layout='whole_matrices', or gather=True")
    for stage in (1, 2, 3):
        with pytest.raises(ValueError, match=text):
            zs.Cluster(3).run(lambda rank, stage=stage: made(rank, stage=stage))
        zs.Cluster(3).run(lambda rank, stage=stage: made(rank, stage=stage, layout="whole_matrices"))
        zs.Cluster(3).run(lambda rank, stage=stage: made(rank, stage=stage, gather=True))
    zs.Cluster(3).run(lambda rank: made(rank, stage=0))
    zs.Cluster(1).run(lambda rank: made(rank, stage=3))


X, T = np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "at least one; found 0 items"),
        ((X, T), "found 2 items, 0 of them pairs"),
        ([(X, T, T)], "found 2 items, 1 of them pairs"),
        ([(X[:, :2], T)], "a row for each column of x"),
        ([(X, T[:1])], r"\(1, 2\)"),
        ([(X, T[:, 0])], r"\(2,\)"),
    ],
    ids=str,
)
def test_wrong_batches_are_refused_and_the_engine_goes_on_as_if_nothing_had_happened(given, text):
    model, data = MODELS["odd"](), batches(MODELS["odd"](), 3, 1, 2)

    def program(rank):
        engine = zs.Engine(rank, model, zs.optim.Adam(lr=0.01), stage=2)
        engine.step(data[0][rank.index])
        with pytest.raises(ValueError, match=text):
            engine.step([data[1][rank.index][0], *given] if len(given) == 1 else given)
        engine.step(data[1][rank.index])
        return flat_state(engine)

    undisturbed = run(model, data, stage=2)
    for found, expected in zip(zs.Cluster(3).run(program), undisturbed, strict=True):
        assert bits(found["master"]) == bits(expected["master"])


def test_an_engine_lives_on_in_the_next_run_of_its_cluster():
    model, data = MODELS["odd"](), batches(MODELS["odd"](), 3, 1, 2)
    cluster = zs.Cluster(3)
    engines = cluster.run(lambda rank: zs.Engine(rank, model, zs.optim.Adam(lr=0.01), stage=3))
    for step in data:
        cluster.run(lambda rank, step=step: engines[rank.index].step(step[rank.index]))
    found = cluster.run(lambda rank: flat_state(engines[rank.index]))
    expected = run(model, data, stage=3)
    assert bits(found[0]["master"]) == bits(expected[0]["master"])


@pytest.mark.parametrize("stage", zs.STAGES)
def test_ranks_that_take_different_numbers_of_micro_batches_are_told_who_is_where(stage):
    model = MODELS["odd"]()

    def program(rank):
        mine = batches(model, 2, 1 + rank.index, 1)[0][rank.index]
        zs.Engine(rank, model, SGD, stage=stage).step(mine)

    with pytest.raises((zs.MismatchError, zs.DeadlockError), match="rank"):
        zs.Cluster(2).run(program)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_unit_may_return_gradients_of_its_own_making(stage):
    class Proud(LinearUnit):
        def backward(self, ctx, w, kept, dy):
            dx, grads = super().backward(ctx, w, kept, dy)
            own = {name: gradient.astype(np.float32).copy() for name, gradient in grads.items()}
            for gradient in grads.values():
                gradient[...] = np.nan
            return dx, own

    plain, proud = (Model([unit("a", 3, 5, "relu", first=True), unit("b", 5, 2)]) for unit in (LinearUnit, Proud))
    data = batches(plain, 3, 2, 2)
    found, expected = (run(m, data, stage=stage, policy=zs.Policy("bf16")) for m in (proud, plain))
    assert bits(found[0]["master"]) == bits(expected[0]["master"])


def test_a_backward_that_returns_too_few_gradients_is_refused():
    class Forgetful(LinearUnit):
        def backward(self, ctx, w, kept, dy):
            dx, grads = super().backward(ctx, w, kept, dy)
            return dx, {name: grads[name] for name in list(grads)[:1]}

    with pytest.raises(
        ValueError, match=r"backward of unit 'a' returned gradients of the shapes .*return one of that shape"
    ):
        alone(lambda rank: train(rank, Model([Forgetful("a", 3, 2)]), batches(Model([Forgetful("a", 3, 2)]), 1, 1, 1)))


@pytest.mark.parametrize(("stage", "must"), [(0, False), (1, True), (2, True), (3, False)])
def test_forward_after_an_update_without_all_gather_is_refused_where_replicas_disagree(stage, must):
    def program(rank):
        engine = zs.Engine(rank, MODELS["odd"](), SGD, stage=stage)
        engine.backward(engine.forward(X, T))
        engine.reduce()
        engine.update()
        if must:
            with pytest.raises(ValueError, match=r"the other ranks have not yet; call all_gather_parameters\(\) first"):
                engine.forward(X, T)
        engine.all_gather_parameters()
        return engine.forward(X, T).loss

    assert zs.Cluster(2).run(program)


def test_a_skipped_step_sends_no_parameters():
    data = batches(MODELS["odd"](), 2, 1, 1)
    data[0][1][0] = (X, np.full((2, 2), np.inf, np.float32))
    for stage in (1, 2):
        cluster = zs.Cluster(2)
        assert cluster.run(lambda rank, s=stage: train(rank, MODELS["odd"](), data, stage=s))[0]["skipped"] == [True]
        assert cluster.trace.sent_nbytes("parameters") == [0, 0]


def test_an_abandoned_step_leaves_nothing_in_the_ledger():
    def program(rank):
        engine = zs.Engine(rank, MODELS["odd"](), SGD, stage=2)
        before = rank.memory.now_nbytes
        engine.gradients.grad_buffers(engine.model.units[0])
        engine.abandon()
        return rank.memory.now_nbytes - before

    assert alone(program) == 0


@pytest.mark.parametrize(("indices", "seen"), [(True, r"int64 \[\[50257\]\]"), (False, r"bfloat16 \[\[50176.0\]\]")])
def test_indices_reach_the_first_unit_as_they_are_and_values_are_rounded(indices, seen):
    class Seen(LinearUnit):
        integer_inputs = indices

        def forward(self, ctx, w, x):
            raise ValueError(f"{x.dtype} {x.astype(object).tolist()}")

    with pytest.raises(ValueError, match=seen):
        alone(
            lambda rank: zs.Engine(rank, Model([Seen("a", 1, 1)]), SGD, policy=zs.Policy("bf16")).forward(
                np.array([[50257]]), T))


def test_weights_read_after_their_block_are_nan_in_debug_mode_at_stage_3():
    model = MODELS["odd"]()

    def program(rank):
        engine = zs.Engine(rank, model, SGD, stage=3)
        with engine.weights(model.units[0]) as w:
            inside = w["layer0.weight"].copy()
        return inside, w["layer0.weight"]

    for inside, late in zs.Cluster(3, debug=True).run(program):
        assert np.isfinite(inside).all()
        assert np.isnan(late).all()


def test_padding_is_nan_in_debug_mode_and_zero_otherwise():
    model = MODELS["fewer_than_ranks"]()  # 2 parameters on 5 ranks: three ranks own padding alone

    def padding(rank):
        engine = zs.Engine(rank, model, SGD, stage=0)
        return engine.param_group.parameter[engine.layout.padding(0, 5)].copy()

    assert all(np.isnan(found).all() and found.size == 3 for found in zs.Cluster(5, debug=True).run(padding))
    assert all((found == 0).all() for found in zs.Cluster(5).run(padding))


def test_micro_batches_of_unequal_lengths_share_no_random_word_and_depend_on_no_length():
    class Drawing(LinearUnit):
        def forward(self, ctx, w, x):
            drawn.append(ctx.draw("mask", x.size, slice(0, x.size)))
            return super().forward(ctx, w, x)

    model, found = Model((Drawing("only", 2, 3),)), {}

    def program(rank, rows):
        engine = zs.Engine(rank, model, SGD, seed=5)
        engine.step([(np.ones((count, 2)), np.ones((count, 3))) for count in rows[rank.index]])

    for rows in ([[4, 8], [8, 4]], [[16, 16], [16, 16]]):
        drawn = []
        zs.Cluster(2).run(program, rows)
        found[rows[0][0]] = drawn
    words = np.concatenate(found[4])
    assert len(set(words.tolist())) == words.size == 2 * (4 + 8 + 8 + 4)
    longer = {words[0]: words for words in found[16]}
    for words in found[4]:
        np.testing.assert_array_equal(words, longer[words[0]][:words.size])


@pytest.mark.parametrize("stage", zs.STAGES)
def test_an_engine_that_is_kept_writes_its_arithmetic_into_the_trace_of_the_run_under_way(stage):
    model, data, cluster, kept = MODELS["odd"](), batches(MODELS["odd"](), 2, 1, 1), zs.Cluster(2), {}

    def computed(trace):
        return [[row for row in of_rank.rows if isinstance(row, Compute)] for of_rank in trace]

    def program(rank):
        engine = kept.setdefault(rank.index, None) or zs.Engine(rank, model, SGD, stage=stage)
        kept[rank.index] = engine
        engine.step(data[0][rank.index])

    cluster.run(program)
    first = computed(cluster.trace)
    cluster.run(program)
    assert computed(cluster.runs[0].trace) == first
    assert computed(cluster.trace) == first, "the same step again"
    assert sum(row.flops for row in first[0]) > 0


@pytest.mark.parametrize("policy", [zs.Policy("fp32"), zs.Policy("bf16", accumulate="fp32")], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", zs.STAGES)
def test_zeros_travel_as_padding_of_gradients_whatever_the_memory_held_before(stage, policy, monkeypatch):
    model, data, ranks = MODELS["odd"](), batches(MODELS["odd"](), 3, 2, 1), 3
    dirty = NumpyKernels.empty

    def of_nan(kernels, shape, dtype):
        array = dirty(kernels, shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    def program(rank):
        engine = zs.Engine(rank, model, SGD, stage=stage, policy=policy)
        for x, target in data[0][rank.index]:
            engine.backward(engine.forward(x, target))
        engine.reduce()
        resting = [engine.param_group.gradient, engine.param_group.reduced.gradient]
        return [np.isnan(array.astype(np.float32)).sum() for array in resting if array is not None]

    monkeypatch.setattr(NumpyKernels, "empty", of_nan)
    cluster = zs.Cluster(ranks)
    assert all(not any(found) and found for found in cluster.run(program))


def test_a_norm_below_the_limit_is_not_clipped():
    model, data = MODELS["odd"](), batches(MODELS["odd"](), 3, 1, 2)
    free, roomy = (run(model, data, stage=1, clip_norm=limit) for limit in (None, 1e6))
    assert bits(free[0]["master"]) == bits(roomy[0]["master"])


@pytest.mark.parametrize(("recompute", "kept_inputs"), [("none", []), ("block", [1, 2]), ("segment(2)", [2])])
def test_between_the_passes_a_segment_holds_its_input_alone(recompute, kept_inputs):
    """widths 2-3-3-1, 2 rows, fp16: unit i's input has 2 * width[i] * 2 bytes; the first one's is the batch itself."""
    model = MODELS["deep"]()

    def program(rank):
        engine = zs.Engine(rank, model, SGD, policy=zs.Policy("fp16"), recompute=recompute)
        tape = engine.forward(*batches(model, 1, 1, 1)[0][0][0])
        held = rank.memory.now_nbytes_by_kind
        engine.backward(tape)
        return held

    held = alone(program)
    expected = sum(2 * model.units[i].inputs * 2 for i in kept_inputs)
    assert held.get("checkpointed_input", 0) == expected
    output = 2 * 1 * 2  # kept by the loss
    assert (held["activation"] > output) is (recompute == "none")


def test_ranks_that_gather_different_units_are_told_so():
    """Both units have 12 elements: shapes alone would not show it."""
    model = Model([LinearUnit("a", 3, 3), LinearUnit("b", 3, 3)])

    def program(rank):
        with zs.Engine(rank, model, SGD, stage=3).weights(model.units[rank.index]) as w:
            return w

    with pytest.raises(zs.MismatchError, match=r"weights of a\).*weights of b\)"):
        zs.Cluster(2).run(program)


def test_a_step_may_take_its_micro_batches_from_a_generator():
    def program(rank):
        return zs.Engine(rank, MODELS["odd"](), SGD).step((X, T) for _ in range(3)).losses

    assert len(alone(program)) == 3


def test_a_failed_second_micro_batch_leaves_no_first_one_behind():
    model, data = MODELS["odd"](), batches(MODELS["odd"](), 1, 2, 2)

    def program(rank):
        engine = zs.Engine(rank, model, zs.optim.Adam(lr=0.01))
        engine.step(data[0][0])
        with pytest.raises(ValueError, match="a row for each column"):
            engine.step([data[1][0][0], (X[:, :1], T)])
        engine.step(data[1][0])
        return flat_state(engine)

    expected = alone(lambda rank: train(rank, model, data))
    assert bits(alone(program)["master"]) == bits(expected["master"])


def test_a_quotient_that_overflows_skips_the_step():
    """The sum fits in fp32; divided by a loss scale of 2^-100 it does not."""
    far = [[[(np.full((2, 3), 1e3, np.float32), np.full((2, 2), 3e38, np.float32))]]]
    found = alone(lambda rank: train(rank, MODELS["odd"](), far, policy=zs.Policy(loss_scale=2.0**-100)))
    assert found["skipped"] == [True]
    assert np.isfinite(found["master"]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ">f4", ml_dtypes.bfloat16])
def test_nan_in_the_data_is_refused_and_the_engine_goes_on(dtype):
    def program(rank):
        engine = zs.Engine(rank, MODELS["odd"](), SGD)
        x, t = X.copy(), T.copy()
        x[1, 2] = np.nan
        with pytest.raises(ValueError, match=r"x has NaN in 1 of 6 values, and with it every gradient; look at"):
            engine.step([(x.astype(dtype), t)])
        t[0, 0] = np.nan
        with pytest.raises(ValueError, match=r"target has NaN in 1 of 4 values"):
            engine.step([(X, t)])
        return engine.step([(X, T)]).skipped

    assert alone(program) is False


def test_a_step_of_two_linear_layers_passes_at_most_25_files_of_the_package():
    model, profile = Model([LinearUnit("a", 3, 5, first=True), LinearUnit("b", 5, 2)]), cProfile.Profile()

    def program(rank):
        engine = zs.Engine(rank, model, zs.optim.Adam(), stage=2)
        engine.step([(X, T)])
        if rank.index == 0:
            profile.enable()
        engine.step([(X, T)])
        if rank.index == 0:
            profile.disable()

    zs.Cluster(2).run(program)
    passed = {path for path, _, _ in pstats.Stats(profile).stats if path.startswith(str(Path(zs.__file__).parent))}
    assert 15 < len(passed) <= 25, sorted(passed)
