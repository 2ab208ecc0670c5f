"""What engines, groups, layouts and placements refuse: what was asked, what was found, what to do.

In a text, parts ... may be anything (`tests.support.literally`).
"""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.optim.papers import MATRIX, named
from tests.support import assert_refused, literally
from tests.zero.optimizers import Plain, Rateless, Shapeless, Uncut
from tests.zero.training import ADAM, ODD, SGD, alone
from tests.zero.units import OwnerUnit, TiedUnit, tied
from zerosim.models import GPT, MLP, LinearUnit, Model
from zerosim.numerics import loss_scale
from zerosim.zero import PARTIAL, REPLICATED, SHARDED, lay_out

WEIGHTS = zs.models.first_weights(ODD)
X, T = np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float32)


def title(value):
    return str(value).split(" at 0x")[0]


# -- an engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "text"), [
    ({"rank": None}, "found rank=None; write Engine(rank, model, ...) in a pro"),
    ({"model": None}, "found NoneType; build one from units with Model(["),
    ({"optimizer": zs.optim.Adam}, "write zs.optim.Adam(lr="),
    ({"optimizer": Shapeless()}, "its state 'rows' for layer0.weight (3, 5) is of shape (3,), and cannot be cut"),
    ({"optimizer": Uncut()}, "Uncut does not say where its state may be cut"),
    ({"optimizer": zs.optim.KFAC(), "layout": "whole_matrices", "model": GPT("gpt-nano"), "groups": [
        zs.Group("*ln_*", "*.bias", optimizer=ADAM)]}, "KFAC needs the factors ... layer of wte does not hand over"),
    ({"stage": 4}, "stages 0, 1, 2, 3, found 4; ...pass Stage("), ({"stage": True}, "found True"),
    ({"layout": "per_units"}, "did you mean 'per_unit'"), ({"layout": ["per_unit"]}, "no layout is called"),
    ({"recompute": "every"}, "names no policy"), ({"recompute": 3}, "recompute=3 names no policy"),
    ({"clip_norm": 0.0}, "clip_norm=0.0 must be positive"), ({"policy": 16}, "found 16; write policy='bf16', or"),
    ({"schedule": "cosine"}, "schedule='cosine' must be a function"), ({"schedule": 3}, "schedule=3 must be"),
    ({"schedule": lambda step: None}, "to the factor of every lr"),
    ({"optimizer": Plain(), "schedule": lambda step: 0.5}, "Plain is no dataclass, whose hyperparameters a group or "),
    ({"optimizer": Rateless(), "schedule": lambda step: 0.5}, "schedule changes lr, and Rateless, which ... has none"),
    ({"overlap": "no"}, "overlap='no' must be True or False"), ({"gather": "no"}, "gather='no' must be True or False"),
    ({"bucket_nbytes": 0}, "bucket_nbytes=0 must be a number of bytes, 1 or more"),
    ({"bucket_nbytes": 1.5}, "bucket_nbytes=1.5 must be"), ({"prefetch": -1}, "prefetch=-1 must be a number of units"),
    ({"prefetch": 1.5}, "prefetch=1.5 must be a number of units, 0 or more"),
    ({"keep_gathered": ["layer9"]}, "keep_gathered=['layer9'] must be 'all', or names of units: layer0, layer1"),
    ({"keep_gathered": 3}, "keep_gathered=3 must be"), ({"keep_gathered": [[1]]}, "or names of units"),
    ({"reduction": "micro_batches"}, "reduction='micro_batches' is no order of additions"),
    ({"reduction": "micro_batch"}, "at the stage asked for gradients rest partial; take stage 2 or 3"),
    ({"reduction": "micro_batch", "stage": zs.Stage(REPLICATED, REPLICATED, SHARDED)}, "rest replicated; take stage 2"),
    ({"reduction": "micro_batch", "stage": 2, "mesh": "1x1"}, "on a mesh each node's are added first; leave mesh"),
    ({"reduction": "micro_batch", "stage": 2, "policy": zs.Policy(wire="fp32")}, "the policy asks for wire='fp32'"),
    ({"reduction": "micro_batch", "stage": 3, "policy": zs.Policy(average="split")}, "average='split', which are of"),
    ({"reduction": "micro_batch", "stage": 3, "optimizer": zs.optim.KFAC(), "gather": True, "groups": [
        zs.Group("*bias", optimizer=zs.optim.Adam())]}, "KFAC needs factors of layer0.weight, which are added in that"),
    ({"weights": [np.zeros(3)]}, "weights= takes weights by name, found list; write {name: array} for every name of "),
    ({"weights": {**WEIGHTS, "layer9.bias": X}}, "takes the model's 4 weights ... not of this model: layer9.b"),
    ({"weights": {"layer0.weight": X}}, "missing or not of this model: layer0.bias, layer1.bias, layer1.weight; zs."),
    ({"weights": {**WEIGHTS, "layer1.bias": X}}, "asked for layer1.bias as an array of shape (2,), and found nd"),
    ({"weights": {**WEIGHTS, "layer1.bias": np.arange(2)}}, "layer1.bias in floating point, and found int64; take np."),
    ({"weights": {**WEIGHTS, "layer1.bias": [[1], [2, 3]]}}, "layer1.bias as an array of shape (2,), and found list;"),
    *(({"weights": {**WEIGHTS, "layer1.bias": np.array([1, x])}},
       "weights= has NaN, inf or numbers beyond fp32 in 1 of 2 values of layer1.bias; look") for x in (np.nan, -1e39)),
    ({"seed": None}, "seed=None must be a whole number"),
    ({"mesh": (2, 2)}, "a mesh of 2 nodes with 2 ranks each has 4 ranks, and there are 1"),
    ({"mesh": "1x1", "stage": zs.Stage(REPLICATED, REPLICATED, SHARDED)}, "on a mesh gradients rest as addends or as "),
    ({"zeropp": "hqz", "mesh": (1, 1)}, "zeropp='hqz' names no parts of ZeRO++; write some of hpz, qwz and qgz, as "),
    ({"zeropp": 3, "mesh": (1, 1)}, "zeropp=3 names no parts"), ({"zeropp": "hpz=int8"}, "names no parts of ZeRO++"),
    ({"zeropp": "qgz=int8+qgz"}, "zeropp='qgz=int8+qgz' names qgz twice; leave one out"),
    ({"zeropp": "hpz", "stage": 3}, "saves what crosses nodes, and there is no mesh; name one, as 1x1"),
    ({"zeropp": "hpz", "mesh": (1, 1), "stage": 2}, "hpZ and qwZ are about the gathers of sharded parameters, and St"),
    ({"zeropp": "qwz", "mesh": (1, 1), "stage": 0}, "has none; take stage=3, or quantized_gradients alone"),
    ({"zeropp": "qgz", "mesh": (1, 1), "stage": 0}, "qgZ reduces gradients to shards, and Stage(REPLICATED, PARTIAL, "),
    ({"zeropp": "qgz", "mesh": (1, 1), "stage": zs.Stage(SHARDED, REPLICATED, SHARDED)}, "take stage 1, 2 or 3"),
    ({"zeropp": "qgz", "mesh": (1, 1), "stage": 3, "policy": zs.Policy("bf16", wire="fp32")}, "wire='fp32' and averag"),
    ({"zeropp": "qgz", "mesh": (1, 1), "stage": 3, "policy": zs.Policy(average="split")}, "with quantized_gradients o"),
    ({"offload": "cpu"}, "must be 'host' or 'disk'"),
    ({"offload": zs.Offload("host", delayed_update=True)}, "a delayed update needs masters beside the parameters"),
    ({"groups": zs.Group("*")}, "groups takes a list of Group, found"), ({"groups": None}, "groups takes a list"),
    ({"groups": ("*.bias",)}, "groups takes a list of Group, found '*.bias'"),
    ({"groups": [zs.Group("layer9.*", lr=0.1)]}, "Group('layer9.*', lr=0.1): no parameter matches 'layer9.*'; there"),
    ({"groups": [zs.Group("*", frozen=True)]}, "all parameters are frozen"),
    ({"optimizer": Plain(), "groups": [zs.Group("*", lr=1.0)]}, "Plain is no dataclass, whose hyperparameters"),
    ({"optimizer": ADAM, "groups": [zs.Group("*.bias", momentum=0.1)]},
     "Adam was given a group with momentum; its hyperparameters are"),
    ({"optimizer": ADAM, "groups": [zs.Group("*.bias", lr=-1.0)]}, "lr is a finite number, 0 or more"),
    ({"groups": [zs.Group("*.bias", compute="fp61")]}, "no number format is named 'fp61'"),
    ({"groups": [zs.Group("*.bias", compute="fp32")], "policy": zs.Policy("bf16", master="bf16")},
     "master='bf16' has fewer mantissa bits than compute='fp32'"),
    ({"groups": [zs.Group("*.bias", compute="fp32")], "policy": "bf16"},
     "Group('*.bias', compute='fp32'): the layer of layer0.bias reads it in the compute format, bf16; leave compute= "
     "out (the master is fp32 anyway), or name parameters that may rest in another format: this model has none"),
    ({"groups": [zs.Group("*ln_*", lr=1e-3), zs.Group("*.bias", compute="fp32")], "policy": "bf16", "optimizer": ADAM,
      "model": GPT("gpt-nano")}, "the layer of block0.attention.qkv.bias reads ... in another format: wpe, block0.ln"),
    ({"groups": [zs.Group("wte", compute="fp32", frozen=True)], "policy": "bf16", "model": GPT("gpt-nano")},
     "the layer of wte reads it")], ids=title)
