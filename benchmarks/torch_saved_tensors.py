"""Bytes that PyTorch's autograd keeps of one block of Hugging Face's decoders, beside the table that plans count by.

    python benchmarks/torch_saved_tensors.py                        # each kind of block, part by part
    python benchmarks/torch_saved_tensors.py --models llama phi3

It needs PyTorch and `transformers`, on a CPU. Blocks are transformers' own, of small random models in bf16 under SDPA
(models with soft caps: eager). What autograd saves is seen by `torch.autograd.graph.saved_tensors_hooks`, each storage
once and parameters, rotary angles and masks not, and counted in bytes of a token by the innermost part that keeps it:
what norms give is counted where it is read. "compiled" is the block under torch.compile, whose partitioner says what
is kept (`aot_eager_decomp_partition`: no code is generated). The table is `zerosim/planning/saved_tensors.toml`.
"""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zerosim.models.model_types import transformer_of_fields
from zerosim.models.transformer import Transformer
from zerosim.planning.saved_tensors import COMPILED, EAGER, Forward, block_of, saved

TOKENS = 96
SIZES = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 512,
         "intermediate_size": 640, "max_position_embeddings": 128}
GROUPED = {**SIZES, "num_key_value_heads": 2}
# The kind of configuration of each model type, and its fields.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 64}),
    "phi3": ("Phi3", {**GROUPED, "pad_token_id": 0}),
    "gemma": ("Gemma", {**GROUPED, "head_dim": 32}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 32}),
    "olmo": ("Olmo", GROUPED),
    "olmo2": ("Olmo2", GROUPED),
    "phi": ("Phi", SIZES),
    "gpt_neox": ("GPTNeoX", SIZES),
    "gpt2": ("GPT2", {"n_embd": 256, "n_layer": 1, "n_head": 8, "n_positions": 128, "vocab_size": 512,
                      "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "opt": ("OPT", {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 512,
                    "ffn_dim": 640, "max_position_embeddings": 128, "word_embed_proj_dim": 256, "dropout": 0.0}),
    "falcon": ("Falcon", {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 512}),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
CAPPED = ("gemma2",)


def decoder_of(name: str) -> tuple[nn.Module, nn.Module, Transformer]:
    """A small model in bf16, its block, and the same block on paper."""
    kind, fields = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**fields, use_cache=False)
    config._attn_implementation = "eager" if name in CAPPED else "sdpa"
    causal = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, causal)(config).bfloat16().train()
    block = next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0]
    return model, block, block_of(transformer_of_fields(name, {**fields, "model_type": name}), 0)


def arguments_of(model: nn.Module, block: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model calls its block with; the stream requires gradients."""
    found: list[Any] = []
    hook = block.register_forward_pre_hook(lambda module, args, named: found.append((args, named)), with_kwargs=True)
    tokens = torch.randint(0, 512, (1, TOKENS))
    model(input_ids=tokens, use_cache=False)
    hook.remove()
    return found[0]


def part_of(name: str, module: nn.Module) -> str:
    """The part of the table that a module of a block is, or nothing: its parent's."""
    kind = type(module).__name__.lower()
    if "norm" in kind:
        return "head norms" if name.rpartition(".")[2] in ("q_norm", "k_norm") else "norms"
    return ("attention" if "attention" in kind else
            "feed_forward" if "mlp" in kind or "sparse" in kind or "moe" in kind else "")


def saved_by_part(block: nn.Module, run: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Counter[str]:
    """Bytes of all storages that autograd keeps, by part, but for parameters and arguments other than the stream."""
    stack, hooks = ["feed_forward"], []  # what is in no part: the networks that are written out in OPT's block
    for name, module in block.named_modules():
        if name and (part := part_of(name, module)):
            hooks.append(module.register_forward_pre_hook(lambda *_, part=part: stack.append(part)))
            hooks.append(module.register_forward_hook(lambda *_: stack.pop() and None))
    others = [one for given in (*args[1:], *named.values())
              for one in (given if isinstance(given, tuple) else (given,)) if isinstance(one, Tensor)]
    not_counted = {one.untyped_storage().data_ptr() for one in (*block.parameters(), *others)}
    kept: dict[int, Tensor] = {}
    found: Counter[str] = Counter()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in (*not_counted, *kept):
            kept[storage.data_ptr()] = tensor
            found[stack[-1]] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(*args, **named)
    for hook in hooks:
        hook.remove()
    return found


def from_table(of: Transformer, by: str) -> Counter[str]:
    """Bytes that the table says, by the same parts."""
    found: Counter[str] = Counter()
    for half in ("attention", "feed_forward"):
        for one in saved(of, half, by):
            part = "head norms" if "head_norms" in one.layer else "norms" if "_norm" in one.layer else half
            found[part] += one.nbytes(of, Forward(1, TOKENS, by=by))
    return found


def main() -> None:
    """Prints bytes of a token, measured and by the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    print(f"Bytes of a token that a block keeps: measured, and by the table (torch {torch.__version__}, transformers "
          f"{transformers.__version__}, Python {sys.version.split()[0]})")
    for name in asked.models:
        model, block, of = decoder_of(name)
        args, named = arguments_of(model, block)
        for by in (EAGER, COMPILED):
            run = block if by == EAGER else torch.compile(block, backend="aot_eager_decomp_partition")
            measured, table = saved_by_part(block, run, args, named), from_table(of, by)
            if by == COMPILED:  # a graph has no parts
                measured, table = (Counter({"block": sum(one.values())}) for one in (measured, table))
            for part in (*table, *(set(measured) - set(table))):
                print(f"{name:10} {by:10} {part:14} {measured[part] / TOKENS:10,.0f} {table[part] / TOKENS:10,.0f}")
            if by == EAGER:
                total = sum(measured.values()) / TOKENS, sum(table.values()) / TOKENS
                print(f"{name:10} {by:10} {'block':14} {total[0]:10,.0f} {total[1]:10,.0f}")
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
