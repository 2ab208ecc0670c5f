"""Gradients from a unit's backward to the optimizer: where they are written, added up over micro-batches, and reduced.

Legend: n elements of the padded vector, s of this rank's shard, u of one padded unit; N ranks, k micro-batches.
Kept PARTIAL, the addends of all micro-batches are summed first and reduced once; kept SHARDED or REPLICATED, each
unit's gradient of each micro-batch is reduced as backward goes, then added. At k > 1 the two orders differ in bits.
"""

import numpy as np

from zerosim.numerics.arrays import may_share_memory
from zerosim.zero.buckets import Bucket, buckets, limit_of
from zerosim.zero.moves import Move, Parts, of_shard, of_whole
from zerosim.zero.placements import PARTIAL, SHARDED, Placement
from zerosim.zero.reduction import Agreement, Reduction
from zerosim.zero.states import Reduced, States, clear_padding


class Gradients:
    """One step's gradients of one rank, of one kin of trained parameters."""

    def __init__(self, states: States, *, bucket_nbytes: int | None, overlap: bool, agreement: Agreement) -> None:
        self.states, self.rank, self.policy, self.layout = states, states.rank, states.policy, states.layout
        self.placement, self.bucket_nbytes = states.stage.gradients, bucket_nbytes
        self.agreement = agreement
        self.micro_batch = 0
        self._reduction = Reduction(states, bucket_nbytes=bucket_nbytes, overlap=overlap, agreement=agreement)

    # -- during backward ----------------------------------------------------------------------------------------------

    def place(self, unit: str) -> np.ndarray:
        """Where a unit's backward writes (u,), in the compute dtype: where it rests, or new memory."""
        lies = self.layout.units[unit]
        if self._writes_at_rest:
            return self.states.gradient[lies]
        whole = self.rank.memory.alloc(lies.stop - lies.start, self.policy.compute_dtype, "unit_gradient", unit)
        padding = self.layout.padding(lies.start, lies.stop)
        if not self.rank.memory.debug:
            whole[padding.start - lies.start:] = 0
        return whole

    @property
    def _writes_at_rest(self) -> bool:
        """True where the first micro-batch's local gradient is what rests, format and all."""
        same_format = self.policy.accumulate_dtype == self.policy.compute_dtype
        return self.placement is PARTIAL and self.micro_batch == 0 and same_format

    def absorb(self, unit: str, whole: np.ndarray) -> None:
        """Takes a unit's gradient (u,): adds it to what rests, reduced first where it does not rest partial."""
        lies = self.layout.units[unit]
        if self.placement is not PARTIAL:
            self._reduction.add(lies, whole, self.micro_batch)
            return
        resting = self.states.gradient[lies]
        if self.micro_batch > 0:
            self.rank.kernels.add_rounded(resting, whole, resting)
        elif not may_share_memory(whole, resting):
            self.rank.kernels.cast_pack(whole, resting)

    def end_of_backward(self) -> None:
        """Reduces what waits in a bucket that is not full: no bucket has two micro-batches in it."""
        self._reduction.flush(self.micro_batch)
        self._reduction.finish()
        self.micro_batch += 1

    def reset(self) -> None:
        """Forgets this step's gradients: the next micro-batch is the first."""
        self.micro_batch = 0
        self._reduction.forget()

    # -- after backward -----------------------------------------------------------------------------------------------

    def reduce(self, scale: float, token_share: float) -> None:
        """Leaves the sum over ranks, as the optimizer needs it, in ``states.reduced``: at rest, or a new array.

        It is to be divided by S·N·k, and by the share of places that have a token.
        """
        divisor = self.policy.divisor(self.rank.size, self.micro_batch, scale) * token_share
        have, want = self.placement, self.states.stage.optimizer
        if have is want or (have is not PARTIAL and want is SHARDED):
            # The same, or the optimizer reads its slices of the replicated sum.
            self.states.reduced = Reduced(self.states.gradient, have, divisor)
            return
        out, dtype = self._target(want), self._moving_dtype
        ranges = [slice(region.low, region.high) for region in self.layout.regions]
        for bucket in buckets(self.layout, ranges, limit_of(self.bucket_nbytes, dtype.itemsize)):
            with self.rank.trace.span(self.layout.region_at(bucket.ranges[0].start).name):
                Move(self.states, bucket, have, want, source=self._parts(bucket, self.states.gradient, have),
                     target=self._parts(bucket, out, want), dtype=dtype, purpose="gradients",
                     agreement=self.agreement.at(self.micro_batch)).finish()
        self.states.reduced = Reduced(out, want, divisor)

    def _parts(self, bucket: Bucket, array: np.ndarray, placement: Placement) -> Parts:
        return of_shard(bucket, self.rank.index, array) if placement is SHARDED else of_whole(bucket, array)

    @property
    def _moving_dtype(self) -> np.dtype:
        """Addends travel in the reduce format, sums in that in which they rest."""
        return self.policy.reduce_dtype if self.placement is PARTIAL else self.states.gradient.dtype

    def _target(self, want: Placement) -> np.ndarray:
        """In place where an all-reduce can be; else a new array in the format that arrives."""
        dtype = self._moving_dtype
        if self.placement is PARTIAL and want is not SHARDED and dtype == self.states.gradient.dtype:
            return self.states.gradient
        out = self.rank.memory.alloc(self.states.length(want), dtype, "gradient", "reduced gradient")
        clear_padding(out, self.layout, want, self.rank)
        return out
