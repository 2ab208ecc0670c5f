"""Published times of training steps beside what a plan of the same run predicts; and the fit of factors.

    python benchmarks/published_steps.py               # median and mean error of both halves of each group
    python benchmarks/published_steps.py torchtitan    # and each row of the groups whose names have that in them
    python benchmarks/published_steps.py --fit         # fits the factors of efficiency.toml from those that stand there
    python benchmarks/published_steps.py --alone       # predicts each device by the factors of the others

The runs are in zerosim/course/published/steps.toml. Every second row of a group, from its first on, is fitted on; the
others are held out, and tell how far predictions are off. Where a source does not say enough, the rest is guessed, and
nothing is fitted on it or held to it.

A fit moves one factor after the other up and down by a step while that lowers the sum, over all groups, of the mean
error and of the median's distance from 1, both as logarithms, on the fitted half alone. The held-out half is looked at
when that is done. Steps are a hundredth, so what is found is written down as it is.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import log
from statistics import fmean, median
from typing import Any

from zerosim.models.transformer import Transformer
from zerosim.numerics.files import facts
from zerosim.numerics.policy import Policy
from zerosim.options import StepOptions
from zerosim.planning import hardware
from zerosim.planning.configuration import PlanConfig
from zerosim.planning.efficiency import Efficiency, constants, efficiency
from zerosim.planning.flops import six_n_and_attention
from zerosim.planning.hardware import Device, Network
from zerosim.planning.shapes import ModelShape, model_of

HOUR = 3600.0


@dataclass(frozen=True, eq=False)  # no slots: what is predicted is kept
class PublishedStep:
    """One run: the model, how it was trained on what, and the number that was published; `of` is its table's fields."""

    of: Mapping[str, Any]
    shape: ModelShape
    device: Device
    tokens: int
    ranks: int
    batch: int
    micro_batches: int
    recompute: float | str
    measured: float

    @property
    def group(self) -> str:
        """The name under which its errors are stated."""
        return str(self.of.get("group", self.of["name"]))

    @property
    def is_fitted(self) -> bool:
        """False where the source does not say enough to hold a prediction to it."""
        return bool(self.of.get("fit", True))

    @property
    def seconds(self) -> float:
        """Seconds of a step, by what was measured of it."""
        of, transformer = self.of, self.transformer
        tokens = self.tokens * self.batch * self.micro_batches  # of a device
        peak = self.device.flops_per_second_in("bf16")
        unit, blocks, channels = of["measured"], transformer.blocks, transformer.channels
        if unit == "tokens/s":
            return tokens * self.ranks / self.measured
        if unit == "tokens/s/device":
            return tokens / self.measured
        if unit == "device hours":
            return float(self.measured * of.get("effective", 1) * HOUR * tokens / of["run_tokens"])
        if unit == "utilization":
            each = six_n_and_attention(self.shape.parameters, blocks, transformer.query_channels, self.tokens)
            return tokens * each / (self.measured * peak)
        beside = self.tokens / (6 * channels) + transformer.vocabulary / (16 * blocks * channels)
        return 96 * tokens * blocks * channels**2 * (1 + beside) / self.measured

    @property
    def transformer(self) -> Transformer:
        """The model's sizes."""
        assert self.shape.transformer is not None
        return self.shape.transformer

    @property
    def reached(self) -> Efficiency:
        """The device's efficiency under this runtime."""
        of = self.of
        return efficiency(self.device, of.get("rates", of.get("runtime", "fsdp2")), compiled=of["compiled"],
                          attention=of.get("attention"), linear=of.get("linear"))

    @property
    def network(self) -> Network:
        """The links of a node and between nodes, by their rates."""
        assert self.device.link is not None
        inside, each = hardware.link(self.device.link), self.of["ranks_per_node"]
        inside = replace(inside, bytes_per_second=self.of.get("link_bytes_per_second", inside.bytes_per_second))
        if self.ranks <= each:
            return Network(inside)
        rate = self.of["node_bits_per_second"] / 8 / each
        between = replace(hardware.link(hardware.BETWEEN), name=f"{rate / 1e9:g} GB/s a device", bytes_per_second=rate)
        return Network(inside, between, each)

    @cached_property
    def predicted_seconds(self) -> float:
        """Seconds of the step by the planner: of arithmetic, exposed communication, the update, and transfers."""
        of, reached, offload = self.of, self.reached, self.of.get("offload", "none")
        mesh = f"{self.ranks // of['ranks_per_node']}x{of['ranks_per_node']}" if of.get("nodes_replicate") else None
        config = PlanConfig(self.shape, self.ranks, self.device, self.network, batch=self.batch, sequence=self.tokens,
                            policy=Policy("bf16", reduce=of.get("reduce", "fp32"), accumulate="fp32"),
                            micro_batches=self.micro_batches, runtime=of.get("runtime", "fsdp2"), kernels=reached,
                            recompute=("none",), host_link=hardware.link("pcie4") if "offload" in of else None,
                            options=StepOptions.of(self.ranks, mesh=mesh, overlap=True, prefetch=1, offload=offload))
        job = config.job(of.get("stage", 3))
        found = config.seconds(job, reached.unit_seconds(self.shape, self.batch, self.tokens, self.recompute))
        return float(found["compute_seconds"] + found["exposed_communication_seconds"] + found["update_seconds"]
                     + config.transfers(job)[1])

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_seconds / self.seconds


