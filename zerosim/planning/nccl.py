"""Seconds that NCCL takes for a collective, as it foresees them itself: by algorithm and protocol, the fastest taken.

`cost` counts the messages of the algorithms that zerosim runs, at α + n/β each; that is what one teaches. A plan for a
cluster wants the time of a library that cuts a vector into pieces which follow each other, over all the links and
network cards of a node at once. So these times are a latency, by steps, and a rate, by the slowest link. The numbers
stand in ``nccl.toml``, each with its source; docs/nodes.md says what measured tables make of it.
"""

import math
from collections.abc import Mapping
from typing import Any

from zerosim.numerics.checks import checked_count, unknown_name
from zerosim.numerics.files import facts
from zerosim.planning.hardware import Link, Network

CONSTANTS: Mapping[str, Any] = facts(__package__, "nccl")
GENERAL, KINDS, PROTOCOLS = CONSTANTS["general"], CONSTANTS["kind"], CONSTANTS["protocol"]
# How often the whole vector goes over a link of a large ring; an all-to-all makes no ring.
RING_TIMES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}
OPERATIONS = (*RING_TIMES, "all_to_all")


def collective_seconds(operation: str, ranks: int, nbytes: int, network: Network) -> float:
    """Seconds that NCCL takes for a collective of N ranks on a whole vector of so many bytes, by its fastest way.

    Of an all-gather that is the vector that is gathered, of an all-to-all what one rank sends, its own part included.
    The ranks fill the network's nodes one after the other. For groups of one rank of each node, which share a node's
    cards evenly, hand in ``Network(inside, between, 1, cards_per_rank)``. A network of one link of kind network has a
    node for each rank.

    >>> from zerosim.planning import hardware
    >>> network = hardware.presets().network(16, "nvlink4", 2, device="h100-80")
    >>> [f"{collective_seconds('all_reduce', 16, nbytes, network) * 1e6:.0f}" for nbytes in (2**16, 2**24, 2**30)]
    ['33', '174', '4645']

    Raises ValueError as `algorithm_seconds` does.
    """
    return min(algorithm_seconds(operation, ranks, nbytes, network).values())


def algorithm_seconds(operation: str, ranks: int, nbytes: int, network: Network) -> dict[tuple[str, str], float]:
    """Seconds by algorithm and protocol, of those that NCCL would take: ``("ring", "LL")``, ("nvls", "Simple"), ...

    Raises ValueError for an operation that there is not, counts that cannot be, and links of a kind that is not known.
    """
    if operation not in OPERATIONS:
        raise unknown_name(f"NCCL's time is known of no {operation!r}", operation, OPERATIONS)
    ranks, nbytes = checked_count("ranks", ranks, 1), checked_count("nbytes", nbytes, 0)
    if ranks == 1:
        return {("ring", "LL"): PROTOCOLS["LL"]["launch"]["ring"] * 1e-6}
    collective = _Collective(ranks, nbytes, network)
    if operation == "all_to_all":
        found = {("pairs", "Simple"): collective.all_to_all()}
    else:
        found = {("ring", name): collective.ring(name, operation) for name in collective.protocols("ring")}
    if operation == "all_reduce":
        found |= {("tree", name): collective.tree(name) for name in collective.protocols("tree")}
        if collective.kind["nvls"] and collective.per_node > 1:
            if nbytes >= GENERAL["nvls_from_nbytes"]:
                found = {taken: time for taken, time in found.items() if taken[1] == "Simple"}
            found["nvls", "Simple"] = collective.nvls()
    return {taken: microseconds * 1e-6 for taken, microseconds in found.items()}