def test_what_an_engine_cannot_use_is_refused_when_it_is_made(options, text):
    assert_refused(lambda: alone(lambda rank: zs.Engine(
        **{"rank": rank, "model": ODD, "optimizer": SGD, **options}) and None), literally(text))


@pytest.mark.parametrize("optimizer", [*MATRIX, zs.optim.Adafactor()], ids=named)
def test_an_optimizer_that_needs_whole_tensors_is_refused_where_the_layout_cuts_inside_them_and_only_there(optimizer):
    def make(ranks, **options):
        zs.Cluster(ranks).run(lambda rank: zs.Engine(rank, ODD, optimizer, **options) and None)

    for stage in (1, 2, 3):
        assert_refused(lambda stage=stage: make(3, stage=stage), literally(
            f"{named(optimizer)} needs all of layer0.weight (3, 5), which the layout 'per_unit' lays on several ranks; "
            "take layout='whole_matrices', or gather=True"))
        make(3, stage=stage, layout="whole_matrices")
        make(3, stage=stage, gather=True)
    make(3, stage=0)
    make(1, stage=3)


# -- its parts, and the batches that it is given ----------------------------------------------------------------------


class Forgetful:
    def backward(self, ctx, w, kept, dy):
        dx, grads = super().backward(ctx, w, kept, dy)
        return dx, {name: grads[name] for name in list(grads)[:1]}


