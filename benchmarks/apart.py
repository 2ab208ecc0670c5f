"""The distance of a library's own sums from the ring's: the same terms, added in another order.

    mpiexec -n 4 python -m mpi4py -m benchmarks.apart     # of MPI's
"""

import numpy as np

import zerosim as zs
from zerosim.numerics.arrays import to_host
from zerosim.testing import ulps_apart

FORMATS = ("fp32", "bf16", "fp16")  # in which MPI, with our operators, and NCCL add
Apart = dict[str, tuple[int, float]]


def from_the_ring(rank: zs.Rank, length: int = 100_003) -> Apart:
    """For each format the most ULPs between ``native`` and the ring in an all-reduce of normals, and the share of sums
    that differ. ULPs grow without bound where terms cancel; the bound of `backends/mpi.py` is one of Σ|x|."""
    found = {}
    for name in FORMATS:
        dtype = zs.FORMATS[name].dtype
        values = np.random.default_rng([7, rank.index]).standard_normal(length).astype(np.float32).astype(dtype)
        x = rank.xp.asarray(values.view(f"u{dtype.itemsize}")).view(dtype)
        ring, native = (to_host(rank.all_reduce(x, algorithm=algorithm)) for algorithm in ("ring", "native"))
        steps = ulps_apart(ring, native)
        found[name] = int(steps.max()), float((steps > 0).mean())
    return found


def distances(found: Apart) -> str:
    """``bf16 at most 12 ULP, 31% of sums``, and so on."""
    return "; ".join(f"{name} at most {ulps:,} ULP, {share:.0%} of sums" for name, (ulps, share) in found.items())


if __name__ == "__main__":
    cluster = zs.connect()
    apart = cluster.run(from_the_ring)[cluster.index]
    if cluster.index == 0:
        print(f"MPI's own all-reduce from the ring, {cluster.ranks[0].size} processes: {distances(apart)}")