@cache
def published_steps() -> tuple[PublishedStep, ...]:
    """All rows, in the file's order."""
    tables = facts("zerosim.course.published", "steps")
    own = {name: Device(name, **fields) for name, fields in tables["device"].items()}
    found = list[PublishedStep]()
    for of in tables["group"]:
        for model, tokens, *numbers in of["rows"]:
            sizes = dict(tables["model"][model])
            sizes["biases"] = tuple(sizes.get("biases", Transformer(1, 1, 1, 1).biases))
            if sizes.get("positions") == 0:
                sizes["positions"] = tokens
            found.append(PublishedStep(of, model_of(model, Transformer(**sizes)),
                                       own.get(of["device"]) or hardware.device(of["device"]), tokens, *numbers))
    return tuple(found)


def halves() -> dict[str, tuple[list[PublishedStep], list[PublishedStep]]]:
    """By group: the rows that are fitted on, every second one from the first, and those that are held out."""
    groups = dict[str, list[PublishedStep]]()
    for row in published_steps():
        groups.setdefault(row.group, []).append(row)
    return {name: (rows[::2], rows[1::2]) for name, rows in groups.items()}


def off(rows: list[PublishedStep]) -> tuple[float, float]:
    """(median of predicted over measured, mean of how far that is from 1)."""
    ratios = [row.ratio for row in rows]
    return median(ratios), fmean(abs(ratio - 1) for ratio in ratios)


# -- the fit, and what is printed --------------------------------------------------------------------------------------

Place = tuple[dict[str, Any], str, float]  # a table, a key, the step


def places() -> Iterator[Place]:
    """What is fitted; eager runtimes share what is not of the network, and all share contention."""
    runtimes, fitted = constants()["runtime"], constants()["fitted"]
    for factors in fitted.values():
        yield from ((row, "factor", 0.01) for name, row in factors.items() if name != "default")
    yield runtimes["fsdp2"], "memory", 0.01
    yield runtimes["fsdp2"], "contention", 0.01
    yield runtimes["deepspeed-2021"], "network", 0.001


def loss() -> float:
    """The sum over the groups' fitted halves."""
    runtimes = constants()["runtime"]
    for name in ("deepspeed", "deepspeed-2021"):
        runtimes[name]["memory"] = runtimes["fsdp2"]["memory"]
    for name in ("deepspeed", "deepspeed-2021", "megatron"):
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
