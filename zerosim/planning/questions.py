"""The questions that one asks before renting: how long a training takes and costs, the largest, the fewest.

Each is answered by the rows of plans, with their margin. Legend: N ranks, B sequences of L tokens of a micro-batch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise, product
from operator import attrgetter

from zerosim.numerics.checks import checked_count
from zerosim.planning.closed_forms import STAGES
from zerosim.planning.configuration import MOST_RANKS, NODE, Plan, PlanConfig
from zerosim.planning.hardware import Network
from zerosim.planning.plan_row import PlanRow
from zerosim.planning.shapes import ModelShape, model_of, model_of_parameters
from zerosim.ranks.mesh import Mesh
from zerosim.shown import Plotted

MOST_SEQUENCES = 1 << 40  # in a batch that nobody has
MOST_BLOCKS = 512  # of a model that one asks about: four times as many as the deepest that are published
LOSS_CHUNKS = (1, 2, 4, 8, 16, 32)  # parts of the loss that are looked at
TOKENS_STEP, MOST_TOKENS = 128, 1 << 30  # of a sequence, which kernels take in whole tiles
DAY, HOUR = 86_400, 3_600  # seconds


@dataclass(frozen=True, slots=True)
class Training:
    """A whole training of ``tokens``: steps, rounded up, days, device-hours, and money where a price is known."""

    tokens: int
    steps: int
    days: float
    device_hours: float
    money: float | None


def training(config: PlanConfig, row: PlanRow) -> Training | None:
    """The training of the configuration's tokens by a row's step; None where none were asked for.

    >>> from zerosim.planning import plan_config
    >>> asked = plan_config("gpt2", runtime="zerosim", ranks=8, stage=0, recompute="none", tokens="300B", price=2)
    >>> found = training(asked, asked.plan().rows[0])
    >>> found.steps == -(-300 * 10**9 // (8 * 1024)), round(found.money / found.device_hours)
    (True, 2)
    """
    if config.tokens is None:
        return None
    steps = -(-config.tokens // row.tokens_per_step)
    seconds = steps * row.step_seconds
    hours = seconds * config.ranks / HOUR
    return Training(config.tokens, steps, seconds / DAY, hours, None if config.price is None else hours * config.price)


# -- the largest and the fewest ---------------------------------------------------------------------------------------


def largest_batch(config: PlanConfig) -> int:
    """The most sequences of a micro-batch that fit in some row with its margin; 0 where not even one does. Of a global
    batch that was asked for they divide a rank's share."""
    if config.global_batch is None:
        return _largest(lambda batch: replace(config, batch=batch), MOST_SEQUENCES)
    share = config.global_batch // config.ranks
    pairs = [(few, share // few) for few in range(1, math.isqrt(share) + 1) if not share % few]
    return next((batch for batch in sorted({*chain(*pairs)}, reverse=True) if _fits(
        replace(config, batch=batch, micro_batches=share // batch))), 0)


def largest_sequence(config: PlanConfig) -> int:
    """The most tokens of a sequence, in steps of 128, that fit in some row with its margin; no more than the model has
    learned positions for. 0 where not even 128 do."""
    transformer = config.model.transformer
    most = (transformer.positions if transformer else 0) or MOST_TOKENS
    return TOKENS_STEP * _largest(lambda tiles: replace(config, sequence=TOKENS_STEP * tiles), most // TOKENS_STEP)


def fewest_ranks(config: PlanConfig) -> int | None:
    """The fewest ranks on which some row fits with its margin: any number on one node of 8, whole nodes beyond.

    None where no number of ranks helps, up to the most that are planned for: what is whole on each rank is too
    much. States are sharded over all ranks, and links do not count. Of a global batch that was asked for each rank has
    a whole number of micro-batches.
    """
    alone, network = replace(config.options, mesh=None, zeropp=None), Network(config.network.inside)

    def fits(ranks: int) -> bool:
        return _fits(replace(config, ranks=ranks, network=network, options=alone))

    def shares(ranks: int) -> bool:
        return not (config.global_batch or 0) % (ranks * config.batch)

    few = next((ranks for ranks in range(1, NODE) if shares(ranks) and fits(ranks)), None)  # a second brings buckets
    if few is not None:
        return few
    nodes = range(1, MOST_RANKS // NODE + 1)
    found = bisect_left(nodes, True, key=lambda count: fits(NODE * count))
    return next((NODE * count for count in nodes[found:] if shares(NODE * count)), None)


def fewest_loss_chunks(plan: Plan) -> tuple[int, PlanRow] | None:
    """The fewest parts of logits and their loss with which a row has the margin that is faster than all that have it,
    and that row, the fastest; None where logits are in no such row's way, and of zerosim's engine, which has no parts.
    """
    config = plan.config
    if config.is_engine:
        return None
    several = [replace(config, loss_chunks=chunks) for chunks in LOSS_CHUNKS if chunks > config.loss_chunks]
    for row in sorted(plan.rows, key=attrgetter("step_seconds")):
        if row.has_margin:
            return None
        if found := next((one for one in several if one.has_margin(row.stage, row.recompute)), None):
            return found.loss_chunks, row
    return None


def fits_inside_nodes(config: PlanConfig) -> bool | None:
    """True where some row fits with its margin with states in shards inside nodes alone, replicated across them (hybrid
    sharding), however many nodes there are; None on one node, and for a runtime that has no such program."""
    each = config.network.ranks_per_node
    if not each or each >= config.ranks or config.options.zeropp:
        return None
    on_mesh = replace(config, options=replace(config.options, mesh=Mesh.of((config.ranks // each, each), config.ranks)))
    stages = tuple(stage for stage in config.stages if on_mesh.lacking(STAGES[stage]) is None)
    return _fits(replace(on_mesh, stages=stages)) if stages else None


def largest_model(config: PlanConfig) -> ModelShape | None:
    """The model of the most blocks as the configuration's own, up to 512, of which some row fits with its margin.

    Where every so many have no experts, blocks come in whole patterns: one more, without experts, may hold less. Of a
    number of parameters alone, the one of most parameters, whose states are all that is counted. None where not even
    one block, or one pattern, fits, and of a model with frozen weights.
    """
    model, of = config.model, config.model.transformer
    if model.has_frozen:
        return None
    dense = of.experts.dense if of and of.experts else ()
    pattern = max((after - place for place, after in pairwise(dense)), default=1)

    def sized(count: int) -> ModelShape:
        if of is None:
            return model_of_parameters(count)
        blocks = pattern * count
        plain = tuple(range(dense[0], blocks, pattern)) if pattern > 1 else dense
        return model_of(model.name, replace(of, blocks=blocks, windowed=of.windowed * blocks // of.blocks,
                                            experts=of.experts and replace(of.experts, dense=plain)))

    most = _largest(lambda count: replace(config, model=sized(count)),
                    1 << 60 if of is None else MOST_BLOCKS // pattern)
    return sized(most) if most else None


def _rows(config: PlanConfig) -> Iterator[tuple[int, str]]:
    """Stage and policy of each row, those first that are likely to hold least."""
    yield from product(sorted(config.stages, reverse=True), reversed(config.policies))


def _fits(config: PlanConfig) -> bool:
    """True where some row has its margin."""
    return any(config.has_margin(*row) for row in _rows(config))


def _largest(sized: Callable[[int], PlanConfig], most: int) -> int:
    """The largest whole number up to ``most`` for which some row of the configuration of that size has its margin,
    where a row that has it has it at less; 0 if none has it at 1.

    Of each row only what is beyond those before it is looked at: numbers are doubled until one does not fit, so that
    none far beyond is looked at.
    """
    found, of_size = 0, lru_cache(maxsize=None)(sized)
    for row in _rows(sized(1)):
        fitting, above = found, found + 1
        while above <= most and of_size(above).has_margin(*row):
            fitting, above = above, 2 * above
        between = range(fitting + 1, min(above, most + 1))
        found = fitting + bisect_left(between, True, key=lambda size: not of_size(size).has_margin(*row))
    return found


# -- several plans ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class OverRanks(Plotted):
    """One plan on several numbers of ranks, which a notebook shows as a table and ``plot`` draws as curves."""

    plans: tuple[Plan, ...]

    def __repr__(self) -> str:
        return f"<OverRanks of {self.plans[0].config.model.name}: {', '.join(f'{n:,}' for n in self.numbers)}>"

    @property
    def numbers(self) -> list[int]:
        """N of each plan."""
        return [plan.config.ranks for plan in self.plans]

    @property
    def rows(self) -> list[PlanRow | None]:
        """Of each plan the fastest row that fits; None where none does."""
        return [plan.fastest for plan in self.plans]


def over_ranks(plan: Plan, numbers: Iterable[int]) -> OverRanks:
    """The same plan on other numbers of ranks: one node up to a node's ranks, beyond it whole nodes of as many.

    Raises ValueError for no numbers, for one that whole nodes do not make, and for several nodes where the plan names
    no link between them.
    """
    config, network = plan.config, plan.config.network
    per_node, found = network.ranks_per_node or max(NODE, config.ranks), list[Plan]()
    for ranks in numbers:
        if checked_count("ranks", ranks, 1) > per_node and (ranks % per_node or network.between is None):
            raise ValueError(f"{ranks} ranks are no whole nodes of {per_node}; take a multiple" if ranks % per_node else
                             f"{ranks} ranks are more than the {per_node} of a node, and this plan names no link "
                             "between nodes; make it of two nodes or more, as nodes=2")
        over = Network(network.inside) if ranks <= per_node else network
        found.append(replace(config, ranks=ranks, network=over, options=replace(config.options, mesh=None)).plan())
    if not found:
        raise ValueError("a plan over ranks was asked for no number of them; name one at least, as [8, 16]")
    return OverRanks(tuple(found))


QUANTITIES: dict[str, Callable[[PlanConfig, PlanRow], float | None]] = {
    "held, GB": lambda config, row: row.total_nbytes / 1e9,
    "spare, GB": lambda config, row: row.spare_nbytes / 1e9,
    "step, s": lambda config, row: row.step_seconds,
    "exposed communication, s": lambda config, row: row.exposed_communication_seconds,
    "tokens per second": lambda config, row: row.tokens_per_second,
    "tokens per second and device": lambda config, row: row.tokens_per_second_per_rank,
    "MFU": lambda config, row: row.model_flops_utilization,
    "days": lambda config, row: found.days if (found := training(config, row)) else None,
    "device-hours": lambda config, row: found.device_hours if (found := training(config, row)) else None,
    "money": lambda config, row: found.money if (found := training(config, row)) else None,
}


def compared(one: Plan, other: Plan) -> list[tuple[str, float, float]]:
    """(quantity, of one plan's fastest row, of the other's) for all that both know; none where one has no row that
    fits."""
    if one.fastest is None or other.fastest is None:
        return []
    rows = [(name, of(one.config, one.fastest), of(other.config, other.fastest)) for name, of in QUANTITIES.items()]
    return [(name, first, second) for name, first, second in rows if first is not None and second is not None
            and not math.isinf(first + second)]
