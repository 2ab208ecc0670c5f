"""Search of the settings of a program that leave a margin, by the rows of its plans.

Legend: N ranks; G sequences of the global batch, which is k micro-batches of B sequences on each rank, G = N·k·B; L
tokens of a sequence.

Candidates are all combinations of stage, recomputation policy, micro-batch and units gathered ahead that the program
has settings for; on several nodes in shards over all ranks, and inside nodes alone (hybrid sharding). Each is judged by
the account of that program: it takes the first of its places of offload, and there the fewest parts of the loss, under
which it has the plan's margin, device, host and disk, since less off the device is never worse.

Seconds of a plan are no better than a few percent, and a full device is a risk. So of the candidates within 2 % of the
fastest the one with the most room is taken, and before it one that leaves more on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from inspect import Signature, signature
from itertools import product
from typing import Any

from rich.markup import escape

from zerosim.course.measured import preset_shape
from zerosim.course.tuned_settings import PROGRAMS, Pasted, pasted, unsaid
from zerosim.display.plan_table import answers, links_text, places_text, policy_label
from zerosim.display.style import percent
from zerosim.display.views import RIGHT, Part, TextLine, View, marked_table, parts, plain_record
from zerosim.numerics.checks import checked_count
from zerosim.numerics.places import DEVICE, KINDS, Offload, offload_of
from zerosim.numerics.units import count_of, counted, gigabytes, seconds_text
from zerosim.planning.closed_forms import STAGES
from zerosim.planning.configuration import Plan, PlanConfig
from zerosim.planning.explanation import order_text
from zerosim.planning.plan import plan_config
from zerosim.planning.plan_row import PlanRow
from zerosim.planning.questions import LOSS_CHUNKS, Training, training
from zerosim.planning.runtimes import DEEPSPEED, FSDP2
from zerosim.ranks.mesh import Mesh
from zerosim.shown import Answer

NEAR = 0.02  # of the fastest's seconds, which a plan cannot tell apart: its own error is larger
SHOWN = 12  # candidates in the table
MOST_SEQUENCES = 1 << 16  # of a rank in a step, more than anybody takes: every micro-batch is looked at
PLAN_ONLY = {  # options of a plan, and why a search does not take them
    "convention": "bytes are counted as the program holds them", "params": "a search needs a model's shape",
    "largest_layer": "a model's shape says it", "micro_batches": "global_batch, ranks and batch say how many there are",
    "zeropp": "parts of ZeRO++ are none of the settings that are searched"}


# -- the answer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings of one step: a plan's configuration, of one micro-batch, places and units ahead, and a row of it."""

    config: PlanConfig
    row: PlanRow

    @property
    def title(self) -> str:
        """``ZeRO-2 with block recomputation, optimizer on the host, in 4 micro-batches of 2 sequences``."""
        options, parts = self.config.options, self.config.loss_chunks
        how = [*([f"sharded inside nodes ({options.mesh})"] if options.mesh else ()),
               *([] if options.offload.is_none else [str(options.offload)]),
               *([f"the loss in {parts} parts"] if parts > 1 else ())]
        return (f"{', '.join([self.row.title, *how])}{',' if how else ''} in "
                f"{counted(self.config.micro_batches, 'micro-batch')} of "
                f"{counted(self.config.batch, 'sequence')}")

    @property
    def kind(self) -> tuple[int, str, int, str, Mesh | None]:
        """All that is chosen but the units gathered ahead, and the parts of the loss that these leave room for."""
        options = self.config.options
        return self.row.stage, self.row.recompute, self.config.batch, options.offload.text, options.mesh

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.row.step_seconds

    def rank(self, fastest_seconds: float) -> dict[str, float]:
        """The criteria by which candidates are ordered, one after the other, each the less the better."""
        near, row = self.seconds <= (1 + NEAR) * fastest_seconds, self.row
        return {"seconds": 0.0 if near else self.seconds, "offload": row.host_nbytes + row.disk_nbytes,
                "room": -row.spare_nbytes, "traffic": row.sent_nbytes_per_step}


