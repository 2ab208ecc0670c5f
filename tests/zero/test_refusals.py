"""What the engine, its layouts and placements refuse: what was asked, what was found, what to do."""

import re

import numpy as np
import pytest

import zerosim as zs
from tests.zero.optimizers import Factored, Normed, Plain, Shapeless, Uncut
from tests.zero.training import MODELS, alone
from tests.zero.units import tied
from zerosim.models.units import LinearUnit, Model
from zerosim.zero import PARTIAL, REPLICATED, SHARDED, lay_out

MODEL, SGD, ADAM = MODELS["odd"](), zs.optim.SGD(lr=0.1), zs.optim.Adam(lr=0.01)
X, T = np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float32)


def refused(call, text):
    """Asserts that the call raises ValueError with this text, whose parts ... may be anything."""
    with pytest.raises(ValueError, match=".*".join(map(re.escape, text.split("...")))):
        call()


def named(value):
    return str(value).split(" at 0x")[0]


# -- an engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "text"), [
    ({"rank": None}, "found rank=None; write Engine(rank, model, ...) in a pro"),
    ({"model": None}, "found NoneType; build one from units with Model(["),
    ({"optimizer": zs.optim.Adam}, "write zs.optim.Adam(lr="),
    ({"optimizer": Normed(lr=0.1)}, "Normed needs norms of whole tensors, and has no direction()"),
    ({"optimizer": Shapeless()}, "its state 'rows' for layer0.weight (3, 5) is of shape (3,), and cannot be cut"),
    ({"optimizer": Uncut()}, "Uncut does not say where its state may be cut"),
    ({"optimizer": Factored(), "layout": "whole_matrices"},
     "Factored needs the factors ... the layer of layer0.bias does not hand over"),
    ({"stage": 4}, "stages 0, 1, 2, 3, found 4; ...pass Stage("), ({"stage": True}, "found True"),
    ({"layout": "per_units"}, "did you mean 'per_unit'"), ({"layout": ["per_unit"]}, "no layout is called"),
    ({"recompute": "every"}, "names no policy"), ({"recompute": 3}, "recompute=3 names no policy"),
    ({"recompute": None}, "recompute=None names no policy"),
    ({"clip_norm": 0.0}, "clip_norm=0.0 must be positive"), ({"policy": "bf16"}, "write zs.Policy('bf16')"),
    ({"schedule": "cosine"}, "schedule='cosine' must be a function"), ({"schedule": 3}, "schedule=3 must be"),
    ({"schedule": lambda step: None}, "to the factor of every lr"),
    ({"optimizer": Plain(), "schedule": lambda step: 0.5}, "Plain is no dataclass, whose hyperparameters a group or "),
    ({"overlap": "no"}, "overlap='no' must be True or False"), ({"gather": "no"}, "gather='no' must be True or False"),
    ({"bucket_nbytes": 0}, "bucket_nbytes=0 must be a number of bytes, 1 or more"),
    ({"bucket_nbytes": 1.5}, "bucket_nbytes=1.5 must be"), ({"prefetch": -1}, "prefetch=-1 must be a number of units"),
    ({"keep_gathered": ["layer9"]}, "keep_gathered=['layer9'] must be 'all', or names of units: layer0, layer1"),
    ({"keep_gathered": 3}, "keep_gathered=3 must be"), ({"keep_gathered": [[1]]}, "or names of units"),
    ({"seed": None}, "seed=None must be a whole number"),
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
], ids=named)
def test_what_an_engine_cannot_use_is_refused_when_it_is_made(options, text):
    refused(lambda: alone(lambda rank: zs.Engine(
        **{"rank": rank, "model": MODEL, "optimizer": SGD, **options}) and None), text)


@pytest.mark.parametrize(("misuse", "text"), [
    (lambda engine: engine.reduce(), "without a gradient; call backward(forward"),
    (lambda engine: engine.update(), "without a reduced gradient; call reduce() first"),
    (lambda engine: (engine.backward(engine.forward(X, T)), engine.reduce(), engine.backward(engine.forward(X, T))),
     "between reduce() and update()"),
    (lambda engine: [engine.backward(tape) for tape in [engine.forward(X, T)] * 2],
     "taken back already...make a new one by forward()"),
    (lambda engine: engine.backward(T), "backward() takes the tape that forward() returns"),
    (lambda engine: engine.state("layer0.wait"),
     "no parameter 'layer0.wait'; it has ...did you mean 'layer0.weight'?")])
def test_parts_called_in_the_wrong_order_or_with_wrong_things_say_what_to_call(misuse, text):
    refused(lambda: alone(lambda rank: misuse(zs.Engine(rank, MODEL, SGD))), text)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_weights_are_read_only(stage):
    def program(rank):
        engine = zs.Engine(rank, MODEL, SGD, stage=stage)
        with engine.weights(engine.model.units[0]) as w:
            w["layer0.weight"][...] = 7

    refused(lambda: alone(program), "read-only")


