"""Peaks of Hugging Face decoders under PyTorch's FSDP2, by torch's own memory tracker, on tensors without data.

    python benchmarks/torch_peaks.py                          # the rows that are kept, computed again
    python benchmarks/torch_peaks.py --models qwen3-0.6b --batches 1 --checkpointing none

It needs PyTorch and `transformers`; no GPU and no data. Models are built from the sizes of their published
configurations, on fake tensors, by 8 ranks of a fake process group: `fully_shard` of every decoder layer and then of
the whole, parameters gathered in bf16, gradients reduced in fp32, fp32 states, PyTorch's fused AdamW (the default of
`transformers.Trainer`), 2,048 tokens a sequence, the loss that the model computes of its labels, whose outputs are not
held. What is counted is `torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker`'s: every storage that an operator
makes, the second step's, when the optimizer has its states. Tensors are a CPU's, whose
fused attention saves the tensors that a GPU's saves: queries, keys, values, output and a log-sum-exp; what an operator
holds inside itself is not counted, on neither.
"""

import argparse
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import masking_utils

RANKS, TOKENS = 8, 2048
BATCHES = (1, 4)
CHECKPOINTING = ("none", "block")


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
}
# transformers reads off the positions' values whether sequences are packed, and takes them to be where there are none.
masking_utils.find_packed_sequence_indices = lambda position_ids: None
EAGER = ("Gemma2",)  # its soft caps are outside SDPA, as transformers says

# The operators whose outputs torchtitan's selective checkpointing keeps (activation_checkpoint.py, 2025), and of the
# matrix products every second one.
ATEN = torch.ops.aten
SAVED = {ATEN._scaled_dot_product_flash_attention_for_cpu.default, ATEN._scaled_dot_product_flash_attention.default,
         ATEN._scaled_dot_product_efficient_attention.default, torch.ops._c10d_functional.reduce_scatter_tensor.default}
PRODUCTS = {ATEN.mm.default, ATEN.linear.default}


def selective() -> Any:
    """The contexts of one checkpointed layer: outputs of SAVED are kept, and of every second matrix product."""
    counts = {False: 0, True: 0}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = func in PRODUCTS
        counts[context.is_recompute] += product
        keep = func in SAVED or (product and counts[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def build(name: str, checkpointing: str, stage: int, mesh: DeviceMesh) -> torch.nn.Module:
    """The model of a published configuration, sharded, in training; in stage 2 blocks stay gathered after forward."""
    kind, fields = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**fields, use_cache=False, pad_token_id=None)
    config._attn_implementation = "eager" if kind in EAGER else "sdpa"
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.train()
    if checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if checkpointing == "selective":
            for layer in model.model.layers:
                layer._gradient_checkpointing_func = lambda function, *given: checkpoint(
                    function, *given, use_reentrant=False, context_fn=selective)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def peak_of(name: str, batch: int, checkpointing: str, stage: int = 3, micro_batches: int = 1) -> dict[str, Any]:
    """A row: bytes at the second step's fullest moment, by the tracker's kinds, and the fullest of each phase."""
    mesh = init_device_mesh("cpu", (RANKS,))  # of real numbers
    with FakeTensorMode():
        model = build(name, checkpointing, stage, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(batch, TOKENS, dtype=torch.long)
        tracker, phases = FSDPMemTracker(model, optimizer), {}
        tracker.track_inputs((tokens,))
        with tracker:
            for _ in range(2):
                phases = steps_peaks(model, optimizer, tokens, tracker, micro_batches)
    phase = max(phases, key=lambda one: phases[one]["Total"])
    return {"model": name, "batch": batch, "tokens": TOKENS, "ranks": RANKS, "checkpointing": checkpointing,
            "stage": stage, "micro_batches": micro_batches, "peak_nbytes": phases[phase]["Total"], "moment": phase,
            **{f"{key}_nbytes": phases[key]["Total"] for key in phases},
            "kinds": {key: nbytes for key, nbytes in phases[phase].items() if nbytes and key != "Total"}}


def steps_peaks(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor,
                tracker: FSDPMemTracker, micro_batches: int) -> dict[str, dict[str, int]]:
    """Makes one step; the fullest moments of the last forward and backward and of the update, each by kind."""
    found = {}
    for _ in range(micro_batches):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        found["forward"] = fullest(tracker)
        loss.backward()
        del loss
        found["backward"] = fullest(tracker)
        tracker.reset_mod_stats()
    optimizer.step()
    optimizer.zero_grad()
    return found | {"update": fullest(tracker)}


def fullest(tracker: FSDPMemTracker) -> dict[str, int]:
    """The fullest moment since it was asked last, by kind; the tracker begins anew."""
    found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    now = tracker.get_tracker_snapshot()
    tracker._peak_mem_snap, tracker._peak_mem = now, {device: kinds["Total"] for device, kinds in now.items()}
    return {getattr(kind, "value", kind): nbytes for kind, nbytes in found.items()}


def main() -> None:
    """Prints rows as TOML, each when it is found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--batches", nargs="*", type=int, default=[*BATCHES])
    parser.add_argument("--checkpointing", nargs="*", default=[*CHECKPOINTING],
                        choices=[*CHECKPOINTING, "selective"])
    parser.add_argument("--stage", type=int, default=3, choices=[2, 3])
    parser.add_argument("--micro-batches", type=int, default=1)
    asked = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    for name in asked.models:
        for checkpointing in asked.checkpointing:
            for batch in asked.batches:
                begun = time.perf_counter()
                row = peak_of(name, batch, checkpointing, asked.stage, asked.micro_batches)
                print("[[row]]")
                for key, value in row.items():
                    if isinstance(value, dict):
                        value = "{ " + ", ".join(f"\"{kind}\" = {n:_}" for kind, n in value.items()) + " }"
                    elif isinstance(value, str):
                        value = f'"{value}"'
                    else:
                        value = f"{value:_}"
                    print(f"{key} = {value}")
                print(f"\n# {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