class ForgetfulLinear(Forgetful, LinearUnit):
    """Of its bias."""


class ForgetfulTied(Forgetful, TiedUnit):
    """Of the weight that it shares."""


class Rebinding(Plain):
    """PyTorch's habit: the state is a dictionary to put arrays into."""

    def update(self, ctx, w, g, state, step):
        state["m"] = state["m"] + g
        w -= np.float32(self.lr) * state["m"]


class Adding(Plain):
    """What it keeps it has not declared."""

    def update(self, ctx, w, g, state, step):
        state["seen"] = g


def with_nan(array, dtype=np.float32):
    array = array.copy()
    array[0, 0] = np.nan
    return array.astype(dtype)


def of_other_weights(engine):
    old = engine.forward(X, T)
    engine.step([(X, T)])
    engine.backward(old)


def of_another_engine(engine):
    engine.backward(zs.Engine(engine.rank, ODD, SGD).forward(X, T))


def weights_of(unit, write=False):
    def ask(engine):
        with engine.weights(engine.model.units[0] if write else unit) as w:
            w["layer0.weight"][...] = 7

    return ask


def tokens_of_two_lengths(engine):
    tokens = np.random.default_rng(0).integers(0, 17, (2, 2, 8))
    engine.step([(tokens[0], tokens[1]), (tokens[0, :1], tokens[1, :1])])


def another_scale_midway(engine, backwards):
    engine.backward(engine.forward(X, T))
    engine.loss_scale.update(True)
    if backwards == 2:
        engine.backward(engine.forward(X, T))
    engine.reduce()


def step_in_a_block_of_weights(engine):
    with engine.weights(engine.model.units[0]):
        engine.step([(X, T)])


