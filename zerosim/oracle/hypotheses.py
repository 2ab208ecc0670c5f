"""The mistakes that a distributed step is tried for: each a name, a sentence, and the recipes that it stands for.

A hypothesis yields, for the settings of a record, recipes that are the right one but for the mistake, each with a text
that says which: of which rank, which micro-batch, which value. Where the mistake cannot show, as an average over one
rank, the recipe is the right one, and the judgement leaves it out.

Legend: N ranks, k micro-batches, S loss scale, mean: the right mean gradient.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from zerosim.oracle.candidates import EVERY, Recipe, Weights, clip_factors, exact_mean
from zerosim.oracle.profiles import Slots, exact
from zerosim.oracle.record import Record

FACTORS = (2.0, 10.0)  # by which a learning rate is often wrong, beside the numbers of ranks and micro-batches
BETAS = (0.0, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)  # that are in use
DIGITS = (2, 3, 5)  # of a value that is inferred
Variations = Iterator[tuple[str, Recipe]]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A row: its name, a sentence that says what went wrong, and the recipes (text, recipe)."""

    name: str
    sentence: str
    recipes: Callable[[Record, Recipe], Variations]


def _times(record: Record, right: Recipe, back: bool) -> Variations:
    s = record.settings
    for text, count in ((f"over the {s.ranks} ranks", s.ranks), (f"over the {s.micro_batches} micro-batches",
                                                                s.micro_batches)):
        yield text, replace(right, divisor=right.divisor * count if back else right.divisor / count)


def _scaled(record: Record, right: Recipe) -> Variations:
    scale = record.settings.loss_scale
    yield f"the gradient is {scale:g} times as large", replace(right, divisor=right.divisor / scale)
    yield f"it is divided by {scale:g} twice", replace(right, divisor=right.divisor * scale)


def _own(record: Record, right: Recipe) -> Variations:
    if record.settings.ranks > 1:
        yield "no reduction took place", replace(right, own=True, divisor=right.divisor / record.settings.ranks)


def _counted(record: Record, right: Recipe, times: float) -> Variations:
    """One micro-batch of one rank, or of all, or one rank, counted so many times; the divisor as if once, or not."""
    s = record.settings
    all_ranks, all_of_rank, total = range(s.ranks), range(s.micro_batches), s.ranks * s.micro_batches
    chosen = [(f"micro-batch {j} of rank {r}", {(r, j)}) for r in all_ranks for j in all_of_rank]
    if s.micro_batches > 1:
        chosen += [(f"micro-batch {j} of every rank", {(r, j) for r in all_ranks}) for j in all_of_rank]
        chosen += [(f"all of rank {r}", {(r, j) for j in all_of_rank}) for r in all_ranks]
        chosen += [("all but the last micro-batch of every rank", {(r, j) for r in all_ranks for j in all_of_rank[:-1]})
                   ] if s.micro_batches > 2 else []
    for text, those in (one for one in chosen if len(one[1]) < total):
        weights = tuple(tuple(one * (times if (r, j) in those else 1) for j, one in enumerate(row))
                        for r, row in enumerate(right.weights))
        yield text, replace(right, weights=weights)
        yield f"{text}, and the divisor counts so", replace(
            right, weights=weights, divisor=right.divisor * (total + (times - 1) * len(those)) / total)


def _tokens(record: Record, right: Recipe) -> Variations:
    s = record.settings
    if s.tokens is None:
        return
    counts, equal = np.array(s.tokens, float), np.ones((s.ranks, s.micro_batches))
    of_rank = counts.sum(1, keepdims=True)
    yield "every micro-batch counts the same", replace(right, weights=_rows(equal))
    if of_rank.all():
        yield "each rank divides by its own tokens", replace(right, weights=_rows(counts / of_rank * s.micro_batches))
    for rank in range(s.ranks):
        if of_rank[rank, 0]:
            yield (f"all divide by rank {rank}'s tokens, times N",
                   replace(right, weights=_rows(counts / of_rank[rank, 0] * s.micro_batches)))


def _rows(weights: np.ndarray) -> Weights:
    return tuple(tuple(row) for row in weights.tolist())


