"""Tensors that DeepSpeed holds on a rank, counted in its own processes, beside the account that plans are made of.

    python benchmarks/deepspeed_states.py              # a small Llama in bf16, on 2 processes, in each of `RUNS`

It needs DeepSpeed, PyTorch and `transformers`; no GPU: ranks are processes of this machine that talk over gloo. All
settings but a run's own are DeepSpeed's defaults, the optimizer is PyTorch's AdamW. Every tensor that Python knows is
looked at, each storage once, and belongs to who holds it; "others" are inputs, rotary angles and counters. Moments are
of the second step: before gradients are reduced, the end of backward, the update when gradients are flat, then when
they are in fp32, and the end of the step. Rows are kept in `zerosim/course/published/deepspeed_states.toml`.
"""

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from subprocess import PIPE, STDOUT, Popen
from typing import Any

RANKS, TOKENS = 2, 64
RUNS = [*({"stage": stage} for stage in range(4)), *({"stage": stage, "overlap": True} for stage in (1, 2)),
        *({"stage": stage, "offload": True} for stage in (1, 2, 3)), {"stage": 2, "offload": True, "micro_batches": 2}]
FIELDS = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
          "vocab_size": 1031, "intermediate_size": 501, "tie_word_embeddings": False}


def owners(engine: Any, flat: Any) -> Iterator[tuple[str, Any]]:
    """What is held for a purpose: tensors, or lists and tables of them; what comes first owns a shared storage."""
    optimizer, parameters = engine.optimizer, [*engine.module.parameters()]
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", None) or [
        one for group in optimizer.optimizer.param_groups for one in group["params"]]
    yield "masters", masters
    yield "state", [*optimizer.optimizer.state.values()]
    yield "of the update, in fp32", [one.grad for one in masters]
    yield "of the update, flat", flat
    yield "updated, on the host", getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", None)
    yield "largest, on the host", getattr(optimizer, "temp_grad_buffer_for_cpu_offload", None)
    yield "largest", getattr(optimizer, "temp_grad_buffer_for_gpu_offload", None)
    yield "bucket", [one.buffer for one in getattr(optimizer, "ipg_buckets", {}).values()]
    yield "parameters", [getattr(one, "ds_tensor", None) for one in parameters]
    yield "parameters, whole", parameters
    yield "gradients", [[getattr(optimizer, name, None) for name in (
        "grad_partitions_flat_buffer", "averaged_gradients", "all_grad_tensors", "accumulated_grads_in_cpu")],
        [one.grad for one in parameters]]


def tensors_in(held: Any) -> Iterator[Any]:
    """All tensors of nested lists and tables."""
    import torch

    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, dict | list | tuple):
        for one in held.values() if isinstance(held, dict) else held:
            yield from tensors_in(one)


def counted(engine: Any, flat: Any = None) -> Counter[str]:
    """Bytes by purpose; counters and tensors without data are nobody's."""
    import torch

    seen: set[int] = set()
    found: Counter[str] = Counter()
    everything = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.device.type == "cpu"]
    for purpose, held in (*owners(engine, flat), ("others", everything)):
        for one in tensors_in(held):
            storage = one.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen and (one.dim() or purpose == "others"):
                seen.add(storage.data_ptr())
                found[purpose] += storage.nbytes()
    return found


def run(stage: int, overlap: bool = False, offload: bool = False, micro_batches: int = 1) -> None:
    """A rank: two steps; the first prints what it holds in the second."""
    import deepspeed
    import torch
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**FIELDS, use_cache=False))
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True},
                "zero_force_ds_cpu_optimizer": False, "gradient_accumulation_steps": micro_batches,
                "zero_optimization": {"stage": stage}}
    if overlap:
        settings["zero_optimization"] |= {"overlap_comm": True}
    if offload:
        settings["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
    engine, *_ = deepspeed.initialize(model=model, config=settings, optimizer=torch.optim.AdamW(model.parameters()))
    tokens, found = torch.zeros(1, TOKENS, dtype=torch.long), {}

    def watch(of: Any, name: str, moment: str) -> None:
        do = getattr(of, name, lambda *_: None)

        def watched(*args: Any, **named: Any) -> Any:
            found[moment] = counted(engine)
            result = do(*args, **named)
            found[moment] = counted(engine, result) if moment == "flat" else found[moment]
            return result

        setattr(of, name, watched)

    watch(engine.optimizer, "reduce_ipg_grads", "reduction")
    if not offload:  # which flattens messages alone
        watch(engine.optimizer, "flatten", "flat")
    watch(engine.optimizer.optimizer, "step", "update")
    for _ in range(2 * micro_batches):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        found["backward"] = counted(engine)
        engine.step()
        found["step"] = counted(engine)
    if engine.global_rank == 0:
        asked = RUNS[int(os.environ["RUN"])]
        print("ROW [[row]]", *(f"ROW {name} = {json.dumps(value)}" for name, value in asked.items()), sep="\n")
        for moment, of in found.items():
            print(f"ROW {moment} = {{ " + ", ".join(f'"{name}" = {nbytes:_}' for name, nbytes in of.items()) + " }")


def main() -> None:
    """Starts the ranks of each run; prints what is counted."""
    for number in range(len(RUNS)):
        there = os.environ | {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "LOCAL_SIZE": str(RANKS),
                              "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29_600 + number),
                              "OMP_NUM_THREADS": "1", "RUN": str(number)}
        ranks = [Popen([sys.executable, __file__], stdout=PIPE, stderr=STDOUT, text=True,
                       env=there | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(RANKS)]
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            sys.exit("\n".join(said))
        print(*(line.removeprefix("ROW ") for line in said[0].splitlines() if line.startswith("ROW ")), "", sep="\n")


if __name__ == "__main__":
    run(**RUNS[int(os.environ["RUN"])]) if "RUN" in os.environ else main()
