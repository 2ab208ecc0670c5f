"""Search of the fastest settings that fit a machine, by the plan's seconds, or by those of a replay where it has none.

Legend: N ranks; G sequences of the global batch, which is k micro-batches of B sequences on each rank, G = N·k·B; L
tokens of a sequence.

The search has three parts. Candidates are all combinations of stage, recomputation policy, micro-batch, units gathered
ahead, and offload. Those that do not fit by the plan are dropped; its bytes are counted in the engine's own convention,
and equal what the engine holds without data, as its seconds equal the replay of that run. So the engine runs only where
a plan's seconds are others: with offload, whose transfers the plan counts beside nothing, and under an optimizer of
whole tensors, whose products it does not count. The plan's seconds with all transfers beside the rest are a lower bound
there: a candidate whose bound is slower than the fastest so far is not run. Last, other buckets than units, which no
plan has, are run on the fastest settings of each stage.

A step of more than three micro-batches is not run whole. Nothing is under way between two micro-batches, so that all
but the first and the last take as long as the second.

By real seconds every candidate that fits takes steps with data on the in-process cluster of this machine instead; the
plan's seconds, of another machine, leave nothing out. Real seconds are the process' CPU time, of all ranks together,
which take turns there: nothing is waited for, and what other programs take of the machine is not counted.

With offload state rests on the host or on disk, and transfers are replayed as all else is. The host's own arithmetic
takes no time there, since no source gives its rate; so no candidate places more off the device than it has to: of the
places that are searched, in their order, each takes the first under which it fits, device, host and disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Signature, signature
from itertools import pairwise, product
from time import process_time
from typing import Any

import numpy as np
from rich.markup import escape

from zerosim.course.measured import decoder_of, engine_options, preset_shape, run_planned
from zerosim.course.tuned_settings import Candidate, Pasted, pasted
from zerosim.display.plan_table import places_text, policy_label
from zerosim.display.style import percent
from zerosim.display.views import RIGHT, Part, TextLine, View, marked_table, parts, plain
from zerosim.numerics.checks import checked_count
from zerosim.numerics.places import DEVICE, KINDS, Offload, offload_of
from zerosim.numerics.units import bytes_text, count_of, counted, gigabytes, nbytes_of, seconds_text
from zerosim.planning.closed_forms import STAGES
from zerosim.planning.conventions import is_cut_anywhere
from zerosim.planning.explanation import order_text
from zerosim.planning.plan import plan_config
from zerosim.planning.plan_config import UTILIZATION, PlanConfig
from zerosim.planning.plan_row import PlanRow
from zerosim.planning.recording import BEGIN, record
from zerosim.planning.streams import COMMUNICATION
from zerosim.planning.timeline import Timeline, replay
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.errors import AsymmetryError
from zerosim.ranks.null_cluster import NullCluster
from zerosim.ranks.rank import Rank
from zerosim.shown import Shown
from zerosim.zero.engine import Engine

ENOUGH = 3  # micro-batches of a run: the first, the last, and one between them that stands for all such
WHOLE_ITEMSIZE = 4  # bytes of the widest elements that are reduced or gathered
TIMED = 2  # steps that are timed after one that is not: the shortest counts
SHOWN = 12  # candidates in the table; and the fastest of each other stage
MOST_SEQUENCES = 1 << 16  # of a rank in a step, more than anybody takes: every micro-batch is looked at
UNIT, MODEL = "unit", "model"  # buckets by name
REPLAYED, REAL = "replayed", "real"  # seconds
PLAN_ONLY = {  # options of a plan, and why a search does not take them
    "convention": "bytes are counted as a runtime holds them", "parameters": "a search needs a model's shape",
    "largest_layer": "a model's shape says it", "micro_batches": "global_batch, ranks and batch say how many there are",
    "mesh": "the settings to paste are of one group of all ranks", "zeropp": "it is of a mesh"}
ALL_OFFLOADS = ("none", "optimizer=host", "optimizer=host+gradients=host", "host",
                "optimizer=disk+gradients=host+parameters=host", "disk")


# -- the answer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate with its seconds of a step, the part exposed to communication, and the most bytes that it holds.

    ``held_nbytes`` have the runtime's overhead in them; ``host_nbytes`` rest on the host, ``disk_nbytes`` on disk.
    ``replayed`` says that the engine ran without data and was replayed; else all numbers are the plan's, or the seconds
    real ones, of which nobody knows which are exposed. ``estimated_seconds`` are the plan's in any case, of buckets
    that are units.
    """

    settings: Candidate
    step_seconds: float
    exposed_seconds: float | None
    held_nbytes: int
    host_nbytes: int
    disk_nbytes: int
    estimated_seconds: float
    replayed: bool


