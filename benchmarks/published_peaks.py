"""Counted bytes of PyTorch's and DeepSpeed's programs beside the account that plans are made of.

    python benchmarks/published_peaks.py               # each group of PyTorch's peaks, both halves; DeepSpeed's states
    python benchmarks/published_peaks.py ddp experts   # and each row of the groups whose names have one of these

Rows stand in `zerosim/course/published`, in torch_peaks.toml and deepspeed_states.toml, which `torch_peaks.py` and
`deepspeed_states.py` beside this script count again. Of the account what a process holds beside its tensors, which
nobody counts, is left out, and what rests on the host.
"""

import sys
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import zerosim as zs
from zerosim.numerics.files import facts
from zerosim.optim import Adam
from zerosim.options import StepOptions
from zerosim.planning import STAGES, Job, account, frozen, lora, model_shape, runtimes
from zerosim.planning.saved_tensors import Forward
from zerosim.planning.shapes import model_of_config

DEFAULTS = {"batch": 1, "checkpointing": "none", "stage": 3, "micro_batches": 1, "offload": False, "loss_chunks": 1,
            "lora": 0, "trained": ""}


# What deepspeed_states.py runs, on 2 ranks, and the account's rows of what it counts.
FIELDS = {"model_type": "llama", "hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6,
          "num_key_value_heads": 2, "vocab_size": 1031, "intermediate_size": 501, "tie_word_embeddings": False}
PURPOSES = {"masters": ("optimizer", "masters in fp32"), "state": ("optimizer", "state"),
            "of the update, flat": ("gradients", "of the update, flat"),
            "of the update, in fp32": ("gradients", "of the update, in fp32"),
            "bucket": ("buckets", "of gradients to reduce"), "parameters": ("parameters", "in the compute format"),
            "parameters, whole": ("parameters", "small tensors, whole"),
            "updated, on the host": ("parameters", "updated, to be copied"),
            "largest, on the host": ("buckets", "copy of the largest tensor's gradients"),
            "largest": ("buckets", "gradients of the largest tensor")}


def rows(file: str = "torch_peaks", table: str = "row") -> list[dict[str, Any]]:
    """The rows that are kept, with what is as usual."""
    return [DEFAULTS | row for row in facts("zerosim.course.published", file)[table]]


def accounted(row: Mapping[str, Any]) -> tuple[runtimes.AccountRow, ...]:
    """The account of what was run."""
    shape = model_shape(row["model"])
    if row["lora"]:
        shape = lora(shape, row["lora"])
    if row["trained"]:
        shape = frozen(shape, but=[row["trained"]])
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


def compiled() -> Iterator[tuple[str, bool, float]]:
    """Model types, whether blocks were compiled, and how far the account of one rank is off."""
    for row in rows(table="compiled"):
        shape = model_of_config(row["fields"])
        job = Job(shape.unit_lengths, 1, STAGES[3], policy=zs.Policy("bf16"))
        held = account("fsdp2", shape, job, batch=row["batch"], tokens=row["tokens"], recompute="none",
                       optimizer=Adam(), compiled=row["compiled"])
        counted = row["peak_nbytes"]
        yield (row["fields"]["model_type"], row["compiled"],
               sum(one.nbytes for one in held if one.kind != "overhead") / counted - 1)


def deepspeed_states() -> Iterator[tuple[int, str, str, int, int]]:
    """Stages, moments, purposes, and the bytes that are counted and accounted."""
    shape = model_of_config(FIELDS)
    for row in rows("deepspeed_states"):
        stage = row["stage"]
        options = StepOptions.of(2, overlap=row.get("overlap", False), **(
            {"offload": "optimizer=host"} if row["offload"] else {}))
        job = Job(shape.unit_lengths, 2, STAGES[stage], policy=zs.Policy("bf16"), options=options,
                  micro_batches=row["micro_batches"])
        step = runtimes.StepSizes(shape, job, Forward(1, 64), "none", Adam(), 1, 2 if stage == 3 else 1)
        *_, reduced, update = (
            {(one.kind, one.what): one.nbytes for one in runtimes.MOMENTS["deepspeed"](step, moment)}
            for moment in step.moments())
        for moment in ("reduction", "flat", "update", "backward"):
            there = update if moment in ("flat", "update") else reduced
            for purpose, counted in row.get(moment, {}).items():
                key = PURPOSES["parameters" if stage < 3 and "parameters" in purpose else purpose] if (
                    purpose in PURPOSES) else None
                if purpose == "gradients" and moment == ("update" if stage == 0 else "flat"):
                    key = ("gradients", "shards in the compute format" if stage else "in the compute format")
                if purpose == "gradients" and row["offload"] and moment == "backward":
                    key = ("gradients", "shards in the compute format")
                if key:
                    yield stage, moment, purpose, counted, there[key]


def lines(asked: list[str]) -> Iterator[str]:
    """What is printed."""
    for (group, half), errors in groups().items():
        worst = max(map(abs, errors.values()))
        yield (f"{group:14}{half:9}{len(errors):4}  median of accounted / counted "
               f"{sorted(errors.values())[len(errors) // 2] + 1:6.3f}   off by {fmean(map(abs, errors.values())):7.2%}"
               f" in the mean, {worst:7.2%} at most")
        if any(name in group for name in asked):
            yield from (f"    {error:+8.2%}  {name}" for name, error in errors.items())
    for kind, by_inductor, error in compiled():
        yield f"{kind:14}{'compiled' if by_inductor else 'eager':9}off by {error:+7.2%}"
    for stage, moment, purpose, counted, held in deepspeed_states():
        yield f"DeepSpeed, stage {stage}, {moment:10}{purpose:24}{counted:15,} counted {held:15,} accounted"


if __name__ == "__main__":
    print(*lines(sys.argv[1:]), sep="\n")
