"""Commands that predict: nothing is trained."""

from __future__ import annotations

from typing import Annotated

import typer

from zerosim.cli.shell import AsJson, answer, busy, command, console


def _former_name(convention: str | None) -> str | None:
    """The convention, given by the option's former name, which says so on standard error."""
    if convention is not None:
        typer.echo("zerosim plan: DeprecationWarning: --dialect is now called --convention", err=True)
    return convention


# What a plan is asked.
Model = Annotated[str | None, typer.Option(help="A preset, as zerosim models lists them, or a config.json.")]
Parameters = Annotated[str | None, typer.Option("--params", help="Instead of a model: how many parameters, as 7.5B.")]
LargestLayer = Annotated[str | None, typer.Option(help="Parameters of the largest layer, with --params.")]
Ranks = Annotated[int, typer.Option(help="N, the number of ranks.")]
DeviceName = Annotated[str, typer.Option("--device", help="A device, as zerosim devices lists them: h100, ...")]
LinkName = Annotated[str, typer.Option("--link", help="What ranks of a node send through, as zerosim links lists them: "
                                                "nvlink, ...")]
Nodes = Annotated[int, typer.Option(help="Over how many nodes the ranks are spread.")]
MeshShape = Annotated[str, typer.Option("--mesh", help="Nodes and ranks of a node, as 2x4: states are in shards inside "
                                                       "a node and replicated across, over --link and --between; "
                                                       "or none.")]
Parts = Annotated[str, typer.Option("--zeropp", help="Parts of ZeRO++ on the mesh, at stage 3: some of hpz, qwz and "
                                                     "qgz, as in hpz+qwz+qgz=int8; flat; or none.")]
Reduction = Annotated[str, typer.Option(help="The order in which gradients are added: by rank; or by micro_batch, at "
                                             "stages 2 and 3.")]
Between = Annotated[str | None, typer.Option(help="The link between nodes; without it, infiniband-ndr.")]
Stage = Annotated[str, typer.Option(help="all, or some, as 2,3.")]
Recompute = Annotated[str, typer.Option(help="usual (none, selective, block), all, or some, as block,tiled.")]
Batch = Annotated[int, typer.Option(help="Sequences of a micro-batch of one rank.")]
Sequence = Annotated[int | None, typer.Option(help="Tokens of a sequence; without it, the model's context.")]
MicroBatches = Annotated[int, typer.Option(help="k, the micro-batches of a step.")]
Compute = Annotated[str, typer.Option(help="bf16, fp16 or fp32.")]
OptimizerName = Annotated[str, typer.Option("--optimizer", help="sgd, momentum, adagrad, rmsprop, adam, adamw, lion, a"
                                                          "dan, lamb, lars, adafactor, muon, shampoo, soap or kfac.")]
ConventionName = Annotated[str | None, typer.Option("--convention", help="How bytes are counted: zero-paper, "
                                                    "fp32-accumulate, megatron-bf16, megatron-fp16, deepspeed-zero2, "
                                                    "deepspeed-zero3, zero-infinity, fp32, scaling-book; or zerosim, "
                                                    "the engine's own.")]
FormerConventionName = Annotated[str | None, typer.Option("--dialect", hidden=True, callback=_former_name)]
Utilization = Annotated[float, typer.Option(help="Share of the dense peak that products are taken to reach.")]
Overlap = Annotated[bool, typer.Option("--overlap/--no-overlap", help="Reductions beside backward, the all-gather of "
                                       "parameters beside the update: seconds for bytes.")]
Prefetch = Annotated[int, typer.Option(help="Units that stage 3 gathers ahead: seconds for bytes.")]
Offload = Annotated[bool, typer.Option("--offload", help="Master weights and optimizer state on the host.")]
OffloadAll = Annotated[str | None, typer.Option(metavar="PLACE", help="All state on the host, or on disk: host or "
                                                "disk; instead of --offload.")]
HostLink = Annotated[str | None, typer.Option(help="The link to the host, for offload; without it, the device's.")]
DiskLink = Annotated[str | None, typer.Option(help="The link to the disk, for --offload-all disk; without it, "
                                                   "nvme-pcie4.")]
OwnHardware = Annotated[str | None, typer.Option("--hardware", metavar="FILE", help="A TOML file of one's own devices "
                                                                                    "and links.")]
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
    nodes: Annotated[int, typer.Option(help="Over how many nodes the ranks are spread.")] = 1,
    between: Annotated[str | None, typer.Option(help="The link between nodes; without it, infiniband-ndr.")] = None,
    itemsize: Annotated[int, typer.Option(help="Bytes of an element; chunks are whole elements.")] = 1,
    hardware: Annotated[str | None, typer.Option(metavar="FILE", help="A TOML file with links of your own.")] = None,
    as_json: AsJson = False,
) -> None:
    """The cost of a collective: steps, bytes, seconds, bandwidths, and where other algorithms are faster."""
    from zerosim.course.collective_cost import CostQuestion, collective_cost
    from zerosim.numerics.units import nbytes_of

    found = collective_cost(CostQuestion(nbytes_of(nbytes), ranks, link, collective, algorithm, nodes, between,
                                         itemsize, hardware))
    answer(as_json, found.as_json, found.view)


