"""Each optimizer's paper, transcribed in float64 and independent of the package, and steps of the package beside it.

Every transcription takes first weights, one gradient per step, the optimizer for its hyperparameters alone, and a
layer's factors; it gives the weights after all steps.
"""

from dataclasses import replace

import numpy as np

from zerosim import optim
from zerosim.numerics import kernels
from zerosim.optim import UpdateContext, with_norms

KERNELS = kernels.NumpyKernels()
CTX = UpdateContext(KERNELS)
ELEMENTWISE = [optim.SGD(lr=0.1), optim.Momentum(lr=0.1), optim.Momentum(lr=0.1, nesterov=True), optim.AdaGrad(),
               optim.RMSprop(), optim.Adam(), optim.AdamW(), optim.Lion(weight_decay=0.1), optim.Adan(weight_decay=0.1)]
NORMED = [optim.LAMB(), optim.LARS()]
MATRIX = [optim.Muon(), optim.Muon(iteration="cubic"), optim.Shampoo(), optim.SOAP()]
WHOLE = [*MATRIX, optim.Adafactor(), optim.KFAC()]
EVERY = [*ELEMENTWISE, *NORMED, *WHOLE]


def named(value):
    """The id of a case: an optimizer's or a function's name."""
    return type(value).__name__ if isinstance(value, optim.Optimizer) else getattr(value, "__name__", str(value))


def tensors(shape, steps, seed=0):
    """First weights, and a gradient for each step, in fp32."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype(np.float32), rng.standard_normal((steps, *shape)).astype(np.float32)


def new_state(optimizer, shape):
    return {name: np.zeros(slot.shape, np.float32) for name, slot in optimizer.slots(shape).items()}


def factors_of(shape, seed=7):
    """Positive definite factors of a linear layer, fp32."""
    rng = np.random.default_rng(seed)
    return tuple((x @ x.T / 20).astype(np.float32) for x in (rng.standard_normal((n, 20)) for n in shape))


def updated(optimizer, w, gradients, *, factors=None, first=1):
    """(weights, state) after all steps of the package's optimizer: flat where it may be cut anywhere, as it is else."""
    w = w.reshape(-1).copy() if optimizer.cut_of(w.shape) == "anywhere" else w.copy()
    state = new_state(optimizer, w.shape)
    for step, g in enumerate(gradients, first):
        ctx, g = UpdateContext(KERNELS, factors=factors), g.reshape(w.shape)
        ctx = with_norms(optimizer, ctx, w, g, state, step)
        optimizer.update(ctx, w, g, state, step)
    return w, state


# -- one element at a time --------------------------------------------------------------------------------------------


def momentum(w, gradients, o, _):
    """SGD without it."""
    b, kept = 0 * w, getattr(o, "momentum", 0.0)
    for g in gradients:
        b = kept * b + g
        w = w - o.lr * (g + kept * b if getattr(o, "nesterov", False) else b)
    return w


def adagrad(w, gradients, o, _):
    v = 0 * w
    for g in gradients:
        v = v + g * g
        w = w - o.lr * g / (np.sqrt(v) + o.epsilon)
    return w


def rmsprop(w, gradients, o, _):
    v = 0 * w
    for g in gradients:
        v = o.alpha * v + (1 - o.alpha) * g * g
        w = w - o.lr * g / (np.sqrt(v) + o.epsilon)
    return w


def adam(w, gradients, o, _):
    m = v = 0 * w
    for t, g in enumerate(gradients, 1):
        w = w - o.lr * getattr(o, "weight_decay", 0.0) * w
        m, v = o.beta1 * m + (1 - o.beta1) * g, o.beta2 * v + (1 - o.beta2) * g * g
        w = w - o.lr * (m / (1 - o.beta1**t)) / (np.sqrt(v / (1 - o.beta2**t)) + o.epsilon)
    return w


def lion(w, gradients, o, _):
    m = 0 * w
    for g in gradients:
        c = o.beta1 * m + (1 - o.beta1) * g
        m = o.beta2 * m + (1 - o.beta2) * g
        w = w - o.lr * (np.sign(c) + o.weight_decay * w)
    return w


def adan(w, gradients, o, _):
    m = v = n = 0 * w
    before = gradients[0]
    for t, g in enumerate(gradients, 1):
        d, before = g - before, g
        m, v = o.beta1 * m + (1 - o.beta1) * g, o.beta2 * v + (1 - o.beta2) * d
        n = o.beta3 * n + (1 - o.beta3) * (g + o.beta2 * d) ** 2
        rate = o.lr / (np.sqrt(n / (1 - o.beta3**t)) + o.epsilon)
        w = (w - rate * (m / (1 - o.beta1**t) + o.beta2 * v / (1 - o.beta2**t))) / (1 + o.lr * o.weight_decay)
    return w