def _local_norm(record: Record, right: Recipe) -> Variations:
    s = record.settings
    if s.clip_norm is None:
        return
    if s.layout != "whole":
        yield "each shard by the norm of that shard", replace(right, norm="shard")
    yield "each parameter by its own norm", replace(right, norm="tensor")
    scaled = [[weight * g.astype(np.float64) for weight, g in zip(*pair, strict=True)]
              for pair in zip(right.weights, record.gradients, strict=True)]
    for text, sums, divisor in (
            ("each rank's own gradient, before the reduction", [[sum(row)] * s.micro_batches for row in scaled],
             right.divisor / s.ranks),
            ("each micro-batch of each rank", scaled, right.divisor / s.ranks / s.micro_batches)):
        with np.errstate(all="ignore"):
            norms = np.array([[np.sqrt(np.sum((g / divisor)**2)) for g in row] for row in sums])
        if np.isfinite(norms).all():
            weights = np.array(right.weights) * np.minimum(1, s.clip_norm / (norms + 1e-6))
            yield text, replace(right, weights=_rows(weights), norm="none")


def _clip_place(record: Record, right: Recipe) -> Variations:
    if record.settings.clip_norm is not None:
        yield "the sum over ranks, before it was averaged", replace(right, norm="sum")
        if record.settings.loss_scale != 1:
            yield "the scaled gradient, before the loss scale was divided out", replace(right, norm="scaled")
        yield "nothing was clipped", replace(right, norm="none")


def _overflow(record: Record, right: Recipe) -> Variations:
    if np.isfinite(exact_mean(record, right.weights, right.divisor)[0]).all():
        return
    if record.settings.layout != "whole":
        yield "only the ranks whose shards overflowed skipped the step", replace(right, overflow="owner")
    yield "no rank skipped the step", replace(right, overflow="nobody")
    for rank in range(record.settings.ranks):
        yield f"rank {rank} skipped the step, and no other", replace(right, overflow="nobody", stale=((rank, EVERY),))


def _correction(record: Record, right: Recipe) -> Variations:
    if not right.update.adam:
        return
    step = record.settings.step
    yield "there is none", right.updating(corrected=None)
    for other in sorted({1, step - 1, step + 1} - {0}):
        yield f"it is that of step {other}, not {step}", right.updating(corrected=other)


def _decay(record: Record, right: Recipe) -> Variations:
    update = right.update
    if update.weight_decay:
        if update.adam:
            yield ("it went into the gradient and the moments" if update.decoupled else "it moved the weights alone",
                   right.updating(decoupled=not update.decoupled))
        yield "no weight decayed", right.updating(weight_decay=0.0)


def _inferred(record: Record, right: Recipe, slot: str, at: Callable[[float, np.ndarray], Slots]) -> list[float]:
    """The value above 0 that fits all elements of rank 0's slot best, where ``at`` is linear in it; rounded."""
    with np.errstate(all="ignore"):
        mean = exact_mean(record, right.weights, right.divisor)[0]
        none, one = (at(x, mean * clip_factors(record.settings, right, mean, 0.0))[slot] for x in (0.0, 1.0))
        value = (record.after[slot][0] - none) @ (one - none) / ((one - none) @ (one - none))
    if not (np.isfinite(value) and value > 0):
        return []
    return [*dict.fromkeys(float(f"{value:.{digits}g}") for digits in DIGITS)]


def _other_decay(record: Record, right: Recipe) -> Variations:
    update, slots = right.update, record.settings.slots
    slot = "master" if update.decoupled else slots[:2][-1]
    if slot in record.after:
        for decay in _inferred(record, right, slot, lambda x, g: exact(
                update._replace(weight_decay=x), record.before, g)):
            yield f"{decay:g}, not {update.weight_decay:g}", right.updating(weight_decay=decay)


def _factor(record: Record, right: Recipe) -> Variations:
    s = record.settings
    if s.clip_norm is None and len(s.slots) > 1 and s.slots[1] in record.after:
        known = {x for size in (s.ranks, s.micro_batches, s.loss_scale) for x in (size, 1 / size)}  # other rows' own
        for factor in _inferred(record, right, s.slots[1], lambda x, g: exact(right.update, record.before, g * x)):
            if not np.isclose(factor, [*known], rtol=0.01).any():
                yield f"times {factor:g}", replace(right, divisor=right.divisor / factor)


def _rate(record: Record, right: Recipe) -> Variations:
    sizes = sorted({record.settings.ranks, record.settings.micro_batches} - {1})
    factors = (*FACTORS, *sizes, *(size**0.5 for size in sizes))
    rates = {lr for factor in factors for lr in (right.update.lr * factor, right.update.lr / factor)}
    for lr in sorted(rates.union(_inferred(record, right, "master", lambda x, g: exact(
            right.update._replace(lr=x), record.before, g)))):
        yield f"{lr:g}, not {right.update.lr:g}", right.updating(lr=lr)


