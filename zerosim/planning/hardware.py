"""Devices, links, the networks that links make and machines of both; by name, those that come along and a user's own.

Every number has a source and a date. Each refusal is a sentence that says where the number stands.
"""

import datetime
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zerosim.numerics.checks import checked_count, count_fields, did_you_mean, is_number
from zerosim.numerics.files import facts
from zerosim.numerics.places import FROM_DISK, TO_DISK
from zerosim.numerics.units import counted

if TYPE_CHECKING:
    from zerosim.ranks.faults import FaultPlan

# The formats for which a device may have a rate, each peak and dense.
RATED_FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8")
LEAST, MOST = 1e-30, 1e30  # in SI units no machine is beyond, and quotients of these and of counts are finite


def positive(where: str, key: str, value: Any, *, or_zero: bool = False) -> float:
    """The value as a float; raises ValueError unless it is a number from 1e-30 (zero, if that may be) to 1e30."""
    name = f"{where}: {key}" if where else key
    if not is_number(value) or not 0 <= value < math.inf or (value == 0 and not or_zero):
        least = "that is not negative" if or_zero else "above 0"
        raise ValueError(f"{name} must be a finite number {least}, got {value!r}")
    if value > MOST or (value < LEAST and not or_zero):
        raise ValueError(f"{name} must be between {0 if or_zero else LEAST:g} and {MOST:g}, got "
                         f"{value!r:.30}; look at its unit")
    return float(value)


def whole(where: str, key: str, value: Any) -> int:
    """The value as an int, of 80e9 too; raises ValueError unless it is a whole number above zero."""
    if positive(where, key, value) != int(value):
        raise ValueError(f"{where}: {key} must be a whole number of bytes, got {value!r}")
    return int(value)


def checked_text(where: str, key: str, value: Any) -> str:
    """The text; raises ValueError for what is none, or blank."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {key} must be a text, got {value!r}; a number without a {key} cannot be checked")
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` with the nearest of the known names, or nothing."""
    return did_you_mean(str(name).lower(), known, most=3, likeness=0.5)


def checked_rates(where: str, key: str, rates: Any) -> dict[str, float]:
    """Rates by format; raises ValueError for none, and for a format that is not in `RATED_FORMATS`."""
    if not isinstance(rates, Mapping) or not rates:
        raise ValueError(f"{where}: {key} must give a dense rate for some of {', '.join(RATED_FORMATS)}, got {rates!r}")
    for format in rates:
        if format not in RATED_FORMATS:
            raise ValueError(f"{where}: {key} has no format {format!r}; there are {', '.join(RATED_FORMATS)}"
                             f"{nearest(format, RATED_FORMATS)}")
    return {format: positive(where, f"{key}.{format}", rate) for format, rate in rates.items()}


def _check_fields(row: Any, where: str, *, or_zero: str = "") -> None:
    """Raises ValueError for a field that is not of its type, each but the name; one number may be 0."""
    checks: Mapping[Any, Callable[[str, str, Any], Any]] = {
        str: checked_text, int: whole, float: positive, Mapping[str, float]: checked_rates}
    for item in fields(row)[1:]:
        value = getattr(row, item.name)
        if value is not None:
            checked = partial(positive, or_zero=True) if item.name == or_zero else checks.get(item.type, checked_text)
            object.__setattr__(row, item.name, checked(where, item.name, value))