EIGHT = zs.Policy("fp16", loss_scale=loss_scale.Dynamic(initial=8.0))
MIDDLE = Model([LinearUnit("a", 3, 4, first=True), LinearUnit("b", 4, 2, first=True)])


@pytest.mark.parametrize(("misuse", "text", "options"), [
    (lambda engine: engine.reduce(), "without a gradient; call backward(forward", {}),
    (lambda engine: engine.update(), "without a reduced gradient; call reduce() first", {}),
    (lambda engine: (engine.backward(engine.forward(X, T)), engine.reduce(), engine.backward(engine.forward(X, T))),
     "between reduce() and update()", {}),
    (lambda engine: (engine.backward(engine.forward(X, T)), engine.step([(X, T)])),
     "step() was called after backward() by hand for 1 of this step's micro-batches; finish it by", {}),
    (lambda engine: [engine.backward(tape) for tape in [engine.forward(X, T)] * 2],
     "taken back already...make a new one by forward()", {}),
    (lambda engine: [engine.backward(engine.forward(X, T), last=last) for last in (True, False)],
     "backward(last=True) has been called in this step...call reduce() and update(), or abandon()", {}),
    (lambda engine: engine.backward(T), "backward() takes the tape that forward() returns", {}),
    (of_other_weights, "made with other weights: before an update, or by another engine", {}),
    (of_another_engine, "made with other weights: before an update, or by another engine", {}),
    (lambda engine: engine.state("layer0.wait"), "no parameter 'layer0.wait'; it has ...did you mean 'layer0.weight'?",
     {}),
    (lambda engine: engine.state("layer0.weight", only=["mster"]), "layer0.weight has no 'mster'; it has parameter, "
     "gradient, master...did you mean 'master'?", {}),
    *((weights_of(None, write=True), "read-only", {"stage": stage}) for stage in zs.STAGES),
    *((step_in_a_block_of_weights, "inside a block `with engine.weights(unit)`, ...; end the block first",
       {"stage": stage}) for stage in zs.STAGES),
    *((partial(another_scale_midway, backwards=backwards), "the loss scale went from 8 to 4 within a step",
       {"stage": stage, "policy": EIGHT}) for stage, backwards in covering(zs.STAGES, (1, 2))),
    *((weights_of(asked), "of this engine's model; pass one, not its name, of engine.model.units: layer0, layer1", {})
      for asked in ("layer0", LinearUnit("layer0", 3, 5), None)),
    (lambda engine: engine.layout, "this engine has 2 param groups, each with arrays and a layout",
     {"groups": [zs.Group("*.bias", frozen=True)]}),
    (lambda engine: engine.step(X[:, :0], T), "linear_forward asked for w of shape (0, 5), and found (3, 5)", {}),
    (lambda engine: engine.step((X, T), (X, T)), "found 1 items, 0 of them pairs", {}),
    *((lambda engine, given=given: engine.step(given), text, {}) for given, text in [
        ([], "at least one; found 0 items"), (7, "at least one; found 0 items"),
        ((X, T), "found 2 items, 0 of them pairs"), ([(X, T, T)], "found 1 items, 0 of them pairs"),
        ([(X, T), X], "found 2 items, 1 of them pairs"), ([(X[:, :2], T)], "a row for each column of x"),
        ([(X, T[:1])], "(1, 2)"), ([(X, T[:, 0])], "(2,)"), ([(X, with_nan(T))], "target has NaN in 1 of 4 values"),
        *(([(with_nan(X, dtype), T)], "x has NaN in 1 of 6 values, and with it every gradient; look at")
          for dtype in (np.float32, np.float64, ">f4", ml_dtypes.bfloat16))]),
    (lambda engine: engine.step([(X, T)]), "backward of unit 'a' returned gradients of the shapes ...return one of tha",
     {"model": Model([ForgetfulLinear("a", 3, 2)])}),
    (lambda engine: engine.step([(X, T)]), "backward of unit 'dec' returned gradients of the shapes ...return one of t",
     {"model": Model([OwnerUnit("enc", 3, 5, "relu", first=True), ForgetfulTied("dec", "enc", 5),
                      LinearUnit("out", 3, 2)])}),
    (lambda engine: engine.step([(X, T)]), "unit 'b' gave back no gradient of its input, which unit 'a' needs",
     {"model": MIDDLE}),
    (tokens_of_two_lengths, "equally many places, found 16 and 8; fill shorter ones up",
     {"model": GPT("gpt-nano", normalization="global")}),
    (lambda engine: engine.step([(X, T)]), "Rebinding.update replaced the state 'm', and what it put there would be "
     "lost; declare it in slots(), and write into it: state['m'][...] = ", {"optimizer": Rebinding()}),
    (lambda engine: engine.step([(X, T)]), "Adding.update replaced the state 'seen', and what it put there would be lo",
     {"optimizer": Adding()})])
