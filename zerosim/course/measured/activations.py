"""What a GPT keeps and computes under each recomputation policy, beside pencil's formulas."""

from dataclasses import dataclass
from typing import Any

from zerosim.course.measured.kinds import FLOWING
from zerosim.models.gpt import GPT, GPTConfig
from zerosim.numerics.policy import Policy
from zerosim.optim.elementwise import SGD
from zerosim.planning.activations import Block, fullest_nbytes, tensors
from zerosim.ranks.cluster import NullCluster
from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import Compute
from zerosim.zero.engine import Engine

# The arrays that a block keeps of its forward pass, in the order in which its layers make them, by pencil's names.
MADE_IN_ORDER = (*("LayerNorm 1 statistics",) * 2, "QKV", "attention output", "probabilities", "LayerNorm 2 input",
                 *("LayerNorm 2 statistics",) * 2, "pre-GELU", "post-GELU")


@dataclass(frozen=True, slots=True)
class MeasuredActivations:
    """One micro-batch of a GPT under a recomputation policy, on a rank without data, at stage 3.

    Bytes of activations, checkpointed inputs and their gradients: when forward ends, and at the fullest moment of all.
    ``flops`` are those of forward and backward.
    """

    policy: str
    kept_nbytes: int
    peak_nbytes: int
    flops: int


def measured_activations(block: Block, blocks: int, vocabulary: int, policy: str) -> MeasuredActivations:
    """Runs forward and backward of a GPT of such blocks in bf16, and reads the ledger; its peak is asserted to be
    pencil's to the byte."""
    gpt = GPT(GPTConfig(blocks, block.channels, block.heads, block.tokens, vocabulary))
    cluster = NullCluster(1)

    def program(rank: Rank) -> int:
        engine = Engine(rank, gpt, SGD(lr=0.1), stage=3, policy=Policy("bf16"), recompute=policy)
        tokens = rank.xp.empty((block.batch, block.tokens), "int64")
        tape = engine.forward(tokens, tokens)
        kept = sum(rank.memory.now_nbytes_by_kind.get(kind, 0) for kind in FLOWING)
        engine.backward(tape)
        return kept

    kept = cluster.run(program)[0]
    found = MeasuredActivations(policy, kept, cluster.memory[0].peak_nbytes_of(FLOWING), sum(
        row.flops for row in cluster.trace[0].rows if isinstance(row, Compute)))
    assert found.peak_nbytes == fullest_nbytes(block, blocks, vocabulary, policy), "the ledger differs from pencil"
    return found


def measured_tensors(block: Block) -> dict[str, int]:
    """Bytes of each tensor that one plain block holds after its forward pass, its input first, read from the ledger.

    They are asserted to be pencil's to the byte. Statistics of a LayerNorm are two arrays, and one line here.
    """
    cluster = NullCluster(1)
    gpt = GPT(GPTConfig(1, block.channels, block.heads, block.tokens, 1))

    def program(rank: Rank) -> Any:
        ctx = Engine(rank, gpt, SGD(lr=0.1), policy=Policy("bf16")).context()
        unit, x = gpt.units[1], ctx.empty((block.batch, block.tokens, block.channels), name="x")
        weights = {name: rank.xp.empty(shape, ctx.dtype) for name, shape in unit.shapes.items()}
        return x, unit.forward(ctx, weights, x)[1]  # its output is the next block's

    kept = cluster.run(program)
    found = dict.fromkeys(("LayerNorm 1 input", *MADE_IN_ORDER), 0)
    lives = [life for life in cluster.trace[0].lifetimes("activation") if life.died is None]
    assert len(kept) == 1  # as long as it is there, what was kept is held
    for name, life in zip(("LayerNorm 1 input", *MADE_IN_ORDER), lives, strict=True):
        found[name] += life.nbytes
    assert found == {name: one.nbytes for name, one in tensors(block).items()}, "the ledger differs from pencil"
    return found
