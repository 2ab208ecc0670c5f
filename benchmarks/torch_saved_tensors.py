"""Bytes that PyTorch's autograd keeps of one Llama-3-8B layer, beside those that zerosim's own layer keeps.

    python benchmarks/torch_saved_tensors.py

It needs PyTorch, on a CPU. The layer is written in plain `torch.nn` as Hugging Face's `modeling_llama.py` has it
(transformers 4): RMSNorm in fp32, rotary positions by halves, keys and values repeated for their queries,
`scaled_dot_product_attention`, a gate by `silu`. What autograd saves is seen by
`torch.autograd.graph.saved_tensors_hooks`, each storage once and parameters not, and counted in hidden states: the
bytes of one tensor (L, d) in bf16. Saved bytes are proportional to the tokens, so that a short sequence says it. A
layer with `torch.nn.RMSNorm` and grouped queries inside attention is measured too: what PyTorch keeps depends on how a
model is written.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zerosim.planning import model_shape
from zerosim.planning.activations import Block, kept

TOKENS, CHANNELS, HEADS, KEY_VALUE_HEADS, FEED_FORWARD, EPSILON, BASE = 128, 4096, 32, 8, 14336, 1e-5, 500_000.0
HEAD_CHANNELS = CHANNELS // HEADS


class WrittenOutRMSNorm(nn.Module):
    """RMSNorm operation by operation, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CHANNELS, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """(1, L, d) to (1, L, d)."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return self.weight * wide.to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys (1, H, L, d_h) turned by their positions."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Layer(nn.Module):
    """A decoder layer without biases."""

    def __init__(self, norm: Callable[[], nn.Module], *, repeated: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.repeated = norm(), norm(), repeated
        widths = {"q": (CHANNELS, CHANNELS), "k": (CHANNELS, KEY_VALUE_HEADS * HEAD_CHANNELS),
                  "v": (CHANNELS, KEY_VALUE_HEADS * HEAD_CHANNELS), "o": (CHANNELS, CHANNELS),
                  "gate": (CHANNELS, FEED_FORWARD), "up": (CHANNELS, FEED_FORWARD), "down": (FEED_FORWARD, CHANNELS)}
        self.linear = nn.ModuleDict({name: nn.Linear(*width, bias=False, dtype=torch.bfloat16)
                                     for name, width in widths.items()})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(1, L, d) to (1, L, d)."""
        of, h = self.linear, self.norm1(x)
        q, k, v = (of[name](h).view(1, TOKENS, -1, HEAD_CHANNELS).transpose(1, 2) for name in "qkv")
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if self.repeated:
            k, v = (one[:, :, None].expand(-1, -1, HEADS // KEY_VALUE_HEADS, -1, -1).reshape(q.shape) for one in (k, v))
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeated)
        x = x + of["o"](o.transpose(1, 2).reshape(x.shape))
        h = self.norm2(x)
        return x + of["down"](nn.functional.silu(of["gate"](h)) * of["up"](h))


def saved_nbytes(layer: Layer) -> int:
    """Bytes of all storages that autograd keeps of the layer's forward, but for parameters and the turning angles."""
    turns = BASE ** -(torch.arange(0, HEAD_CHANNELS, 2) / HEAD_CHANNELS)
    angles = torch.outer(torch.arange(TOKENS), turns).repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    not_counted = {one.untyped_storage().data_ptr() for one in (*layer.parameters(), cos, sin)}
    storages: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in not_counted:
            storages[storage.data_ptr()] = storage.nbytes()
        return saved

    x = torch.randn(1, TOKENS, CHANNELS, dtype=torch.bfloat16, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = layer(x, cos, sin)
    y.sum().backward()  # what is kept alive until here was kept
    return sum(storages.values())


def main() -> None:
    """Prints the hidden states that each layer keeps, and how many times zerosim's."""
    hidden = 2 * TOKENS * CHANNELS
    decoder = model_shape("llama-3-8b").transformer
    assert decoder is not None
    own = kept(Block.of(decoder, 1, TOKENS), "tiled").nbytes / hidden
    print(f"Llama-3-8B layer, bf16, {TOKENS} tokens, fused attention; hidden states kept for backward "
          f"(torch {torch.__version__}, Python {sys.version.split()[0]})")
    print(f"{'zerosim, recompute=tiled':58} {own:6.2f}")
    for text, layer in (
            ("torch, as Hugging Face's modeling_llama writes it", Layer(WrittenOutRMSNorm, repeated=True)),
            ("torch, with grouped queries inside attention", Layer(WrittenOutRMSNorm, repeated=False)),
            ("torch, with nn.RMSNorm too", Layer(
                lambda: nn.RMSNorm(CHANNELS, EPSILON, dtype=torch.bfloat16), repeated=False))):
        found = saved_nbytes(layer) / hidden
        print(f"{text:58} {found:6.2f}  {found / own:.2f} times")


if __name__ == "__main__":
    main()
