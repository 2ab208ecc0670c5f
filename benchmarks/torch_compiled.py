"""Peaks of small Hugging Face decoders under FSDP2 on a CPU, eager and under torch.compile, by torch's profiler.

    python benchmarks/torch_compiled.py                 # each kind of model, as rows of torch_peaks.toml
    python benchmarks/torch_compiled.py --kinds llama

It needs PyTorch, `transformers` and a C++ compiler; no GPU. One rank takes two steps of real tensors, with each layer
compiled by Inductor and sharded, and then the whole; in the second the profiler sees what the CPU's allocator gives and
takes back, beside what was held before it. What Inductor's kernels for a GPU hold inside themselves is not seen. (Of
GPT-NeoX's block Inductor 2.13 makes C++ that does not compile.)
"""

import argparse
import gc
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

BATCH, TOKENS = 2, 1024
SIZES = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 2048,
         "intermediate_size": 1408, "tie_word_embeddings": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", SIZES | {"num_key_value_heads": 2, "head_dim": 64}),
    "phi3": ("Phi3", SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}),
    "olmo2": ("Olmo2", SIZES | {"num_key_value_heads": 2}),
}


def held_nbytes() -> int:
    """Bytes of all tensors that there are, each storage once."""
    found: dict[int, int] = {}
    for one in gc.get_objects():
        try:
            one = getattr(one, "_local_tensor", one) if isinstance(one, torch.Tensor) else None
            if one is not None and one.device.type == "cpu" and one.untyped_storage().nbytes():
                found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        except (ReferenceError, RuntimeError):  # tensors without data, and what is gone by now
            continue
    return sum(found.values())


def peak_nbytes(step: Callable[[], None]) -> int:
    """Bytes at a step's fullest moment."""
    before = held_nbytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return before + most


def peak_of(kind: str, compiled: bool) -> int:
    """The peak of one kind of model."""
    name, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**sizes, use_cache=False)
    config._attn_implementation = "sdpa"
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    how = {"mesh": init_device_mesh("cpu", (1,)),
           "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for layer in getattr(model, model.base_model_prefix).layers:
        if compiled:
            layer.compile()
        fully_shard(layer, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.long)

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    step()
    return peak_nbytes(step)


def main() -> None:
    """Prints rows as TOML; each is found by a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=[*KINDS])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    for kind in parser.parse_args().kinds:
        for compiled in (False, True):
            found = peak_of(kind, compiled)
            gc.collect()
            torch._dynamo.reset()
            sizes = {"model_type": kind, **KINDS[kind][1]}
            print(f"[[compiled]]\ncompiled = {str(compiled).lower()}\nbatch = {BATCH}\ntokens = {TOKENS:_}")
            print(f"peak_nbytes = {found:_}\nfields = {{", ", ".join(
                f"{name} = {json.dumps(value)}" for name, value in sizes.items()), "}\n", flush=True)


if __name__ == "__main__":
    main()