@dataclass(frozen=True, slots=True, repr=False)
class Tuned(Shown):
    """Candidates that fit and were run, fastest first; ``print`` and a notebook show them, with settings to paste.

    ``too_large`` were dropped since they do not fit, by estimate or by measurement; ``slower`` were not run, since
    already a lower bound of theirs is slower than the fastest; ``farther`` neither, since less off the device
    fits too. ``places`` say by what is offloaded what is assumed of host and disk. ``refused`` has what the engine did
    not run, by title, with its reason; ``not_run`` the reason why it ran nothing, and the plan answered. ``timed``:
    seconds are real ones.
    """

    config: PlanConfig
    global_batch: int
    tried: tuple[Tried, ...]
    too_large: int
    slower: int
    farther: int
    missing_nbytes: int
    places: Mapping[Offload, str]
    refused: Mapping[str, str]
    not_run: str | None
    timed: bool

    @property
    def best(self) -> Tried | None:
        """The fastest; of equally fast ones, the one that holds least. None where nothing fits."""
        return self.tried[0] if self.tried else None

    @property
    def verdict(self) -> str:
        """The best candidate in one sentence."""
        if self.best is None:
            return (f"Nothing fits: the smallest of {counted(self.too_large, 'candidate')} misses by "
                    f"{gigabytes(self.missing_nbytes)} GB." if self.too_large else
                    "Nothing was run: the engine refused every candidate that fits.")
        settings = self.best.settings
        return (f"{settings.title} is fastest: {seconds_text(self.best.step_seconds)} a step in "
                f"{counted(settings.micro_batches, 'micro-batch')} of {counted(settings.batch, 'sequence')}, with "
                f"{gigabytes(self.spare_nbytes(self.best))} GB to spare.")

    def spare_nbytes(self, one: Tried) -> int:
        """The device's capacity less what is held."""
        return self.config.device.reported_nbytes - one.held_nbytes

    def tokens_per_second(self, one: Tried) -> float:
        """G·L tokens over the seconds of a step."""
        return self.global_batch * self.config.sequence / one.step_seconds if one.step_seconds else float("inf")

    def view(self) -> View:
        """The verdict, the fastest candidates, what was assumed, and the settings to paste."""
        return View(self.verdict, "", parts(_table(self), map(escape, _assumed(self)), _settings(self)))

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data, with the settings of the fastest to paste, and what they leave out."""
        config = self.config
        data: dict[str, Any] = plain({
            "model": config.model.name, "ranks": config.ranks, "device": config.device.name,
            "compute": config.policy.compute, "overlap": config.options.overlap, "reduction": config.options.reduction,
            "global_batch": self.global_batch,
            "tokens": config.sequence, "verdict": self.verdict, "too_large": self.too_large, "slower": self.slower,
            "farther": self.farther,
            "refused": self.refused, "not_run": self.not_run, "timed": self.timed,
            "rows": [_settings_json(one.settings)
                     | {name: value for name, value in plain(one).items() if name != "settings"}
                     | {"spare_nbytes": self.spare_nbytes(one), "tokens_per_second": self.tokens_per_second(one)}
                     for one in self.tried],
            "assumed": list(_assumed(self)), "settings": [*self.pasted]})
        return data

    @property
    def shown(self) -> list[Tried]:
        """The fastest candidates, and of each stage that is not among them the fastest."""
        fastest = {one.settings.stage: one for one in reversed(self.tried)}
        shown = {*self.tried[:SHOWN], *fastest.values()}
        return [one for one in self.tried if one in shown]

    @property
    def pasted(self) -> tuple[Pasted, ...]:
        """The fastest candidate's settings for each program; none where nothing fits."""
        return pasted(self.config, self.best.settings) if self.best else ()

    def __str__(self) -> str:
        from zerosim.display.render_text import in_lines

        return in_lines(self.view())

    def __repr__(self) -> str:
        return f"<Tuned {self.config.model.name} on {self.config.ranks} ranks: {self.verdict}>"