def test_an_engine_used_wrongly_says_what_to_do(misuse, text, options):
    assert_refused(lambda: alone(lambda rank: misuse(zs.Engine(
        **{"rank": rank, "model": ODD, "optimizer": SGD, **options}))), literally(text))


# -- ranks that disagree, before their replicas drift apart -----------------------------------------------------------

EQUAL_UNITS = Model([LinearUnit("a", 3, 3), LinearUnit("b", 3, 3)])  # shapes alone do not tell which is gathered
DIFFERING = {
    "optimizer": lambda index: {"optimizer": zs.optim.SGD(lr=0.1 + index)},
    "optimizer of a plain class": lambda index: {"optimizer": Plain(lr=0.1 + index)},
    "loss_scale": lambda index: {"policy": zs.Policy(loss_scale=1.0 + index)},
    "clip_norm": lambda index: {"clip_norm": 1.0 + index}, "seed": lambda index: {"seed": index},
    "groups": lambda index: {"groups": [zs.Group("*.bias", lr=0.01 + index)]},
    "master": lambda index: {"policy": zs.Policy("bf16", master=("fp32", "bf16")[index])},
    "schedule": lambda index: {"schedule": lambda step: 1.0 + index},
    "given weights": lambda index: {"weights": WEIGHTS | {"layer0.weight": WEIGHTS["layer0.weight"] + (
        np.arange(15, dtype=np.float32) == 14 * index).reshape(3, 5)}},
    "first values": lambda index: {"model": MLP((3, 5, 2), seed=index)},
    "number of micro-batches": lambda index: {},
    "scale of the moment": lambda index: {"policy": zs.Policy("fp16", loss_scale=loss_scale.Dynamic())},
}


@pytest.mark.parametrize(("name", "stage"), covering(DIFFERING, zs.STAGES))
def test_ranks_that_differ_are_stopped_and_told_in_what(name, stage):
    def program(rank):
        engine = zs.Engine(**{"rank": rank, "model": ODD, "optimizer": ADAM, "stage": stage}
                           | DIFFERING[name](rank.index))
        if rank.index and name == "scale of the moment":
            engine.loss_scale.update(True)
        engine.step([(X, T)] * (1 + rank.index if name == "number of micro-batches" else 1))

    error, text = zs.MismatchError, r"micro-batch \d, loss scale .* settings \w{8} \(policy, groups, clip_norm, seed, "
    if name == "number of micro-batches":
        error, text = (zs.MismatchError, zs.DeadlockError), "rank"
    with pytest.raises(error, match=text):
        zs.Cluster(2).run(program)


def test_ranks_that_gather_different_units_are_told_so():
    def program(rank):
        with zs.Engine(rank, EQUAL_UNITS, SGD, stage=3).weights(EQUAL_UNITS.units[rank.index]) as w:
            return w

    with pytest.raises(zs.MismatchError, match=r"weights of a\).*weights of b\)"):
        zs.Cluster(2).run(program)


# -- groups, models, stages, layouts, placements ----------------------------------------------------------------------

HAND = zs.layout_of(MLP([3, 4, 2]), 3)
VECTOR = HAND.flattened(zs.models.first_weights(MLP([3, 4, 2])))
SMALL = lay_out("per_unit", {"a": {"a.w": (3,)}, "b": {"b.w": (2,)}}, 2)
ENC, DEC, OUT = tied().units


def moved(have, want, length, **options):
    return zs.Cluster(2).run(lambda rank: zs.redistribute(
        rank, np.zeros(length, np.float32), have, want, **{"cut": (0, 3, 6), "policy": zs.Policy()} | options))


