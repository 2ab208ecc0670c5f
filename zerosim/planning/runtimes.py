"""Everything that a program that trains holds on one rank at its step's fullest moment, row by row, with sources.

Legend: N ranks. What is in no block, the embedding and the head, is the root.

A step has few moments that can be its fullest: the loss, in whose backward logits and their gradients are held; of a
block's backward the network's, when nearly all that the block keeps still is, the attention's, and the first norm's,
when all gradients of the block are made; the root's reduction; the update. Of blocks the first and the last two to go
back decide. What a runtime holds is said of any such `Moment`, and the account is of the one that holds most.

Each runtime runs as its documentation starts it: PyTorch's FSDP2 with fp32 shards, computing in bf16 (stage 3; 2 is
`reshard_after_forward=False`), PyTorch's DDP under autocast (stage 0; 1 is with ZeroRedundancyOptimizer), DeepSpeed
with its defaults in bf16, Megatron Core with its distributed optimizer (stage 1; 0 is without).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from zerosim.models.transformer import Transformer
from zerosim.numerics.checks import FP32, checked_count, did_you_mean, unknown_name
from zerosim.numerics.places import DEVICE, HOST
from zerosim.optim.promises import Stateful, state_nbytes
from zerosim.planning.closed_forms import Job
from zerosim.planning.conventions import is_cut_anywhere, shares_nbytes
from zerosim.planning.hardware import OVERHEADS_OF
from zerosim.planning.saved_tensors import (
    COMPILED,
    EAGER,
    MEGATRON,
    PARTS,
    Forward,
    block_of,
    saved,
    saved_nbytes,
    weights_of,
)
from zerosim.planning.shapes import ModelShape, TensorShape

RUNTIMES = FSDP2, DEEPSPEED, MEGATRON_CORE, ZEROSIM = ("fsdp2", "deepspeed", "megatron", "zerosim")
RECOMPUTED = NONE, SELECTIVE, BLOCK = ("none", "selective", "block")  # policies of recomputation
HALVES = ("attention", "feed_forward")

BY_FSDP2 = "PyTorch 2.13, torch/distributed/fsdp/_fully_shard (2026)"
BY_DDP = "PyTorch 2.13, DistributedDataParallel, ZeroRedundancyOptimizer and autocast (2026)"
BY_DEEPSPEED = "DeepSpeed 0.19.8, runtime/zero, counted in its processes; sizes of config.py (2026-11)"
BY_MEGATRON = "Megatron Core, dist_optimizer.md: 6 + 12/d bytes with bf16, optimizer/param_layout.py (2026)"
BY_OPTIMIZER = "what the optimizer declares of what it is handed"
KEPT = "saved_tensors.toml: torch 2.13, transformers 5.24, measured 2026-11"
KEPT_SELECTED = "torchtitan, activation_checkpoint.py, SelectiveAC (2026-06): outputs of its list of operators"
KEPT_BY_MEGATRON = "Korthikanti et al. 2022, section 4.1; Megatron Core, fusions (2026), with fused attention"
MADE = "PyTorch 2.13, operators of autograd's backward (2026)"
LOSS = "transformers 5.24, loss_utils.py: log-probabilities, their gradient and the logits', in fp32 (2026)"
LOSS_OF_MEGATRON = "Megatron Core, tensor_parallel/cross_entropy.py: logits, and their softmax in fp32 (2026)"
DEQUANTIZED = "Dettmers et al. 2023 (QLoRA), section 3: weights are dequantized for each product"
ALLOCATOR = "PyTorch, c10/cuda/CUDACachingAllocator.cpp: 512 bytes, and 2 MiB from 10 MiB on (2026-01)"

# DeepSpeed's defaults, in elements: runtime/zero/config.py, version 0.19.8 (2026).
REDUCE_BUCKET, PREFETCH_BUCKET, PERSISTENCE_THRESHOLD = 500_000_000, 50_000_000, 100_000
MOST_LIVE, SUB_GROUP = 1_000_000_000, 1_000_000_000


class AccountRow(NamedTuple):
    """Bytes of one thing on one rank, and where the number comes from; `kind` is one of the columns of a plan."""

    kind: str
    what: str
    nbytes: int
    source: str
    place: str = DEVICE


def total_nbytes(rows: Iterable[AccountRow], place: str = DEVICE) -> int:
    """Bytes of all rows of a place together."""
    return sum(row.nbytes for row in rows if row.place == place)


def account(runtime: str, model: ModelShape, job: Job, *, batch: int, tokens: int, recompute: str,
            optimizer: Stateful, compiled: bool = False, loss_chunks: int = 1,
            platform: str = "cuda") -> tuple[AccountRow, ...]:
    """The rows of a rank's fullest moment, each above 0.

    ``recompute`` is "none", "block", with all blocks checkpointed, or "selective", by torchtitan's list of operators
    (Megatron's is of attention alone, which a fused kernel does anyway). ``compiled`` blocks, by torch.compile, make
    again what they can. ``loss_chunks`` parts of the tokens have their logits one after the other. Of several
    micro-batches gradients are reduced each time. What the program takes for itself is of the device's ``platform``.
    Without the sizes of a decoder, activations and logits are no rows.
    Raises ValueError for a runtime or a recomputation that there is not, counts below one, and for stages that a
    runtime lacks.
    """
    if runtime not in MOMENTS:
        raise ValueError(f"no account of runtime={runtime!r} is made; there are {', '.join(MOMENTS)}" + (
            ", and what zerosim's own engine holds its plan counts" if runtime == ZEROSIM else
            did_you_mean(runtime, MOMENTS)))
    if recompute not in RECOMPUTED:
        raise unknown_name(f"recompute={recompute!r} is none that {runtime} has", recompute, RECOMPUTED, "there are")
    ddp = runtime == FSDP2 and not job.states.gradients_sharded
    if runtime == MEGATRON_CORE and job.states.gradients_sharded:
        raise ValueError("megatron shards the optimizer's state and no gradients or parameters, and stage 2 or 3 was "
                         "asked for; take stage 0 or 1, or fsdp2")
    itemsize = job.policy.compute_dtype.itemsize
    keeper = MEGATRON if runtime == MEGATRON_CORE else COMPILED if compiled else EAGER
    run = Forward(checked_count("batch", batch, 1), checked_count("tokens", tokens, 1), itemsize,
                  FP32.itemsize if ddp else itemsize, keeper)
    cut = job.states.parameters_sharded
    multiple = {FSDP2: int(ddp), DEEPSPEED: job.shards if cut else 1, MEGATRON_CORE: 64}[runtime]
    step = StepSizes(model, job, run, recompute, optimizer, checked_count("loss_chunks", loss_chunks, 1), multiple)
    holds = _ddp if ddp else MOMENTS[runtime]
    fullest = max((list(holds(step, moment)) for moment in step.moments()), key=total_nbytes)
    return tuple(row for row in (*fullest, *_overheads(step, platform)) if row.nbytes)


class Moment(NamedTuple):
    """A moment of backward, or the update: bytes of activations and of whole parameters, elements of gradients.

    `kept` are activations kept for backward, all of them of so many blocks `uncut`, `made` what backward makes of them,
    `logits` theirs. Parameters are those of the block that goes back, `here`, of the next ones to go, `ahead`, of all
    that have not gone, `left`, and of the `root`. Of gradients whole blocks' are `done`, a block's and the root's
    `begun`, the last block's `behind`; at the end the root is `reduced`.
    """

    kept: int = 0
    made: int = 0
    logits: int = 0
    uncut: int = 0
    here: int = 0
    ahead: int = 0
    left: int = 0
    root: int = 0
    done: int = 0
    begun: int = 0
    behind: int = 0
    reduced: int = 0


@dataclass(frozen=True, eq=False)  # no slots: what is counted is counted once
class StepSizes:
    """The sizes of a step, of which `moments` are made."""

    model: ModelShape
    job: Job
    run: Forward
    recompute: str
    optimizer: Stateful
    loss_chunks: int
    multiple: int = 0  # of elements that a tensor is padded to; 0: of rows, as many as FSDP2's shards

    @property
    def decoder(self) -> Transformer | None:
        """The sizes of a decoder, whose activations are known."""
        of = self.model.transformer
        return of if of is not None and not of.encoder_blocks else None

    # -- parameters ---------------------------------------------------------------------------------------------------

    def padded(self, tensor: TensorShape) -> int:
        """Elements, with padding."""
        unit = self.multiple or self.job.shards * (tensor.parameters // tensor.shape[_outer(tensor)])
        return -(-tensor.parameters // unit) * unit

    def nbytes(self, tensors: Iterable[TensorShape], itemsize: int = 0) -> int:
        """Padded bytes in the compute format; of trained ones with `itemsize` each, if that is said."""
        return sum(tensor.nbytes(self.run.itemsize if tensor.frozen or not itemsize else itemsize, self.padded(tensor))
                   for tensor in tensors)

    @lru_cache(8)  # noqa: B019  # of each moment the same
    def whole_nbytes(self, itemsize: int = 0) -> int:
        """Padded bytes of all parameters."""
        return self.nbytes(self.root, itemsize) + sum(self.model.of_blocks(
            lambda place: self.nbytes(self.model.blocks[place].tensors, itemsize)))

    def trained(self, tensors: Iterable[TensorShape]) -> int:
        """Padded elements that have gradients and state of the optimizer."""
        return sum(self.padded(tensor) for tensor in tensors if not tensor.frozen)

    @cached_property
    def small(self) -> int:
        """Elements of the tensors that DeepSpeed keeps whole."""
        return sum(tensor.parameters for tensor in self.model.tensors if tensor.parameters <= PERSISTENCE_THRESHOLD)

    @cached_property
    def weights(self) -> list[int]:
        """Bytes of each block's parameters, whole."""
        return self.model.of_blocks(lambda place: self.nbytes(self.model.blocks[place].tensors))

    @cached_property
    def gradients(self) -> list[int]:
        """Elements of each block's gradients."""
        return self.model.of_blocks(lambda place: self.trained(self.model.blocks[place].tensors))

    @property
    def root(self) -> list[TensorShape]:
        """The tensors outside of blocks."""
        units = () if self.model.transformer is None else (self.model.units[0], self.model.units[-1])
        return [tensor for unit in units for tensor in unit.tensors]

    @cached_property
    def elements(self) -> int:
        """Elements of all gradients."""
        return sum(self.gradients) + self.trained(self.root)

    @lru_cache(8)  # noqa: B019  # of each moment the same
    def optimizer_nbytes(self, sharded: bool, whole: bool = False, flat: bool = False) -> int:
        """Bytes of the optimizer's own state; of `whole` tensors where it is not cut inside of them.

        One that is not cut anywhere is handed, where gradients are sharded, a shard of each tensor along its first
        dimension; `flat`, unless it is of matrices, a share of all elements as one vector.
        """
        itemsize, shards = self.job.policy.state_dtype.itemsize, self.job.shards if sharded else 1
        if (is_cut_anywhere(self.optimizer) and not whole) or (flat and self.optimizer.cut == "tensor"):
            return state_nbytes(self.optimizer, (self.elements // shards,), itemsize)
        tensors = [tensor for tensor in self.model.tensors if not tensor.frozen]
        if self.job.states.gradients_sharded:
            return sum(state_nbytes(self.optimizer, _shard(tensor, shards), itemsize) for tensor in tensors)
        shapes = [tensor.shape for tensor in tensors]
        return max(nbytes for _, nbytes in shares_nbytes(self.optimizer, shapes, shards, itemsize))

    # -- activations --------------------------------------------------------------------------------------------------

    def block(self, index: int) -> Transformer | None:
        """The sizes of one block."""
        of = self.decoder
        return of if of is None or of.experts is None else block_of(of, index)

    @cached_property
    def halves(self) -> list[dict[str, int]]:
        """Bytes that each half of each block keeps, when nothing is made again, what is beside the table among them."""
        def halves(place: int) -> dict[str, int]:
            of, tensors = self.block(place), self.model.blocks[place].tensors
            return {half: 0 if of is None else saved_nbytes(of, half, self.run, weights_of(tensors))
                    + self.beside_table(of, half, tensors) for half in HALVES}

        return self.model.of_blocks(halves)

    def beside_table(self, of: Transformer, half: str, tensors: Iterable[TensorShape]) -> int:
        """Bytes that a half keeps of its adapters, between their matrices, and of a window shorter than the sequences:
        transformers hands SDPA a mask, of which L x L are kept in the compute format, and keys and values repeated for
        all heads (both measured as the table is); of all blocks the mean."""
        tokens, each = self.run.tokens, self.run.batch * self.run.tokens
        ranks = sum(one.shape[-1] for one in tensors if one.name.endswith("lora_a.weight")
                    and PARTS[one.name.partition(".")[0]] == half)
        masked = half == "attention" and of.window < tokens and "attention" not in of.caps and self.run.by != MEGATRON
        repeated = of.query_channels - of.key_channels + of.attention_channels - of.value_channels
        mask = masked * of.windowed * (tokens**2 + each * repeated) // of.blocks
        return self.run.itemsize * (each * ranks + mask)

    @cached_property
    def stream(self) -> int:
        """Bytes of what flows from block to block."""
        elements = 0 if self.decoder is None else self.run.batch * self.run.tokens * self.decoder.channels
        return elements * self.run.nbytes_each("stream")

    @cached_property
    def reached(self) -> int:
        """The first block that backward gets to: none before what is trained, but checkpointed ones are all run."""
        first = any(not tensor.frozen for tensor in self.model.units[0].tensors) or self.recompute != NONE
        return 0 if first else next((index for index, sums in enumerate(self.gradients) if sums), len(self.gradients))

    @cached_property
    def kept(self) -> list[int]:
        """Bytes that each block keeps from forward to its own backward."""
        if self.recompute == NONE or (self.recompute == SELECTIVE and self.run.by == MEGATRON):
            return [sum(halves.values()) * (index >= self.reached) for index, halves in enumerate(self.halves)]
        return self.model.of_blocks(lambda place: self.stream + self.selected(self.block(place)))

    def selected(self, of: Transformer | None) -> int:
        """Bytes that torchtitan's selective checkpointing keeps of a block, beside its input.

        That is what attention gives, each product with a bias, and every second one without; of experts none.
        """
        if of is None or self.recompute != SELECTIVE:
            return 0
        width = of.feed_forward if of.experts is None else of.experts.shared
        inside = [(1 + of.gated) * width] if of.fused else [width] * (1 + of.gated)
        products = {"qkv": [made for _, made in of.opening.values()], "projection": [of.channels],
                    "feed_forward": [*inside, of.channels] * (width > 0)}
        plain = [made for layer, outputs in products.items() if layer not in of.biases for made in outputs]
        numbers = of.attention_channels + sum(plain[::2]) + sum(sum(products[layer]) for layer in of.biases)
        of_heads = self.run.tokens * self.run.itemsize if "attention" in of.caps else FP32.itemsize
        return self.run.batch * self.run.tokens * (numbers * self.run.itemsize + of.heads * of_heads)

    def made(self, index: int) -> dict[str, int]:
        """Bytes that backward makes at its fullest in a block's halves, and in its first norm, beside what is kept.

        In the network the gradients of what its activation reads and gives; in attention those of its inputs, of
        eager softmax two copies in fp32; in RMSNorm in eager mode seven copies in fp32.
        """
        of = self.block(index)
        if of is None:
            return dict.fromkeys((*HALVES, "norm"), 0)
        each, tokens = self.run.itemsize, self.run.batch * self.run.tokens
        scores = 6 * of.heads * self.run.tokens if "attention" in of.caps else 0
        seven = self.run.by == EAGER and not of.layer_norm
        return {"feed_forward": (1 + of.gated) * tokens * of.feed_forward * each + 2 * self.stream,
                "attention": tokens * (scores + 2 * of.query_channels * each) + 2 * self.stream,
                "norm": 7 * tokens * of.channels * FP32.itemsize if seven else 4 * self.stream}

    @cached_property
    def rounded(self) -> int:
        """Bytes by which memory is larger than the tensors kept of a block in it, when nothing is made again."""
        tensors = [] if self.decoder is None or self.recompute != NONE else [
            one.nbytes(self.decoder, self.run) for half in HALVES for one in saved(self.decoder, half, self.run.by)]
        return sum(-nbytes % (2 << 20 if nbytes >= 10 << 20 else 512) for nbytes in tensors)

    # -- moments ------------------------------------------------------------------------------------------------------

    def moments(self) -> Iterator[Moment]:
        """The moments that may be the fullest, in the order of backward; the last is the update's."""
        weights, sums, last, of = self.weights, self.gradients, len(self.model.blocks) - 1, self.decoder
        ahead = max(1, self.job.options.prefetch)  # FSDP2 gathers one in backward unless more is asked for
        root, outside = self.nbytes(self.root), self.trained(self.root)
        kept_of_ends = kept_of_logits = head = 0
        if of is not None:
            head = min(outside, of.vocabulary * of.channels)  # its gradient is made first
            kept_of_ends = saved_nbytes(of, "head", self.run, weights_of(self.root))
            each = 6 if self.run.by == MEGATRON else 3 * FP32.itemsize
            capped = self.run.itemsize * ("logits" in of.caps)
            kept_of_logits = -(-self.run.batch * self.run.tokens // self.loss_chunks) * of.vocabulary * (each + capped)
        chunked = self.loss_chunks > 1  # adds up the head's gradient
        loss = Moment(sum(self.kept) + kept_of_ends, 2 * self.stream * chunked, kept_of_logits, last + 1 - self.reached,
                      ahead=sum(weights[-ahead:]), left=sum(weights), root=root, begun=head * chunked)
        yield from (loss, loss._replace(logits=0, begun=2 * head * chunked))
        for index in sorted({*range(last + 1)} & {self.reached, self.reached + 1, last - 1, last}):
            at = Moment(uncut=index - self.reached, here=weights[index], left=sum(weights[:index + 1]), root=root,
                        ahead=sum(weights[max(0, index - ahead):index]), done=sum(sums[index + 1:]),
                        behind=sums[index + 1] if index < last else 0)
            before, halves, made = sum(self.kept[:index]), self.halves[index], self.made(index)
            inside = before + self.stream * (self.recompute != NONE)
            here = self.model.blocks[index].tensors
            network = self.trained(tensor for tensor in here if tensor.name.startswith("ffn"))
            down = self.trained(tensor for tensor in here if ".down." in tensor.name)
            yield at._replace(kept=inside + sum(halves.values()), made=made["feed_forward"], begun=head + down,
                          uncut=at.uncut + 1)
            yield at._replace(kept=inside + halves["attention"], made=made["attention"], begun=head + network)
            yield at._replace(kept=before, made=made["norm"], begun=head + sums[index])
        tied = head * bool(self.model.tied)
        yield Moment(root=root, done=sum(sums), begun=outside + tied, behind=sums[0])
        yield Moment(done=sum(sums), begun=outside, reduced=outside)
        yield Moment(done=self.elements)


def _outer(tensor: TensorShape) -> int:
    """The place of the first dimension as PyTorch has it: of a linear layer, here (inputs, outputs), the outputs'."""
    return -1 if tensor.name.endswith("weight") and len(tensor.shape) == 2 else 0


def _shard(tensor: TensorShape, shards: int) -> tuple[int, ...]:
    """The shape of a rank's shard along that dimension."""
    *shape, = tensor.shape
    shape[_outer(tensor)] = -(-shape[_outer(tensor)] // shards)
    return tuple(shape)


def _activations(step: StepSizes, at: Moment) -> Iterator[AccountRow]:
    megatron = step.run.by == MEGATRON
    source = KEPT_BY_MEGATRON if megatron else KEPT_SELECTED if step.recompute == SELECTIVE else KEPT
    yield AccountRow("activations", "kept for backward", at.kept, source)
    yield AccountRow("activations", "made in backward", at.made, MADE)
    yield AccountRow("logits", "of the loss and its backward", at.logits, LOSS_OF_MEGATRON if megatron else LOSS)
    yield AccountRow("overhead", "allocator's rounding", step.rounded * at.uncut, ALLOCATOR)


# -- PyTorch: FSDP2, and DDP ------------------------------------------------------------------------------------------


def _fsdp2(step: StepSizes, at: Moment) -> Iterator[AccountRow]:
    """All-gathers end in a buffer and are copied out; reduce-scatters read a buffer that is held until the next one."""
    shards, each, fp32 = step.job.shards, step.run.itemsize, FP32.itemsize
    offload, stays = step.job.options.offload, not step.job.states.parameters_sharded
    sums = step.elements if step.job.micro_batches > 1 else at.done + at.reduced
    shard = step.whole_nbytes(fp32) // shards
    yield AccountRow("parameters", "shards, trained ones in fp32", shard, BY_FSDP2, offload.parameters)
    yield AccountRow("optimizer", "state of the shards", step.optimizer_nbytes(True), BY_OPTIMIZER, offload.optimizer)
    yield AccountRow("gradients", "shards in fp32", sums // shards * fp32, BY_FSDP2, offload.gradients)
    yield AccountRow("gradients", "of blocks that go back, and the root's", at.begun * each, BY_FSDP2)
    yield AccountRow("gathered", "parameters of blocks", at.left if stays else at.here, BY_FSDP2)
    yield AccountRow("gathered", "parameters of the root", at.root, BY_FSDP2)
    yield AccountRow("buckets", "all-gather of the next block", 0 if stays else at.ahead, BY_FSDP2)
    yield AccountRow("buckets", "input of a reduce-scatter, in fp32", max(at.behind, at.reduced) * fp32, BY_FSDP2)
    yield from _activations(step, at)


def _ddp(step: StepSizes, at: Moment) -> Iterator[AccountRow]:
    """Parameters in fp32, cast by autocast where they are used; gradients beside the buckets that are reduced."""
    fp32, sharded = FP32.itemsize, step.job.states.optimizer_sharded
    made = max(at.done + at.begun, step.elements * (step.job.micro_batches > 1))
    yield AccountRow("parameters", "trained ones in fp32", step.whole_nbytes(fp32), BY_DDP)
    yield AccountRow("optimizer", "state", step.optimizer_nbytes(sharded, whole=True), BY_OPTIMIZER)
    yield AccountRow("gradients", "in fp32", made * fp32, BY_DDP)
    cast = min(at.left + at.root, step.elements * step.run.itemsize)  # frozen ones are in the compute format
    yield AccountRow("gathered", "parameters cast for their products", cast, BY_DDP)
    yield AccountRow("buckets", "of all gradients, in fp32", step.elements * fp32 * (step.job.ranks > 1), BY_DDP)
    yield from _activations(step, at)


# -- DeepSpeed, and Megatron Core -------------------------------------------------------------------------------------


def _deepspeed(step: StepSizes, at: Moment) -> Iterator[AccountRow]:
    """Parameters and gradients in the compute format, masters in fp32 with the optimizer's state.

    Stages 2 and 3 move a gradient into a bucket as it is made, 1 when backward is over, and what is in the bucket is
    copied to travel. It has its whole size in the smallest model too, twice where stages 1 and 2 overlap, and stage 3
    keeps it. The update flattens gradients and casts what is flat. With the optimizer off the device, gradients go to
    the host as they are reduced, in fp32 too, in stages 1 and 2 through a buffer of the largest tensor on each side.
    """
    states, shards, each, fp32 = step.job.states, step.job.shards, step.run.itemsize, FP32.itemsize
    options, again, elements = step.job.options, step.job.micro_batches > 1, step.elements
    offload, away = options.offload, options.offload.optimizer != DEVICE
    share, filled = elements // shards, at.done + at.begun
    cut, masters = states.parameters_sharded, share if states.optimizer_sharded else elements
    updates = at.done == elements
    runs = cut * (not updates)
    full = at.reduced or (states.gradients_sharded and filled >= REDUCE_BUCKET)
    travels = min(REDUCE_BUCKET, filled) if full and not updates and step.job.ranks > 1 else 0
    yield AccountRow("parameters", "in the compute format", step.whole_nbytes() // (shards if cut else 1),
                     BY_DEEPSPEED, offload.parameters)
    yield AccountRow("parameters", "small tensors, whole", runs * step.small * each, BY_DEEPSPEED)
    yield AccountRow("optimizer", "masters in fp32", masters * fp32, BY_DEEPSPEED, offload.optimizer)
    state = step.optimizer_nbytes(states.optimizer_sharded, flat=True)
    yield AccountRow("optimizer", "state", state, BY_OPTIMIZER, offload.optimizer)
    if states.gradients_sharded or (states.optimizer_sharded and updates):
        rests = share * (cut or again or (updates and not away)) or (not away) * at.done // shards
        place = HOST if away else DEVICE
        yield AccountRow("gradients", "shards in the compute format", rests * each, BY_DEEPSPEED, place)
    else:
        rests = max(filled, elements * again)
        if states.optimizer_sharded and travels:
            rests = max(rests - travels, share * (not away))
        yield AccountRow("gradients", "in the compute format", rests * each, BY_DEEPSPEED)
    updated = share if away else updates * (min(share, SUB_GROUP) if cut else masters)
    flat = states.optimizer_sharded * updated * (not away)
    yield AccountRow("gradients", "of the update, flat", flat * each, BY_DEEPSPEED)
    yield AccountRow("gradients", "of the update, in fp32", updated * fp32, BY_DEEPSPEED, offload.optimizer)
    if away and not cut:
        largest = max(step.trained([tensor]) for tensor in step.model.tensors)
        yield AccountRow("parameters", "updated, to be copied", share * each, BY_DEEPSPEED, HOST)
        yield AccountRow("buckets", "copy of the largest tensor's gradients", largest * each, BY_DEEPSPEED, HOST)
        yield AccountRow("buckets", "gradients of the largest tensor", largest * each, BY_DEEPSPEED)
    bucket = REDUCE_BUCKET * (1 if cut else (1 + options.overlap) * (states.optimizer_sharded and not updates))
    yield AccountRow("buckets", "of gradients to reduce", bucket * each, BY_DEEPSPEED)
    yield AccountRow("buckets", "gradients on their way", travels * each, BY_DEEPSPEED)
    live = max(at.here + at.root, min(MOST_LIVE * each, at.left + at.root))
    yield AccountRow("gathered", "parameters in use or soon to be", runs * live, BY_DEEPSPEED)
    ahead = runs * min(PREFETCH_BUCKET, elements) * (options.prefetch > 0)
    yield AccountRow("buckets", "parameters on their way", ahead * each, BY_DEEPSPEED)
    yield from _activations(step, at)


def _megatron(step: StepSizes, at: Moment) -> Iterator[AccountRow]:
    """Parameters in the compute format, one buffer of gradients in fp32 into which backward adds."""
    fp32, elements, sharded = FP32.itemsize, step.elements, step.job.states.optimizer_sharded
    masters = elements // (step.job.shards if sharded else 1)
    yield AccountRow("parameters", "in the compute format", step.whole_nbytes(), BY_MEGATRON)
    yield AccountRow("gradients", "in fp32", elements * fp32, BY_MEGATRON)
    place = step.job.options.offload.optimizer
    yield AccountRow("optimizer", "masters in fp32", masters * fp32, BY_MEGATRON, place)
    yield AccountRow("optimizer", "state", step.optimizer_nbytes(sharded), BY_OPTIMIZER, place)
    yield from _activations(step, at)


MOMENTS: Mapping[str, Callable[[StepSizes, Moment], Iterator[AccountRow]]] = {
    FSDP2: _fsdp2, DEEPSPEED: _deepspeed, MEGATRON_CORE: _megatron}


# -- what a process holds beside its tensors --------------------------------------------------------------------------


def times_held(job: Job) -> dict[str, int]:
    """Times that a program holds each overhead: channels for each communicator, of which hybrid sharding has two, of
    shards and of replicas, and one rank none; fragmentation is a plan's margin."""
    communicators = (job.ranks > 1) * (1 + (job.options.replicas > 1))
    return {"runtime context": 1, "communication channels": communicators, "matmul workspace": 1}


def _overheads(step: StepSizes, platform: str) -> Iterator[AccountRow]:
    """The runtime's own memory."""
    for name, times in times_held(step.job).items():
        found = OVERHEADS_OF[platform][name]
        yield AccountRow("overhead", name, times * found.least_nbytes, found.source)
    wide = max((tensor.parameters for tensor in step.model.tensors if tensor.bits), default=0) * step.run.itemsize
    yield AccountRow("gathered", "a quantized matrix, made wide for its product", wide, DEQUANTIZED)
