"""Peaks of Hugging Face decoders under PyTorch, by torch's own memory tracker, on tensors without data.

    python benchmarks/torch_peaks.py                          # the rows that are kept, computed again, by group
    python benchmarks/torch_peaks.py --groups ddp lora --models llama-3.2-1b

It needs PyTorch and `transformers` (and `peft` for LoRA); no GPU and no data. Models are built from the sizes of their
published configurations, on fake tensors, by 8 ranks of a fake process group: `fully_shard` of every decoder layer and
then of the whole, parameters gathered in bf16, gradients reduced in fp32, fp32 states, PyTorch's fused AdamW (the
default of `transformers.Trainer`), 2,048 tokens a sequence, the loss that the model computes of its labels, whose
outputs are not held. Stage 2 is `reshard_after_forward=False`, stage 0 DistributedDataParallel under autocast, stage 1
that with ZeroRedundancyOptimizer. What is counted is `torch.distributed._tools`' MemTracker's, of FSDP's kind where
there is FSDP: every storage that an operator makes, the second step's, when the optimizer has its states. Tensors are a
CPU's, whose fused attention saves the tensors that a GPU's saves: queries, keys, values, output and a log-sum-exp; what
an operator holds inside itself is not counted, on neither. With CPUOffloadPolicy what it puts on the host, shards of
parameters and gradients and the optimizer's states, is not counted. Blocks under torch.compile are run by
`torch_compiled.py`, on real tensors: of Inductor's code nothing shows without data.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch._functorch.partitioners import get_default_op_list
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import masking_utils

RANKS, TOKENS = 8, 2048


def llama(channels: int, blocks: int, heads: int, vocabulary: int, feed_forward: int, shared: int,
          **others: Any) -> dict[str, Any]:
    """The fields of a Llama's config, and of its relatives'."""
    return {"hidden_size": channels, "num_hidden_layers": blocks, "num_attention_heads": heads,
            "vocab_size": vocabulary, "intermediate_size": feed_forward, "num_key_value_heads": shared, **others}


# The sizes in the published config.json of each; by parameters.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": ("Qwen3", llama(1024, 28, 16, 151_936, 3072, 8, head_dim=128, tie_word_embeddings=True)),
    "llama-3.2-1b": ("Llama", llama(2048, 16, 32, 128_256, 8192, 8, head_dim=64, tie_word_embeddings=True)),
    "qwen2-1.5b": ("Qwen2", llama(1536, 28, 12, 151_936, 8960, 2, tie_word_embeddings=True)),
    "gemma-2-2b": ("Gemma2", llama(2304, 26, 8, 256_000, 9216, 4, head_dim=256)),
    "phi-2": ("Phi", llama(2560, 32, 32, 51_200, 10_240, 32, partial_rotary_factor=0.4)),
    "llama-3.2-3b": ("Llama", llama(3072, 28, 24, 128_256, 8192, 8, head_dim=128, tie_word_embeddings=True)),
    "mistral-7b": ("Mistral", llama(4096, 32, 32, 32_000, 14_336, 8)),
    "llama-3-8b": ("Llama", llama(4096, 32, 32, 128_256, 14_336, 8)),
    "mixtral-8x7b": ("Mixtral", llama(4096, 32, 32, 32_000, 14_336, 8, num_local_experts=8, num_experts_per_tok=2)),
    "qwen3-30b-a3b": ("Qwen3Moe", llama(2048, 48, 32, 151_936, 6144, 4, head_dim=128, num_experts=128,
                                        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True)),
    "qwen1.5-moe": ("Qwen2Moe", llama(2048, 24, 16, 151_936, 5632, 16, num_experts=60, num_experts_per_tok=4,
                                      moe_intermediate_size=1408, shared_expert_intermediate_size=5632)),
}
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe")
# transformers reads off the positions' values whether sequences are packed, and takes them to be where there are none.
masking_utils.find_packed_sequence_indices = lambda position_ids: None
EAGER = ("Gemma2",)  # its soft caps are outside SDPA, as transformers says

# The operators whose outputs torchtitan's selective checkpointing keeps (its SelectiveAC, activation_checkpoint.py,
# 2026-06), and of the matrix products without a bias every second one. The CPU's attention stands for a GPU's.
ATEN = torch.ops.aten
SAVED = {op.default for op in get_default_op_list().compute_intensive_ops} | {
    ATEN._scaled_dot_product_flash_attention_for_cpu.default, ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_attention_math.default, ATEN.max.default, ATEN.linear.default, ATEN.topk.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default}
PRODUCTS = {ATEN.mm.default, ATEN.linear.default}
ON_HOST = ("Sharded Param", "Sharded Grad", "OptState")


@dataclass(frozen=True)
class Run:
    """What is run: fields of a row."""

    model: str
    batch: int = 1
    checkpointing: str = "none"
    stage: int = 3
    micro_batches: int = 1
    offload: bool = False
    loss_chunks: int = 1
    lora: int = 0
    trained: str = ""  # of a model that is frozen but for these layers


def runs_of(*models: str, **options: Any) -> tuple[Run, ...]:
    """Runs of some models, with and without checkpointing."""
    return tuple(Run(model, checkpointing=how, **options) for model in models for how in ("none", "block"))


GROUPS: Mapping[str, tuple[Run, ...]] = {
    "fsdp2": tuple(Run(model, batch, how) for model in MODELS if model not in EXPERTS
                   for how in ("none", "block") for batch in (1, 4)),
    "selective": tuple(Run(model, checkpointing="selective") for model in (
        "qwen2-1.5b", "llama-3.2-3b", "phi-2", "gemma-2-2b", "qwen3-0.6b", "mistral-7b")),
    "stage 2": runs_of("qwen2-1.5b", "llama-3.2-1b", "mistral-7b", stage=2),
    "micro-batches": (*runs_of("qwen2-1.5b", micro_batches=2), Run("mistral-7b", 1, "block", micro_batches=2)),
    "ddp": (*runs_of("qwen3-0.6b", "llama-3.2-1b", "phi-2", "mistral-7b", stage=0), Run("qwen2-1.5b", 4, stage=0)),
    "zero-1": runs_of("qwen3-0.6b", "llama-3.2-1b", stage=1),
    "loss chunks": (*runs_of("mistral-7b", "llama-3-8b", loss_chunks=8), Run("llama-3-8b", 4, "block", loss_chunks=8)),
    "offload": runs_of("qwen2-1.5b", "llama-3-8b", "mistral-7b", offload=True),
    "lora": (*runs_of("qwen2-1.5b", "llama-3.2-1b", "mistral-7b", "llama-3-8b", "phi-2", lora=16),
             *runs_of("llama-3.2-1b", lora=16, stage=0)),
    "frozen": runs_of("mistral-7b", "llama-3-8b", trained="lm_head"),
    "experts": (*runs_of("mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe"), Run("mixtral-8x7b", 4),
                Run("qwen3-30b-a3b", 4)),
}


def selective() -> Any:
    """The contexts of one checkpointed layer: outputs of SAVED are kept, and of every second of PRODUCTS."""
    counts = {False: 0, True: 0}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = func in PRODUCTS
        counts[context.is_recompute] += product
        keep = func in SAVED and not (product and counts[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class ChunkedLoss(torch.autograd.Function):
    """The loss of some tokens' hidden states, whose logits are made in parts, and again in backward."""

    @staticmethod
    def of_part(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """The loss of a part."""
        return nn.functional.cross_entropy(nn.functional.linear(hidden, weight).float(), labels, reduction="sum")

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int) -> Tensor:
        """The loss alone."""
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunks = chunks
        parts = zip(hidden.chunk(chunks), labels.chunk(chunks), strict=True)
        return torch.stack([ChunkedLoss.of_part(part, weight, of) for part, of in parts]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients, each added up in one place."""
        hidden, weight, labels = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for part, targets, result in zip(*(one.chunk(ctx.chunks) for one in (hidden, labels, of_hidden)), strict=True):
            with torch.enable_grad():
                inputs = part.detach().requires_grad_(), weight.detach().requires_grad_()
                made = torch.autograd.grad(ChunkedLoss.of_part(*inputs, targets), inputs, gradient)
            result.copy_(made[0])
            of_weight.add_(made[1])
            del made
        return of_hidden, of_weight, None, None


class WithLoss(nn.Module):
    """A decoder that gives its loss."""

    def __init__(self, model: nn.Module, chunks: int) -> None:
        super().__init__()
        self.model, self.chunks = model, chunks

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of tokens that are their own labels."""
        if self.chunks == 1:
            return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        hidden = self.model.model(input_ids=tokens, use_cache=False)[0].flatten(0, 1)
        return ChunkedLoss.apply(hidden, self.model.lm_head.weight, tokens.flatten(), self.chunks)


def build(run: Run) -> WithLoss:
    """The model of a published configuration, in training, on the meta device."""
    kind, sizes = MODELS[run.model]
    config = getattr(transformers, f"{kind}Config")(**sizes, use_cache=False, pad_token_id=None)
    config._attn_implementation = "eager" if kind in EAGER else "sdpa"
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        if run.lora:
            import peft

            model = peft.get_peft_model(model.bfloat16(), peft.LoraConfig(
                r=run.lora, target_modules=["q_proj", "v_proj"])).base_model.model
        if run.trained:
            model.requires_grad_(False).bfloat16().get_submodule(run.trained).float().requires_grad_(True)
    model.train()
    if run.checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if run.checkpointing == "selective":
            for layer in model.model.layers:
                layer._gradient_checkpointing_func = lambda function, *given: checkpoint(
                    function, *given, use_reentrant=False, context_fn=selective)
    return WithLoss(model, run.loss_chunks)


def place(model: nn.Module) -> None:
    """Puts all tensors of a model on a CPU, tied ones once."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, one in held.items():
                if one is not None and one not in made:
                    new = torch.empty(one.shape, dtype=one.dtype)
                    made[one] = nn.Parameter(new, one.requires_grad) if isinstance(one, nn.Parameter) else new
                held[name] = None if one is None else made[one]


def shard(model: WithLoss, run: Run, mesh: DeviceMesh) -> None:
    """Shards every layer and then the whole; in stage 2 layers stay gathered after forward."""
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
           "offload_policy": CPUOffloadPolicy(pin_memory=False) if run.offload else OffloadPolicy()}
    for layer in model.model.model.layers:
        fully_shard(layer, reshard_after_forward=run.stage == 3, **how)
    fully_shard(model, **how)


class DeviceTracker(FSDPMemTracker):
    """FSDP's tracker, whose peaks are of what is not on the host."""

    def _update_peak_stats(self, peak_state: Any) -> None:
        for device, kinds in self._curr_mem_snap.items():
            now = kinds["Total"] - sum(nbytes for kind, nbytes in kinds.items()
                                       if getattr(kind, "value", kind) in ON_HOST)
            if self._peak_mem.get(device, 0) < now:
                self._peak_mem[device], self._peak_mem_snap[device] = now, {**kinds, "Total": now}


class WholeTracker(MemTracker):
    """The tracker of modules that are not sharded, which puts no hooks on frozen parameters."""

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> Any:
        hooks = install_grad_hooks and all(one.requires_grad for one in module.parameters())
        return super()._track_module_params_and_buffers(module, hooks)


class Reducer:
    """DDP's reducer, whose buckets stay as they were made: fake ranks cannot agree on an order."""

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def in_turn(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduces nothing: a fake group's own work has no result that DDP could wait for."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def peak_of(run: Run) -> dict[str, Any]:
    """A row: bytes at the second step's fullest moment, by the tracker's kinds, and the fullest of each phase."""
    mesh = init_device_mesh("cpu", (RANKS,))  # of real numbers
    model = build(run)
    with FakeTensorMode():
        place(model)
        tokens = torch.zeros(run.batch, TOKENS, dtype=torch.long)
        if run.stage >= 2:
            shard(model, run, mesh)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True) if run.stage != 1 else ZeroRedundancyOptimizer(
            trained, torch.optim.AdamW, fused=True)
        if run.stage >= 2:
            tracker = (DeviceTracker if run.offload else FSDPMemTracker)(model, optimizer)
            tracker.track_inputs((tokens,))
        else:
            tracker = WholeTracker()
            tracker.track_external(model, optimizer, tokens)
        with tracker:
            program: nn.Module = model
            if run.stage < 2:
                program = nn.parallel.DistributedDataParallel(model, init_sync=False)
                program.register_comm_hook(None, in_turn)
                program.reducer = Reducer(program.reducer)
            for _ in range(2):
                phases = steps_peaks(program, optimizer, tokens, tracker, run)
    phase = max(phases, key=lambda one: phases[one]["Total"])
    return {"tokens": TOKENS, "ranks": RANKS, "peak_nbytes": phases[phase]["Total"],
            "moments": {key: phases[key]["Total"] for key in phases},
            "kinds": {key: nbytes for key, nbytes in phases[phase].items() if nbytes and key != "Total"}}


def steps_peaks(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, tracker: MemTracker,
                run: Run) -> dict[str, dict[str, int]]:
    """Makes one step; the fullest moments of the last forward and backward and of the update, each by kind."""
    found = {}
    for _ in range(run.micro_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=run.stage < 2):
            loss = model(tokens)
        found["forward"] = fullest(tracker, run)
        loss.backward()
        del loss
        found["backward"] = fullest(tracker, run)
        tracker.reset_mod_stats()
    optimizer.step()
    optimizer.zero_grad()
    return found | {"update": fullest(tracker, run)}


def fullest(tracker: MemTracker, run: Run) -> dict[str, int]:
    """The fullest moment since it was asked last, by kind; the tracker begins anew."""
    found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    tracker._peak_mem_snap, tracker._peak_mem = {}, {}
    tracker._update_peak_stats(None)
    return {getattr(kind, "value", kind): nbytes for kind, nbytes in found.items()
            if not (run.offload and getattr(kind, "value", kind) in ON_HOST)}


def lines_of(group: str, run: Run, row: Mapping[str, Any]) -> Iterator[str]:
    """A row as TOML, without what is as a field's default."""
    yield from ("[[row]]", f'group = "{group}"')
    asked = {one.name: getattr(run, one.name) for one in fields(run) if getattr(run, one.name) != one.default}
    for key, value in {**asked, **row}.items():
        yield f"{key} = " + (
            "{ " + ", ".join(f'"{kind}" = {n:_}' for kind, n in value.items()) + " }" if isinstance(value, dict) else
            f'"{value}"' if isinstance(value, str) else "true" if value is True else f"{value:_}")


def main() -> None:
    """Prints rows as TOML, each when it is found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", nargs="*", default=[*GROUPS], choices=[*GROUPS])
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    asked = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    for group in asked.groups:
        for run in GROUPS[group]:
            if run.model in asked.models:
                begun = time.perf_counter()
                print(*lines_of(group, run, peak_of(run)), sep="\n")
                print(f"\n# {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
