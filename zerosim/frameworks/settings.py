"""Settings of another program in zerosim's terms, and the reading of them key by key.

Every key of such settings ends in one of four ways. It becomes an argument; it is ignored, where it concerns neither
numbers nor bytes (what is printed, how it is launched); it is different, where numbers are the same and the size of a
buffer or the moment of a message is not; or it is refused, where no argument here does what it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from textwrap import fill
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.models.units import Model
from zerosim.numerics.checks import did_you_mean, is_count, is_finite_number
from zerosim.numerics.places import NOTHING
from zerosim.numerics.policy import BY_RANK, FIRST_VALUES, FROM_COMPUTE, Policy
from zerosim.numerics.units import counted
from zerosim.optim import Optimizer
from zerosim.options import PLAIN, StepOptions
from zerosim.planning.plan_row import ZEROSIM
from zerosim.planning.runtimes import DEEPSPEED, FSDP2
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Batch, Engine
from zerosim.zero.update import StepResult

FORMATS_BY_NAME = {"fp32": "fp32", "float32": "fp32", "float": "fp32", "fp16": "fp16", "float16": "fp16",
                   "half": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
# DeepSpeed casts the model before it makes masters of it; FSDP's shards are masters, and are cast when gathered.
MASTER_FROM = {"DeepSpeed": FROM_COMPUTE, "FSDP": FIRST_VALUES}
RUNTIME = {"DeepSpeed": DEEPSPEED, "FSDP": FSDP2}  # whose bytes and seconds a plan counts


@dataclass(frozen=True, slots=True)
class FrameworkSettings:
    """The settings that a ``program`` was given, as an engine or its arguments, and as those of a plan.

    Fields that are None were not said. ``batch`` is sequences of a rank's micro-batch, ``micro_batches`` those of a
    step. ``ignored`` has the names of settings that change nothing here, ``differences`` a sentence for each that is
    not quite the same; one where masters are not to begin as in the program is added by itself.
    """

    program: str
    stage: int
    policy: Policy
    ranks: int | None = None
    batch: int | None = None
    micro_batches: int | None = None
    optimizer: Optimizer | None = None
    schedule: Callable[[int], float] | None = None
    clip_norm: float | None = None
    keep_gathered: str | tuple[str, ...] | None = None
    options: StepOptions = PLAIN
    ignored: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        begin = replace(self.policy, master_from=MASTER_FROM[self.program])
        said = (f"policy.master_from={self.policy.master_from!r}: masters begin as {begin.master_from!r} there, and "
                "have other bits")
        others = tuple(sentence for sentence in self.differences if not sentence.startswith("policy.master_from="))
        differs = self.policy.first_format != begin.first_format
        object.__setattr__(self, "differences", (*others, *[said] * differs))

    def engine(self, rank: Rank, model: Model, optimizer: Optimizer | None = None) -> Engine:
        """The engine of these settings on one rank, in a rank program; ``optimizer`` stands in place of their own.

        Its ``step`` takes as many micro-batches as they say. Raises ValueError where they are of another number of
        ranks, and where there is no optimizer.

        >>> import zerosim as zs
        >>> found = zs.from_fsdp(mesh=(2,))
        >>> zs.Cluster(2).run(lambda rank: found.engine(rank, zs.models.MLP([3, 2]), zs.optim.SGD(lr=0.1)))[0]
        <Engine of rank 0 of 2: SGD, Stage(SHARDED, SHARDED, SHARDED), 0 steps taken>
        """
        if self.ranks not in (None, rank.size):
            raise ValueError(f"these settings of {self.program} are of {self.ranks} ranks, and the program runs on "
                             f"{rank.size}; run it on zs.Cluster({self.ranks}), or read the settings for {rank.size}")
        chosen = self.optimizer if optimizer is None else optimizer
        if chosen is None:
            raise ValueError(f"these settings of {self.program} name no optimizer; pass one, as "
                             "settings.engine(rank, model, zs.optim.AdamW(lr=...))")
        made = _EngineOfSettings(rank, model, chosen, **self.engine_arguments())
        made.settings = self
        return made

    def micro_batches_of(self, x: np.ndarray, target: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """A rank's samples of one step, x (k·B, ...) and target (k·B, ...), as the k pairs that ``engine.step`` takes.

        B is ``batch`` and k ``micro_batches``; of settings that do not say them, all samples and 1. Raises ValueError
        for another number of samples.
        """
        k = self.micro_batches or 1
        samples = k * self.batch if self.batch else len(x)
        if (len(x), len(target)) != (samples, samples) or samples % k:
            raise ValueError(f"a step of these settings takes {k} x {self.batch or 'equally many'} samples of a rank, "
                             f"found x of {len(x)} and targets of {len(target)}")
        return [(x[i:i + samples // k], target[i:i + samples // k]) for i in range(0, samples, samples // k)]

    def engine_arguments(self) -> dict[str, Any]:
        """The options of ``zs.Engine(rank, model, optimizer, **options)``; the optimizer is the settings' own, or
        yours where they name none."""
        given = {name: getattr(self, name) for name in ("stage", "policy", "clip_norm", "schedule")}
        return given | self.options.arguments() | {"keep_gathered": self.keep_gathered}

    def plan_arguments(self) -> dict[str, Any]:
        """The options of ``zs.plan(model, **options)``, without what the settings do not say.

        A plan counts what the program itself holds, or of ZeRO++ and of additions by micro-batch, which its account has
    not, what an engine of this policy does; in buckets of a unit. Parameters that stay gathered from
        forward to backward are those of stage 2 to it.
        """
        given = {name: getattr(self, name) for name in ("ranks", "batch", "micro_batches", "optimizer")}
        stage = 2 if self.keep_gathered == "all" else self.stage
        runtime = ZEROSIM if self.options.zeropp or self.options.by_micro_batch else RUNTIME[self.program]
        given |= {"stage": stage, "compute": self.policy, "runtime": runtime} | self.options.arguments()
        if runtime == DEEPSPEED:
            given["prefetch"] = min(1, self.options.prefetch)  # a plan counts the default number of elements, or none
        return {name: value for name, value in given.items() if name != "bucket_nbytes" and value is not None}

    def __str__(self) -> str:
        said = [f"{name}={_shortly(value)}" for name, value in self.engine_arguments().items()
                if value not in (None, NOTHING, BY_RANK)]
        lines = [f"{self.program}: " + ", ".join(said)]
        if self.optimizer is not None:
            lines.append(f"optimizer: {_shortly(self.optimizer)}")
        counts = [f"{name} {getattr(self, name)}" for name in ("ranks", "batch", "micro_batches")
                  if getattr(self, name) is not None]
        lines += [", ".join(counts)] * bool(counts) + [f"ignored: {', '.join(self.ignored)}"] * bool(self.ignored)
        lines += [f"different: {line}" for line in self.differences]
        return "\n".join(fill(line, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
                         for line in lines)


class _EngineOfSettings(Engine):
    """An engine whose step is of the micro-batches of its settings, and of no others in their place."""

    settings: FrameworkSettings

    def step(self, batches: Iterable[Batch] | np.ndarray, target: np.ndarray | None = None) -> StepResult:
        """A training step, as the engine's; ValueError for another number of micro-batches than the settings'."""
        pairs: Any = [*batches] if target is None else [(batches, target)]
        if self.settings.micro_batches not in (None, len(pairs)):
            raise ValueError(f"the settings of {self.settings.program} accumulate gradients over "
                             f"{counted(self.settings.micro_batches, 'micro-batch')}, and step() was handed "
                             f"{len(pairs)}; hand it settings.micro_batches_of(x, target)")
        return super().step(pairs)


def _shortly(value: Any) -> str:
    """A value as one writes it, without the fields that are the default."""
    if not is_dataclass(value):
        return repr(value)
    said = [f"{field.name}={_shortly(found)}" for field in fields(value)
            if (found := getattr(value, field.name)) != field.default]
    return f"{type(value).__name__}({', '.join(said)})"


# -- reading ----------------------------------------------------------------------------------------------------------


class Findings:
    """The refusals, names without effect and differences that are found while keys are read."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.ignored: list[str] = []
        self.differences: list[str] = []

    def refuse(self, sentence: str) -> None:
        """Notes a key, its value, and why there is no equivalent."""
        self.refusals.append(sentence)

    def differ(self, sentence: str) -> None:
        """Notes a key, and in what it is not the same here."""
        self.differences.append(sentence)

    def noted(self, settings: FrameworkSettings) -> FrameworkSettings:
        """The settings, with what is ignored and what is different."""
        return replace(settings, ignored=tuple(self.ignored), differences=tuple(self.differences))

    def raise_refusals(self, what: str) -> None:
        """Raises ValueError with every refusal on a line of its own, if there is one."""
        if self.refusals:
            lines = "".join(f"\n  {line}" for line in self.refusals)
            raise ValueError(f"{what} cannot be taken over as it is; change or leave out:{lines}")


