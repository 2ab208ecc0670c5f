"""Each optimizer against its paper, transcribed in float64: the same steps within the rounding of fp32."""

import numpy as np
import pytest

from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim import KFAC, LAMB, LARS, SOAP, Adafactor, AdaGrad, Adan, Lion, Momentum, Muon, RMSprop, Shampoo
from zerosim.optim.base import UpdateContext

CTX = UpdateContext(NumpyKernels())
STEPS = 4
SHAPE = (6, 4)


def tensors(shape, seed=0):
    """First weights, and a gradient for each step."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype(np.float32), rng.standard_normal((STEPS, *shape)).astype(np.float32)


def stepped(optimizer, w, gradients, factors=None):
    """The weights after all steps; a matrix optimizer gets the matrix, the others a flat vector."""
    flat = optimizer.cut_of(w.shape) == "anywhere"
    w = w.reshape(-1).copy() if flat else w.copy()
    state = {name: np.zeros(slot.shape, np.float32) for name, slot in optimizer.slots(w.shape).items()}
    for step, g in enumerate(gradients, 1):
        g, ctx = g.reshape(w.shape), UpdateContext(CTX.kernels, factors=factors)
        if "tensor_norm" in optimizer.needs:
            direction = np.empty_like(w)
            optimizer.advance(ctx, w, g, state, step)
            optimizer.direction(ctx, w, g, state, step, None, direction)
            ctx = UpdateContext(CTX.kernels, norms=(float(np.linalg.norm(w)), float(np.linalg.norm(direction))))
        optimizer.update(ctx, w, g, state, step)
    return w


# -- the papers, one weight or one matrix at a time, in float64 -------------------------------------------------------


def momentum(w, gradients, *, lr, mu, nesterov=False):
    b = 0 * w
    for g in gradients:
        b = mu * b + g
        w = w - lr * (g + mu * b if nesterov else b)
    return w


def adagrad(w, gradients, *, lr):
    v = 0 * w
    for g in gradients:
        v = v + g * g
        w = w - lr * g / (np.sqrt(v) + 1e-10)
    return w


def rmsprop(w, gradients, *, lr, alpha):
    v = 0 * w
    for g in gradients:
        v = alpha * v + (1 - alpha) * g * g
        w = w - lr * g / (np.sqrt(v) + 1e-8)
    return w


def lion(w, gradients, *, lr, beta1, beta2, decay):
    m = 0 * w
    for g in gradients:
        w = w * (1 - lr * decay) - lr * np.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
    return w


def adan(w, gradients, *, lr, betas, decay):
    m = v = n = 0 * w
    before, (b1, b2, b3) = gradients[0], betas
    for t, g in enumerate(gradients, 1):
        d = g - before
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * d
        n = b3 * n + (1 - b3) * (g + b2 * d) ** 2
        up = (m / (1 - b1**t) + b2 * v / (1 - b2**t)) / (np.sqrt(n / (1 - b3**t)) + 1e-8)
        w, before = (w - lr * up) / (1 + lr * decay), g
    return w


def lamb(w, gradients, *, lr, decay):
    m = v = 0 * w
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + decay * w
        w = w - lr * np.linalg.norm(w) / np.linalg.norm(u) * u
    return w


def lars(w, gradients, *, lr, mu, trust, decay):
    b = 0 * w
    for g in gradients:
        rate = trust * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w))
        b = mu * b + lr * rate * (g + decay * w)
        w = w - b
    return w


def adafactor(w, gradients, *, lr):
    rows, columns, v = 0.0, 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        beta, squares = 1 - t**-0.8, g * g + 1e-30
        if w.ndim == 2:
            rows, columns = (beta * a + (1 - beta) * squares.mean(axis) for a, axis in ((rows, 1), (columns, 0)))
            v = np.outer(rows, columns) / rows.mean()
        else:
            v = beta * v + (1 - beta) * squares
        u = g / np.sqrt(v)
        u = u / max(1, np.sqrt((u * u).mean()))
        w = w - lr * max(1e-3, np.sqrt((w * w).mean())) * u
    return w


def power(a, exponent):
    values, vectors = np.linalg.eigh(a)
    return vectors @ np.diag(values**exponent) @ vectors.T


def shampoo(w, gradients, *, lr, epsilon):
    left, right = epsilon * np.eye(len(w)), epsilon * np.eye(w.shape[1])
    for g in gradients:
        left, right = left + g @ g.T, right + g.T @ g
        w = w - lr * power(left, -0.25) @ g @ power(right, -0.25)
    return w


def soap(w, gradients, *, lr, every):
    left = right = 0.0
    m = v = 0 * w
    ql = qr = np.eye(1)
    for t, g in enumerate(gradients):  # the first one, number 0, only begins the factors
        if t:
            m, v = 0.95 * m + 0.05 * g, 0.95 * v + 0.05 * (ql.T @ g @ qr) ** 2
            u = (ql.T @ m @ qr) / (1 - 0.95**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
            w = w - lr * ql @ u @ qr.T
        left, right = 0.95 * left + 0.05 * g @ g.T, 0.95 * right + 0.05 * g.T @ g
        if not t:
            ql, qr = (np.linalg.eigh(x)[1][:, ::-1] for x in (left, right))
        elif (t + 1) % every == 0:
            ql, qr = np.linalg.qr(left @ ql)[0], np.linalg.qr(right @ qr)[0]
    return w


def muon(w, gradients, *, lr, mu, coefficients, iterations):
    b = 0 * w
    for g in gradients:
        b = mu * b + g
        x = g + mu * b
        left, s, right = np.linalg.svd(x / np.linalg.norm(x), full_matrices=False)
        for _ in range(iterations):
            s = sum(c * s ** (2 * i + 1) for i, c in enumerate(coefficients))
        w = w - lr * np.sqrt(max(1, w.shape[0] / w.shape[1])) * left @ np.diag(s) @ right
    return w


def kfac(w, gradients, *, lr, damping, factors):
    a, b = (factor + damping * np.eye(len(factor)) for factor in factors)
    for g in gradients:
        w = w - lr * np.linalg.inv(a) @ g @ np.linalg.inv(b)
    return w


FACTORS = tuple((x @ x.T).astype(np.float32) for x in (np.random.default_rng(7).standard_normal((6, 9)),
                                                       np.random.default_rng(8).standard_normal((4, 9))))
CASES = {
    "momentum": (Momentum(lr=0.1), momentum, {"lr": 0.1, "mu": 0.9}),
    "nesterov": (Momentum(lr=0.1, nesterov=True), momentum, {"lr": 0.1, "mu": 0.9, "nesterov": True}),
    "adagrad": (AdaGrad(lr=0.1), adagrad, {"lr": 0.1}),
    "rmsprop": (RMSprop(lr=0.1, alpha=0.9), rmsprop, {"lr": 0.1, "alpha": 0.9}),
    "lion": (Lion(lr=0.1, weight_decay=0.1), lion, {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "decay": 0.1}),
    "adan": (Adan(lr=0.1, weight_decay=0.1), adan, {"lr": 0.1, "betas": (0.98, 0.92, 0.99), "decay": 0.1}),
    "lamb": (LAMB(lr=0.1), lamb, {"lr": 0.1, "decay": 0.01}),
    "lars": (LARS(lr=0.1, trust=0.1), lars, {"lr": 0.1, "mu": 0.9, "trust": 0.1, "decay": 1e-4}),
    "adafactor": (Adafactor(lr=0.1), adafactor, {"lr": 0.1}),
    "shampoo": (Shampoo(lr=0.1), shampoo, {"lr": 0.1, "epsilon": 1e-4}),
    "soap": (SOAP(lr=0.1, every=2), soap, {"lr": 0.1, "every": 2}),
    "muon": (Muon(lr=0.1), muon, {"lr": 0.1, "mu": 0.95, "coefficients": (3.4445, -4.775, 2.0315), "iterations": 5}),
    "muon, cubic": (Muon(lr=0.1, iteration="cubic", iterations=9), muon,
                    {"lr": 0.1, "mu": 0.95, "coefficients": (1.5, -0.5), "iterations": 9}),
    "kfac": (KFAC(lr=0.1), kfac, {"lr": 0.1, "damping": 1e-2, "factors": FACTORS}),
}


@pytest.mark.parametrize("shape", [SHAPE, SHAPE[::-1]], ids=["tall", "wide"])
@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_follows_its_paper(name, shape):
    """Some dozen fp32 roundings of values about 1, magnified by divisions by small roots: 1e-4 is their bound here."""
    optimizer, paper, settings = CASES[name]
    if name == "soap":  # a factor of less than full rank leaves eigenvectors open, and fp32 would choose others
        shape = (4, 4)
    factors = FACTORS if shape == SHAPE else FACTORS[::-1]
    settings = settings | ({"factors": factors} if name == "kfac" else {})
    w, gradients = tensors(shape)
    found = stepped(optimizer, w, gradients, factors).reshape(shape)
    expected = paper(w.astype(np.float64), gradients.astype(np.float64), **settings)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(expected - w).max() > 0.01  # it moved by much more than that


@pytest.mark.parametrize("optimizer", [Muon(), SOAP(), Shampoo(), Adafactor()], ids=lambda o: type(o).__name__)
def test_vectors_are_updated_too_and_follow_what_the_docstring_says(optimizer):
    w, gradients = tensors((5,))
    found, wide = stepped(optimizer, w, gradients), w.astype(np.float64)
    if isinstance(optimizer, Adafactor):
        expected = adafactor(wide, gradients.astype(np.float64), lr=optimizer.lr)
    elif isinstance(optimizer, Shampoo):
        v, expected = 0.0, wide
        for g in gradients.astype(np.float64):
            v = v + g * g
            expected = expected - optimizer.lr * g / np.sqrt(v + optimizer.epsilon)
    else:
        lr = optimizer.vector_lr if isinstance(optimizer, Muon) else optimizer.lr
        m = v = 0.0
        expected = wide
        for t, g in enumerate(gradients.astype(np.float64), 1):
            m, v = optimizer.beta1 * m + (1 - optimizer.beta1) * g, optimizer.beta2 * v + (1 - optimizer.beta2) * g * g
            root = np.sqrt(v / (1 - optimizer.beta2**t)) + optimizer.epsilon
            expected = expected - lr * m / (1 - optimizer.beta1**t) / root
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)  # a dozen fp32 roundings


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adagrad", "rmsprop"])
def test_optimizers_agree_with_torch_where_both_have_them(name):
    torch = pytest.importorskip("torch")
    made = {"momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
            "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
            "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9)}[name]
    w, gradients = tensors(SHAPE)
    parameter = torch.nn.Parameter(torch.tensor(w))
    theirs = made([parameter])
    for g in gradients:
        parameter.grad = torch.tensor(g)
        theirs.step()
    found = stepped(CASES[name][0], w, gradients).reshape(SHAPE)
    np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)  # other orders of roundings
