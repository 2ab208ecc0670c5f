"""The same training several times, side by side: under every stage, in every format, or with other optimizers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from zerosim.course.training.options import Options
from zerosim.course.training.run import Heard, Trained, require_engine, train
from zerosim.models.text import Corpus
from zerosim.numerics.checks import did_you_mean
from zerosim.ranks.errors import OutOfMemoryError
from zerosim.zero.placements import STAGES

OVER: Mapping[str, tuple[Any, ...]] = MappingProxyType({
    "stage": tuple(STAGES), "compute": ("fp32", "bf16", "fp16"), "optimizer": ("sgd", "adamw", "lion", "muon"),
    "recompute": ("none", "sub_block", "selective", "tiled", "block")})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs that differ in one option; ``same_bits`` says which of them ended in the same bits."""

    over: str
    values: tuple[Any, ...]
    runs: tuple[Trained, ...]

    @property
    def same_bits(self) -> list[list[Any]]:
        """The values whose runs saw the same losses and ended in the same weights, bit for bit, together."""
        together: dict[tuple[Any, ...], list[Any]] = {}
        for value, run in zip(self.values, self.runs, strict=True):
            # NaN equals nothing, but the same text.
            together.setdefault((run.digest, str(run.losses)), []).append(value)
        return list(together.values())

    @property
    def all_same_bits(self) -> bool:
        """True where every run saw the same losses and ended in the same weights."""
        return len(self.same_bits) == 1


def values_of(over: str, text: str | None) -> list[Any] | None:
    """``"0,3"`` as values of an option: whole numbers for stages, words for the others; None without a text."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    return [int(word) if word.isdecimal() else word for word in words] if over == "stage" else words


def wanted(options: Options, over: str = "stage", values: Sequence[Any] | None = None) -> dict[Any, Options]:
    """What is to be run, by value of one option; without values, by all of them.

    Raises ValueError for an option not in OVER, for fewer than two values, for one that comes twice, and for one that
    cannot be.
    """
    if over not in OVER:
        raise ValueError(f"asked to compare over {over!r}; choose one of {', '.join(OVER)}"
                         f"{did_you_mean(over, OVER)}")
    chosen = OVER[over] if values is None else tuple(values)
    if len(chosen) < 2 or len(set(chosen)) < len(chosen):
        raise ValueError(f"asked to compare over {over} the values {', '.join(map(str, chosen)) or 'none'}; name two "
                         f"or more that differ, as in {', '.join(map(str, OVER[over]))}")
    return {value: replace(options, sample_tokens=0, **{over: value}) for value in chosen}


def compare(options: Options, corpus: Corpus, over: str = "stage", values: Sequence[Any] | None = None,
            begun: Callable[[str], None] | None = None, heard: Heard | None = None) -> Comparison:
    """Trains once for each value of one option; ``begun`` hears which, ``heard`` every step.

    Raises what `wanted` and `train` raise; all that can be checked, before the first run.
    """
    chosen = wanted(options, over, values)
    corpus.require_length(options.config().context)
    for value, one in chosen.items():
        with _told(f"{over} {value}"):
            require_engine(one)
    runs = []
    for value, one in chosen.items():
        if begun is not None:
            begun(f"{over} {value}")
        with _told(f"{over} {value}"):
            runs.append(train(one, corpus, heard))
    return Comparison(over, tuple(chosen), tuple(runs))


@contextmanager
def _told(which: str) -> Iterator[None]:
    """Names the run that does not fit."""
    try:
        yield
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{which}: {error}") from error
