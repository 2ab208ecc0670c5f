"""The runs in which the exhibits are seen: a small training in fp32, observed rank by rank and step by step.

Legend: N ranks, k micro-batches; P elements of all parameters, one behind the other in the order of the model.
"""

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from zerosim.models.autodiff import AutodiffUnit
from zerosim.models.passes import first_weights, one_pass
from zerosim.models.small import MLP
from zerosim.models.units import Model
from zerosim.optim import SGD, Adam, Muon, WarmupCosine
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.testing import SingleDevice
from zerosim.zero.engine import Engine
from zerosim.zero.layout import layout_of
from zerosim.zero.param_group import Group
from zerosim.zero.skipped import SkippedStepWarning
from zerosim.zero.update import StepResult

OPTIMIZERS: dict[str, Any] = {"sgd": SGD(0.1), "adam": Adam(0.05), "muon": Muon(0.1)}
ROWS = 3  # samples of a micro-batch
SPOILED_STEP = 1  # counted from 0


@dataclass(frozen=True)
class Setting:
    """One training: an MLP of these widths on N ranks. ``options`` are the engine's; ``spoil`` is what rank 0's
    gradient has in its first element in the second step; ``empty`` adds a parameter without elements; ``rates`` gives
    learning rates by the beginning of a parameter's name, with a schedule; ``reload_ranks`` load a checkpoint at the
    end."""

    ranks: int = 2
    stage: int = 1
    widths: Sequence[int] = (4, 3, 2)
    bias: bool = True
    empty: bool = False
    optimizer: str = "sgd"
    rates: Mapping[str, float] = field(default_factory=dict)
    steps: int = 2
    micro_batches: int = 1
    same_data: bool = False
    spoil: float = 0.0
    debug: bool = False
    reload_ranks: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def model(self) -> Model:
        """The model."""
        mlp = MLP(list(self.widths), bias=self.bias)
        nothing = AutodiffUnit("nothing", {"weight": (0,)}, lambda w, x: x + w["weight"].sum())
        return Model([*mlp.units, nothing], mlp.loss) if self.empty else mlp

    def factor(self, step: int) -> float:
        """The schedule's, of a step counted from 1."""
        return WarmupCosine(1, 4)(step) if self.rates else 1.0

    def batches(self, rank: int, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The k micro-batches of a rank's step: x (B, I) and target (B, O)."""
        data = np.random.default_rng([0 if self.same_data else rank, step])
        return [(data.standard_normal((ROWS, self.widths[0]), np.float32),
                 data.standard_normal((ROWS, self.widths[-1]), np.float32)) for _ in range(self.micro_batches)]

    def engine(self, rank: Rank) -> Engine:
        """A rank's engine."""
        return Engine(rank, self.model, OPTIMIZERS[self.optimizer], stage=self.stage,
                      groups=[Group(f"{beginning}*", lr=lr) for beginning, lr in self.rates.items()],
                      schedule=self.factor if self.rates else None, **self.options)


@dataclass
class Observed:
    """One training as seen, in rank order: the weights (P,) at first and after each step, the results of steps,
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

    def drawn(self, what: str) -> dict[str, list[float]]:
        """Numbers for a picture, by what they are: one row of all ranks, or one of each."""
        rows: list[list[Any]] = {
            "bytes at rest": [self.resting], "gradients sent (bytes)": [self.gradient_nbytes],
            "collectives of gradients": [self.collectives], "warnings": [[len(self.warned)]],
            "first weights of rank 0": [mine[0].tolist() for mine in self.weights[:1]],
            "state that rank 0 loaded": [state.tolist() for state in self.loaded[:1]],
            "steps taken": [[float(not result.skipped) for result in results] for results in self.results],
            "changes of weights": [(mine[-1].astype(np.float64) - mine[0]).tolist() for mine in self.weights if mine]
        }[what]
        of_each = what in ("steps taken", "changes of weights")
        return {f"{what}, rank {rank}" if of_each else what: row for rank, row in enumerate(rows)}


def observe(setting: Setting, *, seed: int = 0) -> Observed:
    """Trains, and notes what is seen; an error ends the training and is noted too."""
    seen = Observed(setting, [[] for _ in range(setting.ranks)], [[] for _ in range(setting.ranks)])
    cluster = Cluster(setting.ranks, seed=seed, debug=setting.debug)

    def load(rank: Rank) -> np.ndarray:
        engine = setting.engine(rank)
        engine.load(folder)
        return _state(engine)

    with warnings.catch_warnings(record=True) as warned, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        try:
            found = cluster.run(partial(_train, seen=seen, folder=folder))
            seen.resting, seen.saved = [nbytes for nbytes, _ in found], [state for _, state in found]
            if setting.reload_ranks:
                seen.loaded = list(Cluster(setting.reload_ranks).run(load))
        except Exception as error:
            seen.error = f"{type(error).__name__}: {error}"
    seen.gradient_nbytes = cluster.trace.sent_nbytes("gradients")
    seen.collectives = [len(trace.collectives(purpose="gradients")) for trace in cluster.trace]
    seen.warned = [str(one.message) for one in warned if issubclass(one.category, SkippedStepWarning)]
    return seen


def _train(rank: Rank, seen: Observed, folder: str) -> tuple[int, np.ndarray]:
    """Returns the bytes at rest, and the state at the end where it is saved."""
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


def _weights(engine: Engine) -> np.ndarray:
    """All weights as this rank computes with them."""
    found: dict[str, np.ndarray] = {}
    for unit in engine.model.units:
        with engine.weights(unit) as w:
            found |= {name: array.copy() for name, array in w.items()}
    return _flat(found)


def _state(engine: Engine) -> np.ndarray:
    """Master and moments, parameter by parameter."""
    return np.concatenate([_flat(engine.state(name, only=("master", "m", "v")))
                           for name in engine.model.shapes])


def _flat(arrays: Mapping[str, Any]) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays.values()])


def one_device(setting: Setting) -> list[np.ndarray]:
    """The weights (P,) at first and after each step of one device, which is fed with all ranks' gradients.

    With each rank's micro-batches added first, and k a power of two: then equal means equal bits.
    """
    model, optimizer, weights = setting.model, OPTIMIZERS[setting.optimizer], first_weights(setting.model)
    layout = layout_of(model, setting.ranks, setting.options.get("layout", "per_unit"))
    devices = {entry.name: SingleDevice(optimizer, weights[entry.name], setting.ranks,
                                        tuple(layout.cut(entry.low, entry.high))) for entry in layout.entries}
    found = [_flat(weights)]
    for step in range(setting.steps):
        passes = [[one_pass(model, weights, "fp32", *batch).gradients for batch in setting.batches(rank, step)]
                  for rank in range(setting.ranks)]
        for name, device in devices.items():
            rate = next((lr for beginning, lr in setting.rates.items() if name.startswith(beginning)), optimizer.lr)
            assert device.stepper is not None, "it was given an optimizer of zerosim's"
            device.stepper.optimizer = optimizer.with_lr(rate * setting.factor(step + 1))
            weights[name] = device.step([np.add.reduce([one[name] for one in its]) / np.float32(len(its))
                                         for its in passes])
        found.append(_flat(weights))
    return found