@dataclass(frozen=True, slots=True, repr=False)
class Tuned(Answer):
    """Candidates that have the margin, best first; ``print`` and a notebook show them, with settings to paste.

    Units gathered ahead are as few as are as fast. ``too_large`` have not the margin under any places; ``nearest`` is
    the one of them that comes nearest to it, where none has it. ``left_out`` are the reasons why the program has no
    settings for some.
    """

    config: PlanConfig
    global_batch: int
    tried: tuple[Candidate, ...]
    too_large: int
    nearest: Candidate | None
    left_out: tuple[str, ...]

    @property
    def best(self) -> Candidate | None:
        """The one with the most room within 2 % of the fastest; None where none has the margin."""
        return self.tried[0] if self.tried else None

    @property
    def runner_up(self) -> Candidate | None:
        """The next best that differs from the best in more than the units gathered ahead; None where none does."""
        return next((one for one in self.tried if one.kind != self.tried[0].kind), None)

    @property
    def decides(self) -> str:
        """The first in which the runner-up differs from the best: seconds, offload, room, traffic; or nothing."""
        if self.best is None or self.runner_up is None:
            return "nothing"
        fastest = min(one.seconds for one in self.tried)
        one, other = (found.rank(fastest) for found in (self.best, self.runner_up))
        return next((name for name in one if one[name] != other[name]), "nothing")

    @property
    def verdict(self) -> str:
        """The best candidate in one sentence, and the runner-up with what decides in another."""
        margin = gigabytes(self.config.margin_nbytes)
        if self.best is None:
            assert self.nearest
            row = self.nearest.row
            how = f"misses by {gigabytes(row.missing_nbytes)} GB" if row.missing_nbytes else (
                f"has {gigabytes(row.spare_nbytes)} GB to spare, which a smaller margin takes")
            return (f"Nothing fits with a margin of {margin} GB: of {counted(self.too_large, 'candidate')} "
                    f"{self.nearest.title} comes nearest and {how}.")
        row = self.best.row
        return (f"{self.best.title}: {row.tokens_per_second_per_rank:,.0f} tokens/s per device, "
                f"{seconds_text(row.step_seconds)} a step, {gigabytes(row.spare_nbytes)} GB to spare."
                f"{self._runner_up()}")

    def _runner_up(self) -> str:
        """The runner-up, by how much it differs, and what decides."""
        best, other = self.best, self.runner_up
        if best is None or other is None:
            return ""
        slower = round(other.seconds / best.seconds - 1, 3)
        more = other.row.spare_nbytes - best.row.spare_nbytes
        said = [f"{percent(abs(slower))} {'slower' if slower > 0 else 'faster'}"] * bool(slower)
        said += [f"{gigabytes(abs(more))} GB {'more' if more > 0 else 'less'} to spare"] * bool(more)
        if other.row.sent_nbytes_per_step != best.row.sent_nbytes_per_step and best.row.sent_nbytes_per_step:
            said += [f"{other.row.sent_nbytes_per_step / best.row.sent_nbytes_per_step:.2f} times the traffic"]
        decides = "seconds decide" if self.decides == "seconds" else f"{self.decides} decides" + (
            f", since seconds within {percent(NEAR)} count as equal" * bool(slower))
        return f" Runner-up: {other.title}, {', '.join(said) or 'equal in all'}; {decides}."

    def view(self) -> View:
        """The verdict, the whole training if one was asked for, the candidates, and the settings to paste."""
        said = answers(Plan(self.best.config, (self.best.row,))) if self.best else ()
        return View(self.verdict, "", parts(map(escape, said), _table(self), map(escape, _assumed(self)),
                                            _settings(self)))

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data, with the settings of the best to paste."""
        config = self.config
        return plain_record({
            "model": config.model.name, "runtime": config.runtime, "ranks": config.ranks, "device": config.device.name,
            "compute": config.policy.compute, "overlap": config.options.overlap, "reduction": config.options.reduction,
            "global_batch": self.global_batch, "sequence": config.sequence, "margin_nbytes": config.margin_nbytes,
            "verdict": self.verdict, "training": asdict(self.training) if self.training else None,
            "decides": self.decides, "too_large": self.too_large, "left_out": self.left_out,
            "rows": [{"batch": one.config.batch, "micro_batches": one.config.micro_batches,
                      "prefetch": one.config.options.prefetch, "loss_chunks": one.config.loss_chunks,
                      "offload": one.config.options.offload.text, "mesh": str(one.config.options.mesh or "none")}
                     | one.row.as_dict() for one in self.tried],
            "assumed": list(_assumed(self)), "settings": asdict(self.pasted) if self.pasted else None})

    @property
    def pasted(self) -> Pasted | None:
        """The best candidate's settings for its program; None where none has the margin."""
        return pasted(self.best.config, self.best.row) if self.best else None

    @property
    def training(self) -> Training | None:
        """The whole training by the best candidate's step; None where no tokens were asked for."""
        return training(self.best.config, self.best.row) if self.best else None

    def __repr__(self) -> str:
        return f"<Tuned {self.config.model.name} on {self.config.ranks} ranks: {self.verdict}>"


