"""The speed at which a recorded run of a million events is kept, replayed, and made into other things.

The run is a real one: GPT's engine on 8 ranks at stage 3, with overlap and prefetch, as many steps as make a million
rows. The rings are of 512 ranks that arrive one by one, a million messages in all. Seconds are this machine's.
"""

import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table
from timing import best_seconds

import zerosim as zs
from zerosim.display.chrome_trace import chrome_trace
from zerosim.planning import ceil_cut
from zerosim.planning.collectives import CollectiveShape
from zerosim.planning.hardware import Network, device, link
from zerosim.planning.recording import RecordedCall, Recording, from_plain, record, to_plain
from zerosim.planning.streams import Collectives
from zerosim.planning.timeline import Machine, Slow, critical_path, memory, replay
from zerosim.ranks.trace import Traces

RANKS, ROWS, ROWS_PER_STEP = 8, 1_000_000, 2_500
RING_RANKS, RING_ELEMENTS = 512, 1 << 20
NETWORK = Network(link("nvlink4"), link("infiniband-ndr"), 4)
MACHINE = Machine(device("h100-80"), NETWORK, "bf16", efficiency=0.5)
STRAGGLER = Machine(device("h100-80"), NETWORK, "bf16", efficiency=0.5, slow=[Slow(3, 1.5)])


def traces(steps: int) -> Traces:
    """A real run of so many steps."""

    def program(rank: zs.Rank) -> None:
        engine = zs.Engine(rank, zs.models.GPT("gpt-nano"), zs.optim.Adam(), stage=3, policy=zs.Policy("bf16"),
                           overlap=True, prefetch=1)
        tokens = np.random.default_rng(rank.index).integers(0, 17, (1, 9))
        for _ in range(steps):
            engine.step([(tokens[:, :-1], tokens[:, 1:])])

    cluster = zs.Cluster(RANKS)
    cluster.run(program)
    return cluster.trace


def ring_messages() -> None:
    """Two all-reduces of 512 ranks that arrive one by one: a million messages."""
    shape = CollectiveShape("all_reduce", "ring", ceil_cut(RING_ELEMENTS, RING_RANKS), 2, 2)
    collectives = Collectives(MACHINE)
    arrivals = [1e-6 * rank for rank in range(RING_RANKS)]
    for number in range(2):
        collectives.ends(RecordedCall(shape, tuple(range(RING_RANKS)), (), number, "gradients"), arrivals)


def cases(found: Traces, recording: Recording) -> dict[str, Callable[[], object]]:
    """The timed functions, by name."""
    timeline, plain = replay(recording, STRAGGLER), to_plain(recording)
    everyone = range(RANKS)
    return {
        "record (traces to tables)": partial(record, found),
        "to plain data": partial(to_plain, recording),
        "from plain data": partial(from_plain, plain),
        "replay, with each rank's usage": lambda: replay(recording, MACHINE).usage,
        "replay with a straggler": lambda: replay(recording, STRAGGLER).usage,
        "when each row began": lambda: [timeline.clocks(rank) for rank in everyone],
        "memory over time": lambda: [memory(timeline, rank) for rank in everyone],
        "critical path": lambda: critical_path(replay(recording, STRAGGLER)),
        "Chrome trace": partial(chrome_trace, timeline),
        "rings of 512": ring_messages,
    }


def main() -> None:
    """Prints one row per case; the number of rows may be given."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    start = time.perf_counter()
    found = traces(-(-rows // ROWS_PER_STEP))
    recording = record(found)
    console = Console()
    console.print(f"A run of {recording.row_count:,} rows on {RANKS} ranks, {len(recording.calls):,} collectives, made "
                  f"in {time.perf_counter() - start:.1f} s. Rings: {2 * 2 * (RING_RANKS - 1) * RING_RANKS:,} messages.")
    table = Table(title="A million events")
    table.add_column("what")
    table.add_column("seconds", justify="right")
    for name, action in cases(found, recording).items():
        table.add_row(name, f"{best_seconds(action):.3f}")
    console.print(table)


if __name__ == "__main__":
    main()
