"""Text as bytes: a vocabulary of 256 that knows every file, and batches that depend on no cut.

Legend: B batch, T tokens of a sequence; N ranks, k micro-batches. A token is a byte of the text's UTF-8.
"""

from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np

from zerosim.numerics import random
from zerosim.numerics.arrays import Array

VOCABULARY = 256
SHIPPED = "moby_dick"
STREAM = "moby_dick"  # of random numbers: one for all texts, named after the first
HELD_OUT = 0.1  # of the text, its end: never trained on


@dataclass(frozen=True)
class Corpus:
    """A text as tokens (n,) uint8, of which the first ``trained`` are for training and the rest is held out."""

    name: str
    tokens: Array

    @property
    def trained(self) -> int:
        """Tokens that batches are drawn from."""
        return len(self.tokens) - int(len(self.tokens) * HELD_OUT)

    @cached_property
    def unigram_entropy(self) -> float:
        """-Σ p·log p over the text's bytes, in nats: the loss of the best model that knows frequencies alone."""
        counts = np.bincount(self.tokens, minlength=VOCABULARY)
        p = counts[counts > 0] / len(self.tokens)
        return float(-(p * np.log(p)).sum())

    def require_length(self, context: int) -> None:
        """Raises ValueError unless there is a sequence of T tokens and its next one, to train on and held out."""
        shortest = min(self.trained, len(self.tokens) - self.trained)
        if shortest <= context:
            raise ValueError(
                f"the text {self.name} has {len(self.tokens)} bytes, of which {self.trained} are to train on "
                f"and the rest is held out; sequences of {context} need more. Take a longer text, or a "
                "model of a shorter context"
            )

    def batch(self, seed: int, step: int, number: int, rows: int, context: int) -> tuple[Array, Array]:
        """Micro-batch ``number`` of a step: tokens (B, T) int64 and the tokens that follow each of them, (B, T).

        Rank r's j-th micro-batch has the number j·N + r. It depends on the arguments and the text alone: not on its
        name, N, a stage or a layout.
        """
        words = random.bits((seed, "batches", step, STREAM), number * rows, rows).astype(np.uint64)
        starts = (words * np.uint64(self.trained - context)) >> np.uint64(32)
        return self._sequences(starts.astype(np.int64), context)

    def held_out(self, rows: int, context: int) -> tuple[Array, Array]:
        """Sequences (B, T) from the end of the text, evenly spread, and the tokens that follow."""
        last = len(self.tokens) - context - 1
        return self._sequences(np.linspace(self.trained, last, rows).astype(np.int64), context)

    def _sequences(self, starts: Array, context: int) -> tuple[Array, Array]:
        at = starts[:, None] + np.arange(context)
        return self.tokens[at].astype(np.int64), self.tokens[at + 1].astype(np.int64)


def shipped() -> Corpus:
    """The text that comes along: 40 chapters of Melville's *Moby-Dick* (1851); its provenance lies beside it."""
    text = files("zerosim.models").joinpath("texts", f"{SHIPPED}.txt").read_bytes()
    return Corpus(SHIPPED, np.frombuffer(text, np.uint8))


def read(path: str | Path) -> Corpus:
    """A text file of any language in UTF-8; ValueError, in one sentence, for anything else."""
    path = Path(path)
    try:
        found = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"the text {str(path)!r} cannot be read: {error.strerror}; give the path of a text file"
        ) from None
    if not found.strip():
        raise ValueError(f"the text {str(path)!r} is empty; give a file of some thousand characters")
    try:
        found.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is no UTF-8 text: byte {error.start} is {found[error.start]:#04x}; convert it, or "
            "give another file"
        ) from None
    if b"\0" in found:
        raise ValueError(f"{str(path)!r} has zero bytes and is no text; give another file")
    return Corpus(path.name, np.frombuffer(found, np.uint8))


def readable(tokens: Array) -> str:
    r"""Tokens as text; bytes that are no UTF-8, and characters that do not print, as ``\xff`` and ``\u200b``."""
    text = np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="backslashreplace")
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
