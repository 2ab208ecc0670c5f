"""The grader refuses who has the right values without the messages that bring them, and names what was left undone."""

from typing import ClassVar

import numpy as np
import pytest

from zerosim.course.puzzles.adapters import LENGTHS, grade_ddp, grade_fsdp, grade_sharded_optimizer
from zerosim.course.puzzles.expected import ring_sum
from zerosim.course.puzzles.solutions import FSDP, DataParallel, ShardedOptimizer, own_part
from zerosim.optim.base import UpdateContext


def in_a_rings_order(arrays):
    """The mean of one tensor over ranks, as a ring adds it up."""
    flat, ranks = [one.reshape(-1) for one in arrays], len(arrays)
    total = ring_sum(flat)
    total /= ranks
    return total.reshape(arrays[0].shape)


class SeeingDDP:
    """Reads what the others have in a dict that all ranks share."""

    shared: ClassVar = {}

    def __init__(self, rank, module):
        self.rank, self.module = rank, module
        self.shared[rank.index] = {name: w.copy() for name, w in module.parameters.items()}
        rank.barrier()
        for name, w in module.parameters.items():
            w[...] = self.shared[0][name]
        rank.barrier()

    def forward_backward(self, x, target):
        loss, own = self.module.forward_backward(x, target)
        self.shared[self.rank.index] = own
        self.rank.barrier()
        mean = {name: in_a_rings_order([self.shared[r][name] for r in range(self.rank.size)]) for name in own}
        self.rank.barrier()
        return loss, mean


class HalfSeeingDDP(SeeingDDP):
    """Begins like rank 0 by messages, and adds up without them."""

    def __init__(self, rank, module):
        self.rank, self.module = rank, module
        for parameter in module.parameters.values():
            rank.broadcast(parameter, out=parameter)


def test_who_broadcasts_and_then_adds_up_without_messages_is_refused():
    score = grade_ddp(HalfSeeingDDP)
    assert score.verdict == "refused", score
    length = sum(LENGTHS)
    assert f"sent {4 * length:,} bytes in all where {7 * 4 * length:,} have to travel" in score.sentence


class ReplicatedOptimizer:
    """Updates everything on every rank, with states that no ledger knows; only a shard's worth is charged."""

    def __init__(self, rank, parameters, optimizer):
        self.rank, self.parameters, self.optimizer, self.steps = rank, parameters, optimizer, 0
        self.state = {name: {slot: np.zeros(w.size, np.float32) for slot in optimizer.slots((w.size,))}
                      for name, w in parameters.items()}
        length = sum(w.size for w in parameters.values())
        self.charged = rank.memory.alloc(2 * -(-length // rank.size), np.float32, "optimizer_state")

    def step(self, gradients):
        self.steps += 1
        for name, w in self.parameters.items():
            self.optimizer.update(UpdateContext(self.rank.kernels), w.reshape(-1), gradients[name].reshape(-1),
                                  self.state[name], self.steps)


@pytest.mark.parametrize(("grade", "answer"), [
    (grade_ddp, SeeingDDP), (grade_sharded_optimizer, ReplicatedOptimizer)])
def test_who_has_the_right_values_without_their_messages_is_refused(grade, answer):
    score = grade(answer)
    assert score.verdict == "refused", score
    assert score.sentence.startswith("On N=2 the ranks sent 0 bytes in all where ")
    assert "have to travel: what one rank knows of another's data must come in a message" in score.sentence


def test_who_shards_but_passes_arrays_around_without_messages_is_refused():
    shared = {}

    class Seeing(FSDP):
        def __init__(self, rank, module, optimizer):
            super().__init__(rank, module, optimizer)
            self.rank = Hearsay(rank, shared)

    score = grade_fsdp(Seeing)
    assert score.verdict == "refused", score
    assert score.sentence.startswith("On N=2 the ranks sent 0 bytes in all where ")


class Hearsay:
    """A rank whose collectives read in a dict that all ranks share."""

    def __init__(self, rank, shared):
        self.rank, self.shared, self.calls = rank, shared, 0

    def __getattr__(self, name):
        return getattr(self.rank, name)

    def of_all(self, x):
        self.calls += 1
        self.shared[self.calls, self.rank.index] = x.copy()
        self.rank.barrier()
        return [self.shared[self.calls, r] for r in range(self.rank.size)]

    def reduce_scatter(self, x):
        return ring_sum(self.of_all(x))[own_part(self.rank, len(x))].copy()

    def all_gather(self, x, length):
        return np.concatenate(self.of_all(x))[:length]


class Stepping(DataParallel):
    """Does the optimizer's work too."""

    def forward_backward(self, x, target):
        loss, mean = super().forward_backward(x, target)
        for name, w in self.module.parameters.items():
            w -= mean[name]
        return loss, mean


def test_a_wrapper_that_updates_the_parameters_itself_is_told_so():
    assert grade_ddp(Stepping).sentence == (
        "On N=1 forward_backward changed module.parameters; return the mean gradients, with which the grader makes "
        "the update.")


def test_an_optimizer_that_does_nothing_is_told_so():
    class Lazy(ShardedOptimizer):
        def step(self, gradients):
            pass

    assert grade_sharded_optimizer(Lazy).sentence.startswith(
        "On N=1 after step 0 rank 0 has all parameters as they were before; nothing was updated: element [0, 0] of ")
