"""The same training several times, side by side: under every stage, in every format, or with other optimizers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from zerosim.lessons.training import Options, Trained, train
from zerosim.models.text import Corpus
from zerosim.zero.placements import STAGES

OVER: Mapping[str, tuple[Any, ...]] = MappingProxyType({
    "stage": tuple(STAGES), "compute": ("fp32", "bf16", "fp16"), "optimizer": ("sgd", "adamw", "lion", "muon")})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs that differ in one option; ``same_bits`` says which of them ended in the bits of the first of their order.

    Stages that add micro-batches before they reduce (0 and 1) and those that reduce each (2 and 3) are two orders as
    soon as there are two micro-batches.
    """

    over: str
    values: tuple[Any, ...]
    runs: tuple[Trained, ...]

    @property
    def digests(self) -> tuple[str, ...]:
        """The masters' digests, run by run."""
        return tuple(run.digest for run in self.runs)

    @property
    def same_bits(self) -> list[list[Any]]:
        """The values whose runs ended in the same bits, together."""
        together: dict[str, list[Any]] = {}
        for value, digest in zip(self.values, self.digests, strict=True):
            together.setdefault(digest, []).append(value)
        return list(together.values())

    @property
    def all_same_bits(self) -> bool:
        """True where every run ended in the same bits and saw the same losses."""
        return len(set(self.digests)) == 1 and len({run.losses for run in self.runs}) == 1


def values_of(over: str, text: str | None) -> list[Any] | None:
    """``"0,3"`` as values of an option: whole numbers for stages, words for the others; None without a text."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    return [int(word) if word.isdigit() else word for word in words] if over == "stage" else words


def compare(options: Options, corpus: Corpus, over: str = "stage", values: Sequence[Any] | None = None,
            begun: Callable[[str], None] | None = None) -> Comparison:
    """Trains once for each value of one option; ``begun`` hears which. Raises ValueError for an option not in OVER."""
    if over not in OVER:
        near = get_close_matches(str(over), OVER, 1)
        raise ValueError(f"asked to compare over {over!r}; choose one of {', '.join(OVER)}"
                         + (f"; did you mean {near[0]!r}?" if near else ""))
    chosen = tuple(values) if values else OVER[over]
    # All are checked before the first is run.
    wanted = [replace(options, sample_tokens=0, **{over: value}) for value in chosen]
    runs = []
    for value, one in zip(chosen, wanted, strict=True):
        if begun is not None:
            begun(f"{over} {value}")
        runs.append(train(one, corpus))
    return Comparison(over, chosen, tuple(runs))
