"""What a program that trains holds on one rank at its step's fullest moment: all of it, row by row, each with a source.

Legend: N ranks; P parameters, S those of a rank's shard; G elements of a unit. A unit of PyTorch's FSDP2 is each block,
and one of all that is in no block (the root, which stays gathered from forward to the end of backward).

A step has few moments that can be the fullest: the loss, in whose backward logits are held three times in fp32; of each
block's backward the network's, when nearly all that is kept of the block still is, and the first norm's, when all its
gradients are made; the reduction of the root; the update. The account is of the one that holds most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from zerosim.models.transformer import Transformer
from zerosim.numerics.checks import FP32, checked_count
from zerosim.numerics.places import DEVICE
from zerosim.optim import Optimizer, state_nbytes
from zerosim.planning.closed_forms import Job
from zerosim.planning.conventions import is_cut_anywhere, shares_nbytes
from zerosim.planning.hardware import OVERHEADS, overheads_nbytes
from zerosim.planning.saved_tensors import saved, saved_nbytes
from zerosim.planning.shapes import ModelShape, TensorShape, UnitShape

RUNTIMES = ("fsdp2", "deepspeed", "megatron", "zerosim")
RECOMPUTED = ("none", "selective", "block")
FSDP2 = "PyTorch 2.13, torch.distributed.fsdp._fully_shard (2026)"
TABLE = "saved_tensors.toml: torch 2.13, transformers 5.24, measured by benchmarks/torch_saved_tensors.py (2026-11)"
TITAN = "torchtitan, activation_checkpoint.py (2025): fused attention, and every second product without a bias"
LOSS = "transformers 5.24, loss_utils.py: logits in fp32; log-probabilities, their gradient and the logits' in fp32"
ALLOCATOR = "PyTorch, CUDACachingAllocator.cpp: 512 bytes, and 2 MiB from 10 MiB on (2024)"


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one thing on one rank, and where the number comes from; `kind` is one of the columns of a plan."""

    kind: str
    what: str
    nbytes: int
    source: str
    place: str = DEVICE


Moment = list[Held]


def total_nbytes(rows: Iterable[Held], place: str = DEVICE) -> int:
    """Bytes of all rows of a place together."""
    return sum(row.nbytes for row in rows if row.place == place)


def account(runtime: str, model: ModelShape, job: Job, *, batch: int, tokens: int, recompute: str,
            optimizer: Optimizer, compiled: bool = False, loss_chunks: int = 1, synchronized: bool = True,
            overheads: Mapping[str, int] | None = None) -> tuple[Held, ...]:
    """The rows of a rank's fullest moment.

    ``recompute`` is "none", "block", all blocks checkpointed, or "selective", with torchtitan's list of operators.
    ``compiled`` blocks, by torch.compile, make more again by themselves. ``loss_chunks`` parts of the tokens have their
    logits one after the other. Of several micro-batches gradients are reduced each time, or, not ``synchronized``, add
    up whole on each rank. ``overheads`` replace those of `hardware.OVERHEADS`, whose fragmentation is a plan's margin.
    Without a decoder's sizes activations and logits are no rows.
    Raises ValueError for an unknown runtime or recomputation, and counts below one.
    """
    if runtime not in MOMENTS:
        raise ValueError(f"runtime={runtime!r} has no account here; there are {', '.join(MOMENTS)}"
                         + ("; what zerosim's own engine holds is counted by its plan" if runtime == "zerosim" else ""))
    if recompute not in RECOMPUTED:
        raise ValueError(f"recompute={recompute!r} is none that {runtime} has; it has {', '.join(RECOMPUTED)}")
    step = Step(model, job, checked_count("batch", batch, 1) * checked_count("tokens", tokens, 1), recompute, optimizer,
                compiled, checked_count("loss_chunks", loss_chunks, 1), synchronized)
    fullest = max(MOMENTS[runtime](step), key=total_nbytes)
    return tuple(row for row in (*fullest, *_overheads(step, overheads)) if row.nbytes)


