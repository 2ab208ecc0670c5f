"""The same GPT in PyTorch, eager, with the same parameters by name: for comparison of numbers and of speed.

Legend: B batch, T tokens, C channels, H heads, V vocabulary. Only benchmarks and tests import this, where torch is.
"""

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from zerosim.models import GPT

Tensors = dict[str, torch.Tensor]


def tensors_of(weights: dict[str, np.ndarray]) -> Tensors:
    """The weights as torch tensors that ask for gradients, in memory of their own."""
    return {name: torch.tensor(np.asarray(w, np.float64 if w.dtype == np.float64 else np.float32), requires_grad=True)
            for name, w in weights.items()}


def loss_of(model: GPT, w: Tensors, tokens: torch.Tensor, target: torch.Tensor, *, fused: bool = True) -> torch.Tensor:
    """The mean cross-entropy of tokens and targets (B, T); ``fused``: with torch's own attention."""
    config = model.config
    x = w["wte"][tokens] + w["wpe"][:tokens.shape[1]]
    for index in range(config.layers):
        block = f"block{index}"
        h = _norm(w, f"{block}.ln_1", x, config.epsilon)
        qkv = _linear(w, f"{block}.attention.qkv", h)
        o = _attention(qkv, config.heads, fused)
        x = x + _linear(w, f"{block}.attention.projection", o)
        h = _linear(w, f"{block}.ffn.up", _norm(w, f"{block}.ln_2", x, config.epsilon))
        x = x + _linear(w, f"{block}.ffn.down", F.gelu(h, approximate="tanh"))
    h = _norm(w, "ln_f", x, config.epsilon)
    logits = h @ (w["wte"].T if model.tied else w["lm_head.weight"])
    return F.cross_entropy(logits.view(-1, config.vocabulary), target.reshape(-1))


def step(model: GPT, w: Tensors, tokens: torch.Tensor, target: torch.Tensor, *, fused: bool = True) -> Any:
    """Forward and backward; the gradients lie in each tensor's ``grad``."""
    for tensor in w.values():
        tensor.grad = None
    loss = loss_of(model, w, tokens, target, fused=fused)
    loss.backward()
    return loss


def _linear(w: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    """One fused product with its bias; F.linear takes weights (O, I), and a transposed view costs nothing."""
    return F.linear(x, w[f"{name}.weight"].T, w[f"{name}.bias"])


def _norm(w: Tensors, name: str, x: torch.Tensor, epsilon: float) -> torch.Tensor:
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
