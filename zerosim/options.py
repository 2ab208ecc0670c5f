"""Options of a training step, beside its stage, policy and recomputation: stated, read and checked once for all.

An engine takes them, a plan counts what they cost, a training hands them on, and the settings of other programs are
read into them. None but ``reduction``, quantized parts of ``zeropp``, a ``mesh`` and a delayed update changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from zerosim.numerics.checks import require_count, unknown_name
from zerosim.numerics.places import NOTHING, Offload, offload_of
from zerosim.numerics.policy import BY_MICRO_BATCH, BY_RANK, REDUCTIONS
from zerosim.numerics.quantization import ZeroPlusPlus
from zerosim.ranks.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """The moment at which a step communicates, the places where state rests, and the order in which ranks add up.

    ``overlap`` lets reductions and the all-gather of parameters run beside other work, ``prefetch`` gathers so many
    units ahead, ``bucket_nbytes`` is the most that one collective moves (None: a unit). ``offload`` places state on the
    host or on disk. On a ``mesh`` states are in shards inside nodes and replicated across (hybrid sharding); with a
    ``zeropp``, in shards on all ranks, and less crosses nodes. ``reduction`` is the order in which gradients are added,
    by "rank" or by "micro_batch". `of` takes them as one writes them. Raises ValueError for what is no count, no
    switch, no order or no Offload, and for an order by micro-batch on a mesh.
    """

    bucket_nbytes: int | None = None
    overlap: bool = False
    prefetch: int = 0
    offload: Offload = NOTHING
    mesh: Mesh | None = None
    zeropp: ZeroPlusPlus | None = None
    reduction: str = BY_RANK

    def __post_init__(self) -> None:
        require_count("bucket_nbytes", self.bucket_nbytes, 1, "a number of bytes", none="for one collective per unit")
        require_count("prefetch", self.prefetch, 0, "a number of units")
        if not isinstance(self.overlap, bool | np.bool):
            raise ValueError(f"overlap={self.overlap!r} must be True or False")
        if not isinstance(self.offload, Offload):
            raise ValueError(f"offload={self.offload!r} must be an Offload, as zs.Offload('host') is; StepOptions.of "
                             "takes texts too, as 'optimizer=host'")
        if self.reduction not in REDUCTIONS:
            raise unknown_name(f"reduction={self.reduction!r} is no order of additions", self.reduction,
                               REDUCTIONS)
        if self.by_micro_batch and self.mesh:
            raise ValueError("reduction='micro_batch' adds the gradients of all ranks in one order, and on a mesh each "
                             "node's are added first; leave mesh and zeropp out, or take reduction='rank'")

    @classmethod
    def of(cls, ranks: int, *, offload: str | Offload | None = None, mesh: Mesh | Sequence[int] | str | None = None,
           zeropp: ZeroPlusPlus | str | None = None, **others: Any) -> StepOptions:
        """The options of so many ranks as one writes them: places, mesh and parts of ZeRO++ as texts too.

        >>> options = StepOptions.of(8, offload="host", mesh="2x4", prefetch=1)
        >>> options.offload.text, options.nodes, options.replicas
        ('host', 2, 2)

        None and "none" are nothing. Raises ValueError as `offload_of`, `Mesh.of` and `ZeroPlusPlus.parse` do, and for
        parts of ZeRO++ without a mesh.
        """
        on_mesh = None if mesh is None or (isinstance(mesh, str) and mesh == "none") else Mesh.of(mesh, ranks)
        return cls(offload=offload_of(offload), mesh=on_mesh, zeropp=ZeroPlusPlus.on_mesh(zeropp, on_mesh, ranks),
                   **others)

    @property
    def nodes(self) -> int:
        """The nodes of the mesh: 1 without a mesh."""
        return self.mesh.nodes if self.mesh else 1

    @property
    def replicas(self) -> int:
        """The nodes that have a shard each of the same: all of a mesh, and 1 with ZeRO++ or without a mesh."""
        return 1 if self.zeropp else self.nodes

    @property
    def by_micro_batch(self) -> bool:
        """True where the owner adds every rank's gradient of every micro-batch itself."""
        return self.reduction == BY_MICRO_BATCH

    @property
    def parts(self) -> ZeroPlusPlus:
        """The parts of ZeRO++ that are on: without a ``zeropp``, none."""
        return self.zeropp or ZeroPlusPlus()

    def said_of_ranks(self) -> list[str]:
        """In words: the groups of ranks on which bits depend."""
        return [f"on a mesh of {self.mesh}"] * bool(self.mesh) + [f"with {self.zeropp}"] * bool(self.zeropp)

    def arguments(self) -> dict[str, Any]:
        """The options by name, as `zerosim.Engine` takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


PLAIN = StepOptions()  # nothing overlaps, all state rests on the device, and all ranks are of one group
