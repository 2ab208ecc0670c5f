"""Units that the tests of the engine need and no model of the package has."""

from dataclasses import dataclass

import numpy as np

from zerosim.models import Filled, LinearUnit, Model, Normal, Unit, autodiff, layers


@dataclass(frozen=True, eq=False)
class OwnerUnit(LinearUnit):
    """A linear unit without a bias, to whose weight another unit ties, transposed."""

    bias: bool = False


@dataclass(frozen=True, eq=False)
class TiedUnit(Unit):
    """y = (x @ own) @ tiedᵀ: x (B, O) -> (B, I), own (O, O)."""

    name: str
    owner: str
    width: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.own": (self.width, self.width)}

    @property
    def tied_weights(self) -> dict[str, str]:
        return {f"{self.owner}.weight": self.owner}

    def initializer(self, name):
        return Normal(7, 0.5)

    def forward(self, ctx, w, x):
        h, kept_x = layers.linear_forward(ctx, x, w[f"{self.name}.own"])
        y, kept_h = layers.linear_forward(ctx, h, w[f"{self.owner}.weight"].T)
        return y, (kept_x, kept_h)

    def backward(self, ctx, w, kept, dy):
        x, h = kept
        tied, grads = w[f"{self.owner}.weight"].T, ctx.gradients(self)
        dh = layers.linear_backward(ctx, tied, h, dy, grads[f"{self.owner}.weight"].T)
        return layers.linear_backward(ctx, w[f"{self.name}.own"], x, dh, grads[f"{self.name}.own"]), grads


def tied(inputs: int = 3, outputs: int = 5) -> Model:
    """x -> relu(x @ w) -> (· @ own) @ wᵀ -> a linear unit: w is in two units."""
    return Model([OwnerUnit("enc", inputs, outputs, "relu", first=True), TiedUnit("dec", "enc", outputs),
                  LinearUnit("out", inputs, 2)])


def thrice_used() -> Model:
    """The same with w in three units."""
    return Model([OwnerUnit("enc", 3, 5, "relu", first=True), TiedUnit("dec", "enc", 5), LinearUnit("mid", 3, 5),
                  TiedUnit("again", "enc", 5), LinearUnit("out", 3, 2)])


class OwnGradients(LinearUnit):
    """A linear unit that hands over gradients in arrays of its own making, and of its own format."""

    def backward(self, ctx, w, kept, dy):
        dx, grads = super().backward(ctx, w, kept, dy)
        own = {name: gradient.astype(np.float32).copy() for name, gradient in grads.items()}
        for gradient in grads.values():
            gradient[...] = np.nan
        return dx, own


def own_gradients() -> Model:
    return Model([OwnGradients("a", 3, 5, "relu", first=True), LinearUnit("b", 5, 2)])


@dataclass(frozen=True, eq=False)
class Gain(Unit):
    """y = x · gain, computed in fp32 and rounded once, whatever the format of gain: x (B, C), gain (C,) or ().

    Beside a gain without dimensions stands a parameter without elements, which nothing reads. ``used`` False leaves the
    gain out, and says so: its gradient is None.
    """

    name: str
    shape: tuple[int, ...]
    used: bool = True

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        nothing = {} if self.shape else {f"{self.name}.nothing": (0, 3)}
        return nothing | {f"{self.name}.gain": self.shape}

    def initializer(self, name):
        return Normal(3, 1.0)

    def forward(self, ctx, w, x):
        if not self.used:
            return x, None
        y = ctx.empty(x.shape)
        y[...] = (x.astype(np.float32) * w[f"{self.name}.gain"].astype(np.float32)).astype(y.dtype)
        return y, x

    def backward(self, ctx, w, kept, dy):
        if not self.used:
            return dy, {f"{self.name}.gain": None}
        grads, wide = ctx.gradients(self), dy.astype(np.float32)
        gradient = (wide * kept.astype(np.float32)).reshape(-1, *self.shape).sum(0)
        grads[f"{self.name}.gain"][...] = np.asarray(gradient).astype(grads[f"{self.name}.gain"].dtype)
        dx = ctx.empty(dy.shape, "activation_gradient")
        dx[...] = (wide * w[f"{self.name}.gain"].astype(np.float32)).astype(dx.dtype)
        return dx, grads


def gained(shape: tuple[int, ...] = (5,), used: bool = True) -> Model:
    """Linear, gain, linear: the gain is the parameter that is treated in other ways than the others."""
    return Model([LinearUnit("first", 3, 5, "relu", first=True), Gain("scale", shape, used), LinearUnit("last", 5, 2)])


def gated(w, x):
    """Operations that round one by one, on weights in any format, of which one is used twice and one not at all."""
    h = autodiff.layernorm(x @ w["up"], w["norm"], w["bias"])
    h = h.gelu() * (x @ w["gate"] + w["bias"]).tanh()
    return autodiff.concatenate([h[:, :3] / (1 + autodiff.softmax(h)[:, :3]), x * w["gain"].exp()]) + h.mean(0)


def differentiated() -> Model:
    """Linear, a unit whose backward is found, linear."""
    shapes = {"up": (5, 8), "gate": (5, 8), "norm": (8,), "bias": (8,), "gain": (), "spare": (2, 3)}
    found = autodiff.AutodiffUnit("gated", shapes, gated, {"norm": Filled(1)}, seed=5)
    return Model([LinearUnit("first", 3, 5, "relu", first=True), found, LinearUnit("last", 8, 2)])