def _settings_json(settings: Candidate) -> dict[str, Any]:
    """The settings that were searched, as plain data."""
    return {"stage": settings.stage, "recompute": settings.recompute, "batch": settings.batch,
            "micro_batches": settings.micro_batches, "prefetch": settings.options.prefetch,
            "offload": settings.options.offload.text, "bucket_nbytes": settings.options.bucket_nbytes}


# -- as it is shown ---------------------------------------------------------------------------------------------------


def _table(found: Tuned) -> Iterator[Part | str]:
    """The subject of the search, and the fastest candidates."""
    config = found.config
    yield from ("", TextLine(f"[bold]{escape(config.model.name)}[/]: {counted(config.ranks, 'rank')} of "
                             f"{escape(config.device.name)}, {counted(found.global_batch, 'sequence')} of "
                             f"{counted(config.sequence, 'token')} a step, {config.policy.compute}, "
                             f"{'overlapped' if config.options.overlap else 'nothing overlapped'}{order_text(config)}",
                             indent=0), "")
    if found.tried:
        yield marked_table("", *(RIGHT + name for name in (
            "k · B", "ahead", "bucket", "step", "exposed", "held", "tokens/s")), rows=[
                (" ".join((f"{one.settings.stage}", policy_label(one.settings.recompute, config.runtime),
                           off_device(one.settings.options.offload))).rstrip(),
                 f"{one.settings.micro_batches} · {one.settings.batch}", f"{one.settings.options.prefetch}",
                 UNIT if one.settings.options.bucket_nbytes is None else bytes_text(one.settings.options.bucket_nbytes),
                 seconds_text(one.step_seconds),
                 "" if one.exposed_seconds is None else seconds_text(one.exposed_seconds), gigabytes(one.held_nbytes),
                 f"{found.tokens_per_second(one):,.0f}") for one in found.shown])
    if more := len(found.tried) - len(found.shown):
        yield f"and {more:,} more that were tried; --json, or .tried, has them all."
    yield ""


def off_device(places: Offload) -> str:
    """A short text of what rests off the device: ``og host``, by the first letters of kinds; empty for nothing."""
    by_place: dict[str, str] = {}
    for kind in KINDS:
        by_place[getattr(places, kind)] = by_place.get(getattr(places, kind), "") + kind[0]
    return ", ".join(f"{letters} {place}" for place, letters in by_place.items() if place != DEVICE)


def _assumed(found: Tuned) -> Iterator[str]:
    """The units, what was not run and why, and what the numbers rest on."""
    config = found.config
    yield ("k micro-batches of B sequences on each rank; held are GB, 10⁹ bytes, of one rank at the fullest moment, "
           "with the runtime's overhead, which is an estimate.")
    if found.too_large or found.slower:
        yield (f"Not in the table: {counted(found.too_large, 'candidate')} that did not fit, and {found.slower:,} "
               "with offload that were not run, since already a lower bound of theirs is slower than the fastest.")
    if found.farther:
        yield (f"{counted(found.farther, 'candidate')} would place more off the device than has to be, and were not "
               "looked at.")
    if found.not_run:
        yield f"{found.not_run}."
    elif found.timed:
        yield ("Candidates took steps with data on as many ranks in this process, which take turns: seconds are the "
               f"process' CPU time, of all ranks, the shortest of {TIMED} steps after a first; nothing overlaps.")
    else:
        yield (f"Arithmetic reaches {percent(config.utilization or UTILIZATION)} of the dense peak, which is assumed, or what memory "
               "allows; messages take α + n/β.")
        if any(one.replayed for one in found.tried):
            yield ("Seconds are the plan's, and of what is offloaded or has other buckets than units those of a run "
                   "without data, replayed: by one rank for all, or by all where a bucket cuts units.")
        if any(one.settings.options.bucket_nbytes is not None for one in found.tried):
            yield ("Buckets other than units were tried on the fastest settings of each stage alone, where a unit's "
                   "bucket fits.")
    placed = dict.fromkeys(found.places[one.settings.options.offload] for one in found.tried)
    for assumed in filter(None, placed):
        yield (f"Off the device are o, the optimizer's state and masters, g, gradients, p, parameters. Assumed of "
               f"{assumed}.")
    for title, reason in found.refused.items():
        yield f"{title} was not run: {reason}"


