"""Commands that predict: nothing is trained."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from zerosim.cli.shell import (
    OFFLOAD,
    AsJson,
    Batch,
    Between,
    MeshName,
    Nodes,
    OptimizerName,
    OwnHardware,
    Ranks,
    Reduction,
    SequenceLength,
    answer,
    busy,
    command,
    console,
    reply,
)

# What a plan is asked.
Model = Annotated[str | None, typer.Option(help="A preset, as zerosim models lists them, or a config.json.")]
Parameters = Annotated[str | None, typer.Option(help="Instead of a model: how many parameters, as 7.5B.")]
LargestLayer = Annotated[str | None, typer.Option(help="Parameters of the largest layer, with --params.")]
DeviceName = Annotated[str, typer.Option("--device", help="A device, as zerosim devices lists them: h100, ...")]
LinkName = Annotated[str | None, typer.Option("--link", help="What ranks of a node send through, as zerosim links "
                                              "lists them: nvlink, ...; of plan and tune, without it, the device's.")]
SomeNodes = Annotated[int | None, typer.Option("--nodes", help="Over how many nodes the ranks are spread; without it, "
                                               "one, of up to 8 ranks.")]
Parts = Annotated[str, typer.Option("--zeropp", help="Parts of ZeRO++ on the mesh, at stage 3: some of hpz, qwz and "
                                                     "qgz, as in hpz+qwz+qgz=int8; flat, for shards on all ranks; or "
                                                     "none.")]
Stage = Annotated[str, typer.Option(help="all, or some, as 2,3.")]
Recompute = Annotated[str, typer.Option(help="usual (none, block, selective if the runtime has it), all, or some.")]
Attention = Annotated[str, typer.Option(help="fused, which keeps no probabilities, as FlashAttention; or unfused.")]
Compute = Annotated[str, typer.Option(help="bf16, fp16 or fp32.")]
ConventionName = Annotated[str | None, typer.Option("--convention", help="How bytes are counted: zero-paper, "
                                                    "fp32-accumulate, megatron-bf16, megatron-fp16, deepspeed-zero2, "
                                                    "deepspeed-zero3, zero-infinity, fp32, scaling-book; or zerosim, "
                                                    "the engine's own.")]
Utilization = Annotated[float | None, typer.Option(help="Share of the dense peak that products are taken to reach; "
                                                   "without it, what was measured of the device, and 0.5 of zerosim.")]
Runtime = Annotated[str, typer.Option(help="Whose step it is: fsdp2 (PyTorch's, with DDP at stage 0 and "
                                           "ZeroRedundancyOptimizer at 1), deepspeed, megatron, or zerosim.")]
Compiled = Annotated[bool, typer.Option("--compiled", help="Each block goes through torch.compile; the loss does not.")]
LossChunks = Annotated[int, typer.Option(help="In how many parts logits and their loss are made.")]
LoraRank = Annotated[int | None, typer.Option(help="Rank of adapters beside frozen linear layers.")]
Weights = Annotated[str | None, typer.Option(help="How frozen weights rest, with --lora: nf4 or int8; without it, in "
                                                  "the format of --compute.")]
TrainOnly = Annotated[str | None, typer.Option(help="Units or layers that are trained, as block3[01],head; all else is "
                                               "frozen, without adapters.")]
Margin = Annotated[float, typer.Option(help="Share of the device that is to stay free.")]
GlobalBatch = Annotated[str | None, typer.Option(help="Sequences of a step on all ranks together, in place of "
                                                      "--micro-batches.")]
SomeMicroBatches = Annotated[int | None, typer.Option("--micro-batches", help="k, the micro-batches of a step; without "
                                                      "it, 1.")]
Tokens = Annotated[str | None, typer.Option(help="Tokens of a whole training, as 300B: its days and device-hours.")]
Price = Annotated[float | None, typer.Option(help="Of a device and hour, with --tokens: what the training costs.")]
Compare = Annotated[str | None, typer.Option(metavar="OPTIONS", help="Another plan side by side, by what differs: "
                                             "\"--device a100-80 --batch 2\".")]
Overlap = Annotated[bool, typer.Option("--overlap/--no-overlap", help="Reductions beside backward, the all-gather of "
                                       "parameters beside the update: seconds for bytes.")]
Prefetch = Annotated[int, typer.Option(help="Units that stage 3 gathers ahead: seconds for bytes.")]
Offload = Annotated[str, OFFLOAD]
HostLink = Annotated[str | None, typer.Option(help="The link to the host, for offload; without it, the device's.")]
DiskLink = Annotated[str | None, typer.Option(help="The link to the disk, for offload to it; without it, nvme-pcie4.")]
HostCapacity = Annotated[str | None, typer.Option("--host-capacity", help="Bytes of the host's memory for each rank, "
                                                  "for offload; without it, 250GB.")]
DiskCapacity = Annotated[str | None, typer.Option("--disk-capacity", help="Bytes of disk for each rank, for offload to "
                                                  "it; without it, 3840GB.")]
DsConfig = Annotated[str | None, typer.Option("--ds-config", metavar="FILE", help="A ds_config.json of DeepSpeed's, in "
                                              "place of the options that it says.")]
Explain = Annotated[bool, typer.Option("--explain", help="Print each number's formula, values filled in.")]
Measure = Annotated[bool, typer.Option("--measure", help="Run the engine without data, and compare.")]


@command("cost", "zerosim cost --nbytes 14GB --ranks 8 --link nvlink4")
def cost(
    nbytes: Annotated[str, typer.Option(help="n, bytes of the whole vector, as 14GB.")],
    ranks: Annotated[int, typer.Option(help="N, the number of ranks.")],
    link: Annotated[str, typer.Option(help="What ranks send through, as zerosim links lists them.")],
    collective: Annotated[str, typer.Option(help="all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, "
                                            "all_to_all or barrier.")] = "all_reduce",
    algorithm: Annotated[str | None, typer.Option(help="ring, pairwise, halving, doubling, bruck, rabenseifner, tree, "
                                                  "naive or everyone, where the collective has it; without it, its "
                                                  "first.")] = None,
    nodes: Nodes = 1, between: Between = None,
    itemsize: Annotated[int, typer.Option(help="Bytes of an element; chunks are whole elements.")] = 1,
    hardware: Annotated[str | None, typer.Option(metavar="FILE", help="A TOML file with links of your own.")] = None,
    as_json: AsJson = False,
) -> None:
    """The cost of a collective: steps, bytes, seconds, bandwidths, and where other algorithms are faster."""
    from zerosim.course.collective_cost import CostQuestion, collective_cost
    from zerosim.numerics.units import nbytes_of

    found = collective_cost(CostQuestion(nbytes_of(nbytes), ranks, link, collective, algorithm, nodes, between,
                                         itemsize, hardware))
    answer(as_json, found)


@command("plan", "zerosim plan --model llama-2-7b --device h100 --batch 4")
def plan(
    ctx: typer.Context, model: Model = None, params: Parameters = None, largest_layer: LargestLayer = None,
    ranks: Ranks = 8, device: DeviceName = "h100-80", link: LinkName = None, nodes: SomeNodes = None,
    between: Between = None, stage: Stage = "all", recompute: Recompute = "usual", attention: Attention = "fused",
    batch: Batch = 1, sequence: SequenceLength = None, micro_batches: SomeMicroBatches = None,
    global_batch: GlobalBatch = None, compute: Compute = "bf16", optimizer: OptimizerName = "adamw",
    runtime: Runtime = "fsdp2", compiled: Compiled = False, loss_chunks: LossChunks = 1, lora: LoraRank = None,
    weights: Weights = None, train_only: TrainOnly = None, convention: ConventionName = None,
    utilization: Utilization = None, margin: Margin = 0.1, tokens: Tokens = None, price: Price = None,
    overlap: Overlap = True, prefetch: Prefetch = 1, offload: Offload = "none", host_link: HostLink = None,
    disk_link: DiskLink = None, host_capacity_nbytes: HostCapacity = None, disk_capacity_nbytes: DiskCapacity = None,
    mesh: MeshName = "none", zeropp: Parts = "none", reduction: Reduction = "rank", hardware: OwnHardware = None,
    ds_config: DsConfig = None, compare: Compare = None, explain: Explain = False, measure: Measure = False,
    as_json: AsJson = False,
) -> None:
    """Does it fit, how long is a step, what does a training take: a row for each stage and recomputation policy."""
    from zerosim.course.plan_view import as_json as plain
    from zerosim.course.plan_view import plan_view
    from zerosim.planning.plan import plan_config

    notes: list[str] = []
    asked = _arguments(ctx)
    if ds_config is not None:
        said, notes = read_ds_config(ctx, ds_config, model, ranks)
        asked |= said
    found, beside = plan_config(**asked).plan(), None
    if compare is not None:
        other = ctx.command.make_context("plan", shlex.split(compare), parent=ctx.parent)
        if alone := [name for name in OF_THE_COMMAND if name in _typed(other)]:
            raise ValueError(f"--compare takes what differs in the other plan, found "
                             f"--{alone[0].removeprefix('as_').replace('_', '-')}; type that outside")
        typed = _typed(other)
        beside = plan_config(**asked | {name: value for name, value in _arguments(other).items()
                                        if name in typed}).plan()
    measured = {}
    if measure:
        from zerosim.course.measured import measured_row

        if not found.config.is_engine:
            raise ValueError(f"--measure runs zerosim's engine, and this is a plan of {runtime}; take --runtime "
                             "zerosim")
        measured = {row: measured_row(found.config, row.stage, row.recompute) for row in found.rows}
    reply(as_json, lambda: plain(found, measured, beside) | {"notes": notes},
          lambda: plan_view(found, console().width, explain=explain, measured=measured, notes=notes, beside=beside))


OF_THE_COMMAND = ("ds_config", "explain", "measure", "as_json", "compare")  # no options of a plan or a search


def _arguments(ctx: Any) -> dict[str, Any]:
    """The options of `zs.plan` and `zs.tune` that the command's are, by the same names."""
    return {name: value for name, value in ctx.params.items() if name not in OF_THE_COMMAND}


