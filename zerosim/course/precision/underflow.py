"""Gradients that are too small for a format: what becomes of each, and what a loss scale changes.

S times the loss has S times the gradients: scaled up, fewer of them fall below the format's smallest number, and more
rise above its largest. Legend: g a gradient as fp32 computes it, S the loss scale.
Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2 and figure 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from zerosim.numerics.arrays import Array
from zerosim.numerics.formats import Format, format_of
from zerosim.numerics.kernels import NumpyKernels


@dataclass(frozen=True, slots=True)
class Fates:
    """What became of so many gradients in a format, S times as large; all counts but ``elements`` add up to it.

    ``zero``: 0 in fp32. ``lost``: 0 here alone. ``subnormal``: kept with fewer bits. ``normal``: kept with all bits.
    ``not_finite``: inf or NaN.
    """

    format: str
    scale: float
    elements: int
    zero: int
    lost: int
    subnormal: int
    normal: int
    not_finite: int

    @property
    def lost_share(self) -> float:
        """The share of the gradients other than 0 that are lost."""
        return self.lost / max(1, self.elements - self.zero)


@dataclass(frozen=True, slots=True)
class Binade:
    """How many gradients have a magnitude from 2^exponent up to, but not including, 2^(exponent + 1)."""

    exponent: int
    elements: int


@dataclass(frozen=True, slots=True)
class TensorLoss:
    """How many gradients of one parameter are lost."""

    name: str
    elements: int
    lost: int


def rounded_fates(kernels: NumpyKernels, gradients: Iterable[Array], fmt: Format | str, scale: float = 1.0) -> Fates:
    """What the format makes of S·g, the product in fp32, rounded once: gradients of any shape, fp32."""
    row, exact, found = format_of(fmt), [], []
    for g in gradients:
        stored = np.empty(g.shape, row.dtype)
        kernels.multiply_rounded(g, scale, stored)
        exact.append(g)
        found.append(stored)
    return fates(kernels, exact, found, row, scale)


def fates(kernels: NumpyKernels, exact: Iterable[Array], found: Iterable[Array], fmt: Format | str,
          scale: float) -> Fates:  # fmt: skip
    """What became of gradients that are ``exact`` in fp32 and, S times as large, ``found`` in the format."""
    row, counts = format_of(fmt), [0] * 6
    for g, stored in zip(exact, found, strict=True):
        magnitude = np.empty(stored.shape, np.float32)
        kernels.cast_pack(stored, magnitude)
        np.abs(magnitude, out=magnitude)
        finite, was, gone = np.isfinite(magnitude), g != 0, magnitude == 0
        small = magnitude < row.smallest_normal
        kinds = (np.ones_like(was), finite & ~was, was & gone, was & ~gone & small, was & finite & ~small, ~finite)
        counts = [count + int(np.count_nonzero(kind)) for count, kind in zip(counts, kinds, strict=True)]
    elements, zero, lost, subnormal, normal, not_finite = counts
    return Fates(row.name, scale, elements, zero, lost, subnormal, normal, not_finite)


def binades(gradients: Iterable[Array]) -> tuple[Binade, ...]:
    """How many gradients, fp32 of any shape, lie in each binade, from the smallest other than 0 to the largest; binades
    between them that have none are there too, infinities and NaN nowhere."""
    counts: dict[int, int] = {}
    for g in gradients:
        _, exponents = np.frexp(g[np.isfinite(g) & (g != 0)])  # g = m·2^e with 1/2 <= |m| < 1
        for exponent, count in zip(*np.unique(exponents - 1, return_counts=True), strict=True):
            counts[int(exponent)] = counts.get(int(exponent), 0) + int(count)
    span = range(min(counts, default=0), max(counts, default=-1) + 1)
    return tuple(Binade(exponent, counts.get(exponent, 0)) for exponent in span)


def losses_by_tensor(kernels: NumpyKernels, exact: Mapping[str, Array], found: Mapping[str, Array], fmt: Format | str,
                     scale: float) -> Iterator[TensorLoss]:  # fmt: skip
    """The parameters that lose gradients, those that lose most first."""
    lost = {name: fates(kernels, [g], [found[name]], fmt, scale).lost for name, g in exact.items()}
    for name in sorted(lost, key=lambda name: (-lost[name], name)):
        if lost[name]:
            yield TensorLoss(name, exact[name].size, lost[name])