# -- a device, a link, and the network that links make ----------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: its memory and its peak arithmetic.

    `capacity_nbytes` is the vendor's number, `reported_nbytes` what the device itself says; they differ both ways.
    `usable_nbytes`, 0 for as reported, is what programs can take. `flops_per_second` are dense by format, never the
    doubled figures for sparse matrices. `link` names the link between the devices of a node, `host_link` that between a
    device and its host, `network` that between nodes, which have `cards_per_device` cards for each device, where they
    are known. `platform`, "cuda", "hopper", "rocm" or "tpu", says what a runtime takes for itself there.
    Raises ValueError for numbers that are not positive and finite, for a format that is not in `RATED_FORMATS`, for
    more bytes to use than are reported, and for another platform.
    """

    name: str
    capacity_nbytes: int
    reported_nbytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float] = field(hash=False)
    source: str
    date: str
    host_link: str | None = None
    link: str | None = None
    usable_nbytes: int = 0
    network: str | None = None
    cards_per_device: float = 1
    platform: str = "cuda"

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        if self.usable_nbytes == 0:
            object.__setattr__(self, "usable_nbytes", self.reported_nbytes)
        _check_fields(self, where)
        if self.usable_nbytes > self.reported_nbytes:
            raise ValueError(f"{where}: usable_nbytes must be at most reported_nbytes, {self.reported_nbytes:,}, got "
                             f"{self.usable_nbytes:,}; programs get no more than the device has")
        if self.platform not in OVERHEADS_OF:
            raise ValueError(f"{where}: platform must be one of {', '.join(OVERHEADS_OF)}, got {self.platform!r}")

    def flops_per_second_in(self, format: str) -> float:
        """The dense peak in one format; raises ValueError where the device has none."""
        if format not in self.flops_per_second:
            raise ValueError(f"the device {self.name} has no rate in {format}; "
                             f"it has {', '.join(self.flops_per_second)}; compute in one of these")
        return self.flops_per_second[format]


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a device: β bytes per second one way, and α seconds for each message whatever its length.

    ``kind`` names the row of `zerosim.planning.nccl.KINDS` by which NCCL's time over it is computed.
    Raises ValueError for a rate that is not positive and finite, and for a latency that is negative or not finite.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float
    source: str
    date: str
    kind: str | None = None

    def __post_init__(self) -> None:
        _check_fields(self, f"link {self.name!r}", or_zero="latency_seconds")  # then it is an ideal link

    @property
    def alpha(self) -> Fraction:
        """α, exactly as its decimals are written."""
        return Fraction(str(self.latency_seconds))

    @property
    def beta(self) -> Fraction:
        """β, exactly as its decimals are written."""
        return Fraction(str(self.bytes_per_second))

    def seconds(self, nbytes: Any) -> Any:
        """α + n/β: how long a message of n bytes takes; a whole number, or an array of them, (n,)."""
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Network:
    """The links between ranks: one kind, or a fast one inside a node and a slow one between nodes.

    Ranks stand node by node: 0 to g-1 in the first of g = `ranks_per_node`, and so on. Each rank has a link of its own
    of either kind: a network card of its own for what leaves the node. A message between two ranks takes the sender's
    card; in a collective the cards of all its ranks on a node carry what leaves the node, as NCCL's channels do, which
    are rings that leave it by a card each. Machines whose nodes have more cards than ranks, or fewer, say so as
    `cards_per_rank`; `zerosim.planning.nccl` counts them, and nothing else does.
    Raises ValueError where `between` stands without `ranks_per_node` or the other way round.
    """

    inside: Link
    between: Link | None = None
    ranks_per_node: int | None = None
    cards_per_rank: float = 1

    def __post_init__(self) -> None:
        if (self.between is None) != (self.ranks_per_node is None):
            raise ValueError(f"a network of nodes needs a link between them and the ranks of a node, got "
                             f"between={self.between and self.between.name!r} and ranks_per_node="
                             f"{self.ranks_per_node}; give both, or neither for a network of one node")
        if self.ranks_per_node is not None:
            count_fields(self, ranks_per_node=1)
        positive("the network", "cards_per_rank", self.cards_per_rank)

    def crosses(self, source: Any, destination: Any) -> Any:
        """True where a message leaves its node; ranks as whole numbers or as arrays of them, (n,) and (n,)."""
        if self.ranks_per_node is None:
            return source != source  # False, of the arguments' shape
        return source // self.ranks_per_node != destination // self.ranks_per_node

    def sharing(self, sources: np.ndarray, destinations: np.ndarray, group: np.ndarray) -> tuple[Any, Any]:
        """(network cards, messages that share them) of each message of one step of a group's collective, (n,) each.

        Of a message that leaves its node these are the group's ranks there, and the messages that leave with it; or
        those of the other node and the messages that enter, where that is slower. Inside a node 1 and 1.

        >>> from zerosim.planning import hardware
        >>> network, ranks = hardware.presets().network(8, "nvlink4", 2), np.arange(8)
        >>> [one.tolist() for one in network.sharing(ranks, (ranks + 1) % 8, ranks)]
        [[1, 1, 1, 4, 1, 1, 1, 4], [1, 1, 1, 1, 1, 1, 1, 1]]
        """
        if self.ranks_per_node is None:
            return np.ones_like(sources), np.ones_like(sources)
        start, end, nodes = (ranks // self.ranks_per_node for ranks in (sources, destinations, group))
        crosses, cards = start != end, np.bincount(nodes)
        leaving, entering = (np.bincount(ends[crosses], minlength=len(cards)) for ends in (start, end))
        here = leaving[start] * cards[end] >= entering[end] * cards[start]  # slower than there
        return (np.where(crosses, np.where(here, cards[start], cards[end]), 1),
                np.where(crosses, np.where(here, leaving[start], entering[end]), 1))


# -- a machine, and what of it is slow --------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Slow:
    """A straggler: all that the rank computes, or every message on its link ``to`` another rank, takes ``factor`` times
    as long."""

    rank: int
    factor: float
    to: int | None = None

    def __post_init__(self) -> None:
        count_fields(self, rank=0, **{"to": 0} if self.to is not None else {})
        positive(f"the slow {self}", "factor", self.factor)

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.to is None else f"link from {self.rank} to {self.to}"


@dataclass(frozen=True, slots=True)
class Machine:
    """N equal devices on a network.

    Arithmetic runs at ``efficiency`` times the device's dense peak in ``format``, or as fast as memory brings its
    operands, whichever is slower (Williams, Waterman & Patterson 2009, the roofline). An efficiency of 1 gives a bound:
    no program is faster. Each device has a ``host_link`` of its own, full duplex, as pcie5, and its host a
    ``disk_link`` for it, which reads and writes at once: what other devices move, and what the host's memory allows, is
    not in it.

    Raises ValueError for a format that the device lacks, an efficiency outside (0, 1], and a rank or a link that is
    slow twice.
    """

    device: Device
    network: Network
    format: str = "bf16"
    efficiency: float = 1.0
    slow: Sequence[Slow] = ()
    host_link: Link | None = None
    disk_link: Link | None = None

    def slowed_by(self, plan: "FaultPlan") -> "Machine":
        """This machine with the slow ranks and links of a plan of faults too."""
        return replace(self, slow=[*self.slow, *(Slow(fault.rank, fault.factor, fault.to) for fault in plan.faults
                                                 if fault.kind == "slow")])

    def __post_init__(self) -> None:
        self.device.flops_per_second_in(self.format)
        if positive("the machine", "efficiency", self.efficiency) > 1:
            raise ValueError(f"the machine: efficiency must be a share of the peak, above 0 and at most 1, got "
                             f"{self.efficiency!r}")
        object.__setattr__(self, "slow", tuple(self.slow))
        if twice := [name for name, count in Counter(map(str, self.slow)).items() if count > 1]:
            raise ValueError(f"the {twice[0]} is slow twice; give it one factor")

    @property
    def peak_flops_per_second(self) -> float:
        """The dense peak of one device in the machine's format."""
        return self.device.flops_per_second_in(self.format)

    def link_of(self, direction: str) -> Link:
        """The link of transfers of a direction, to a host or a disk; raises ValueError where the machine has none."""
        name, place, example = (("disk_link", "disk", "nvme-pcie4") if direction in (TO_DISK, FROM_DISK) else
                                ("host_link", "host", "pcie5"))
        found: Link | None = getattr(self, name)
        if found is None:
            raise ValueError(f"something is moved to a {place} or back, and the machine has no link to one; name it, "
                             f"as {name}=link(\"{example}\")")
        return found

    def pace(self, rank: int) -> float:
        """Seconds that a rank takes for a nominal one of arithmetic: its factor where it is slow, or 1."""
        return next((slow.factor for slow in self.slow if slow.rank == rank and slow.to is None), 1.0)

    def compute_seconds(self, flops: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Nominal seconds of arithmetic that reads and writes so many bytes, (n,), by the roofline."""
        seconds: np.ndarray = np.maximum(flops / (self.peak_flops_per_second * self.efficiency),
                                         nbytes / self.device.memory_bytes_per_second)
        return seconds

    def message_seconds(self, sources: np.ndarray, destinations: np.ndarray, nbytes: np.ndarray,
                        group: np.ndarray | None = None) -> np.ndarray:
        """Seconds of messages between ranks of two different devices, (n,), each by its sender's card; or of one step
        of a collective of a group, whose ranks' cards they share."""
        seconds: np.ndarray = self.network.inside.seconds(nbytes)
        if self.network.between is not None:
            crosses = self.network.crosses(sources, destinations)
            cards, messages = (1, 1) if group is None else self.network.sharing(sources, destinations, group)
            seconds = np.where(crosses, self.network.between.seconds(nbytes * messages / cards), seconds)
        for slow in self.slow:
            if slow.to is not None:
                seconds[(sources == slow.rank) & (destinations == slow.to)] *= slow.factor
        return seconds

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError for slow ranks and links that a run of N ranks does not have."""
        for slow in self.slow:
            if max(slow.rank, slow.to or 0) >= ranks:
                raise ValueError(f"the {slow} is to be slow, but the run has {ranks} ranks, numbered from 0")


# -- by name ----------------------------------------------------------------------------------------------------------

# Names of devices and links that say no size or generation, and which is meant; case does not matter.
SHORT_NAMES = {"a100": "a100-80", "h100": "h100-80", "v100": "v100-32", "nvlink": "nvlink4",
               "pcie": "pcie5", "infiniband": "infiniband-ndr", "ethernet": "ethernet-100g", "nvme": "nvme-pcie4"}
# Words of full names, as programs print them, that tell no two devices apart.
NEEDLESS_WORD = re.compile(r"nvidia|amd|google|geforce|tesla|instinct|oam|sxm\d?|hbm\d?e?")
BETWEEN = "infiniband-ndr"  # what lies between nodes where neither a link is named nor a device, which has its own
DISK_LINK = "nvme-pcie4"    # and between a host and its disk
# A device's share of its host's memory and disks, unless others are given: 2 TB and 8 disks of 3.84 TB for 8 devices.
# Source: NVIDIA DGX H100 data sheet (system memory 2 TB, internal storage 8 x 3.84 TB NVMe), not seen (2023-03).
HOST_NBYTES, DISK_NBYTES = 250 * 10**9, 3840 * 10**9
DeviceOrLink = TypeVar("DeviceOrLink", Device, Link)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Devices and links, each under its name."""

    devices: Mapping[str, Device] = field(hash=False)
    links: Mapping[str, Link] = field(hash=False)

    def device(self, name: str) -> Device:
        """The device of this name, or of a name that people type, as 4090 or NVIDIA A100-SXM4-80GB.

        Raises ValueError with the nearest names, and all there are.
        """
        return _named("device", name, self.devices)

    def link(self, name: str) -> Link:
        """The link of this name; raises ValueError with the nearest names, and all there are."""
        return _named("link", name, self.links)

    def device_link(self, device: str, name: str | None = None) -> Link:
        """The link between devices of a node, its own unless another is named; nvlink is of the device's generation.

        Raises ValueError for a device that does not say, and for no link.
        """
        return self._link(name, self.device(device).link, f"the device {device} does not say by which link the devices "
                          "of a node are connected; name one, as nvlink4 or pcie5")

    def network(self, ranks: int, link: str, nodes: int = 1, between: str | None = None,
                device: str | None = None) -> Network:
        """The network of N ranks, spread evenly over so many nodes, by the names of its links.

        Where nodes are several and `between` is None, it is the ``device``'s own, or `BETWEEN` without a device; the
        network cards are as many as the device's machines have. Raises ValueError as `link` does, for counts below one,
        for ranks that the nodes do not divide, for one node with a link between nodes, and for a device that does not
        say what lies between its nodes.
        """
        own = None if device is None else self.device(device)
        if between is None and nodes != 1:
            between = BETWEEN if own is None else own.network
            if between is None:
                raise ValueError(f"the device {device} does not say by which link its nodes are connected; name one, "
                                 "as between=infiniband-hdr or between=ethernet-10g")
        inside, outside = self.link(link), None if between is None else self.link(between)
        ranks, nodes = checked_count("ranks", ranks, 1), checked_count("nodes", nodes, 1)
        if ranks % nodes:
            raise ValueError(f"{counted(ranks, 'rank')} cannot be spread evenly over {nodes} nodes; take as many on "
                             "each")
        if nodes > 1:
            return Network(inside, outside, ranks // nodes, 1 if own is None else own.cards_per_device)
        if outside is not None:
            raise ValueError(f"one node has no link between nodes, found between={outside.name!r}; take more nodes, "
                             "or leave it out")
        return Network(inside)

    def host_link(self, device: str, name: str | None = None) -> Link:
        """The link between a device and its host, its own unless another is named; pcie is of its generation.

        Raises ValueError for a device that does not say, and for no link.
        """
        return self._link(name, self.device(device).host_link, f"the device {device} does not say by which link it "
                          "is connected to its host; name one, as pcie5")

    def _link(self, name: str | None, own: str | None, unsaid: str) -> Link:
        """The link named, or the device's own; that too where the name is a short one of its kind: nvlink3 for
        nvlink."""
        asked = own if name is None else name
        if asked is None:
            raise ValueError(unsaid)
        typed = str(asked).strip().lower()
        return self.link(own if own is not None and typed in SHORT_NAMES and own.startswith(typed) else asked)


@lru_cache(maxsize=1)
def presets() -> Hardware:
    """The devices and links that come along, each number with its source."""
    return parse(facts(__package__, "hardware"), "hardware.toml")


def read(path: str | Path | None) -> Hardware:
    """The devices and links that come along, and beside them those of a TOML file, where one is named.

    The file has tables ``[device.NAME]`` and ``[link.NAME]`` with the fields of `Device` and `Link`:

        [link.my-nvlink]
        bytes_per_second = 400e9
        latency_seconds = 2.1e-6
        source = "measured with nccl-tests on our cluster"
        date = "2025-06"

    Raises ValueError for a file that cannot be read or is no TOML, for tables and keys that are not known, for fields
    that are missing or not of their kind, and for a name that a preset has.
    """
    if path is None:
        return presets()
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the hardware file {str(path)!r} cannot be read: {error.strerror}; give the path of a TOML "
                         "file") from None
    except (ValueError, RecursionError) as error:  # UTF-8's, TOML's, one for too many digits, one for too deep nesting
        raise ValueError(f"{path} is no TOML: {error}") from None
    own, known = parse(data, str(path)), presets()
    for kind, names, taken in (("device", own.devices, known.devices), ("link", own.links, known.links)):
        for name in names:
            if name in taken:
                raise ValueError(f"{path}: the {kind} {name!r} comes along already; give yours a name of its own")
    return Hardware({**known.devices, **own.devices}, {**known.links, **own.links})


def parse(data: Mapping[str, Any], where: str) -> Hardware:
    """The devices and links of a TOML file's tables; `where` is its name in errors, which are those of `read`."""
    for key in data:
        if key not in {"device", "link"}:
            raise ValueError(f"{where}: no table {key!r} is known; write [device.NAME] or [link.NAME]")
    for kind, tables in data.items():
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            raise ValueError(f"{where}: {kind} must hold tables; write [{kind}.NAME], and its fields under it")
    devices, links = data.get("device", {}), data.get("link", {})
    return Hardware({name: _row(where, "device", Device, name, table) for name, table in devices.items()},
                    {name: _row(where, "link", Link, name, table) for name, table in links.items()})


def device(name: str) -> Device:
    """The device of this name among those that come along; raises ValueError for none."""
    return presets().device(name)


def link(name: str) -> Link:
    """The link of this name among those that come along; raises ValueError for none."""
    return presets().link(name)


def _row(where: str, kind: str, row: type[DeviceOrLink], name: str, table: dict[str, Any]) -> DeviceOrLink:
    known = {item.name: item.default for item in fields(row) if item.name != "name"}
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: {kind} {name!r} has a field {key!r}, which no {kind} has; there are "
                             f"{', '.join(known)}{nearest(key, known)}")
    missing = [key for key, default in known.items() if default is MISSING and key not in table]
    if missing:
        raise ValueError(f"{where}: {kind} {name!r} lacks {', '.join(missing)}")
    # TOML has dates of its own; 2025-06-01 and "2025-06-01" mean the same.
    values: dict[str, Any] = {key: value.isoformat() if isinstance(value, datetime.date) else value
                              for key, value in table.items()}
    try:
        return row(name=name, **values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _named(kind: str, name: str, rows: Mapping[str, DeviceOrLink]) -> DeviceOrLink:
    typed = str(name).strip()
    plain = _plain(typed)
    for known in (typed, typed.lower(), SHORT_NAMES.get(plain, "")):
        if known in rows:
            return rows[known]
    # The name in other words, or without the family that it begins with: 4090 for rtx-4090, v5e for tpu-v5e.
    for pattern in ("", r"[a-z]+-"):
        found = [known for known in rows if plain and plain == _plain(re.sub(f"^{pattern}", "", known))]
        if len(found) == 1:
            return rows[found[0]]
        if found:
            raise ValueError(f"{name!r} may be the {kind} {' or '.join(found)}; write which")
    raise ValueError(f"no {kind} is called {name!r}; there are {', '.join(rows)}{nearest(name, rows)}")


def _plain(name: str) -> str:
    """A name without what spelling adds: NVIDIA A100-SXM4-80GB is a10080."""
    words = re.split(r"[\s_-]+", name.lower())
    return "".join(re.sub(r"(?<=\d)gb$", "", word) for word in words if not NEEDLESS_WORD.fullmatch(word))


# -- the memory that a runtime takes for itself -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes of a device's memory that a runtime takes for itself, between two numbers, as its source has it."""

    least_nbytes: int
    most_nbytes: int
    source: str


# Estimates, each for one device of a platform; a plan names those that it adds, and replaces them by measured ones.
ROWS_OF_OVERHEADS = facts(__package__, "overheads")
OVERHEADS_OF: Mapping[str, Mapping[str, Overhead]] = {platform: {
    name: Overhead(**row) for name, row in {**ROWS_OF_OVERHEADS["cuda"], **rows}.items()}
    for platform, rows in ROWS_OF_OVERHEADS.items()}
OVERHEADS = OVERHEADS_OF["cuda"]


def overheads_nbytes(nbytes: Mapping[str, int] | None = None, platform: str = "cuda") -> dict[str, int]:
    """Bytes that a runtime takes, by name: the least that the sources give, but for those that are given here.

    >>> sum(overheads_nbytes().values()), sum(overheads_nbytes({"allocator fragmentation": 0}).values())
    (2708519680, 708519680)

    Raises ValueError for a name that is not in `OVERHEADS` and for negative bytes.
    """
    if not isinstance(nbytes, Mapping | None):
        raise ValueError(f"overheads are bytes by name, as {{'matmul workspace': 0}}, got {nbytes!r}")
    given = dict(nbytes or {})
    if unknown := given.keys() - OVERHEADS.keys():
        raise ValueError(f"no overhead is called {', '.join(sorted(map(repr, unknown)))}; there are "
                         f"{', '.join(OVERHEADS)}")
    return {name: checked_count(name, given.get(name, overhead.least_nbytes), 0)
            for name, overhead in OVERHEADS_OF[platform].items()}