UNFIT = [
    (lambda: zs.Group(lr=0.1), "a group needs patterns of parameter names, found ()"),
    (lambda: zs.Group("*", frozen=True, lr=0.1), "is frozen, and was given an optimizer or hyperparameters"),
    (lambda: zs.Group("*", optimizer="adam"), "was given optimizer='adam'; write zs.optim.Adam(lr="),
    (lambda: Model([DEC, ENC]), "unit 'dec' ties 'enc.weight' to the unit 'enc', which does not come bef"),
    (lambda: Model([DEC, OUT]), "unit 'dec' ties 'enc.weight' to the unit 'enc', which does not come bef"),
    (lambda: zs.Stage(PARTIAL, PARTIAL, SHARDED), "only gradients can be partial"),
    (lambda: zs.Stage("replicated", PARTIAL, SHARDED), "'replicated' is no placement; take zs.Placement"),
    (lambda: SMALL.cut(0, 6), "[0, 6) crosses regions of the per_unit layout"),
    (lambda: SMALL.flattened({"a.w": np.zeros(3), "a.v": np.zeros(2)}),
     "values of 2 parameters ... missing or not of this layout: a.v, b.w"),
    (lambda: HAND.flattened(dict.fromkeys(HAND.by_name, 1.0)),
     "layer0.weight has the shape (3, 4), found values of shape (); nothing is broadcast"),
    (lambda: HAND.flattened({key: view.reshape(-1) for key, view in HAND.views(VECTOR).items()}),
     "layer0.weight has the shape (3, 4), found values of shape (12,)"),
    *((lambda rank=rank: HAND.shard(rank, VECTOR), f"this layout has the ranks 0 to 2, found {rank}")
      for rank in (-1, 3, 1.0)),
    (lambda: HAND.shard(2, VECTOR[:-3]), "the layout's vector has 30 elements, padding included, found shape (27,)"),
    (lambda: HAND.views(np.zeros(31)), "has 30 elements, padding included, found shape (31,)"),
    (lambda: HAND.views(VECTOR[None]), "found shape (1, 30)"),
    (lambda: zs.layout_of(ODD, 2.5), "found 2 units and 2.5 ranks"),
    (lambda: zs.layout_of(ODD, True), "found 2 units and True ranks"),
    (lambda: zs.ZeroPlusPlus(hpz="yes"), "hpz='yes' must be True or False"),
    (lambda: zs.ZeroPlusPlus(quantized_weights="fp8"), "no quantized format 'fp8'"),
    (lambda: zs.Offload("gpu"), "optimizer='gpu'...device, host, disk"),
    (lambda: zs.Offload("host", directory="x"), "nothing rests on disk"),
    (lambda: zs.Offload("disk", directory=3), "directory=3) must be a folder's path"),
    (lambda: zs.Offload(delayed_update=True), "leave delayed_update out"),
    (lambda: zs.Offload("disk", delayed_update=1), "must be True or False"),
    (lambda: zs.Offload(parameters="disk"), "place the optimizer on disk too"),
    (lambda: zs.Offload("host", "disk"), "gradients on disk, and the optimizer's state on the host"),
    # Also where nothing is sent.
    (lambda: moved(REPLICATED, PARTIAL, 6), "a sum cannot be unsummed"),
    (lambda: moved(SHARDED, PARTIAL, 3), "a sum cannot be unsummed"),
    (lambda: moved(REPLICATED, SHARDED, 4), "replicated vector of 4 elements does not fit the cut"),
    (lambda: moved(REPLICATED, SHARDED, 6, cut=(0, 9, 6)), "does not cut"),
    (lambda: moved(SHARDED, REPLICATED, 2), "brings 2 elements to all_gather, but its chunk of the cut"),
    (lambda: moved(REPLICATED, SHARDED, 6, cut=(0, 6)), "pass 3 rising boundaries"),
    (lambda: moved("partial", SHARDED, 6), "is no placement"),
    (lambda: moved(PARTIAL, "sharded", 6), "is no placement"),
    (lambda: moved(REPLICATED, SHARDED, 6, async_op=True), "sends nothing and is done at once; leave async_op out"),
    *((lambda out=out: moved(REPLICATED, SHARDED, 6, out=out), "out= has shape")
      for out in (np.zeros(3, np.int8), np.zeros((2, 3), np.float32))),
]


def test_what_does_not_fit_is_refused_and_nothing_is_cut_short_or_broadcast():
    for call, text in UNFIT:
        assert_refused(call, literally(text))
