"""The twin: one device, no ranks, no shards; the definition of what every stage must compute, bit for bit.

Legend: P parameters, N imagined ranks, k micro-batches. Everything is kept parameter by parameter, without padding.
It adds the gradients of N batches in the order of a ring, each addition rounded as NumPy and ml_dtypes round, and
feeds the sum to the unsharded optimizer. It imports nothing of zerosim.zero and zerosim.ranks.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from tests.ranks import oracles
from zerosim.models import Context, Model
from zerosim.numerics import formats, kernels, loss_scale, random
from zerosim.numerics import policy as policies
from zerosim.optim import Optimizer, UpdateContext

BLOCK = 65536
Vectors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Rule:
    """What holds for one parameter: who updates it (None: frozen), and the format of its weights."""

    optimizer: Optimizer | None
    compute: str


def cut_whole(lengths: list[int], ranks: int) -> np.ndarray:
    """The owner of each element where shards begin and end on borders of parameters, each the nearest to its share."""
    borders, total = sorted({0, *np.cumsum(lengths).tolist()}), sum(lengths)
    starts = [min(borders, key=lambda b: (abs(b * ranks - rank * total), b)) for rank in range(ranks)]
    return np.searchsorted(starts, np.arange(total), "right") - 1


def owners(model: Model, ranks: int, layout: str, group_of: dict[str, object], nodes: int) -> tuple[Vectors, Vectors]:
    """By parameter, the rank that owns each element: by ceil(length / N) in each unit, or in the whole vector, of
    parameters of one group; or on borders of parameters. On M nodes M neighbors are one, the owner in each node, and
    what it owns is cut once more, by ceil, among the nodes: the second vectors."""
    found, across = {}, {}
    for kind in dict.fromkeys(group_of.values()):
        stretches = [[name for name in unit.shapes if group_of[name] == kind] for unit in model.units]
        if layout != "per_unit":
            stretches = [[name for names in stretches for name in names]]
        for names in stretches:
            lengths = [math.prod(model.shapes[name]) for name in names]
            n = sum(lengths)
            chunk = -(-n // ranks)
            owner = cut_whole(lengths, ranks) if layout == "whole_matrices" else np.arange(n) // max(1, chunk)
            owner //= nodes
            owned = np.bincount(owner)[owner] if layout == "whole_matrices" else np.full(n, nodes * chunk)
            node = (np.arange(n) - np.searchsorted(owner, owner)) // np.maximum(1, -(-owned // nodes))
            ends = np.cumsum([0, *lengths])
            for name, (a, b) in zip(names, pairwise(ends), strict=True):
                found[name], across[name] = owner[a:b], node[a:b]
    return found, across


def rounded_add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b, rounded once to a's format; so is b before."""
    [b] = oracles.cast([b], a.dtype)
    return oracles.add(a, b)


def ring_sum(vectors: list[np.ndarray], owner: np.ndarray) -> np.ndarray:
    """The sum of N vectors in which an element of owner c is x[c+1] + x[c+2] + ... + x[c]."""
    total = np.empty_like(vectors[0])
    for c in range(len(vectors)):
        total[owner == c] = oracles.rank_order([vector[owner == c] for vector in vectors], root=c + 1)
    return total


def squares(x: np.ndarray) -> float:
    """The float64 sum of squares in blocks, the blocks' sums added left to right."""
    wide, total = x.astype(np.float64), 0.0
    for low in range(0, len(wide), BLOCK):
        total += float(np.add.reduce(wide[low:low + BLOCK] ** 2))
    return total