@dataclass(frozen=True)  # no slots: what is counted is counted once
class Step:
    """One step's sizes, of which each runtime makes its moments; bytes are those of a rank."""

    model: ModelShape
    job: Job
    positions: int
    recompute: str
    optimizer: Optimizer
    compiled: bool
    loss_chunks: int
    synchronized: bool

    @property
    def decoder(self) -> Transformer | None:
        """The sizes of a decoder, whose activations are known."""
        of = self.model.transformer
        return of if of is not None and not of.encoder_blocks else None

    @property
    def itemsize(self) -> int:
        """Bytes of what is computed with."""
        return self.job.policy.compute_dtype.itemsize

    @cached_property
    def blocks(self) -> Sequence[UnitShape]:
        """The units that are gathered and recomputed one by one."""
        return self.model.units if self.model.transformer is None else self.model.units[1:-1]

    @cached_property
    def root(self) -> Sequence[TensorShape]:
        """The tensors outside of blocks."""
        units = () if self.model.transformer is None else (self.model.units[0], self.model.units[-1])
        return [tensor for unit in units for tensor in unit.tensors]

    def padded(self, tensors: Iterable[TensorShape]) -> int:
        """Elements with each tensor's rows padded to a multiple of the ranks that have a shard of it."""
        shards = self.job.shards
        return sum(-(-(rows := _rows(tensor)) // shards) * shards * (tensor.parameters // rows) for tensor in tensors)

    @cached_property
    def lengths(self) -> list[int]:
        """Padded elements of each block."""
        return [self.padded(unit.tensors) for unit in self.blocks]

    # -- activations --------------------------------------------------------------------------------------------------

    def saved(self, part: str) -> int:
        """Bytes that a part of the model keeps without checkpointing."""
        if self.decoder is None:
            return 0
        return saved_nbytes(self.decoder, part, self.positions, self.itemsize, compiled=self.compiled)

    @cached_property
    def block(self) -> int:
        """Bytes that a block keeps while it goes back."""
        return self.saved("attention") + self.saved("feed_forward") + (self.recompute != "none") * self.stream

    @property
    def stream(self) -> int:
        """Bytes of what flows from block to block."""
        return 0 if self.decoder is None else self.positions * self.decoder.channels * self.itemsize

    @cached_property
    def kept(self) -> int:
        """Bytes that a block keeps from forward to its own backward."""
        if self.recompute == "none" or self.decoder is None:
            return self.block
        return self.stream + (self.recompute == "selective") * self.positions * selected_nbytes(self.decoder,
                                                                                               self.itemsize)

    @property
    def in_network(self) -> int:
        """Bytes of gradients of activations that the network's backward adds to what the block keeps."""
        if self.decoder is None:
            return 0
        return (1 + self.decoder.gated) * self.positions * self.decoder.feed_forward * self.itemsize + 2 * self.stream

    @property
    def in_norm(self) -> int:
        """Bytes that the backward of a block's first norm works in: of RMSNorm in eager mode seven copies in fp32."""
        if self.decoder is None or self.decoder.layer_norm or self.compiled:
            return 4 * self.stream
        return 7 * self.positions * self.decoder.channels * FP32.itemsize

    @property
    def logits(self) -> int:
        """Bytes of logits and their gradients in the loss' backward, of one chunk."""
        return 0 if self.decoder is None else 3 * FP32.itemsize * self.decoder.vocabulary * -(-self.positions
                                                                                              // self.loss_chunks)

    # -- states -------------------------------------------------------------------------------------------------------

    @cached_property
    def elements(self) -> int:
        """Padded elements of the whole model."""
        return sum(self.lengths) + self.padded(self.root)

    def optimizer_nbytes(self, sharded: bool) -> int:
        """Bytes of the optimizer's own state."""
        itemsize, shards = self.job.policy.state_dtype.itemsize, self.job.shards if sharded else 1
        if is_cut_anywhere(self.optimizer):
            return state_nbytes(self.optimizer, (self.elements // shards,), itemsize)
        shapes = [tensor.shape for tensor in self.model.tensors]
        return max(nbytes for _, nbytes in shares_nbytes(self.optimizer, shapes, shards, itemsize))


def _rows(tensor: TensorShape) -> int:
    """The first dimension of the tensor as PyTorch has it: of a linear layer, whose shape is (inputs, outputs) here, the
    outputs."""
    return tensor.shape[-1] if tensor.name.endswith(".weight") else tensor.shape[0]


def selected_nbytes(of: Transformer, itemsize: int) -> int:
    """Bytes of a token that torchtitan's selective checkpointing keeps of a block, beside the block's input."""
    queries, keys = of.query_channels, of.key_channels
    opening = [queries + 2 * keys] if of.fused else [queries, keys, keys]
    network = [(1 + of.gated) * of.feed_forward] if of.fused else [of.feed_forward] * (1 + of.gated)
    products = [*opening * ("qkv" not in of.biases), *[of.channels] * ("projection" not in of.biases),
                *[*network, of.channels] * ("feed_forward" not in of.biases)]
    return (queries + sum(products[::2])) * itemsize + of.heads * FP32.itemsize


# -- PyTorch: FSDP2, and DDP ------------------------------------------------------------------------------------------


def _fsdp2(step: Step) -> Iterator[Moment]:
    states, shards, whole, fp32 = step.job.states, step.job.shards, step.itemsize, FP32.itemsize
    lengths, root, last = step.lengths, step.padded(step.root), len(step.lengths) - 1
    again = step.job.micro_batches > 1
    stays = not states.parameters_sharded
    head = 0 if step.decoder is None else step.decoder.vocabulary * step.decoder.channels

    def moment(activations: int, *, logits: int = 0, reduced: int = 0, made: int = 0, gathered: int = 0,
               ahead: int = 0, scattered: int = 0, work: int = 0) -> Moment:
        """Elements of gradients `reduced` and `made`, of units `gathered`, gathered `ahead`, being `scattered`."""
        return [
            Held("parameters", "shards in fp32", step.elements // shards * fp32, FSDP2),
            Held("optimizer", "state of the shards", step.optimizer_nbytes(True), "the optimizer's own slots"),
            Held("gradients", "shards in fp32", (step.elements if again else reduced) // shards * fp32, FSDP2),
            Held("gradients", "of a unit, whole", made * whole, FSDP2),
            Held("activations", "kept for backward", activations, TITAN if step.recompute == "selective" else TABLE),
            Held("activations", "made in backward", work, "torch 2.13, operators of autograd (2026)"),
            Held("logits", "in fp32, three times", logits, LOSS),
            Held("gathered", "units, whole", gathered * whole, FSDP2),
            Held("buckets", "all-gather of the next unit", ahead * whole, FSDP2),
            Held("buckets", "input of the last reduce-scatter, fp32", scattered * fp32, FSDP2),
        ]

    def kept(blocks: int) -> int:
        return blocks * step.kept

    everything = kept(last + 1) + step.saved("head")
    yield moment(everything, logits=step.logits, gathered=root + stays * sum(lengths),
                 ahead=0 if stays else lengths[last])
    for block in sorted({0, min(1, last), max(last - 1, 0), last}):
        now = {"reduced": sum(lengths[block + 1:]), "ahead": lengths[block - 1] if block and not stays else 0,
               "gathered": root + (sum(lengths[:block + 1]) if stays else lengths[block]),
               "scattered": lengths[block + 1] if block < last else 0}
        down = 0 if step.decoder is None else step.decoder.feed_forward * step.decoder.channels
        yield moment(kept(block) + step.block, made=head + down, work=step.in_network, **now)
        yield moment(kept(block), made=head + lengths[block], work=step.in_norm, **now)
    tied = head * bool(step.model.tied)
    yield moment(0, reduced=sum(lengths), made=root + tied, gathered=root, scattered=lengths[0])
    yield moment(0, reduced=step.elements, made=root, scattered=root)
    yield moment(0, reduced=step.elements)


MOMENTS: Mapping[str, Callable[[Step], Iterator[Moment]]] = {"fsdp2": _fsdp2}


# -- what a process holds beside its tensors --------------------------------------------------------------------------


def _overheads(step: Step, given: Mapping[str, int] | None) -> Iterator[Held]:
    """The runtime's own memory; a margin, and no row, is what fragmentation takes."""
    for name, nbytes in overheads_nbytes(given).items():
        alone = name == "communication channels" and step.job.ranks == 1
        if name != "allocator fragmentation" and not alone:
            yield Held("overhead", name, nbytes, OVERHEADS[name].source)
    yield Held("overhead", "allocator's rounding", _rounded(step), ALLOCATOR)


def _rounded(step: Step) -> int:
    """Bytes by which blocks of memory are larger than the tensors in them that blocks keep."""
    if step.decoder is None or step.recompute != "none":
        return 0
    tensors = [one.nbytes(step.decoder, step.positions, step.itemsize) for part in ("attention", "feed_forward")
               for one in saved(step.decoder, part, compiled=step.compiled)]
    return step.decoder.blocks * sum(-nbytes % (2 << 20 if nbytes >= 10 << 20 else 512) for nbytes in tensors)
