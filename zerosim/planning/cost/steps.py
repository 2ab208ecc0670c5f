"""In which step of a collective each message goes, and the longest message of every step on every kind of link.

Legend: N ranks. A message goes when both its ends are ready for it: each end has done all that its own program has
before. All messages that can go at once make one step, which ends with the slowest of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from zerosim.planning.cost.schedule import Ints, Level
from zerosim.planning.hardware import Network

# Bytes of a step's longest message inside nodes, and of its longest between nodes; None where there is no message.
Longest = tuple[int | None, int | None]


def placed(levels: Iterable[Level], ranks: int) -> Iterator[tuple[Ints, Level]]:
    """Each level with the step, counted from 0, in which each of its messages goes, (messages,).

    A level that goes several times takes that many steps from there on; its ranks, all of them, go at one pace.
    """
    ready = np.zeros(ranks, np.int64)
    for level in levels:
        step = np.maximum(ready[level.sources], ready[level.destinations])
        assert level.times == 1 or (step == step[0]).all(), "ranks at different paces cannot repeat a level"
        yield step, level
        for ends in (level.sources, level.destinations):
            np.maximum.at(ready, ends, step + level.times)


def longest_by_step(levels: Iterable[Level], ranks: int, network: Network) -> Counter[Longest]:
    """How many steps have which longest messages."""
    steps: dict[int, Longest] = {}
    repeated: Counter[Longest] = Counter()
    for step, level in placed(levels, ranks):
        crosses = network.crosses(level.sources, level.destinations)
        for number in {int(step[0])} if (step == step[0]).all() else set(step.tolist()):
            here = step == number
            found = _longest(level.nbytes[here & ~crosses]), _longest(level.nbytes[here & crosses])
            if level.times > 1:
                repeated[found] += level.times
            else:
                inside, between = steps.get(number, (None, None))
                steps[number] = _longer(inside, found[0]), _longer(between, found[1])
    return repeated + Counter(steps.values())


def _longest(nbytes: Ints) -> int | None:
    return int(nbytes.max()) if len(nbytes) else None


def _longer(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)
