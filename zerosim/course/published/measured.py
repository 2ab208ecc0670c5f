"""Times of collectives that others measured with nccl-tests, beside what `zerosim.planning.nccl` makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from zerosim.planning.facts import facts
from zerosim.planning.hardware import Network, presets
from zerosim.planning.nccl import algorithm_seconds


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """One table: µs of a collective on nodes of eight devices, of sizes that double from ``from_kibibytes`` on.

    ``fitted`` tables are those on which the model's constants were fitted. ``algorithm`` is the only one that the run
    allowed, or empty. ``off`` are the sizes, in KiB, at which the model is more than 20 % away, and ``why`` is what is
    known of them.
    """

    name: str
    operation: str
    device: str
    nodes: int
    fitted: bool
    from_kibibytes: int
    microseconds: Sequence[float]
    source: str
    date: str
    algorithm: str = ""
    off: Sequence[int] = ()
    why: str = ""

    @property
    def network(self) -> Network:
        """The network of the device's machines."""
        known, device = presets(), presets().device(self.device)
        return known.network(8 * self.nodes, device.link or "", self.nodes, device=self.device)

    @property
    def errors(self) -> dict[int, float]:
        """By size in KiB, the model's time over the measured one, less 1."""
        found = {}
        for doubled, measured in enumerate(self.microseconds):
            kibibytes = self.from_kibibytes << doubled
            times = algorithm_seconds(self.operation, 8 * self.nodes, kibibytes * 1024, self.network)
            model = min(seconds for (algorithm, _), seconds in times.items() if self.algorithm in ("", algorithm))
            found[kibibytes] = 1e6 * model / measured - 1
        return found


@cache
def measured_collectives() -> tuple[MeasuredCollective, ...]:
    """All tables that are kept.

    >>> table = measured_collectives()[0]
    >>> table.name, table.operation, table.microseconds[0], f"{table.errors[64]:+.0%}"
    ('DGX H100', 'all_reduce', 18.85, '-9%')
    """
    return tuple(MeasuredCollective(**row) for row in facts("nccl", __package__)["table"])
