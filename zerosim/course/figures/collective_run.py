"""All-reduces for the picture of the latency wall, run without data; what they take on a wire, the picture finds.

Legend: N ranks.
"""

from zerosim.ranks.cluster import NullCluster
from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import Traces

ITEM_NBYTES = 4


def all_reduce_traces(ranks: int, nbytes: int, algorithm: str) -> Traces:
    """The traces of one all-reduce of so many bytes, whole fp32 numbers, on N ranks."""

    def program(rank: Rank) -> None:
        rank.all_reduce(rank.xp.zeros(nbytes // ITEM_NBYTES, "float32"), algorithm=algorithm)

    cluster = NullCluster(ranks)
    cluster.run(program)
    return cluster.trace