class Section:
    """One object of settings, whose keys are taken one after the other; `close` notes those that were not taken."""

    def __init__(self, given: object, name: str, findings: Findings) -> None:
        self.prefix, self.findings, self.known = f"{name}." if name else "", findings, list[str]()
        self.given = dict(given) if isinstance(given, Mapping) else {}
        if given is not None and not isinstance(given, Mapping):
            findings.refuse(f"{name}={given!r} must be an object with keys and values")

    def take(self, key: str, default: Any, check: Callable[[Any], Any]) -> Any:
        """The value as ``check`` returns it, and the default where there is none, or one that is refused."""
        self.known.append(key)
        if key not in self.given:
            return default
        value = self.given.pop(key)
        if isinstance(value, str) and value == "auto":
            self.findings.refuse(f"{self.prefix}{key}=\"auto\" is filled in by Hugging Face's Trainer: write the value")
            return default
        try:
            return check(value)
        except ValueError as error:
            self.findings.refuse(f"{self.prefix}{key}={value!r} {error}")
            return default

    def section(self, key: str) -> Section:
        """The object that stands at a key, an empty one where there is none."""
        self.known.append(key)
        return Section(self.given.pop(key, None), f"{self.prefix}{key}", self.findings)

    def close(self, no_effect: Iterable[str] = (), no_equivalent: Mapping[str, str] = MappingProxyType({})) -> None:
        """Notes what is left: names without effect, what has no equivalent unless it is off, and unknown keys."""
        known = [*self.known, *no_effect, *no_equivalent]
        for key, value in self.given.items():
            name = f"{self.prefix}{key}"
            if key in no_equivalent and not is_off(value):
                self.findings.refuse(f"{name}={value!r}: {no_equivalent[key]}")
            elif key in known:
                self.findings.ignored.append(name)
            else:
                self.findings.refuse(f"{name}={value!r} is no key that is known{did_you_mean(key, known)}")
        self.given = {}