def _settings(found: Tuned) -> Iterator[Part | str]:
    """The fastest candidate's settings, program by program."""
    for one in found.pasted:
        yield from ("", TextLine(f"[bold cyan]{one.program}[/]", indent=0), "")
        yield from (TextLine(escape(line.lstrip()), indent=2 + len(line) - len(line.lstrip()))
                    for line in one.code.splitlines())
        yield from map(escape, one.notes)


# -- from names to an answer ------------------------------------------------------------------------------------------


Several = str | int | Iterable[Any]


def tune(model: Any, *, global_batch: int | str, batch: Several = "all", prefetch: Several = (0, 1, 2),
         bucket_nbytes: Several = (UNIT, MODEL), offload: Several | Offload = "all", seconds: str = REPLAYED,
         host_link: str | None = None, disk_link: str | None = None, host_capacity_nbytes: int | str | None = None,
         disk_capacity_nbytes: int | str | None = None, **options: Any) -> Tuned:
    """The fastest settings for a model, a machine and a global batch of G sequences.

    What is searched: ``stage`` and ``recompute``, as in `zs.plan`; ``batch``, the sequences of a micro-batch, "all" for
    each number that divides a rank's share of G; ``prefetch``, units ahead; ``bucket_nbytes``, numbers of bytes, "unit"
    and "model", one bucket for everything; ``offload``, places as the engine takes them, of which each candidate takes
    the first under which it fits: "all", from "none" over "optimizer=host" to "disk", or some, as "none,host".
    ``seconds`` are "replayed" on the machine that is asked about, or "real" ones, CPU time of this process, for a model
    that it can train, which are of no offload. The other options are those of `zs.plan` and mean the same; bytes are
    counted as the engine holds them. Buckets that cut a unit are run on all ranks, which takes N times as long. Raises
    ValueError for what cannot be searched, for a model without a known shape, and as `zs.plan` does.

    >>> print(tune("gpt2", global_batch=8, ranks=4, stage="2,3", batch=2, recompute="none", prefetch=1).verdict)
    ZeRO-3 without recomputation is fastest: 5.149 ms a step in 1 micro-batch of 2 sequences, with 81.30 GB to spare.
    """
    for name in PLAN_ONLY.keys() & options.keys():
        raise ValueError(f"{name}= is no option of tune: {PLAN_ONLY[name]}; leave it out")
    if seconds not in [REPLAYED, REAL]:
        raise ValueError(f"seconds={seconds!r} must be {REPLAYED} or {REAL}")
    places = _offloads("none" if seconds == REAL and offload == "all" else offload)
    if seconds == REAL and places != [offload_of("none")]:
        raise ValueError(f"seconds={REAL!r} are of this process, where device and host are one memory; say "
                         "offload='none'")
    refused: dict[str, str] = {}
    configs = _configs(preset_shape(model), places, refused, options | {
        "host_link": host_link, "host_capacity_nbytes": host_capacity_nbytes, "disk_link": disk_link,
        "disk_capacity_nbytes": disk_capacity_nbytes})
    config = next(iter(configs.values()))
    if config.decoder is None:
        raise ValueError(f"the activations of {config.model.name} are not known, so nothing says which micro-batch "
                         "fits; tune a decoder, as gpt2-xl, or ask zs.plan")
    sequences, ranks = count_of(global_batch, "global_batch"), config.ranks
    if sequences % ranks:
        raise ValueError(f"global_batch={sequences} cannot be shared equally by {counted(ranks, 'rank')}; take "
                         f"{-(-sequences // ranks) * ranks}, a multiple of {ranks}")
    share = sequences // ranks
    if share > MOST_SEQUENCES:
        raise ValueError(f"global_batch={sequences} gives each rank {share:,} sequences a step; take one that "
                         f"gives {MOST_SEQUENCES:,} at most")
    dividing = [size for size in range(1, share + 1) if not share % size]
    batches = dividing if batch == "all" else _counts("batch", batch)
    if wrong := sorted({*batches} - {*dividing}):
        raise ValueError(f"batch={wrong[0]} does not divide the {counted(share, 'sequence')} of each rank, and "
                         f"micro-batches are equal; take some of {', '.join(map(str, dividing))}")
    sizes = _buckets(bucket_nbytes, WHOLE_ITEMSIZE * sum(config.job(config.stages[0]).padded_lengths))
    candidates = _candidates(config, share, batches, _counts("prefetch", prefetch, 0))
    return _Search(configs, sequences, refused, timed=seconds == REAL).answer(list(candidates), sizes)