@pytest.mark.parametrize("asked", ["layer0", LinearUnit("layer0", 3, 5), None], ids=named)
def test_weights_of_what_is_no_unit_of_the_model_are_refused(asked):
    def program(rank):
        with zs.Engine(rank, MODEL, SGD).weights(asked):
            pass

    refused(lambda: alone(program), "no unit of this engine's model; take one of engine.model.units: layer0, layer1")


def test_old_names_of_the_engine_work_and_warn():
    def program(rank):
        engine, found = zs.Engine(rank, MODEL, SGD, stage=1), []
        for old, new in (("states", "param_group"), ("families", "param_groups"), ("refresh", "all_gather_parameters")):
            with pytest.warns(DeprecationWarning, match=f"engine.{old} is now engine.{new}"):
                found.append(getattr(engine, old) == getattr(engine, new))
        with pytest.raises(AttributeError, match="'Engine' object has no attribute 'state_dict'"):
            _ = engine.state_dict
        return found

    assert alone(program) == [True, True, True]


# -- groups, models, stages, layouts, placements ----------------------------------------------------------------------

HAND = zs.layout_of(zs.models.MLP([3, 4, 2]), 3)
VECTOR = HAND.flattened(zs.models.first_weights(zs.models.MLP([3, 4, 2])))
SMALL = lay_out("per_unit", {"a": {"a.w": (3,)}, "b": {"b.w": (2,)}}, 2)
ENC, DEC, OUT = tied().units


@pytest.mark.parametrize(("call", "text"), [
    (lambda: zs.Group(lr=0.1), "a group needs patterns of parameter names, found ()"),
    (lambda: zs.Group("*", frozen=True, lr=0.1), "is frozen, and was given an optimizer or hyperparameters"),
    (lambda: zs.Group("*", optimizer="adam"), "was given optimizer='adam'; write zs.optim.Adam(lr="),
    (lambda: Model([ENC, ENC]), "more than one unit named 'enc'"),
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
    (lambda: HAND.shard(-1, VECTOR), "this layout has the ranks 0 to 2, found -1"),
    (lambda: HAND.shard(3, VECTOR), "this layout has the ranks 0 to 2, found 3"),
    (lambda: HAND.shard(1.0, VECTOR), "this layout has the ranks 0 to 2, found 1.0"),
    (lambda: HAND.shard(2, VECTOR[:-3]), "the layout's vector has 30 elements, padding included, found shape (27,)"),
    (lambda: HAND.views(np.zeros(31)), "has 30 elements, padding included, found shape (31,)"),
    (lambda: HAND.views(VECTOR[None]), "found shape (1, 30)"),
    (lambda: zs.layout_of(MODEL, 2.5), "found 2 units and 2.5 ranks"),
    (lambda: zs.layout_of(MODEL, True), "found 2 units and True ranks")])
def test_what_does_not_fit_is_refused_and_nothing_is_cut_short_or_broadcast(call, text):
    refused(call, text)


@pytest.mark.parametrize(("have", "want", "length", "cut", "text"), [
    (REPLICATED, PARTIAL, 6, (0, 3, 6), "a sum cannot be unsummed"),
    (SHARDED, PARTIAL, 3, (0, 3, 6), "a sum cannot be unsummed"),
    (REPLICATED, SHARDED, 4, (0, 3, 6), "replicated vector of 4 elements does not fit the cut"),
    (REPLICATED, SHARDED, 6, (0, 9, 6), "does not cut"), (SHARDED, REPLICATED, 2, (0, 3, 6), "has 3 on rank"),
    (REPLICATED, SHARDED, 6, (0, 6), "pass 3 rising boundaries"), ("partial", SHARDED, 6, (0, 3, 6), "is no placement"),
    (PARTIAL, "sharded", 6, (0, 3, 6), "is no placement")], ids=named)
def test_redistribute_refuses_what_does_not_fit_even_where_nothing_is_sent(have, want, length, cut, text):
    refused(lambda: zs.Cluster(2).run(lambda rank: zs.redistribute(
        rank, np.zeros(length, np.float32), have, want, cut, policy=zs.Policy())), text)


@pytest.mark.parametrize("out", [np.zeros(3, np.int8), np.zeros((2, 3), np.float32)], ids=str)
def test_redistribute_writes_no_other_format_or_shape_than_it_has(out):
    refused(lambda: zs.Cluster(2).run(lambda rank: zs.redistribute(
        rank, np.zeros(6, np.float32), REPLICATED, SHARDED, (0, 3, 6), policy=zs.Policy(), out=out)), "out= has shape")