def _typed(ctx: Any) -> set[str]:
    """The options that were typed."""
    return {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}


def read_ds_config(ctx: typer.Context, file: str, model: str | None,
                   ranks: int) -> tuple[dict[str, Any], list[str]]:
    """A plan's options that a file of DeepSpeed's says, and notes on what is ignored and different; ValueError for an
    option that was typed too, but for the ranks, which the file may leave open, and whose step it is."""
    from zerosim.frameworks import from_deepspeed

    typed = _typed(ctx)
    settings = from_deepspeed(file, model=model, ranks=ranks if "ranks" in typed else None)
    said = {name: value for name, value in settings.plan_arguments().items() if name not in typed & {"runtime"}}
    if both := [name for name in said if name in typed and name != "ranks"]:
        raise ValueError(f"--{both[0].replace('_', '-')} was asked for, and {file} says it too, in words or by "
                         "DeepSpeed's default; leave the option out")
    ignored = [f"Of DeepSpeed's settings these change nothing here: {', '.join(settings.ignored)}."]
    return said, ignored * bool(settings.ignored) + [f"Not the same as DeepSpeed's: {line}."
                                                     for line in settings.differences]


@command("tune", "zerosim tune --model gpt2-xl --ranks 8 --global-batch 64")
def tune(
    ctx: typer.Context,
    global_batch: Annotated[str, typer.Option(help="G, the sequences of a step on all ranks together.")],
    model: Annotated[str, typer.Option(help="A preset, as zerosim models lists them, or a config.json.")],
    ranks: Ranks = 8, device: DeviceName = "h100-80", link: LinkName = None, nodes: SomeNodes = None,
    between: Between = None, stage: Stage = "all", recompute: Recompute = "usual", attention: Attention = "fused",
    batch: Annotated[str, typer.Option(help="all, or some sizes of a micro-batch of one rank, as 1,4.")] = "all",
    prefetch: Annotated[str, typer.Option(help="Units that stage 3 gathers ahead, as 0,1,2.")] = "1,2",
    offload: Annotated[str, typer.Option(help="all that the runtime has, or some places that are tried in this order "
                                              "until one fits: none, host, disk, or kinds one by one, as "
                                              "none,optimizer=host.")] = "all",
    sequence: SequenceLength = None, compute: Compute = "bf16", optimizer: OptimizerName = "adamw",
    runtime: Runtime = "fsdp2", compiled: Compiled = False,
    loss_chunks: Annotated[str, typer.Option(help="In how many parts logits and their loss are made: all, 1 to 32, or "
                                                  "some, as 1,8; the fewest that fit are taken.")] = "all",
    lora: LoraRank = None,
    weights: Weights = None, train_only: TrainOnly = None, utilization: Utilization = None, margin: Margin = 0.1,
    tokens: Tokens = None, price: Price = None, overlap: Overlap = True, host_link: HostLink = None,
    disk_link: DiskLink = None, host_capacity_nbytes: HostCapacity = None, disk_capacity_nbytes: DiskCapacity = None,
    mesh: MeshName = "none", reduction: Reduction = "rank", hardware: OwnHardware = None, as_json: AsJson = False,
) -> None:
    """The settings to take for a model, a machine and a global batch, the runner-up, and what to paste into the
    runtime's program."""
    from zerosim.course.tuning import tune as found_by

    with busy("searching"):
        found = found_by(**_arguments(ctx))
    answer(as_json, found)