def _signature() -> Signature:
    """The options of `tune` and those of `zs.plan` that it takes, for a notebook."""
    own, plans = signature(tune).parameters, signature(plan_config).parameters
    others = [option for name, option in plans.items() if name not in {*own, *PLAN_ONLY}]
    return Signature([*list(own.values())[:-1], *others], return_annotation=Tuned)


tune.__signature__ = _signature()  # type: ignore[attr-defined]


def _several(name: str, asked: Any, offer: str) -> list[Any]:
    """One, several, or several in a text with commas between; ValueError, with what to name, for none."""
    if isinstance(asked, str):
        return [text.strip() for text in asked.split(",")]
    found = list(asked) if isinstance(asked, Iterable) else [asked]
    if not found:
        raise ValueError(f"{name}={asked!r} leaves nothing to search; name {offer}")
    return found


def _counts(name: str, asked: Any, least: int = 1) -> list[int]:
    """The numbers asked for, each once, rising; ValueError for what is none."""
    several = _several(name, asked, "one number at least")
    try:
        found = [int(one) if isinstance(one, str) else one for one in several]
    except ValueError:
        raise ValueError(f"{name}={asked!r} must be numbers, as in 1,2") from None
    return sorted({checked_count(name, one, least) for one in found})


def _buckets(asked: Any, whole_nbytes: int) -> list[int | None]:
    """Bytes of buckets, None for a unit, each once; a bucket of more than the model is one of the model."""
    names = {None: None, UNIT: None, MODEL: whole_nbytes}
    return list(dict.fromkeys(
        names[one] if isinstance(one, str | None) and one in names else
        min(nbytes_of(one, "bucket_nbytes", least=1), whole_nbytes)
        for one in _several("bucket_nbytes", asked, f"{UNIT}, {MODEL}, or bytes, as 25MB")))


def _offloads(asked: Any) -> list[Offload]:
    """The places asked for, each once, in their order; ValueError for what is none."""
    several = [asked] if isinstance(asked, Offload) else _several(
        "offload", ALL_OFFLOADS if asked == "all" else asked, "one place at least, as none")
    return list(dict.fromkeys(map(offload_of, several)))


def _configs(model: Any, places: Sequence[Offload], refused: dict[str, str],
             options: Mapping[str, Any]) -> dict[Offload, PlanConfig]:
    """The plan's configuration under each of the places; ``refused`` gets why one is none. What a host and a disk are
    goes to those that use them. Raises ValueError where none is left, and for a host or a disk that none uses."""
    found = {}
    for of in places:
        own = {name: value for name, value in options.items()
               if _uses(of, name) or not any(_uses(other, name) for other in places)}
        try:
            found[of] = plan_config(model, runtime="zerosim", offload=of, **own)
        except ValueError as error:
            refused[f"offload of {of}"] = str(error)
            if of == places[-1] and not found:
                raise
    return found


def _uses(places: Offload, option: str) -> bool:
    """False for an option of a host, or a disk, where nothing is placed there."""
    return places.uses_disk if option.startswith("disk_") else not (option.startswith("host_") and places.is_none)