# -- with norms of tensors --------------------------------------------------------------------------------------------


def lamb(w, gradients, o, _):
    m = v = 0 * w
    for t, g in enumerate(gradients, 1):
        m, v = o.beta1 * m + (1 - o.beta1) * g, o.beta2 * v + (1 - o.beta2) * g * g
        u = m / (1 - o.beta1**t) / (np.sqrt(v / (1 - o.beta2**t)) + o.epsilon) + o.weight_decay * w
        w = w - o.lr * np.linalg.norm(w) / np.linalg.norm(u) * u
    return w


def lars(w, gradients, o, _):
    b = 0 * w
    for g in gradients:
        rate = o.trust * np.linalg.norm(w) / (np.linalg.norm(g) + o.weight_decay * np.linalg.norm(w))
        b = o.momentum * b + o.lr * rate * (g + o.weight_decay * w)
        w = w - b
    return w


# -- whole tensors ----------------------------------------------------------------------------------------------------


def rms(x):
    return np.sqrt((x * x).mean())


def adafactor(w, gradients, o, _):
    rows = columns = v = 0.0
    for t, g in enumerate(gradients, 1):
        beta, squares = 1 - t ** -o.decay, g * g + o.epsilon1
        if w.ndim == 2:
            rows = beta * rows + (1 - beta) * squares.sum(1)
            columns = beta * columns + (1 - beta) * squares.sum(0)
            v = np.outer(rows, columns) / rows.sum()
        else:
            v = beta * v + (1 - beta) * squares
        u = g / np.sqrt(v)
        u = u / max(1, rms(u) / o.threshold)
        w = w - max(o.epsilon2, rms(w)) * min(o.lr, 1 / np.sqrt(t)) * u
    return w


def muon(w, gradients, o, _):
    if w.ndim != 2:
        return adam(w, gradients, replace(o, lr=o.vector_lr), _)
    b, coefficients = 0 * w, {"quintic": (3.4445, -4.775, 2.0315), "cubic": (1.5, -0.5)}[o.iteration]
    for g in gradients:
        b = o.momentum * b + g
        x = g + o.momentum * b if o.nesterov else b
        left, s, right = np.linalg.svd(x / np.linalg.norm(x), full_matrices=False)
        for _ in range(o.iterations):
            s = sum(c * s ** (2 * i + 1) for i, c in enumerate(coefficients))
        inputs, outputs = w.shape
        w = (1 - o.lr * o.weight_decay) * w - o.lr * np.sqrt(max(1, outputs / inputs)) * left @ np.diag(s) @ right
    return w


def power(a, exponent):
    values, vectors = np.linalg.eigh(a)
    return vectors @ np.diag(values**exponent) @ vectors.T


def shampoo(w, gradients, o, _):
    if w.ndim != 2:
        v = o.epsilon + 0 * w
        for g in gradients:
            v = v + g * g
            w = w - o.lr * g / np.sqrt(v)
        return w
    left, right = o.epsilon * np.eye(len(w)), o.epsilon * np.eye(w.shape[1])
    for g in gradients:
        left, right = left + g @ g.T, right + g.T @ g
        w = w - o.lr * power(left, -0.25) @ g @ power(right, -0.25)
    return w


def soap(w, gradients, o, _):
    if w.ndim != 2:
        return adam(w, gradients, o, _)
    left = right = 0.0
    m = v = 0 * w
    ql = qr = np.eye(1)
    for t, g in enumerate(gradients):  # the first one, number 0, only begins the factors
        if t:
            m, v = o.beta1 * m + (1 - o.beta1) * g, o.beta2 * v + (1 - o.beta2) * (ql.T @ g @ qr) ** 2
            u = (ql.T @ m @ qr) / (1 - o.beta1**t) / (np.sqrt(v / (1 - o.beta2**t)) + o.epsilon)
            w = (1 - o.lr * o.weight_decay) * w - o.lr * ql @ u @ qr.T
        left, right = o.beta2 * left + (1 - o.beta2) * g @ g.T, o.beta2 * right + (1 - o.beta2) * g.T @ g
        if not t:
            ql, qr = (np.linalg.eigh(x)[1][:, ::-1] for x in (left, right))
        elif (t + 1) % o.every == 0:
            ql, qr = np.linalg.qr(left @ ql)[0], np.linalg.qr(right @ qr)[0]
    return w


def kfac(w, gradients, o, factors):
    a, b = factors  # the same in every step, and so are their means
    balance = np.sqrt(np.trace(a) / len(a) / (np.trace(b) / len(b)))
    damping = np.sqrt(o.damping)
    for g in gradients:
        first = np.linalg.inv(a + balance * damping * np.eye(len(a)))
        w = w - o.lr * first @ g @ np.linalg.inv(b + damping / balance * np.eye(len(b)))
    return w