def is_off(value: object) -> bool:
    """True for the values that switch a setting off: false, null, 0, "none", an empty list, "enabled": false, and
    objects of those. A key whose 0 means something is taken with a check of its own."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(map(is_off, value.values()))
    return value in (None, False, "none") or value == []


def flag(value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def count(least: int = 0) -> Callable[[Any], int]:
    """A check for whole numbers from ``least`` on, also as 5e8 writes them."""
    def check(value: Any) -> int:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if not is_count(whole) or whole < least:
            raise ValueError(f"must be a whole number, {least} or more")
        return int(whole)
    return check


def number(value: Any) -> float:
    """A finite number that is not negative."""
    if not is_finite_number(value) or value < 0:
        raise ValueError("must be a number, 0 or more")
    return float(value)


def choice(*names: str) -> Callable[[Any], str]:
    """A check for one of several names."""
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return str(value)
    return check


def text_or_none(value: Any) -> str | None:
    """A text, or None."""
    if value is not None and not isinstance(value, str):
        raise ValueError("must be a text, or null")
    return value


def format_or_none(value: Any) -> str | None:
    """The format of a name such as "bf16" or of a torch.dtype, or None."""
    if value is None:
        return None
    name = re.sub(r"^torch\.", "", str(value))
    if name not in FORMATS_BY_NAME:
        raise ValueError(f"must be one of {', '.join(dict.fromkeys(FORMATS_BY_NAME.values()))}, the formats in which "
                         "values rest and travel here")
    return FORMATS_BY_NAME[name]
