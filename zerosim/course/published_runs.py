"""Published numbers checked: beside what is printed and what is estimated stands what a run holds, sends or computes.

Legend: P parameters, N ranks, k micro-batches; B batch, L tokens, d channels, H heads, n blocks. All runs are on arrays
without data, so that a laptop has room for them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import isqrt
from typing import Any

from zerosim.course.measured import flops_of_passes, run_blocks, take_step
from zerosim.course.published import Published, published
from zerosim.course.published.quantities import derived
from zerosim.models.small import MLP
from zerosim.numerics.policy import Policy
from zerosim.numerics.rounding import round_to, spacing
from zerosim.optim.elementwise import Adam
from zerosim.planning import hardware
from zerosim.planning.activations import Block
from zerosim.ranks.null_cluster import NullCluster
from zerosim.ranks.trace import Held
from zerosim.zero.placements import REPLICATED, SHARDED, Stage

COMPUTE = {"zero-paper": "bf16", "fp32": "fp32"}  # the ways of counting that the engine's formats can be
MANY = 1024  # ranks, where a print means the limit of many
MATRIX = 10**6  # parameters, where their number does not matter
ALL_REDUCED = Stage(REPLICATED, REPLICATED, SHARDED)  # stage 1 by who all-reduces the gradients, and then takes a slice
KEPT = ("activation", "checkpointed_input")


@dataclass(frozen=True, slots=True)
class Checked:
    """A published number, the estimate, and what a run measures, all in the row's unit."""

    row: Published
    estimated: float
    measured: float

    @property
    def ratio(self) -> float:
        """Published over measured."""
        return self.row.stated / self.measured


def checked(*subjects: str) -> Iterator[Checked]:
    """The published numbers of these subjects, or of all, that a run of the package can check; in the files' order.

    >>> next(one for one in checked("states") if not one.row.closes).row.why
    '4P + 12P/N, which the same text has, is 28 + 10.5; nothing in it comes to 21.5'
    """
    for row in published(*subjects):
        measured = measured_quantity(**row.inputs)
        if measured is not None:
            yield Checked(row, row.computed(), measured)


def measured_quantity(quantity: str, convention: str = "zero-paper", **taken_of: Any) -> float | None:
    """The result of a run, in the unit of published rows that name the quantity; None for what no run computes."""
    if quantity not in MEASURES or convention not in COMPUTE:
        return None
    of_format = {} if convention == "zero-paper" else {"convention": convention}
    return float(MEASURES[quantity](**taken_of, **of_format))


# -- model states and what is sent -------------------------------------------------------------------------------------


