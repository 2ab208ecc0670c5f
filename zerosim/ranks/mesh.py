"""A mesh of ranks, nodes by ranks of a node: its groups, and the bytes that cross nodes.

Ranks stand node by node, as `ranks.hierarchical` says, whose collectives cross a mesh in two steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerosim.numerics.checks import is_count

if TYPE_CHECKING:
    from zerosim.ranks.rank import Rank
    from zerosim.ranks.trace import Collective, Message, Trace


@dataclass(frozen=True, slots=True)
class Mesh:
    """M nodes of R ranks each, with the groups that a rank program needs, and the bytes that its traces send across.

    Raises ValueError for what are no counts.
    """

    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            if not is_count(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"a mesh has so many nodes of so many ranks each, 1 or more, found {name}="
                                 f"{getattr(self, name)!r}; write (2, 4) for two nodes of four ranks")

    @classmethod
    def of(cls, asked: Mesh | Sequence[int] | str, ranks: int) -> Mesh:
        """The mesh of N ranks that a pair, or a text such as "2x4", asks for.

        Raises ValueError for what is neither, and for nodes and ranks of a node that do not multiply to N.
        """
        if isinstance(asked, str) and (match := re.fullmatch(r"(\d+)x(\d+)", asked)):
            asked = int(match[1]), int(match[2])
        if not isinstance(asked, Mesh):
            if not isinstance(asked, tuple | list) or len(asked) != 2:
                raise ValueError(f"mesh={asked!r} must be nodes and ranks of a node, as \"2x4\"")
            asked = cls(*asked)
        if asked.ranks != ranks:
            raise ValueError(f"a mesh of {asked.nodes} nodes with {asked.ranks_per_node} ranks each has {asked.ranks} "
                             f"ranks, and there are {ranks}; take nodes and ranks of a node that multiply to {ranks}")
        return asked

    @property
    def ranks(self) -> int:
        """N."""
        return self.nodes * self.ranks_per_node

    def place(self, rank: int) -> tuple[int, int]:
        """(m, i): the rank's node, and its place there."""
        return divmod(rank, self.ranks_per_node)

    def members_inside(self, rank: int) -> list[int]:
        """The ranks of this rank's node."""
        first = rank - self.place(rank)[1]
        return list(range(first, first + self.ranks_per_node))

    def members_across(self, rank: int) -> list[int]:
        """The ranks at this rank's place, one of each node."""
        return list(range(self.place(rank)[1], self.ranks, self.ranks_per_node))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"

    def inside(self, rank: Rank) -> Rank:
        """A handle in the group of the rank's node."""
        return rank.new_group(self.members_inside(rank.index))

    def across(self, rank: Rank) -> Rank:
        """A handle in the group of the ranks at the same place, one of each node."""
        return rank.new_group(self.members_across(rank.index))

    def sent_nbytes_across(self, traces: Iterable[Trace], purpose: str | None = None) -> list[int]:
        """Bytes that each rank, in rank order, sent to other nodes: all, or those of one purpose.

        A flat ring crosses from the last rank of a node alone, so that the sum over a node's ranks is what to compare.
        """
        return [self.nbytes_across(rank, trace, purpose) for rank, trace in enumerate(traces)]

    def nbytes_across(self, rank: int, trace: Trace, purpose: str | None = None) -> int:
        """Bytes that one rank, whose trace it is, sent to other nodes."""
        return sum(self._nbytes_across(rank, row) for row in trace.messages(purpose))

    def _nbytes_across(self, rank: int, row: Collective | Message) -> int:
        from zerosim.ranks.trace import Message  # only here, where there is a trace: a plan has a mesh too

        node = self.place(rank)[0]
        if isinstance(row, Message):
            return row.sent_nbytes * (row.destination is not None and self.place(row.destination)[0] != node)
        group = row.call.group
        nodes = [self.place(member)[0] for member in group]
        if set(nodes) == {node}:
            return 0
        me = group.index(rank)
        if row.call.algorithm == "ring":  # which sends to the next alone
            return row.sent_nbytes * (nodes[(me + 1) % len(nodes)] != node)
        return sum(hop.nbytes for hop in row.hops() if hop.source == me and nodes[hop.destination] != node)