class _Collective:
    """A vector and the ranks that it is for: µs of each algorithm, from rates in GB/s."""

    def __init__(self, ranks: int, nbytes: int, network: Network) -> None:
        self.ranks, self.nbytes, self.kind = ranks, nbytes, _kind(network.inside)
        between = network.between or (network.inside if network.inside.kind == "network" else None)
        self.nodes = math.ceil(ranks / (network.ranks_per_node or (ranks if between is None else 1)))
        self.per_node = ranks / self.nodes
        self.line_rate = network.inside.bytes_per_second / 1e9
        self.inside = self.line_rate * self.kind["efficiency"] if self.per_node > 1 else math.inf
        self.between = math.inf if self.nodes == 1 or between is None else (
            between.bytes_per_second / 1e9 * KINDS["network"]["efficiency"] * self.per_node * network.cards_per_rank)
        self.levels = math.floor(math.log2(self.nodes))
        # What leaves a node by a tree: of two nodes each sends once; of more, a node in the middle sends and passes on.
        self.tree_between = self.between / (1 if self.nodes <= 2 else 2)
        self.ll_most = self.kind["ll_most"][min(self.nodes, 3) - 1]

    def protocols(self, algorithm: str) -> list[str]:
        return [name for name in self.kind[algorithm]
                if name != "LL128" or self.nodes == 1 or self.kind["ll128_between"]]

    def ring(self, protocol: str, operation: str) -> float:
        row, times = PROTOCOLS[protocol], RING_TIMES[operation]
        crossing = times * (self.nodes - 1)
        steps = (times * (self.ranks - 1) - crossing) * self.kind["ring"][protocol] + crossing * row["between"]["ring"]
        if protocol == "Simple" and operation == "all_reduce" and self.nodes > 1:
            steps *= GENERAL["plateau"]
        rate = min(self.inside, self.between) * row["share"]["ring"]
        if protocol == "LL":
            rate = min(rate, self.ll_most)
        fills = protocol == "Simple" or (protocol == "LL128" and self.nodes > 1)
        moved = times if operation == "broadcast" else times * (self.ranks - 1) / self.ranks  # of the vector, on a link
        return self._time(row["launch"]["ring"] + steps, rate / moved, fills=fills)

    def tree(self, protocol: str) -> float:
        row, share = PROTOCOLS[protocol], PROTOCOLS[protocol]["share"]["tree"]
        if protocol == "LL128" and self.nodes == 1:
            share = GENERAL["tree_ll128_one_node"]
        steps = (self.per_node - 1) * self.kind["tree"][protocol] + self.levels * row["between"]["tree"]
        rate = min(self.inside * GENERAL["tree_inside"], self.tree_between) * share
        if protocol == "LL":
            rate = min(rate, self.ll_most / 4)
        deeper = math.sqrt((self.per_node - 1 + max(1, self.levels)) / self.per_node)  # than that of two nodes
        return self._time(row["launch"]["tree"] + 2 * steps, rate, fills=deeper * (protocol != "LL"))

    def nvls(self) -> float:
        rate = self.line_rate * self.kind["nvls"]
        if self.nodes > 1:
            rate = min(rate * GENERAL["nvls_between"], self.tree_between)
        return self._time(GENERAL["nvls_launch"] + 2 * self.levels * GENERAL["nvls_level"], rate,
                          fills=math.sqrt((1 + max(1, self.levels)) / 2))

    def all_to_all(self) -> float:
        far = self.ranks - self.per_node
        seconds_per_part = max((self.per_node - 1) / self.inside, far * self.per_node / self.between)
        latency = (self.per_node - 1) * GENERAL["all_to_all_inside"] + far * GENERAL["all_to_all_between"]
        return self._time(PROTOCOLS["LL"]["launch"]["ring"] + latency, self.ranks / seconds_per_part)

    def _time(self, latency: float, rate: float, *, fills: float = 1.0) -> float:
        wire = self.nbytes / rate / 1e3
        return float(latency + wire + GENERAL["fill"] * fills * math.sqrt(wire))


def _kind(link: Link) -> Mapping[str, Any]:
    if link.kind is not None and link.kind not in KINDS:
        raise unknown_name(f"the link {link.name} is of kind {link.kind!r}, of which NCCL's time is not known",
                           link.kind, KINDS)
    found: Mapping[str, Any] = KINDS[link.kind or "other"]
    return found
