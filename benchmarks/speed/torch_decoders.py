"""The same GPT or Llama in PyTorch, eager, with the same parameters by name: for comparison of numbers and of speed.

Legend: B batch, T tokens, C channels, H heads, V vocabulary. Only benchmarks and tests import this, where torch is.
"""

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from zerosim.models import Decoder, Llama, LlamaConfig

Tensors = dict[str, torch.Tensor]


def tensors_of(weights: dict[str, np.ndarray]) -> Tensors:
    """The weights as torch tensors that ask for gradients, in memory of their own."""
    return {name: torch.tensor(np.asarray(w, np.float64 if w.dtype == np.float64 else np.float32), requires_grad=True)
            for name, w in weights.items()}


def loss_of(model: Decoder, w: Tensors, tokens: torch.Tensor, target: torch.Tensor, *,
            fused: bool = True) -> torch.Tensor:
    """The mean cross-entropy of tokens and targets (B, T); ``fused``: with torch's own attention, as a Llama always."""
    config = model.config
    x = w["wte"][tokens]
    if not isinstance(model, Llama):
        x = x + w["wpe"][:tokens.shape[1]]
    for index in range(config.layers):
        block = f"block{index}"
        if isinstance(model, Llama):
            x = _llama_block(w, block, x, model.config)
            continue
        h = _norm(w, f"{block}.ln_1", x, config.epsilon)
        qkv = _linear(w, f"{block}.attention.qkv", h)
        o = _attention(qkv, config.heads, fused)
        x = x + _linear(w, f"{block}.attention.projection", o)
        h = _linear(w, f"{block}.ffn.up", _norm(w, f"{block}.ln_2", x, config.epsilon))
        x = x + _linear(w, f"{block}.ffn.down", F.gelu(h, approximate="tanh"))
    h = _norm(w, config.last_norm, x, config.epsilon)
    logits = h @ (w["wte"].T if model.tied else w["lm_head.weight"])
    return F.cross_entropy(logits.view(-1, config.vocabulary), target.reshape(-1))


def _llama_block(w: Tensors, block: str, x: torch.Tensor, of: LlamaConfig) -> torch.Tensor:
    h = _norm(w, f"{block}.attention_norm", x, of.epsilon)
    q, k, v = (_linear(w, f"{block}.attention.qkv", h).unflatten(2, (-1, of.head_channels)).transpose(1, 2)
               .split([of.heads, of.key_value_heads, of.key_value_heads], 1))
    if of.head_norms:
        q, k = (_norm(w, f"{block}.attention.{name}_norm", x, of.epsilon) for name, x in (("query", q), ("key", k)))
    o = F.scaled_dot_product_attention(_turned(q, of.base), _turned(k, of.base), v, is_causal=True, enable_gqa=True)
    x = x + _linear(w, f"{block}.attention.projection", o.transpose(1, 2).flatten(2))
    gate, up = _linear(w, f"{block}.ffn.gate_up", _norm(w, f"{block}.ffn_norm", x, of.epsilon)).chunk(2, -1)
    return x + _linear(w, f"{block}.ffn.down", F.silu(gate) * up)


def _turned(x: torch.Tensor, base: float) -> torch.Tensor:
    """x (B, heads, T, D) by complex numbers, whose imaginary parts are the second halves of the heads."""
    width, wide = x.shape[3], torch.promote_types(x.dtype, torch.float32)
    places, planes = (torch.arange(*of, dtype=torch.float64) for of in ((x.shape[2],), (0, width, 2)))
    turns = torch.outer(places, base ** (-planes / width))
    points = torch.complex(*x.to(wide).chunk(2, -1)) * torch.polar(torch.ones_like(turns), turns).to(
        torch.complex128 if wide == torch.float64 else torch.complex64)
    return torch.cat([points.real, points.imag], -1).to(x.dtype)


def step(model: Decoder, w: Tensors, tokens: torch.Tensor, target: torch.Tensor, *, fused: bool = True) -> Any:
    """Forward and backward; the gradients lie in each tensor's ``grad``."""
    for tensor in w.values():
        tensor.grad = None
    loss = loss_of(model, w, tokens, target, fused=fused)
    loss.backward()
    return loss


def _linear(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    """One fused product with its bias; F.linear takes weights (O, I), and a transposed view costs nothing."""
    return F.linear(x, w[f"{name}.weight"].T, w.get(f"{name}.bias"))


def _norm(w: Tensors, name: str, x: torch.Tensor, epsilon: float) -> torch.Tensor:
    if f"{name}.bias" not in w:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], epsilon)
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], epsilon)


def _attention(qkv: torch.Tensor, heads: int, fused: bool) -> torch.Tensor:
    batch, tokens, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.view(batch, tokens, 3, heads, channels // heads).permute(2, 0, 3, 1, 4)
    if fused:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        s = (q @ k.transpose(-2, -1)) * (channels // heads)**-0.5
        o = s.masked_fill(future, float("-inf")).softmax(-1) @ v
    return o.transpose(1, 2).reshape(batch, tokens, channels)
