"""Tensors that DeepSpeed holds on a rank, counted in its own processes, beside the account that plans are made of.

    python benchmarks/deepspeed_states.py              # stages 0 to 3, of a small Llama in bf16, on 2 processes
    python benchmarks/deepspeed_states.py --stages 3

It needs DeepSpeed, PyTorch and `transformers`; no GPU: ranks are processes of this machine that talk over gloo. All
settings but the stage are DeepSpeed's defaults, the optimizer is PyTorch's AdamW. Every tensor that Python knows is
looked at, each storage once, at the end of backward, at the beginning of the update, when its gradients are made, and
at the end of the step, and belongs to who holds it: the module, the optimizer, its buckets. What is left of "others" are
inputs, rotary angles and counters. The second step is counted, when the optimizer has its state.
"""

import argparse
import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

RANKS, TOKENS = 2, 64
FIELDS = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
          "vocab_size": 1031, "intermediate_size": 501, "tie_word_embeddings": False}


def owners(engine: Any) -> Iterator[tuple[str, Any]]:
    """What is held for a purpose: tensors, or lists and tables of them; what comes first owns a shared storage."""
    optimizer, parameters = engine.optimizer, [*engine.module.parameters()]
    partitions = [getattr(one, "ds_tensor", None) for one in parameters]
    small = [one for one in partitions if getattr(one, "ds_param_persists", False)]
    masters = [one for group in optimizer.optimizer.param_groups for one in group["params"]]
    yield "masters in fp32", masters
    yield "state", [*optimizer.optimizer.state.values()]
    yield "of the update, in fp32", [one.grad for one in masters]
    yield "buckets of gradients", [one.buffer for one in getattr(optimizer, "ipg_buckets", {}).values()]
    yield "parameters", [[getattr(optimizer, "lp_param_buffer", None)], partitions, small, parameters]
    yield "gradients", [[getattr(optimizer, name, None) for name in (
        "grad_partitions_flat_buffer", "averaged_gradients", "all_grad_tensors")], [one.grad for one in parameters]]


def tensors_in(held: Any) -> Iterator[Any]:
    """All tensors of nested lists and tables."""
    import torch

    if isinstance(held, torch.Tensor):
        yield held
    elif hasattr(held, "flat_partition"):
        yield held.flat_partition
    elif isinstance(held, dict | list | tuple | set):
        for one in held.values() if isinstance(held, dict) else held:
            yield from tensors_in(one)


def counted(engine: Any) -> Counter[str]:
    """Bytes by purpose."""
    import torch

    seen: dict[int, int] = {}
    found: Counter[str] = Counter()
    everything = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    for purpose, held in (*owners(engine), ("others", everything)):
        for one in tensors_in(held):
            storage = one.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen[storage.data_ptr()] = storage.nbytes()
                found[purpose] += storage.nbytes()
    return found


def run(stage: int) -> None:
    """A rank: two steps; prints what rank 0 holds in the second."""
    import deepspeed
    import torch
    import transformers

    config = transformers.LlamaConfig(**FIELDS, use_cache=False)
    model = transformers.LlamaForCausalLM(config)
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True},
                "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, config=settings,
                                      optimizer=torch.optim.AdamW(model.parameters(), fused=False))
    tokens, found = torch.zeros(1, TOKENS, dtype=torch.long), {}
    update = engine.optimizer.optimizer.step

    def step(*args: Any, **named: Any) -> Any:
        found["update"] = counted(engine)
        return update(*args, **named)

    engine.optimizer.optimizer.step = step
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        found["backward"] = counted(engine)
        engine.step()
        found["step"] = counted(engine)
    if engine.global_rank == 0:
        for moment in ("backward", "update", "step"):
            print("COUNTED", stage, moment, *(f"{purpose}={n}" for purpose, n in found[moment].items()), sep="|")


def main() -> None:
    """Starts the ranks of each stage; prints what is counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="*", type=int, default=[0, 1, 2, 3])
    for stage in parser.parse_args().stages:
        there = os.environ | {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "LOCAL_SIZE": str(RANKS),
                              "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29_600 + stage),
                              "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  env=there | {"RANK": str(rank), "LOCAL_RANK": str(rank), "STAGE": str(stage)})
                 for rank in range(RANKS)]
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            sys.exit("\n".join(said))
        print(*(line for line in said[0].splitlines() if line.startswith("COUNTED")), sep="\n", flush=True)


if __name__ == "__main__":
    run(int(os.environ["STAGE"])) if "STAGE" in os.environ else main()
