"""The other order in which gradients are added: by micro-batch, so that no bit depends on the number of ranks.

By default a step's gradients are added "by rank": in the order of the ring, from the rank after an element's owner on,
each rank's micro-batches first or last, as the stage says. With ``reduction="micro_batch"`` the owner adds g[0], g[1],
g[2], ..., where the j-th micro-batch of rank r is number j·N + r, as it is in dropout: each rank sends its addend of
every micro-batch as it is, in the reduce format, and the owner adds what arrives to its sum, in the accumulate format.
Norms are then of exact sums of squares. So a step depends on its micro-batches alone: 12 of them have the same bits on
3 ranks with 4 each and on 6 with 2, under any stage and layout that this order takes.

Cost: an all-to-all for each bucket of each micro-batch, which sends the bytes of a reduce-scatter, n - |chunk r|, in as
many messages, to all ranks in place of the next one; a bucket's n elements, where the addends arrive, in place of the
ring's two chunks; and `NBYTES` for a sum of squares in place of 8. Against stages 0 and 1, which send once a step, the
gradients travel once a micro-batch.

Legend: N ranks, k micro-batches of a rank; n elements of a bucket, or of a block.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from zerosim.numerics.arrays import has_data, spans, to_host
from zerosim.numerics.checks import FP32
from zerosim.numerics.policy import AVERAGES, Policy
from zerosim.zero.gradients import Reduction
from zerosim.zero.layout import Bucket, Parts
from zerosim.zero.param_group import ParamGroup
from zerosim.zero.placements import SHARDED, Move, Placement, Stage
from zerosim.zero.update import Squares

OF_THE_CUT = ("ranks", "stage", "layout")  # settings on which bits depend by rank, and do not by micro-batch


def check_order(stage: Stage, policy: Policy) -> None:
    """Raises ValueError for a stage or a policy under which the order of micro-batches cannot be kept."""
    if stage.gradients is not SHARDED:
        raise ValueError("reduction='micro_batch' adds the gradient of every micro-batch at the owner of each element, "
                         f"and at the stage asked for gradients rest {stage.gradients.value}; take stage 2 or 3, or "
                         "another whose gradients are sharded")
    if policy.wire is not None or policy.average != AVERAGES[0]:
        raise ValueError("reduction='micro_batch' sends gradients as they are, one by one, and the policy asks for "
                         f"wire={policy.wire!r}, average={policy.average!r}, which are of sums over ranks; leave both "
                         "out, or take reduction='rank'")


def refuse_factors(groups: Sequence[ParamGroup]) -> None:
    """Raises ValueError for an optimizer whose factors of layers are sums over ranks."""
    for group in groups:
        for name, optimizer in group.optimizers.items():
            if "input_factors" in optimizer.needs:
                raise ValueError(f"reduction='micro_batch' is an order without ranks, and {type(optimizer).__name__} "
                                 f"needs factors of {name}, which are added in that of ranks; take another optimizer, "
                                 "or reduction='rank'")


class OrderedReduction(Reduction):
    """The addends of all ranks arrive at their owner as they are, and it adds one after the other, in rank order."""

    def start(self, bucket: Bucket, want: Placement, *, source: Parts, target: Parts, dtype: np.dtype[Any],
              agreement: str, add: bool = False, async_op: bool = False) -> Move:
        """Begins to send a bucket of addends, which are put into ``target`` one by one, with ``add`` onto what is
        there."""
        rank, store = self.group.rank, self.group.store
        vector = store.packed(source, bucket.length, dtype)
        found = rank.agreeing(agreement).all_to_all(vector, splits=bucket.cut, async_op=async_op, purpose="gradients")

        def put(arrived: np.ndarray) -> None:
            for number, addend in enumerate(arrived.reshape(rank.size, -1)):
                store.put_parts(target, addend, add=add or number > 0)

        return Move(found, put, async_op=async_op)


class ExactSquares(Squares):
    """Sums of squares that nothing rounds: they depend on no owner, and so on no number of ranks."""

    def of(self, kernels: Any, x: np.ndarray, divisor: float = 1.0) -> int:
        """The sum of (x/divisor)², in units of 2^-298."""
        return sum_of_squares(kernels, x, divisor)

    def roots(self, group: ParamGroup, mine: Sequence[Sequence[float]]) -> list[float]:
        """The root of each sum over owners, rounded to float64 once, and its root once more."""
        sent = np.frombuffer(b"".join(to_bytes(int(one)) for row in mine for one in row), np.uint8)
        table = group.all_gather_scalars(sent).reshape(-1, len(mine[0]), NBYTES)
        return [root(owner.tobytes() for owner in table[:, index]) for index in range(len(mine[0]))]


# -- Sums of squares of fp32 numbers without any rounding --------------------------------------------------------------
# A number of fp32 is m·2^e with |m| < 2^24 and e from -149 on, so that its square is a whole number of 2^-298, and so
# is every sum of squares. In 80 bytes such a sum has room for 2^69 squares of the largest number.

UNIT_BITS, NBYTES = 298, 80  # a sum counts units of 2^-298
NOT_FINITE = 1 << 8 * NBYTES - 17  # of inf and NaN: above every sum of finite squares, and 2^16 of it have room
HALF = 24  # bits of half a square
AT_ONCE = 1 << 20  # elements at most, which come to the host where a device has them


def sum_of_squares(kernels: Any, x: np.ndarray, divisor: float = 1.0) -> int:
    """The sum of (x/divisor)² over x (n,), each quotient rounded to fp32, in units of 2^-298.

    At least `NOT_FINITE` where a quotient is inf or NaN; 0 for arrays without data. Adds on the host, block by block.
    """
    if not has_data(x):
        return 0
    total = 0
    at_once = min(kernels.BLOCK, AT_ONCE)
    quotients = kernels.scratch("quotients", min(at_once, x.size), FP32)
    for here in spans(x.size, at_once):
        block = quotients[:here.stop - here.start]
        kernels.gradient_block(x[here], divisor, 1.0, block)
        total += _of_block(to_host(block))
    return total


def _of_block(x: np.ndarray) -> int:
    """The sum of a block of fp32 (n,), n < 2^29: by exponent, whole numbers that float64 adds without rounding."""
    code = x.view(np.uint32) & np.uint32(0x7FFFFFFF)  # without the sign
    exponent, fraction = code >> 23, (code & np.uint32(0x7FFFFF)).astype(np.uint64)
    if len(x) and exponent.max() == 0xFF:
        return NOT_FINITE
    mantissa = fraction + ((exponent > 0).astype(np.uint64) << np.uint64(23))
    square, total = mantissa * mantissa, 0
    for part, shift in ((square >> np.uint64(HALF), HALF), (square & np.uint64((1 << HALF) - 1), 0)):
        sums = np.bincount(exponent, weights=part)
        for e in np.flatnonzero(sums).tolist():
            total += int(sums[e]) << shift + 2 * max(e, 1) - 2
    return total


def to_bytes(total: int) -> bytes:
    """A sum as it travels."""
    return min(total, NOT_FINITE).to_bytes(NBYTES, "little")


def root(sums: Iterable[bytes]) -> float:
    """The square root of what such sums come to, rounded once to float64 and once more; NaN where one is not finite."""
    total = sum(int.from_bytes(one, "little") for one in sums)
    return math.nan if total >= NOT_FINITE else math.sqrt(total / (1 << UNIT_BITS))