def _averages(record: Record, right: Recipe) -> Variations:
    update = right.update
    if update.adam:
        yield "the two were exchanged", right.updating(beta1=update.beta2, beta2=update.beta1)
    for name in ("beta1", "beta2") if update.adam else ("momentum",):
        for beta in BETAS:
            yield f"{name}={beta:g}, not {getattr(update, name):g}", right.updating(**{name: beta})


def _uphill(record: Record, right: Recipe) -> Variations:
    yield "the gradient was added", replace(right, divisor=-right.divisor)


def _inside(record: Record, right: Recipe) -> Variations:
    if right.update.adam:
        yield "√(v̂ + ε) in place of √v̂ + ε", right.updating(inside=True)


def _epsilon(record: Record, right: Recipe) -> Variations:
    if right.update.adam:
        for epsilon in (0.0, *(float(f"1e-{digits}") for digits in range(1, 17))):
            yield f"{epsilon:g}, not {right.update.epsilon:g}", right.updating(epsilon=epsilon)


def _stale(record: Record, right: Recipe) -> Variations:
    ranks, sharded = range(record.settings.ranks), record.settings.layout != "whole"
    owning = set(record.settings.owners().tolist() if sharded else ranks)
    for rank in owning:
        pair = (EVERY, rank) if sharded else (rank, EVERY)
        text = f"rank {rank}'s shard" if sharded else f"rank {rank}'s replica"
        yield f"{text} was not updated", replace(right, stale=(pair,))
        if record.weights:
            yield f"{text} was updated, and its copies to compute with were not", replace(right, stale_copies=(pair,))
            for owner in owning - {rank} if sharded else ():
                yield f"rank {rank} has rank {owner}'s shard from before", replace(right, stale_copies=((rank, owner),))
            yield f"rank {rank} gathered no shard", replace(right, stale_copies=((rank, EVERY),))


def _masters(record: Record, right: Recipe) -> Variations:
    compute = record.settings.compute
    if compute != "fp32":
        yield f"the update began at the weights in {compute}", replace(right, start=compute)
        yield f"weights in {compute} were updated, without a master", replace(right, start=compute, end=compute)


def _forgotten(record: Record, right: Recipe) -> Variations:
    if len(record.settings.slots) > 1 and record.settings.step > 1:
        yield "they began as zeros", replace(right, forgets=True)


def _order(record: Record, right: Recipe) -> Variations:
    yield f"{right.order} was asked for", replace(right, order=None)


HYPOTHESES = (
    Hypothesis("no average", "a sum was not divided", lambda record, right: _times(record, right, False)),
    Hypothesis("two averages", "a mean was divided once more", lambda record, right: _times(record, right, True)),
    Hypothesis("loss scale", "the loss scale was not divided out once", _scaled),
    Hypothesis("scaled gradient", "the mean gradient is multiplied by one number", _factor),
    Hypothesis("no reduction", "each rank updated by its own gradient", _own),
    Hypothesis("missing micro-batch", "a micro-batch is not in the sum",
               lambda record, right: _counted(record, right, 0.0)),
    Hypothesis("repeated micro-batch", "a micro-batch is in the sum twice",
               lambda record, right: _counted(record, right, 2.0)),
    Hypothesis("wrong divisor of tokens", "the mean is not that over all tokens", _tokens),
    Hypothesis("another order", "the additions were made in another order", _order),
    Hypothesis("clipped by a local norm", "gradients were clipped by the norm of a part", _local_norm),
    Hypothesis("clipped at another place", "what was clipped is not the mean gradient", _clip_place),
    Hypothesis("unshared overflow", "the ranks did not agree to skip a step that overflowed", _overflow),
    Hypothesis("bias correction", "the moments were corrected wrongly", _correction),
    Hypothesis("weight decay", "weights decayed in another way", _decay),
    Hypothesis("wrong weight decay", "the rate of the weights' decay is another one", _other_decay),
    Hypothesis("wrong learning rate", "the learning rate is another one", _rate),
    Hypothesis("wrong beta", "a moving average has another rate", _averages),
    Hypothesis("wrong sign", "the step went uphill", _uphill),
    Hypothesis("epsilon inside the root", "ε was added before the root was taken", _inside),
    Hypothesis("wrong epsilon", "ε is another one", _epsilon),
    Hypothesis("stale shard", "a part of the weights is that from before the step", _stale),
    Hypothesis("masters from 16 bits", "masters lost the bits that the compute format has not", _masters),
    Hypothesis("forgotten state", "the optimizer's state from before was not used", _forgotten),
)
