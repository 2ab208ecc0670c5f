"""Forward and backward of one decoder, beside PyTorch's eager mode and beside its own fp32."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from zerosim.models import GPT, Context, Decoder, GPTConfig, Llama, LlamaConfig, Unit
from zerosim.numerics.policy import Policy

from . import Action, Row, Side

Arrays = dict[str, np.ndarray]


def decoder(kind: str, small: bool) -> Decoder:
    """4 layers of 256 channels in 8 heads, 128 tokens; or small."""
    size: dict[str, Any] = {"layers": 1 if small else 4, "channels": 32 if small else 256, "heads": 2 if small else 8,
                            "context": 8 if small else 128, "vocabulary": 256}
    return GPT(GPTConfig(**size)) if kind == "gpt" else Llama(LlamaConfig(**size, key_value_heads=size["heads"] // 2))


def tokens_of(model: Decoder, small: bool) -> np.ndarray:
    """Tokens and targets (2, B, T)."""
    batch = 2 if small else 8
    return np.random.default_rng(0).integers(0, model.config.vocabulary, (2, batch, model.config.context))


def first_weights(model: Decoder, ctx: Context) -> Arrays:
    """Every parameter in the compute format."""
    return {name: ctx.cast(unit.initial(name, 0, int(np.prod(shape)))).reshape(shape)
            for unit in model.units for name, shape in unit.shapes.items()}


def context(model: Decoder, format: str) -> Context:
    """A context without ranks, which has a place for a tied parameter's gradient too."""
    ctx = Context.standalone(Policy(format))

    def places(unit: Unit) -> Arrays:
        return {name: ctx.empty(model.shapes[name], "unit_gradient") for name in (*unit.shapes, *unit.tied_weights)}

    return replace(ctx, gradients=places)


def forward_and_backward(model: Decoder, ctx: Context, w: Arrays, tokens: np.ndarray, target: np.ndarray) -> float:
    """The loss of tokens and targets (B, T)."""
    kept, x = [], tokens
    for unit in model.units:
        x, of_unit = unit.forward(ctx, w, x)
        kept.append(of_unit)
        del of_unit
    loss, of_loss = model.loss.forward(ctx, x, target)
    dy = model.loss.backward(ctx, of_loss, 1.0)
    del x, of_loss
    for unit in reversed(model.units):
        dy, _ = unit.backward(ctx, w, kept.pop(), dy)
    return loss


def zerosim_side(kind: str, format: str) -> Side:
    """One decoder in one format."""
    def prepare(small: bool) -> Action:
        model = decoder(kind, small)
        ctx = context(model, format)
        return partial(forward_and_backward, model, ctx, first_weights(model, ctx), *tokens_of(model, small))

    return prepare


def torch_side(kind: str) -> Side:
    """The same decoder in torch, fp32, with torch's own attention."""
    def prepare(small: bool) -> Action:
        import torch

        from . import torch_decoders

        model = decoder(kind, small)
        w = torch_decoders.tensors_of(first_weights(model, context(model, "fp32")))
        tokens, target = map(torch.tensor, tokens_of(model, small))
        return lambda: torch_decoders.step(model, w, tokens, target).item()

    return prepare


WHAT = "{} of 4 layers, 256 channels, 8 x 128 tokens: forward and backward, {}, one thread"
ROWS = (
    *(Row(kind, WHAT.format(name, "fp32"), "torch eager, its own attention", 1.0, zerosim_side(kind, "fp32"),
          torch_side(kind), needs=("torch",), tolerance=1e-5)  # sums in another order
      for kind, name in (("gpt", "GPT"), ("llama", "Llama"))),
    *(Row(f"gpt-{format}", WHAT.format("GPT", format), "its own fp32", goal, zerosim_side("gpt", format),
          zerosim_side("gpt", "fp32"), tolerance=2e-2)  # the format's own roundings
      for format, goal in (("bf16", 1.1), ("fp16", 1.25))),
)