@command("plan", "zerosim plan --model llama-2-7b --device h100 --batch 4")
def plan(
    model: Model = None, parameters: Parameters = None, largest_layer: LargestLayer = None, ranks: Ranks = 8,
    device: DeviceName = "h100-80", link: LinkName = "nvlink4", nodes: Nodes = 1, between: Between = None,
    stage: Stage = "all", recompute: Recompute = "usual", batch: Batch = 1, sequence: Sequence = None,
    micro_batches: MicroBatches = 1, compute: Compute = "bf16", optimizer: OptimizerName = "adamw",
    convention: ConventionName = None, utilization: Utilization = 0.5, overlap: Overlap = True, prefetch: Prefetch = 1,
    offload: Offload = False, offload_all: OffloadAll = None, host_link: HostLink = None, disk_link: DiskLink = None,
    mesh: MeshShape = "none", zeropp: Parts = "none", reduction: Reduction = "rank",
    hardware: OwnHardware = None, explain: Explain = False, measure: Measure = False,
    dialect: FormerConventionName = None, as_json: AsJson = False,
) -> None:
    """Does it fit, what does it send, how long is a step: a row for each stage and recomputation policy."""
    from zerosim.course.plan_view import as_json as plain
    from zerosim.course.plan_view import plan_view
    from zerosim.course.training import optimizer_named
    from zerosim.planning.plan import plan_config

    if None not in (convention, dialect):  # --dialect is the former name
        raise ValueError("--convention and --dialect, its former name, are one option; leave --dialect out")
    if offload and offload_all is not None:
        raise ValueError(f"--offload keeps the optimizer's state on the host, --offload-all {offload_all} all state; "
                         "leave one of them out")
    found = plan_config(
        model, parameters=parameters, largest_layer=largest_layer, ranks=ranks, device=device, link=link, nodes=nodes,
        between=between, stage=stage, recompute=recompute, batch=batch, tokens=sequence, micro_batches=micro_batches,
        compute=compute, optimizer=optimizer_named(optimizer, 1e-3), convention=convention or dialect,
        utilization=utilization, overlap=overlap, prefetch=prefetch, offload=offload_all or offload,
        host_link=host_link, disk_link=disk_link, hardware=hardware, mesh=mesh, zeropp=zeropp,
        reduction=reduction).plan()
    measured = {}
    if measure:
        from zerosim.course.measured import measured_row

        measured = {row: measured_row(found.config, row.stage, row.recompute) for row in found.rows}
    answer(as_json, lambda: plain(found, measured),
           lambda: plan_view(found, console().width, explain=explain, measured=measured))


@command("tune", "zerosim tune --model gpt2-xl --ranks 8 --global-batch 64")
def tune(
    global_batch: Annotated[str, typer.Option(help="G, the sequences of a step on all ranks together.")],
    model: Annotated[str, typer.Option(help="A preset, as zerosim models lists them, or a config.json.")],
    ranks: Ranks = 8, device: DeviceName = "h100-80", link: LinkName = "nvlink4", nodes: Nodes = 1,
    between: Between = None, stage: Stage = "all", recompute: Recompute = "usual",
    batch: Annotated[str, typer.Option(help="all, or some sizes of a micro-batch of one rank, as 1,4.")] = "all",
    prefetch: Annotated[str, typer.Option(help="Units that stage 3 gathers ahead, as 0,1,2.")] = "0,1,2",
    bucket_nbytes: Annotated[str, typer.Option(help="unit, model (one bucket for everything), or bytes, as unit,25e6; "
                                                    "what cuts units is run on every rank.")] = "unit,model",
    offload: Annotated[str, typer.Option(help="Master weights and optimizer state on the host: never, always or "
                                              "both.")] = "both",
    seconds: Annotated[str, typer.Option(help="replayed on the machine asked about, or real ones: CPU time of "
                                              "steps taken in this process.")] = "replayed",
    sequence: Sequence = None, compute: Compute = "bf16", optimizer: OptimizerName = "adamw",
    utilization: Utilization = 0.5, overlap: Overlap = True, host_link: HostLink = None, hardware: OwnHardware = None,
    as_json: AsJson = False,
) -> None:
    """The fastest settings that fit, for a model, a machine and a global batch, to paste into zerosim, FSDP2 and
    DeepSpeed."""
    from zerosim.course.training import optimizer_named
    from zerosim.course.tuning import tune as found_by

    with busy("searching"):
        found = found_by(
            model, global_batch=global_batch, batch=batch, prefetch=prefetch, bucket_nbytes=bucket_nbytes,
            offload=offload, seconds=seconds, ranks=ranks, device=device, link=link, nodes=nodes, between=between,
            stage=stage, recompute=recompute, tokens=sequence, compute=compute,
            optimizer=optimizer_named(optimizer, 1e-3), utilization=utilization, overlap=overlap, host_link=host_link,
            hardware=hardware)
    answer(as_json, found.as_json, found.view)
