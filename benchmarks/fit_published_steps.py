"""The factors of efficiency.toml, fitted on every second published step time, and how far the other half is off.

    python benchmarks/fit_published_steps.py        # fits from the factors that stand there, and prints both
    python benchmarks/fit_published_steps.py alone  # of each device what the default factors of the others come to

One factor after the other goes up and down by a step while that lowers the sum, over all groups, of the mean error and of
the median's distance from 1, both as logarithms, on the fitted half alone. The held-out half is looked at when that is
done. Steps are a hundredth, so what is found is written down as it is.
"""

import sys
from collections.abc import Iterator
from math import log
from statistics import fmean, median
from typing import Any

from zerosim.course.published_steps import halves, off, published_steps, table
from zerosim.planning.efficiency import constants

Place = tuple[dict[str, Any], str, float]  # a table, a key, the step


def places() -> Iterator[Place]:
    """What is fitted; eager runtimes share what is not of the network, and all share contention."""
    runtimes, fitted = constants()["runtime"], constants()["fitted"]
    for factors in fitted.values():
        yield from ((row, "factor", 0.01) for name, row in factors.items() if name != "default")
    yield runtimes["fsdp2"], "memory", 0.01
    yield runtimes["fsdp2"], "contention", 0.01
    yield runtimes["deepspeed"], "network", 0.001


def loss() -> float:
    """The sum over the groups' fitted halves."""
    runtimes = constants()["runtime"]
    runtimes["deepspeed"]["memory"] = runtimes["fsdp2"]["memory"]
    for name in ("deepspeed", "megatron"):
        runtimes[name]["contention"] = runtimes["fsdp2"]["contention"]
    total = 0.0
    for fitted, _ in halves().values():
        if fitted[0].is_fitted:
            for row in fitted:
                vars(row).pop("predicted_seconds", None)
            errors = [log(row.ratio) for row in fitted]
            total += fmean(map(abs, errors)) + abs(median(errors))
    return total


def fit() -> None:
    """Coordinate descent until no step helps."""
    best, last = loss(), float("inf")
    while best < last:
        last = best
        for row, key, step in places():
            for sign in (step, -step):
                while True:
                    before = row[key]
                    row[key] = round(before + sign, 3)
                    if (found := loss()) >= best:
                        row[key] = before
                        break
                    best = found


def main(words: list[str]) -> None:
    """Prints the factors and the table."""
    if "alone" in words:
        for factors in constants()["fitted"].values():
            own = {name: row["factor"] for name, row in factors.items() if name != "default"}
            for name in own:
                factors[name]["factor"] = median(other for key, other in own.items() if key != name)
        ways = {(row.reached.runtime == "megatron", row.device.name) for row in published_steps() if row.is_fitted}
        for megatron, name in sorted(ways):
            rows = [row for row in published_steps() if row.is_fitted and row.device.name == name
                    and (row.reached.runtime == "megatron") == megatron]
            print(f"{'megatron' if megatron else 'pytorch':9} {name:8} {len(rows):4} rows, median {off(rows)[0]:.2f}, "
                  f"error {off(rows)[1]:.1%}")
        return
    fit()
    for name, factors in constants()["fitted"].items():
        print(name, {key: row["factor"] for key, row in factors.items()})
    print({name: {key: row[key] for key in ("memory", "contention", "network")}
           for name, row in constants()["runtime"].items()})
    for row in published_steps():
        vars(row).pop("predicted_seconds", None)
    print(*table(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