@cache
def step(parameters: int, ranks: int, stage: int | Stage, compute: str = "bf16",
         micro_batches: int = 1) -> tuple[Mapping[str, int], int]:
    """One step with Adam of a single matrix of P parameters: the memory of rank 0 at rest after it, by kind, and the
    bytes that it sent for gradients and parameters."""
    inputs = next(n for n in range(isqrt(parameters), 0, -1) if parameters % n == 0)
    cluster, widths = NullCluster(ranks, representative=0), (inputs, parameters // inputs)
    (held,) = take_step(cluster, MLP(widths, bias=False), Adam(), (1, widths[0]), (1, widths[1]), stage=stage,
                        policy=Policy(compute), micro_batches=micro_batches)
    return held.at_rest, sum(cluster.trace[0].sent_nbytes(purpose) for purpose in ("gradients", "parameters"))


def states(parameters: int, ranks: int, stage: int, convention: str = "zero-paper") -> float:
    """GB at rest on a rank."""
    resting, _ = step(parameters, ranks, stage, COMPUTE[convention])
    return sum(resting.values()) / 1e9


def bytes_per_parameter(stage: int, ranks: int, convention: str = "zero-paper") -> float:
    """Bytes at rest on a rank for each parameter."""
    resting, _ = step(MATRIX, ranks, stage, COMPUTE[convention])
    return sum(resting.values()) / MATRIX


def optimizer_bytes(stage: int) -> float:
    """Bytes per parameter, on all ranks together, of what a stage cuts of masters and moments."""
    ranks = 8
    resting, _ = step(MATRIX, ranks, stage)
    return ranks * (resting["master"] + resting["optimizer_state"]) / MATRIX


def vectors(stage: int | Stage, micro_batches: int = 1, ranks: int = MANY) -> float:
    """Sent by a rank in a step, in vectors of all parameters."""
    parameters = MATRIX * 128
    _, sent_nbytes = step(parameters, ranks, stage, micro_batches=micro_batches)
    return sent_nbytes / (2 * parameters)


# -- what blocks keep and compute --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blocks:
    """Measurements of n blocks: kept after forward, attention's probabilities, held at most, and computed."""

    kept_nbytes: int
    probabilities_nbytes: int
    largest_nbytes: int
    peak_nbytes: int
    flops: int


@cache
def blocks(count: int, policy: str, *, batch: int, tokens: int, channels: int, heads: int) -> Blocks:
    """Forward and backward of n blocks of a GPT in 16 bit, whose vocabulary is next to nothing."""
    cluster, kept = run_blocks(Block(batch, tokens, channels, heads), count, 2, policy)
    held = [row for row in cluster.trace[0].rows if isinstance(row, Held) and row.kind in KEPT]
    probabilities = accumulate(row.nbytes for row in held if row.name == "attention.p")
    return Blocks(kept, max(probabilities, default=0), max(row.nbytes for row in held),
                  cluster.memory[0].peak_nbytes_of(KEPT), flops_of_passes(cluster))


_run = blocks  # for functions that take a number of blocks by that name, as the rows do


def of_a_block(policy: str, **block: Any) -> Blocks:
    """The difference that one block more makes to two, of each."""
    two, three = (blocks(count, policy, **block) for count in (2, 3))
    return Blocks(*(getattr(three, name) - getattr(two, name) for name in Blocks.__slots__))


def kept(blocks: int, parameters: int = 0, **block: Any) -> float:
    """GB that n blocks keep without recomputation, and the states of P parameters."""
    own = states(parameters, 1, 0) if parameters else 0.0
    return blocks * of_a_block("none", **block).kept_nbytes / 1e9 + own


def largest_in_blocks(batch: int, tokens: int, channels: int, heads: int) -> float:
    """The largest array that a block keeps, in BLd elements."""
    found = blocks(2, "none", batch=batch, tokens=tokens, channels=channels, heads=heads)
    return found.largest_nbytes / (2 * batch * tokens * channels)


def best_segment(blocks: int, **block: Any) -> int:
    """The number of blocks to a segment with which n blocks hold least; of powers of two."""
    return min((1 << power for power in range(blocks.bit_length())),
               key=lambda k: _run(blocks, f"segment({k})", **block).peak_nbytes)


def scores_again(**block: Any) -> float:
    """10⁹ operations of making a block's probabilities again, softmax included."""
    return (of_a_block("selective", **block).flops - of_a_block("none", **block).flops) / 1e9


# -- others ------------------------------------------------------------------------------------------------------------


def transfer_milliseconds(collective: str, algorithm: str, ranks: int, nbytes: int, link: str) -> float:
    """Of a collective's bytes, as the trace counts them, over a link one way, without latency."""
    cluster = NullCluster(ranks, representative=0)
    cluster.run(lambda rank: getattr(rank, collective)(rank.xp.empty(nbytes // 2, "float16"), algorithm=algorithm))
    return 1e3 * cluster.trace[0].sent_nbytes() / hardware.link(link).bytes_per_second


def underflow(format: str) -> float:
    """The largest power of two that the format rounds to zero."""
    return next(2.0**-power for power in range(200) if round_to(2.0**-power, format) == 0)


MEASURES: Mapping[str, Callable[..., float]] = {
    **derived(states, bytes_per_parameter, vectors, kept), "optimizer bytes": optimizer_bytes,
    "vectors at": lambda stage, ranks: vectors(stage, ranks=ranks),
    "all-reduce then all-gather": lambda ranks: vectors(ALL_REDUCED, ranks=ranks),
    "linear": lambda **block: of_a_block("selective", **block).kept_nbytes / 1e6,
    "probabilities": lambda **block: of_a_block("none", **block).probabilities_nbytes / 1e6,
    "probabilities of all": lambda blocks, **block: blocks * of_a_block("none", **block).probabilities_nbytes / 1e9,
    "quadratic peak": lambda blocks, policy, **block: _run(blocks, policy, **block).probabilities_nbytes / 1e9,
    "largest in BLd": largest_in_blocks,
    "checkpoints": lambda blocks, **block: blocks * of_a_block("block", **block).kept_nbytes / 2**40,
    "best segment": best_segment, "scores": scores_again,
    "transfer milliseconds": transfer_milliseconds,
    "spacing": lambda formats: float(spacing(1.0, formats[0]) / spacing(1.0, formats[1])), "underflow": underflow,
}