def _candidates(config: PlanConfig, share: int, batches: Iterable[int], ahead: Sequence[int]) -> Iterator[Candidate]:
    """All combinations, as yet without offload; only where parameters are sharded is anything gathered ahead."""
    for stage, policy, batch in product(config.stages, config.policies, batches):
        for prefetch in ahead if STAGES[stage].parameters_sharded else [0]:
            yield Candidate(stage, policy, batch, share // batch, replace(config.options, prefetch=prefetch))


# -- the search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """A step's seconds, the exposed ones where it was replayed, and the most bytes that a rank's memory held."""

    step_seconds: float
    exposed_seconds: float | None
    peak_nbytes: int


class _Search:
    """A search: what there is to choose from, and what it has found so far."""

    def __init__(self, configs: Mapping[Offload, PlanConfig], global_batch: int, refused: dict[str, str], *,
                 timed: bool) -> None:
        self.configs, self.global_batch, self.refused, self.timed = configs, global_batch, refused, timed
        self.config = next(iter(configs.values()))
        self.tried: list[Tried] = []
        self.missing_nbytes: list[int] = []  # of what does not fit
        self.slower = self.farther = 0

    def answer(self, candidates: Sequence[Candidate], sizes: Sequence[int | None]) -> Tuned:
        """The candidates that fit, tried; where the engine lacks the model, as the plan has them."""
        fitting = [found for found in map(self._placed, candidates) if found is not None]
        rows = [(candidate, self._row(candidate)) for candidate in fitting]
        rows.sort(key=lambda one: (one[1].step_seconds, one[1].total_nbytes, one[0].options.prefetch))
        not_run = None
        try:
            decoder_of(self.config.model, self.config.sequence)
        except ValueError:
            if self.timed:
                raise
            not_run = (f"zerosim's layers do not make {self.config.model.name}, so no step was run: seconds and bytes "
                       "are the plan's, in buckets that are units")
            self.tried = [_planned(candidate, row) for candidate, row in rows]
        else:
            self._try_all(rows, sizes)
        self.tried.sort(key=lambda one: (one.step_seconds, one.held_nbytes, one.settings.options.prefetch))
        places = {of: places_text(config) for of, config in self.configs.items()}
        return Tuned(self.config, self.global_batch, tuple(self.tried), len(self.missing_nbytes), self.slower,
                     self.farther, min(self.missing_nbytes, default=0), places, self.refused, not_run, self.timed)

    def _placed(self, candidate: Candidate) -> Candidate | None:
        """The candidate with the first places under which it fits; None where it fits under none."""
        for number, places in enumerate(self.configs, start=1):
            placed = replace(candidate, options=replace(candidate.options, offload=places))
            if self._config(placed).has_margin(placed.stage, placed.recompute):
                self.farther += len(self.configs) - number
                return placed
            self.missing_nbytes.append(self._row(placed).missing_nbytes)
        return None

    def _config(self, candidate: Candidate) -> PlanConfig:
        """The plan's configuration of a candidate, in buckets that are units."""
        return replace(self.configs[candidate.options.offload], batch=candidate.batch,
                       micro_batches=candidate.micro_batches, options=replace(candidate.options, bucket_nbytes=None))

    def _row(self, candidate: Candidate) -> PlanRow:
        return self._config(candidate).row(candidate.stage, candidate.recompute)

    def _try_all(self, rows: Sequence[tuple[Candidate, PlanRow]], sizes: Sequence[int | None]) -> None:
        """The candidates that a plan answers; of the others the first of a stage that has none, and those whose lower
        bound is below the fastest so far; then other buckets."""
        first: dict[int, Candidate] = {}
        for candidate, row in sorted(rows, key=lambda one: not self._is_planned(one[0])):
            leads = first.setdefault(candidate.stage, candidate) is candidate
            best = min((one.step_seconds for one in self.tried), default=float("inf"))
            if leads or self.timed or self._is_planned(candidate) or row.least_seconds < best:
                self._try(candidate, row)
            else:
                self.slower += 1
        by_stage = {one.settings.stage: one for one in sorted(self.tried, key=lambda one: -one.step_seconds)}
        for nbytes, one in product((size for size in sizes if size is not None), by_stage.values()):
            settings = replace(one.settings, options=replace(one.settings.options, bucket_nbytes=nbytes))
            self._try(settings, self._row(settings))
        if None not in sizes:
            self.tried = [one for one in self.tried if one.settings.options.bucket_nbytes is not None]

    def _try(self, candidate: Candidate, row: PlanRow) -> None:
        """Keeps a candidate that a plan answers; runs another, and keeps what came out if it fits and the engine runs
        it."""
        if self._is_planned(candidate):
            self.tried.append(_planned(candidate, row))
            return
        try:
            run = (_timed if self.timed else _measured)(self._config(candidate), candidate)
        except ValueError as error:
            self.refused[candidate.title] = str(error)
            return
        held = run.peak_nbytes + row.overhead_nbytes
        if held > row.capacity_nbytes:
            self.missing_nbytes.append(held - row.capacity_nbytes)
            return
        self.tried.append(Tried(candidate, run.step_seconds, run.exposed_seconds, held, row.host_nbytes,
                                row.disk_nbytes, row.step_seconds, not self.timed))

    def _is_planned(self, candidate: Candidate) -> bool:
        """True where a replay would say what the plan says."""
        return (not self.timed and candidate.options.bucket_nbytes is None and candidate.options.offload.is_none
                and is_cut_anywhere(self.config.optimizer))


def _planned(candidate: Candidate, row: PlanRow) -> Tried:
    return Tried(candidate, row.step_seconds, row.exposed_communication_seconds, row.total_nbytes, row.host_nbytes,
                 row.disk_nbytes, row.step_seconds, False)


# -- a step that is timed ---------------------------------------------------------------------------------------------


def _memory_nbytes() -> int | None:
    """The bytes of this machine's memory; None where the system does not say."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None


def _timed(config: PlanConfig, candidate: Candidate) -> _Run:
    """Takes steps on all ranks in this process, on different tokens each.

    Raises ValueError as the engine does, and where by estimate all ranks together hold more than this machine has.
    """
    row, there = config.row(candidate.stage, candidate.recompute), _memory_nbytes()
    nbytes = config.ranks * (row.total_nbytes - row.overhead_nbytes)
    if there is not None and nbytes > there:
        raise ValueError(f"{counted(config.ranks, 'rank')} hold {gigabytes(nbytes)} GB in this process, on a machine "
                         f"with {gigabytes(there)} GB; take fewer ranks or a smaller model, or seconds={REPLAYED!r}")
    cluster, model = Cluster(config.ranks), decoder_of(config.model, config.sequence)
    shape = (candidate.micro_batches, 2, candidate.batch, config.sequence)
    options = engine_options(config, candidate.stage, candidate.recompute, candidate.options.bucket_nbytes)

    def program(rank: Rank) -> list[float]:
        engine = Engine(rank, model, config.optimizer, **options)
        tokens = np.random.default_rng(rank.index).integers(0, model.config.vocabulary, shape)
        ends = []
        for _ in range(1 + TIMED):
            engine.step([(x, target) for x, target in tokens])
            rank.barrier()
            ends.append(process_time())
        return ends

    ends = cluster.run(program)[0]
    return _Run(min(after - before for before, after in pairwise(ends)), None,
                max(memory.peak_nbytes for memory in cluster.memory))


# -- a step, run without data and replayed ----------------------------------------------------------------------------


def _measured(config: PlanConfig, candidate: Candidate) -> _Run:
    """Runs the step on one rank that stands for all, or on all of them where buckets cut units, and replays it.

    Raises ValueError as the engine does.
    """
    few = replace(config, micro_batches=min(ENOUGH, config.micro_batches))
    for representative in (0, None):
        cluster = NullCluster(config.ranks, representative=representative)
        try:
            run_planned(cluster, few, candidate.stage, candidate.recompute,
                        bucket_nbytes=candidate.options.bucket_nbytes)
            break
        except AsymmetryError:
            if representative is None:
                raise
    recording = record(cluster.trace).inside("step")
    timeline = replay(recording.on_ranks(config.ranks) if cluster.representative is not None else recording,
                      config.machine)
    seconds, exposed = timeline.step_seconds, timeline.exposed_seconds
    if config.micro_batches > ENOUGH:
        more = config.micro_batches - ENOUGH
        each, each_exposed = _second_micro_batch(timeline)
        seconds, exposed = seconds + more * each, exposed + more * each_exposed
    return _Run(seconds, exposed, max(memory.peak_nbytes for memory in cluster.memory))


def _second_micro_batch(timeline: Timeline) -> tuple[float, float]:
    """(seconds, those exposed to communication) from the second micro-batch's first unit to the third's, on rank 0."""
    recording, lane, clocks = timeline.recording, timeline.lanes[0], timeline.clocks(0)
    program = recording.program(0)
    begun = [(row, recording.paths[program.first[row]]) for row in program.where(BEGIN).tolist()]
    forward = next(path for _, path in begun if path[-2:-1] == ("forward",))
    _, low, high = (row for row, path in begun if path == forward)
    exposed = sum(after - before for (row, _, _), part, before, after
                  in zip(lane.points, lane.part_at, lane.reached, lane.resumed, strict=True)
                  if low <= row < high and part.stream == COMMUNICATION)
    return float(clocks[high] - clocks[low]), exposed
