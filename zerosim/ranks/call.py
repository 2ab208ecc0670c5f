"""A call: everything about a collective on which the ranks of its group must agree.

Legend: n elements, N ranks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.ranks.cuts import Cut

OPS = ("sum", "mean", "max", "min")
Group = tuple[tuple[int, ...], tuple[int, ...]]  # the members' indices, and what tells groups of equal members apart


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of one group: its number there, what it does and to what.

    ``group`` holds the members' indices in the whole cluster and ``communicator`` tells groups of equal members
    apart; ``cut`` has the N+1 boundaries of the whole vector; ``shape`` is that of the whole vector.
    """

    number: int
    communicator: tuple[int, ...]
    group: tuple[int, ...]
    operation: str
    algorithm: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    cut: Cut
    op: str = "sum"
    average: str | None = None
    wire: np.dtype[Any] | None = None
    accumulate: np.dtype[Any] | None = None
    root: int = 0
    purpose: str = "unspecified"
    agreement: str = ""

    @property
    def ranks(self) -> int:
        """N, the number of ranks that take part."""
        return len(self.group)

    @property
    def key(self) -> Group:
        """What identifies the group."""
        return self.group, self.communicator

    @property
    def length(self) -> int:
        """n, the elements of the whole vector."""
        return self.cut[-1]

    @property
    def wire_dtype(self) -> np.dtype[Any]:
        """The dtype in which values travel."""
        return self.dtype if self.wire is None else self.wire

    def __str__(self) -> str:
        details = [f"call {self.number}", str(self.shape), str(self.dtype)]
        details += [f"op={self.op}"] * (self.op != "sum")
        details += [f"algorithm={self.algorithm}"] * (self.algorithm != "ring")
        details += [f"wire={self.wire}"] * (self.wire is not None)
        details += [f"root={self.root}"] * (self.root != 0)
        details += [self.agreement] * bool(self.agreement)
        return f"{self.operation}({', '.join(details)})"

    def in_full(self) -> str:
        """Like ``str``, with everything that ranks must agree on, for when the short form shows no difference."""
        return (f"{self.operation}(call {self.number}, {self.shape}, {self.dtype}, op={self.op}, "
                f"average={self.average}, algorithm={self.algorithm}, wire={self.wire}, accumulate={self.accumulate}, "
                f"root={self.root}, splits={self.cut}, purpose={self.purpose}, "
                f"agreement={self.agreement!r}, group={self.group})")