# -- as it is shown ---------------------------------------------------------------------------------------------------


def _table(found: Tuned) -> Iterator[Part | str]:
    """The subject of the search, and the best candidates."""
    config = found.config
    yield from ("", TextLine(f"[bold]{escape(config.model.name)}[/]: {counted(config.ranks, 'rank')} of "
                             f"{escape(config.device.name)} ({gigabytes(config.device.usable_nbytes)} GB) "
                             f"{escape(links_text(config))}, {counted(found.global_batch, 'sequence')} of "
                             f"{counted(config.sequence, 'token')} a step, {config.policy.compute}, "
                             f"{'overlapped' if config.options.overlap else 'nothing overlapped'}{order_text(config)}, "
                             f"{config.runtime}", indent=0), "")
    if found.tried:
        shown = [(one.config, one.row) for one in found.tried[:SHOWN]]
        in_parts = any(one.loss_chunks > 1 for one, _ in shown)
        yield marked_table("", *(RIGHT + name for name in (
            "k · B", "ahead", *["loss"] * in_parts, "step", "exposed", "held", "spare", "tokens/s")), rows=[
                (" ".join(filter(None, (f"{row.stage}", policy_label(row.recompute, config.runtime),
                                        f"{one.options.mesh or ''}", off_device(one.options.offload)))),
                 f"{one.micro_batches} · {one.batch}", f"{one.options.prefetch}",
                 *[f"{one.loss_chunks}"] * in_parts, seconds_text(row.step_seconds),
                 seconds_text(row.exposed_communication_seconds), gigabytes(row.total_nbytes),
                 gigabytes(row.spare_nbytes), f"{row.tokens_per_second_per_rank:,.0f}")
                for one, row in shown])
    if (more := len(found.tried) - SHOWN) > 0:
        yield f"and {more:,} more; --json, or .tried, has them all."
    yield ""


def off_device(places: Offload) -> str:
    """A short text of what rests off the device: ``og host``, by the first letters of kinds; ``host``, where all does;
    empty for nothing."""
    by_place: dict[str, str] = {}
    for kind in KINDS:
        by_place[getattr(places, kind)] = by_place.get(getattr(places, kind), "") + kind[0]
    return ", ".join(f"{letters} {place}" if len(by_place) > 1 else place
                     for place, letters in by_place.items() if place != DEVICE)


