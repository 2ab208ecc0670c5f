"""Published times of training steps beside predicted ones: how far seconds of a plan are off; and the fit of factors.

    python benchmarks/published_steps.py               # median and mean error of both halves of each group
    python benchmarks/published_steps.py torchtitan    # and each row of the groups whose names have that in them
    python benchmarks/published_steps.py --fit         # fits the factors of efficiency.toml from those that stand there
    python benchmarks/published_steps.py --alone       # predicts each device by the factors of the others

A fit moves one factor after the other up and down by a step while that lowers the sum, over all groups, of the mean
error and of the median's distance from 1, both as logarithms, on the fitted half alone. The held-out half is looked at
when that is done. Steps are a hundredth, so what is found is written down as it is.
"""

import sys
from collections.abc import Iterator
from math import log
from statistics import fmean, median
from typing import Any

from zerosim.course.published.steps import halves, off, published_steps
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
    """Coordinate descent until no step helps; prints the factors."""
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
    for name, factors in constants()["fitted"].items():
        print(name, {key: row["factor"] for key, row in factors.items()})
    for name, row in constants()["runtime"].items():
        print(name, {key: row[key] for key in ("memory", "contention", "network")})


def alone() -> None:
    """Prints the errors of each device under the median of the others' factors."""
    for name, factors in constants()["fitted"].items():
        own = {device: row["factor"] for device, row in factors.items() if device != "default"}
        for device in own:
            factors[device]["factor"] = median(factor for other, factor in own.items() if other != device)
        for device in own:
            rows = [row for row in published_steps() if row.is_fitted and row.device.name == device
                    and constants()["runtime"][row.reached.runtime]["fitted"] == name]
            print(f"{name:9} {device:8} {len(rows):4} rows, median {off(rows)[0]:.2f}, error {off(rows)[1]:.1%}")


def table() -> Iterator[str]:
    """Lines of the groups: rows, median of predicted over measured, and mean error, of both halves.

    A star marks groups of which too little is published to hold a prediction to them.
    """
    yield f"{'':34}{'fitted on':>24}   {'held out':>24}"
    yield f"{'published step times':34}" + "   ".join(2 * [f"{'rows':>6}{'median':>9}{'error':>9}"])
    for name, both in halves().items():
        cells = ("{:6}{:9.2f}{:9.1%}".format(len(rows), *off(rows)) for rows in both if rows)
        yield f"{name + ' *' * (not both[0][0].is_fitted):34}" + "   ".join(cells)


def main(words: list[str]) -> None:
    """Prints what is asked for."""
    if "--alone" in words:
        return alone()
    if "--fit" in words:
        fit()
        for row in published_steps():
            vars(row).pop("predicted_seconds", None)
    print(*table(), sep="\n")
    for row in published_steps():
        if any(word in row.group for word in words):
            print(f"{row.of['name']}: {row.shape.name}, {row.ranks} x {row.micro_batches} x {row.batch} x {row.tokens} "
                  f"tokens, again {row.recompute}: {row.seconds:.3f} s, predicted {row.predicted_seconds:.3f}, "
                  f"{row.ratio:.2f}")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
