"""Counted peaks of PyTorch's programs beside the account that plans are made of: how far bytes of a plan are off.

    python benchmarks/published_peaks.py               # each group of rows, both halves
    python benchmarks/published_peaks.py ddp experts   # and each row of the groups whose names have one of these in them

Rows stand in `zerosim/course/published/torch_peaks.toml`, which `benchmarks/torch_peaks.py` computes again. Of the
account what a process holds beside its tensors, which no tracker counts, is left out, and what rests on the host.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from statistics import fmean
from typing import Any

import zerosim as zs
from zerosim.optim import Adam
from zerosim.options import StepOptions
from zerosim.planning import STAGES, Job, account, model_shape, runtimes
from zerosim.planning.finetuning import frozen, lora

DEFAULTS = {"batch": 1, "checkpointing": "none", "stage": 3, "micro_batches": 1, "offload": False, "loss_chunks": 1,
            "lora": 0, "trained": ""}


def rows() -> list[dict[str, Any]]:
    """The rows that are kept, with what is as usual."""
    text = files("zerosim.course.published").joinpath("torch_peaks.toml").read_text("utf-8")
    return [DEFAULTS | row for row in tomllib.loads(text)["row"]]


def accounted(row: Mapping[str, Any]) -> tuple[runtimes.AccountRow, ...]:
    """The account of what was run."""
    shape = model_shape(row["model"])
    shape = lora(shape, row["lora"]) if row["lora"] else frozen(shape, but=[row["trained"]]) if row["trained"] else shape
    options = StepOptions.of(row["ranks"], **{"offload": "host"} if row["offload"] else {})
    job = Job(shape.unit_lengths, row["ranks"], STAGES[row["stage"]], policy=zs.Policy("bf16"), options=options,
              micro_batches=row["micro_batches"])
    return account("fsdp2", shape, job, batch=row["batch"], tokens=row["tokens"], recompute=row["checkpointing"],
                   optimizer=Adam(), loss_chunks=row["loss_chunks"])


def off(row: Mapping[str, Any]) -> float:
    """The account's bytes over the counted ones, less 1."""
    held = sum(one.nbytes for one in accounted(row) if one.kind != "overhead" and one.place == "device")
    return held / row["peak_nbytes"] - 1


def name_of(row: Mapping[str, Any]) -> str:
    """A row's model, and what of it is not as usual."""
    return ", ".join([row["model"], *(f"{key} {row[key]}" for key in DEFAULTS if row[key] != DEFAULTS[key])])


def groups() -> dict[tuple[str, str], dict[str, float]]:
    """How far each row is off, by group and half."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows():
        found.setdefault((row["group"], row["half"]), {})[name_of(row)] = off(row)
    return found


def lines(asked: list[str]) -> Iterator[str]:
    """What is printed."""
    for (group, half), errors in groups().items():
        worst = max(map(abs, errors.values()))
        yield (f"{group:14}{half:9}{len(errors):4}  median of accounted / counted "
               f"{sorted(errors.values())[len(errors) // 2] + 1:6.3f}   off by {fmean(map(abs, errors.values())):7.2%}"
               f" in the mean, {worst:7.2%} at most")
        if any(name in group for name in asked):
            yield from (f"    {error:+8.2%}  {name}" for name, error in errors.items())


if __name__ == "__main__":
    print(*lines(sys.argv[1:]), sep="\n")