def _assumed(found: Tuned) -> Iterator[str]:
    """The units, the order, what is not in the table, and what the numbers rest on."""
    config = found.config
    yield ("k micro-batches of B sequences on each rank; GB are 10⁹ bytes of one rank at the step's fullest moment, by "
           f"{config.runtime}'s account; tokens/s are of one device. All leave the margin of {percent(config.margin)}, "
           f"{gigabytes(config.margin_nbytes)} GB. Within {percent(NEAR)} of the fastest those with the most room come "
           "first, then the others by seconds, which are a plan's: zerosim plan --explain has what they rest on.")
    if found.too_large:
        yield f"Not in the table: {counted(found.too_large, 'candidate')} without the margin."
    if any(one.config.loss_chunks > 1 for one in found.tried):
        yield ("Under loss are the parts in which logits and their loss are made; seconds are those of "
               "an undivided loss, as where each part's gradient is made with it.")
    if mesh := next((one.config.options.mesh for one in found.tried if one.config.options.mesh), None):
        yield f"{mesh} are in shards inside nodes, and replicated across them."
    placed = dict.fromkeys(places_text(one.config) for one in found.tried)
    for assumed in filter(None, placed):
        yield (f"Off the device are o, the optimizer's state and masters, g, gradients, p, parameters. Assumed of "
               f"{assumed}; what is moved counts as beside nothing.")
    yield from (f"Left out: {reason}." for reason in found.left_out)


def _settings(found: Tuned) -> Iterator[Part | str]:
    """The best candidate's settings."""
    if one := found.pasted:
        yield from ("", TextLine(f"[bold cyan]{one.program}[/]", indent=0), "")
        yield from (TextLine(escape(line.lstrip()), indent=2 + len(line) - len(line.lstrip()))
                    for line in one.code.splitlines())
        yield from map(escape, one.notes)


# -- from names to an answer ------------------------------------------------------------------------------------------


Several = str | int | Iterable[Any]


