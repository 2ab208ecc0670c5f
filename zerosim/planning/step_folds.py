"""Folds over the events of a step: what comes and goes in memory, and the seconds for which the program stands still.

Legend: N ranks, k micro-batches of B sequences. Activations and tokens grow with B, all else does not.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from zerosim.planning.activations import Block
from zerosim.planning.closed_forms import Job
from zerosim.planning.cost import Curve, curve
from zerosim.planning.hardware import Network
from zerosim.planning.step_activations import BETWEEN, Place, snapshots
from zerosim.planning.step_events import (
    ACROSS,
    ALL,
    BUFFER,
    GATHERED,
    GRADIENT,
    HELD,
    INSIDE,
    SECONDARY,
    START,
    TOKEN_NBYTES,
    At,
    CollectiveIssue,
    CollectiveWait,
    HeldBytes,
    StepEvent,
    step_events,
)

# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flow:
    """The activations of a decoder: blocks, vocabulary and recomputation policy; one sequence of the block counts."""

    block: Block
    blocks: int
    vocabulary: int
    policy: str


class TransientSnapshot(NamedTuple):
    """Bytes at one moment: gathered, of gradients on their way, of buffers; of each sequence activations and tokens.

    ``place`` is the last computation before it.
    """

    place: Place
    gathered_nbytes: int
    secondary_nbytes: int
    gradients_nbytes: int
    buffers_nbytes: int
    sequence_nbytes: int

    def nbytes(self, batch: int) -> int:
        """All of it, of so many sequences."""
        return self.fixed_nbytes + batch * self.sequence_nbytes

    @property
    def fixed_nbytes(self) -> int:
        """The bytes that do not grow with the batch."""
        return self.gathered_nbytes + self.secondary_nbytes + self.gradients_nbytes + self.buffers_nbytes


@dataclass(frozen=True, slots=True)
class TransientMemory:
    """The most bytes at one moment: of gathered parameters, of secondary shards (hpZ), of gradients on their way, of
    collectives' buffers, of the latter two together. ``snapshots`` are those that can be the fullest of all."""

    gathered_nbytes: int
    secondary_nbytes: int
    gradients_nbytes: int
    buffers_nbytes: int
    in_flight_nbytes: int
    snapshots: tuple[TransientSnapshot, ...]

    def fullest(self, batch: int) -> TransientSnapshot:
        """The fullest moment of a step of so many sequences a micro-batch."""
        return max(self.snapshots, key=lambda snapshot: snapshot.nbytes(batch))


@lru_cache(maxsize=512)
def transient_memory(job: Job, flow: Flow | None = None) -> TransientMemory:
    """The bytes that come and go in a step of this job, under its options; without a flow, no activations.

    >>> from zerosim.options import StepOptions
    >>> from zerosim.planning.closed_forms import STAGES
    >>> [transient_memory(Job((400, 600, 200), 2, STAGES[2], options=StepOptions(overlap=overlap))).in_flight_nbytes
    ...  for overlap in (False, True)]
    [1800, 2600]
    """
    levels = {} if flow is None else _levels(flow)
    held, most = dict.fromkeys(HELD, 0), dict.fromkeys(HELD, 0)
    in_flight, total, place, level = 0, 0, START, 0
    fullest: dict[int, TransientSnapshot] = {}  # by bytes of each sequence
    for event in step_events(job):
        if isinstance(event, At):
            place, level = event, levels.get(event, 0)
        elif isinstance(event, HeldBytes):
            held[event.kind] += event.nbytes
            total += event.nbytes
            if event.nbytes <= 0:
                continue
            most[event.kind] = max(most[event.kind], held[event.kind])
            in_flight = max(in_flight, held[GRADIENT] + held[BUFFER])
        else:
            continue
        if level not in fullest or total > fullest[level].fixed_nbytes:
            fullest[level] = TransientSnapshot(
                place, held[GATHERED], held[SECONDARY], held[GRADIENT], held[BUFFER], level)
    assert not any(held.values()), f"what comes also goes, but {held} stayed"
    snapshots: list[TransientSnapshot] = []  # those that none exceeds in both respects
    for _, snapshot in sorted(fullest.items(), reverse=True):
        if not snapshots or snapshot.fixed_nbytes > snapshots[-1].fixed_nbytes:
            snapshots.append(snapshot)
    return TransientMemory(most[GATHERED], most[SECONDARY], most[GRADIENT], most[BUFFER], in_flight, tuple(snapshots))


@lru_cache(maxsize=512)
def _levels(flow: Flow) -> dict[Place, int]:
    """Bytes of activations, their gradients and tokens of one sequence, at the fullest moment of each place."""
    found: dict[Place, int] = {START: 2 * TOKEN_NBYTES * flow.block.tokens}
    last = flow.blocks + 1
    for snapshot in snapshots(flow.block, flow.blocks, flow.vocabulary, flow.policy, between=True):
        phase = "loss" if snapshot.step == "loss" else snapshot.phase
        ends = snapshot.step == BETWEEN and phase != "accumulated"  # what is between two computations rests from there
        place = (f"{phase} end" if ends else phase, snapshot.unit)
        tokens_dropped = place in (("accumulated", 0), ("backward end", 0))  # by the first unit
        vectors = 2 if phase == "forward" or place == ("loss", last) else 0 if tokens_dropped else 1
        nbytes = snapshot.total_nbytes + vectors * TOKEN_NBYTES * flow.block.tokens
        found[place] = max(found.get(place, 0), nbytes)
    return found


# -- seconds ----------------------------------------------------------------------------------------------------------


Price = Callable[[str, int, int, Network], float]  # seconds of an operation of N ranks on so many bytes


def communication_seconds(events: Iterable[StepEvent], seconds_at: Mapping[Place, float], network: Network,
                          price: Price | None = None) -> tuple[float, float]:
    """(seconds of communication, seconds for which the program stands still for it) in a step or a part of one.

    ``seconds_at`` are those that a unit computes at each of its places. Without a ``price`` collectives are rings, and
    all-to-alls of pairs, by the α-β model of `cost`.
    """
    clock = free = communication = exposed = 0.0
    ends: dict[tuple[str, int], float] = {}
    prices: dict[tuple[str, int, int, str], float] = {}
    networks = {ALL: network, INSIDE: Network(network.inside), ACROSS: Network(network.between or network.inside)}
    if price and network.between is not None:
        networks[ACROSS] = replace(network, ranks_per_node=1)  # one rank of each node, with its own card
    for event in events:
        if isinstance(event, At):
            clock += seconds_at.get(event, 0.0)
        elif isinstance(event, CollectiveIssue):
            call = event.operation, event.ranks, event.nbytes, event.where
            if call not in prices:  # a model of many equal units has few
                over = networks[event.where]
                prices[call] = (price(event.operation, event.ranks, event.nbytes, over) if price else
                                _ring(event.operation, event.ranks, over).seconds(event.nbytes))
            seconds = prices[call]
            communication += seconds
            ends[event.key] = free = max(clock, free) + seconds
        elif isinstance(event, CollectiveWait):
            end = ends.pop(event.key)
            if end > clock:
                exposed, clock = exposed + (end - clock), end
    return communication, exposed


@lru_cache(maxsize=64)
def _ring(operation: str, ranks: int, network: Network) -> Curve:
    return curve(operation, "pairwise" if operation == "all_to_all" else "ring", ranks, network)