@dataclass
class Twin:
    """Single-device training on the batches of N imagined ranks. ``order`` is "local_first", "reduce_first" or
    "micro_batch", in which nothing depends on N, and norms are exact.

    On M ``nodes`` the sums of each node's ring are the addends of a ring across nodes, in the reduce format, and those
    of micro-batches are added up before: it is made once.

    ``rules`` are those of the parameters that differ from the others; ``seed`` is that of dropout.
    """

    model: Model
    optimizer: Optimizer
    ranks: int
    policy: policies.Policy
    layout: str
    order: str
    rules: dict[str, Rule] = field(default_factory=dict)
    nodes: int = 1
    schedule: object = None
    seed: int = 0
    taken: int = 0
    begun: int = 0

    def __post_init__(self) -> None:
        self.rule = {name: self.rules.get(name, Rule(self.optimizer, self.policy.compute))
                     for name in self.model.shapes}
        group_of = {name: (rule.compute, rule.optimizer is None) for name, rule in self.rule.items()}
        self.groups = {kind: [name for name in group_of if group_of[name] == kind]
                       for kind in dict.fromkeys(group_of.values())}
        self.owner, self.node = owners(self.model, self.ranks, self.layout, group_of, self.nodes)
        self.weights, self.state = {}, {}
        for unit in self.model.units:
            for name, shape in unit.shapes.items():
                first, frozen = unit.initial(name, 0, math.prod(shape)), self.rule[name].optimizer is None
                at_rest = self.compute_dtype(name) if frozen else self.policy.master_dtype
                with np.errstate(all="ignore"):
                    if self.policy.master_from == "compute":
                        first = first.astype(self.compute_dtype(name))
                    self.weights[name] = first.astype(at_rest)
                self.state[name] = {} if frozen else {
                    key: np.zeros(slot.shape, self.policy.state_dtype if slot.format == "fp32"
                                  else formats.format_of(slot.format).dtype)
                    for key, slot in self.rule[name].optimizer.slots(shape).items()}
        self.kernels, self.scaler = kernels.NumpyKernels(), loss_scale.scaling_of(self.policy.loss_scale).start()

    # -- what is compared ---------------------------------------------------------------------------------------------

    def compute_dtype(self, name: str) -> np.dtype:
        return policies.Policy(self.rule[name].compute).compute_dtype

    def cast(self, name: str) -> np.ndarray:
        """One parameter's weights in its compute format, flat."""
        with np.errstate(all="ignore"):
            return self.weights[name].astype(self.compute_dtype(name))

    @property
    def master(self) -> np.ndarray:
        """(P,): the weights that the optimizer updates, in the order of the model."""
        return np.concatenate(list(self.weights.values()))

    @property
    def compute(self) -> np.ndarray:
        """(P,): the weights in the compute formats."""
        return np.concatenate([self.cast(name) for name in self.weights])

    @property
    def slots(self) -> Vectors:
        """The slots that every parameter has, with an element for each of its elements."""
        names = set.intersection(*[{key for key, slot in state.items() if slot.size == self.weights[name].size}
                                   for name, state in self.state.items()])
        return {key: np.concatenate([state[key].reshape(-1) for state in self.state.values()]) for key in sorted(names)}

    # -- gradients ----------------------------------------------------------------------------------------------------

    def gradient(self, x: np.ndarray, target: np.ndarray, number: int = 0) -> tuple[float, Vectors]:
        """The loss and the local gradients of one micro-batch, from its own forward and backward."""
        def draw(name: str, span: slice) -> np.ndarray:
            return random.bits((self.seed, f"dropout of micro-batch {number}", self.begun, name), 0, span.stop)[span]

        ctx, kept = replace(Context.standalone(self.policy), draw=draw, gradients=self._places), []
        y = np.ascontiguousarray(x)
        y = y if self.model.units[0].integer_inputs else y.astype(self.policy.compute_dtype)
        weights = [{name: self.cast(name).reshape(self.model.shapes[name])
                    for name in (*unit.shapes, *unit.tied_weights)}
                   for unit in self.model.units]
        for unit, w in zip(self.model.units, weights, strict=True):
            y, keeps = unit.forward(ctx, w, y)
            kept.append(keeps)
        loss, keeps = self.model.loss.forward(ctx, y, target)
        dy = self.model.loss.backward(ctx, keeps, self.scaler.scale)
        found: Vectors = {}
        for unit, w, keeps in zip(reversed(self.model.units), reversed(weights), reversed(kept), strict=True):
            dy, grads = unit.backward(ctx, w, keeps, dy)
            shared = {self.rule[name] for name in unit.shapes if name in found}  # others have gone back before
            shared = {rule.compute for rule in shared if rule.optimizer is not None}
            for name in (*unit.shapes, *unit.tied_weights):
                self._collect(found, name, grads[name])
            for name in unit.shapes:  # what other units completed is in the accumulate format, the whole unit
                if self.rule[name].compute in shared and self.rule[name].optimizer is not None:
                    found[name] = found[name].astype(self.policy.accumulate_dtype)
        return loss, found

    def _places(self, unit: object) -> Vectors:
        """Where a unit writes the gradients of its own parameters and of those that it shares."""
        return {name: np.empty(self.model.shapes[name], self.compute_dtype(name))
                for name in (*unit.shapes, *unit.tied_weights)}

    def _collect(self, found: Vectors, name: str, gradient: np.ndarray | None) -> None:
        """A weight that is tied: the part of the units that share it is the first addend, in the accumulate format."""
        own = np.zeros(math.prod(self.model.shapes[name]), self.compute_dtype(name)) if gradient is None else gradient
        own = own.reshape(-1).astype(self.compute_dtype(name))
        found[name] = (rounded_add(found[name].astype(self.policy.accumulate_dtype), own) if name in found
                       else own.copy())

    def reduced(self, gradients: list[list[Vectors]], name: str) -> np.ndarray:
        """The sum of gradients[r][j] over ranks and micro-batches, in the twin's order."""
        policy = replace(self.policy, compute=self.rule[name].compute)
        accumulate, reduce = policy.accumulate_dtype, policy.reduce_dtype
        with np.errstate(all="ignore"):
            if self.order == "local_first":
                sums = []
                for mine in gradients:
                    total = mine[0][name].astype(accumulate)
                    for g in mine[1:]:
                        total = rounded_add(total, g[name])
                    sums.append(total.astype(reduce))
                return ring_sum([ring_sum(node, self.owner[name]) for node in self._by_node(sums)], self.node[name])
            if self.order == "micro_batch":
                total = None
                for one in (mine[j][name].astype(reduce) for j in range(len(gradients[0])) for mine in gradients):
                    total = one.astype(accumulate) if total is None else rounded_add(total, one)
                return total
            totals = []
            for node in self._by_node(gradients):
                total = None
                for j in range(len(gradients[0])):
                    summed = ring_sum([mine[j][name].astype(reduce) for mine in node], self.owner[name])
                    total = summed.astype(accumulate) if total is None else rounded_add(total, summed)
                totals.append(total)
            if self.nodes == 1:
                return totals[0]
            return ring_sum([total.astype(reduce) for total in totals], self.node[name]).astype(accumulate)

    def _by_node(self, of_ranks: list) -> list[list]:
        """What ranks have, node by node."""
        return [of_ranks[m * self.ranks // self.nodes:(m + 1) * self.ranks // self.nodes] for m in range(self.nodes)]

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(self, batches: list[list[tuple[np.ndarray, np.ndarray]]], clip_norm: float | None = None) -> dict:
        """One step on batches[r][j] = (x, target); the losses per rank, the norm, and whether it was skipped."""
        k, scale = len(batches[0]), self.scaler.scale
        pairs = [[self.gradient(x, t, j * self.ranks + r) for j, (x, t) in enumerate(mine)]
                 for r, mine in enumerate(batches)]
        self.begun += 1
        losses, local = ([[pair[i] for pair in mine] for mine in pairs] for i in (0, 1))
        wide = np.float64 if self.policy.compute == "fp64" else np.float32
        divisor = wide(scale * self.ranks * k * self._token_share(batches))
        with np.errstate(all="ignore"):
            mean = {name: self.reduced(local, name).astype(wide) / divisor
                    for names in self.groups.values() for name in names if self.rule[name].optimizer is not None}
        norm = self._norm(lambda name: mean[name], list(mean))
        skipped = not np.isfinite(norm)
        self.scaler.update(skipped)
        if not skipped:
            self._update(mean, wide(clip_norm / norm) if clip_norm is not None and norm > clip_norm else None)
        return {"losses": losses, "norm": math.nan if skipped else norm, "skipped": skipped, "scale": scale}

    def _token_share(self, batches: list) -> float:
        loss, targets = self.model.loss, [t for mine in batches for _, t in mine]
        return sum(int((t >= 0).sum()) for t in targets) / sum(t.size for t in targets) if loss.is_global else 1.0

    def _norm(self, vector: object, names: list[str]) -> float:
        """The norm of some tensors: per owner, tensor by tensor; owners in rank order."""
        total = 0.0
        if self.order == "micro_batch":
            wide = np.concatenate([vector(name) for name in names]).astype(np.float64)
            return math.sqrt(math.fsum(wide**2)) if np.isfinite(wide).all() else math.nan
        for rank in range(self.ranks // self.nodes):
            partial = 0
            for name in names:
                partial += squares(vector(name)[self.owner[name] == rank])
            total += partial
        return math.sqrt(total) if np.isfinite(total) else math.nan

    def _update(self, mean: Vectors, clip: np.floating | None) -> None:
        self.taken += 1
        for name, g in mean.items():
            rule, shape = self.rule[name], self.model.shapes[name]
            whole = rule.optimizer.cut_of(shape) != "anywhere"
            g = (g if clip is None else g * clip).astype(np.float32)
            w, g = (x.reshape(shape) if whole else x for x in (self.weights[name].astype(np.float32), g))
            state = {key: slot.astype(np.float32) if slot.size != g.size or whole else
                     slot.astype(np.float32).reshape(-1) for key, slot in self.state[name].items()}
            optimizer: Any = rule.optimizer
            if self.schedule is not None:
                optimizer = optimizer.with_lr(optimizer.lr * self.schedule(self.taken))
            ctx = UpdateContext(self.kernels)
            if "tensor_norm" in optimizer.needs:
                ctx = self._with_norms(optimizer, name, w, g, state)
            optimizer.update(ctx, w, g, state, self.taken)
            with np.errstate(all="ignore"):
                self.weights[name] = w.reshape(-1).astype(self.weights[name].dtype)
                self.state[name] = {key: slot.reshape(self.state[name][key].shape).astype(self.state[name][key].dtype)
                                    for key, slot in state.items()}

    def _with_norms(self, optimizer: Any, name: str, w: np.ndarray, g: np.ndarray, state: Vectors) -> UpdateContext:
        ctx, direction = UpdateContext(self.kernels), np.empty_like(w)
        optimizer.advance(ctx, w, g, state, self.taken)
        for key, slot in state.items():  # the moments point from where they rest
            slot[...] = slot.astype(self.state[name][key].dtype).astype(np.float32)
        optimizer.direction(ctx, w, g, state, self.taken, direction)
        return replace(ctx, norms=(self._norm(lambda _: w, [name]), self._norm(lambda _: direction, [name])))