def tune(model: Any, *, global_batch: int | str, batch: Several = "all", recompute: Several = "usual",
         prefetch: Several = (1, 2), loss_chunks: Several = "all", offload: Several | Offload = "all",
         runtime: str = "fsdp2", **options: Any) -> Tuned:
    """The settings of a program for a model, a machine and a global batch of G sequences: of those within 2 % of the
    fastest the one with the most room.

    What is searched: ``stage`` and ``recompute``, as in `zs.plan`; ``batch``, the sequences of a micro-batch, "all" for
    each number that divides a rank's share of G; ``prefetch``, units that stage 3 gathers ahead; on several ``nodes``
    shards over all ranks and, unless a ``mesh`` says which, inside nodes alone; ``loss_chunks``, "all" for powers of
    two up to 32 where the program can make its loss in parts, and ``offload``, places: each candidate takes the first
    under which it has the margin: "all" that the ``runtime``'s program has, or some, as "none,host". The other
    options are those of `zs.plan`. Raises ValueError for what cannot be searched, for what the program has no settings
    for, for a model without a known shape, and as `zs.plan` does.

    >>> found = tune("gpt2", global_batch=8, ranks=4, batch="1,2", recompute="none", stage=3, runtime="zerosim")
    >>> found.best.title, found.runner_up.config.batch, found.decides
    ('ZeRO-3 without recomputation in 1 micro-batch of 2 sequences', 1, 'seconds')
    """
    for name in PLAN_ONLY.keys() & options.keys():
        raise ValueError(f"{name}= is no option of tune: {PLAN_ONLY[name]}; leave it out")
    options |= {"runtime": runtime, "recompute": recompute}
    shape = preset_shape(model)
    searched = [_configs(shape, offload, options)]
    config, nodes = searched[0][0], options.get("nodes") or 1
    if nodes > 1 and not config.options.mesh:
        inside = _configs(shape, offload, options | {"mesh": (nodes, config.ranks // nodes)})
        searched += [inside] * any(unsaid(inside[0], stage, "none") is None for stage in inside[0].stages)
    if config.decoder is None:
        raise ValueError(f"the activations of {config.model.name} are not known, so nothing says which micro-batch "
                         "fits; tune a decoder, as gpt2-xl, or ask zs.plan")
    sequences, ranks = count_of(global_batch, "global_batch"), config.ranks
    if sequences % ranks:
        near = [f"{ranks * each}" for each in (sequences // ranks, sequences // ranks + 1) if each]
        raise ValueError(f"global_batch={sequences} cannot be shared equally by {counted(ranks, 'rank')}; take "
                         f"{' or '.join(near)}, or other ranks")
    share = sequences // ranks
    if share > MOST_SEQUENCES:
        raise ValueError(f"global_batch={sequences} gives each rank {share:,} sequences a step; take one that "
                         f"gives {MOST_SEQUENCES:,} at most")
    dividing = [size for size in range(1, share + 1) if not share % size]
    batches = dividing if batch == "all" else _counts("batch", batch)
    if wrong := sorted({*batches} - {*dividing}):
        raise ValueError(f"batch={wrong[0]} does not divide the {counted(share, 'sequence')} of each rank, and "
                         f"micro-batches are equal; take some of {', '.join(map(str, dividing))}")
    usual = LOSS_CHUNKS if config.runtime in (FSDP2, DEEPSPEED) else (1,)
    return _searched(searched, sequences, batches, _counts("prefetch", prefetch, 0),
                     _counts("loss_chunks", usual if loss_chunks == "all" else loss_chunks))


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


def _configs(model: Any, offload: Any, options: Mapping[str, Any]) -> list[PlanConfig]:
    """The plan's configuration under each of the places, in their order. What a host and a disk are goes to those that
    use them. Raises ValueError where a plan has none of them, and for a host or a disk that none uses."""
    names = PROGRAMS[options["runtime"]].offloads if offload == "all" and options["runtime"] in PROGRAMS else (
        "none" if offload == "all" else offload)
    places = list(dict.fromkeys(map(offload_of, [names] if isinstance(names, Offload) else _several(
        "offload", names, "one place at least, as none"))))
    found = []
    for of in places:
        own = {name: value for name, value in options.items()
               if _uses(of, name) or not any(_uses(other, name) for other in places)}
        try:
            found.append(plan_config(model, offload=of, **own))
        except ValueError:
            if of == places[-1] and not found:
                raise
    return found


def _uses(places: Offload, option: str) -> bool:
    """False for an option of a host, or a disk, where nothing is placed there."""
    return places.uses_disk if option.startswith("disk_") else not (option.startswith("host_") and places.is_none)


# -- the search -------------------------------------------------------------------------------------------------------


def _searched(searched: list[list[PlanConfig]], sequences: int, batches: Iterable[int], ahead: list[int],
              chunks: list[int]) -> Tuned:
    """The candidates that have the margin, best first, of those with more ahead the faster ones alone; ValueError where
    the program has settings for none."""
    config, tried, left_out = searched[0][0], list[Candidate](), dict[str, None]()
    small: list[tuple[PlanConfig, int, str]] = []
    for configs, (stage, policy, batch) in ((placed, chosen) for placed in searched for chosen in product(
            placed[0].stages, config.policies, batches)):
        for prefetch in ahead if STAGES[stage].parameters_sharded else [0]:
            several = [replace(one, batch=batch, micro_batches=sequences // config.ranks // batch, loss_chunks=parts,
                               options=replace(one.options, prefetch=prefetch)) for one in configs for parts in chunks]
            reasons = [unsaid(one, stage, policy) for one in several]
            left_out |= dict.fromkeys(filter(None, reasons))
            said = [one for one, reason in zip(several, reasons, strict=True) if reason is None]
            if found := next((one for one in said if one.has_margin(stage, policy)), None):
                candidate = Candidate(found, found.row(stage, policy))
                if not (tried and tried[-1].kind == candidate.kind and tried[-1].seconds <= candidate.seconds):
                    tried.append(candidate)
            elif said:
                small.append((said[-1], stage, policy))
    if not tried and not small:
        raise ValueError(f"there are no settings of {config.runtime} for what was asked: {'; '.join(left_out)}")
    nearest = None
    if tried:
        fastest = min(one.seconds for one in tried)
        tried.sort(key=lambda one: (*one.rank(fastest).values(), one.seconds, one.config.options.prefetch))
    else:
        nearest = min((Candidate(one, one.row(stage, policy)) for one, stage, policy in small),
                      key=lambda one: (one.row.missing_nbytes, -one.row.spare_nbytes))
    return Tuned(config, sequences, tuple(tried), len(small), nearest, tuple(left_out))
