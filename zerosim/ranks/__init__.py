"""Ranks, the collectives between them, and the record of what they hold and send."""

from typing import TYPE_CHECKING

from zerosim.face import face

if TYPE_CHECKING:
    from zerosim.ranks.call import Hop
    from zerosim.ranks.cluster import Cluster, Results, Run
    from zerosim.ranks.errors import (
        AsymmetryError,
        BackendError,
        DeadlockError,
        MismatchError,
        OutOfMemoryError,
        PendingWorkError,
        RankStopped,
        RankUseError,
        RemoteError,
    )
    from zerosim.ranks.inspect import step_through
    from zerosim.ranks.memory import Memory
    from zerosim.ranks.mesh import Mesh
    from zerosim.ranks.null_cluster import NullCluster
    from zerosim.ranks.option_rows import Transfer, TransferWait
    from zerosim.ranks.races import Exploration, RaceError, explore
    from zerosim.ranks.rank import Rank, Work
    from zerosim.ranks.trace import Compute, Lifetime, Trace

__getattr__, __dir__ = face(__name__)
