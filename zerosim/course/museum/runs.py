"""The runs in which the exhibits are seen: a small training, observed rank by rank and step by step.

Legend: N ranks, k micro-batches; P elements of all parameters, one behind the other in the order of the model.
"""

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from zerosim.models.initializers import Filled, Initializer
from zerosim.models.one_pass import first_weights, one_pass
from zerosim.models.small import MLP
from zerosim.models.units import Model, Unit
from zerosim.numerics.policy import Policy
from zerosim.optim import SGD, Adam, Muon, WarmupCosine
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.testing import SingleDevice
from zerosim.zero.engine import Engine
from zerosim.zero.layout import layout_of
from zerosim.zero.param_group import Group
from zerosim.zero.skipped import SkippedStepWarning
from zerosim.zero.update import StepResult

OPTIMIZERS = {"sgd": SGD(0.1), "adam": Adam(0.05), "muon": Muon(0.1)}
ROWS = 3  # samples of a micro-batch
SPOILED_STEP = 1  # counted from 0


class EmptyUnit(Unit):
    """Hands on its input, and has one parameter without elements."""

    name = "nothing"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """One, of no elements."""
        return {"nothing.weight": (0,)}

    def initializer(self, name: str) -> Initializer:
        """That of no elements."""
        return Filled(0)

    def forward(self, ctx: Any, w: Any, x: np.ndarray) -> tuple[np.ndarray, None]:
        """x (B, I) -> x."""
        return x, None

    def backward(self, ctx: Any, w: Any, saved: None, dy: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
        """dy (B, I) -> dy, and a gradient of nothing."""
        return dy, {"nothing.weight": ctx.gradients(self)["nothing.weight"]}


@dataclass(frozen=True)
class Setting:
    """One training: an MLP of these widths on N ranks. ``options`` are the engine's; ``spoil`` is what one rank's
    gradient has in its first element in the second step. ``empty`` adds a parameter without elements, ``rates`` gives
    parameters a learning rate of their own by their pattern, with a schedule, ``reload_ranks`` load a checkpoint at the
    end."""

    ranks: int = 2
    stage: int = 1
    widths: Sequence[int] = (4, 3, 2)
    optimizer: str = "sgd"
    steps: int = 2
    micro_batches: int = 1
    policy: str = "fp32"
    bias: bool = True
    debug: bool = False
    spoil: float = 0.0
    empty: bool = False
    same_data: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)
    reload_ranks: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def model(self) -> Model:
        """The model."""
        mlp = MLP(list(self.widths), bias=self.bias)
        return Model([*mlp.units, EmptyUnit()], mlp.loss) if self.empty else mlp

    def rate(self, name: str) -> float:
        """The learning rate of a parameter, before the schedule."""
        usual: Any = OPTIMIZERS[self.optimizer]
        return next((lr for pattern, lr in self.rates.items() if name.startswith(pattern)), usual.lr)

    @property
    def schedule(self) -> WarmupCosine | None:
        """The schedule, where there are rates."""
        return WarmupCosine(1, 4) if self.rates else None

    def batches(self, rank: int, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The k micro-batches of a rank's step: x (B, I) and target (B, O)."""
        data = np.random.default_rng([0 if self.same_data else rank, step])
        return [(data.standard_normal((ROWS, self.widths[0]), np.float32),
                 data.standard_normal((ROWS, self.widths[-1]), np.float32)) for _ in range(self.micro_batches)]

    def engine(self, rank: Rank) -> Engine:
        """A rank's engine."""
        groups = [Group(f"{pattern}*", lr=lr) for pattern, lr in self.rates.items()]
        return Engine(rank, self.model, OPTIMIZERS[self.optimizer], stage=self.stage, policy=Policy(self.policy),
                      groups=groups, schedule=self.schedule, **self.options)


@dataclass
class Observed:
    """What is seen of one training, in rank order: the weights (P,) at first and after each step, the results of steps,
    bytes of gradients sent, collectives that sent them, and bytes at rest. Then what was warned of, the state (P, three
    times) saved and loaded by other ranks, and the error that ended it."""

    setting: Setting
    weights: list[list[np.ndarray]]
    results: list[list[StepResult]]
    gradient_nbytes: list[int] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    resting: list[int] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    saved: list[np.ndarray] = field(default_factory=list)
    loaded: list[np.ndarray] = field(default_factory=list)
    error: str = ""

    @property
    def changes(self) -> list[np.ndarray]:
        """What training has added to each element, (P,), by rank, as far as ranks began."""
        return [weights[-1].astype(np.float64) - weights[0] for weights in self.weights if weights]


def observe(setting: Setting, *, seed: int = 0, debug: bool | None = None) -> Observed:
    """Trains, and notes what is seen; an error ends the training and is noted too."""
    seen = Observed(setting, [[] for _ in range(setting.ranks)], [[] for _ in range(setting.ranks)])
    cluster = Cluster(setting.ranks, seed=seed, debug=setting.debug if debug is None else debug)
    with warnings.catch_warnings(record=True) as warned, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        try:
            seen.resting, seen.saved = map(list, zip(*cluster.run(partial(_train, seen=seen, folder=folder)),
                                                     strict=True))
            if setting.reload_ranks:
                seen.loaded = list(Cluster(setting.reload_ranks).run(partial(_load, setting=setting, folder=folder)))
        except Exception as error:
            seen.error = f"{type(error).__name__}: {error}"
    seen.gradient_nbytes = cluster.trace.sent_nbytes("gradients")
    seen.collectives = [len(trace.collectives(purpose="gradients")) for trace in cluster.trace]
    seen.warned = [str(one.message) for one in warned if issubclass(one.category, SkippedStepWarning)]
    return seen


def _train(rank: Rank, seen: Observed, folder: str) -> tuple[int, np.ndarray]:
    setting, mine = seen.setting, seen.weights[rank.index]
    engine = setting.engine(rank)
    resting = rank.memory.now_nbytes
    mine.append(_weights(engine))
    for step in range(setting.steps):
        for x, target in setting.batches(rank.index, step):
            engine.backward(engine.forward(x, target))
        if setting.spoil and step == SPOILED_STEP and rank.index == 0:
            engine.param_group.gradient[0] = setting.spoil
        engine.reduce()
        seen.results[rank.index].append(engine.update())
        engine.all_gather_parameters()
        mine.append(_weights(engine))
    if not setting.reload_ranks:
        return resting, mine[-1]
    engine.save(folder)
    return resting, _state(engine)


def _load(rank: Rank, setting: Setting, folder: str) -> np.ndarray:
    engine = setting.engine(rank)
    engine.load(folder)
    return _state(engine)


def _weights(engine: Engine) -> np.ndarray:
    """All weights as this rank computes with them."""
    found: dict[str, np.ndarray] = {}
    for unit in engine.model.units:
        with engine.weights(unit) as w:
            found |= {name: array.copy() for name, array in w.items()}
    return flat(engine.model, found)


def _state(engine: Engine) -> np.ndarray:
    """The master and the moments of all parameters, one behind the other."""
    states = {name: engine.state(name) for name in engine.model.shapes}
    return np.concatenate([flat(engine.model, {name: state[kind] for name, state in states.items()})
                           for kind in ("master", "m", "v")])


def flat(model: Model, arrays: Mapping[str, Any]) -> np.ndarray:
    """The parameters one behind the other, (P,)."""
    return np.concatenate([arrays[name].reshape(-1).astype(np.float32) for name in model.shapes])


def one_device(setting: Setting) -> list[np.ndarray]:
    """The weights (P,) at first and after each step of one device, which is fed with all ranks' gradients.

    In fp32, with each rank's micro-batches added first, and k a power of two: then equal means equal bits.
    """
    model, weights = setting.model, first_weights(setting.model)
    layout, usual = layout_of(model, setting.ranks, setting.options.get("layout", "per_unit")), OPTIMIZERS[
        setting.optimizer]
    devices = {entry.name: SingleDevice(usual, weights[entry.name], setting.ranks,
                                        tuple(layout.cut(entry.low, entry.high))) for entry in layout.entries}
    found = [flat(model, weights)]
    for step in range(setting.steps):
        gradients = [_summed(model, weights, setting.batches(rank, step)) for rank in range(setting.ranks)]
        factor = setting.schedule(step + 1) if setting.schedule else 1.0
        for name, device in devices.items():
            assert device.stepper is not None, "it was given an optimizer of zerosim's"
            device.stepper.optimizer = usual.with_lr(setting.rate(name) * factor)
            weights[name] = device.step([one[name] / np.float32(setting.micro_batches) for one in gradients])
        found.append(flat(model, weights))
    return found


def _summed(model: Model, weights: Mapping[str, np.ndarray],
            batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    """The sum of one rank's gradients over its micro-batches, in their order."""
    passes = [one_pass(model, weights, "fp32", x, target).gradients for x, target in batches]
    return {name: sum(one[name] for one in passes[1:]) + passes[0][name] if passes[1:] else passes[0][name]
            for name in model.shapes}
