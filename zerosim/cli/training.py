"""Commands that train: one run, or the same training side by side."""

from __future__ import annotations

from os.path import exists
from typing import Annotated

import typer

from zerosim.cli.shell import (
    OFFLOAD,
    AsJson,
    Batch,
    Capacity,
    MeshName,
    MicroBatches,
    OptimizerName,
    Ranks,
    Reduction,
    SequenceLength,
    TextFile,
    capacity_nbytes,
    command,
    console,
    corpus_of,
    reply,
)

# What both commands ask.
Model = Annotated[str, typer.Option(help="A preset for training, as zerosim models lists them: gpt-nano, gpt-micro, "
                                         "llama-nano, llama-micro, gpt2, ...; or a Hugging Face folder, with its "
                                         "weights, or a config.json.")]
Stage = Annotated[int, typer.Option(min=0, max=3, help="ZeRO's stage: 0, 1, 2 or 3.")]
Compute = Annotated[str, typer.Option(help="The format of weights, activations and gradients: fp32, bf16 or fp16; or "
                                           "fp8, an experiment: bf16 with matrix products of fp8 operands.")]
LearningRate = Annotated[float | None, typer.Option("--lr", help="The learning rate; without it, the optimizer's.")]
Recompute = Annotated[str, typer.Option(help="What is not kept: none, block, segment(k), sub_block, selective, tiled.")]
LayoutName = Annotated[str | None, typer.Option("--layout", help="per_unit, contiguous or whole_matrices; without it, "
                                                                 "what the optimizer can be cut by.")]
Gather = Annotated[bool, typer.Option("--gather", help="Gather whole matrices for an optimizer that needs them.")]
Seed = Annotated[int, typer.Option(help="Of first values, batches and the sample.")]
LossScale = Annotated[str | None, typer.Option(help="A number, or dynamic (the default in fp16).")]
WeightsFrom = Annotated[str | None, typer.Option("--weights", metavar="FILE|FOLDER", help=(
    "Begin from these weights, of export or Hugging Face's, in place of drawn ones."))]
Parts = Annotated[str, typer.Option("--zeropp", help="Parts of ZeRO++ on the mesh: hpz and qwz, of stage 3, and qgz, "
                                                     "as in hpz+qwz+qgz=int8; flat, for shards on all ranks; or none.")]
SaveTo = Annotated[str | None, typer.Option("--save", metavar="FILE", help="Record the last step's trace in this JSON "
                                                                           "file, for zerosim report; to go on later, "
                                                                           "see --checkpoint.")]
Checkpoint = Annotated[str | None, typer.Option(metavar="FOLDER", help="The folder of the run's checkpoint.")]
SaveEvery = Annotated[int | None, typer.Option(metavar="STEPS", help="Save the whole training after every so many "
                                                                     "steps and the last, in --checkpoint.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from --checkpoint; --steps counts from the beginning.")]
Faults = Annotated[list[str] | None, typer.Option("--fault", metavar="TEXT", help="Inject a fault, as rank=2,step=40,"
                                                  "bitflip; once for each. docs/faults.md lists the kinds.")]
Checksums = Annotated[bool, typer.Option("--checksums", help="Send a checksum of 4 bytes with each message, and check "
                                                             "it.")]
MaxRestarts = Annotated[int, typer.Option(min=0, help="How often the others go on from --checkpoint, one rank fewer, "
                                                      "when a rank has died.")]
Offload = Annotated[str | None, OFFLOAD]
OffloadDirectory = Annotated[str | None, typer.Option(metavar="FOLDER", help="Where --offload disk keeps its files; "
                                                      "without it, here.")]
StepsOfOne = Annotated[int, typer.Option(help="How many steps.")]
StepsOfEach = Annotated[int, typer.Option(help="How many steps each.")]
Sample = Annotated[int, typer.Option(help="Tokens that it writes at the end.")]
Over = Annotated[str, typer.Option(help="What differs: stage, compute, optimizer, recompute, mesh or zeropp.")]
Values = Annotated[str | None, typer.Option(help="Its values, as in fp32,bf16; without it, the usual ones.")]
FigureFile = Annotated[str | None, typer.Option(help="Draw it too, into this .svg or .png file.")]
Dark = Annotated[bool, typer.Option("--dark", help="Draw the dark variant.")]


@command("train", "zerosim train --stage 3 --ranks 4 --compute bf16")
def train(
    text: TextFile = None, model: Model = "gpt-micro", ranks: Ranks = 4, stage: Stage = 3, compute: Compute = "bf16",
    optimizer: OptimizerName = "adamw", lr: LearningRate = None, micro_batches: MicroBatches = 1, batch: Batch = 4,
    sequence: SequenceLength = None, recompute: Recompute = "none", layout: LayoutName = None, gather: Gather = False,
    reduction: Reduction = "rank", steps: StepsOfOne = 200, seed: Seed = 0, loss_scale: LossScale = None,
    capacity: Capacity = None,
    sample: Sample = 160, weights: WeightsFrom = None, save: SaveTo = None, checkpoint: Checkpoint = None,
    save_every: SaveEvery = None, resume: Resume = False, offload: Offload = None,
    offload_directory: OffloadDirectory = None, mesh: MeshName = "none", zeropp: Parts = "none",
    fault: Faults = None, checksums: Checksums = False, max_restarts: MaxRestarts = 0, as_json: AsJson = False,
) -> None:
    """Trains a GPT or a Llama on a text, under any stage of ZeRO, and says what it came to."""
    from zerosim.course import training
    from zerosim.numerics.files import require_writable
    from zerosim.planning import recording
    from zerosim.ranks import faults

    options = training.Options(
        model=model, ranks=ranks, stage=stage, compute=compute, optimizer=optimizer, lr=lr, micro_batches=micro_batches,
        batch=batch, sequence=sequence, recompute=recompute, layout=layout, gather=gather, reduction=reduction,
        steps=steps, seed=seed, loss_scale=loss_scale, capacity_nbytes=capacity_nbytes(capacity), offload=offload,
        offload_directory=offload_directory, sample_tokens=sample, mesh=mesh, zeropp=zeropp)
    corpus = corpus_of(text)
    if save is not None:
        require_writable(save, "save a recording as")
    if checkpoint is None and (resume or save_every is not None):
        raise ValueError("asked for --resume or --save-every without a folder; name one, as in --checkpoint my-run")
    if weights is not None and resume:
        raise ValueError(f"asked to begin from --weights {weights} and to --resume, which goes on from the weights of "
                         "--checkpoint; leave one of them out")
    if weights is not None and not exists(weights):
        raise ValueError(f"asked to begin from --weights {weights}, and there is no such file or folder; name what "
                         "export wrote, or a folder of Hugging Face's")
    checkpoints = None if checkpoint is None else training.Checkpoints(checkpoint, save_every, resume)
    if max_restarts and not fault:
        raise ValueError(f"asked for --max-restarts {max_restarts} without a --fault: ranks of one process die only "
                         "where one asks for it; name one, as in --fault rank=2,step=40,dies")
    stderr = console(stderr=True)

    def warn(step: int, differences: tuple[str, ...]) -> None:
        for one in differences:
            stderr.print(f"zerosim train: goes on from step {step}, but {one}", markup=False, highlight=False)

    with training.progress_bar(stderr, steps) as bar:
        found = training.train(options, corpus, bar.on_step, keep_last_step=save is not None, checkpoints=checkpoints,
                               on_resume=warn, weights=weights, faults=faults.Plan(*fault) if fault else None,
                               checksums=checksums, max_restarts=max_restarts)
    if save is not None and found.last_step is not None:
        recording.save(recording.record(found.last_step), save)
    training.require_learned(found)
    reply(as_json, lambda: training.training_as_json(found), lambda: training.training_view(found, corpus.name))


@command("export", "zerosim export my-run weights.safetensors")
def export(
    checkpoint: Annotated[str, typer.Argument(help="The folder of a checkpoint.", metavar="CHECKPOINT")],
    out: Annotated[str, typer.Argument(help="A folder, or one file by its name.", metavar="FOLDER|FILE.safetensors")],
    shard_nbytes: Annotated[str | None, typer.Option(metavar="NBYTES", help="Several files, each of at most so many "
                                                                            "bytes of weights, as 5GB, and an index."
                                                     )] = None,
    kind: Annotated[str, typer.Option(help="master, or parameter for the copies in the compute format.")] = "master",
    config: Annotated[str | None, typer.Option(metavar="FOLDER|FILE", help="Write this config.json beside the weights, "
                                               "so that transformers reads the folder.")] = None,
) -> None:
    """Writes a checkpoint's weights as Hugging Face names and shards them; train --weights begins from them."""
    from zerosim.numerics.units import nbytes_of
    from zerosim.zero import export_weights

    most = None if shard_nbytes is None else nbytes_of(shard_nbytes, "shard_nbytes")
    try:
        files = export_weights(checkpoint, out, shard_nbytes=most, kind=kind, config=config)
    except OSError as error:
        raise ValueError(f"asked to export {checkpoint!r} to {out!r}, but {error.filename}: {error.strerror}; name a "
                         "place that can be written") from None
    for file in files:
        typer.echo(file)


@command("compare", "zerosim compare --model gpt-nano --over stage")
def compare(
    text: TextFile = None, over: Over = "stage", values: Values = None, model: Model = "gpt-micro", ranks: Ranks = 4,
    stage: Stage = 3, compute: Compute = "bf16", optimizer: OptimizerName = "adamw", lr: LearningRate = None,
    micro_batches: MicroBatches = 1, batch: Batch = 4, sequence: SequenceLength = None, recompute: Recompute = "none",
    layout: LayoutName = None,
    gather: Gather = False, steps: StepsOfEach = 40, seed: Seed = 0, loss_scale: LossScale = None,
    capacity: Capacity = None, mesh: MeshName = "none", zeropp: Parts = "none", figure: FigureFile = None,
    dark: Dark = False, as_json: AsJson = False,
) -> None:
    """The same training side by side: under every stage, in other formats, or with other optimizers."""
    from zerosim.course import training
    from zerosim.course.figures.comparison import checked_place, save_comparison

    options = training.Options(
        model=model, ranks=ranks, stage=stage, compute=compute, optimizer=optimizer, lr=lr, micro_batches=micro_batches,
        batch=batch, sequence=sequence, recompute=recompute, layout=layout, gather=gather, steps=steps, seed=seed,
        loss_scale=loss_scale, capacity_nbytes=capacity_nbytes(capacity), mesh=mesh, zeropp=zeropp)
    corpus, chosen = corpus_of(text), training.values_of(over, values)
    if figure is not None:
        checked_place(figure)
    elif dark:
        raise ValueError("asked for --dark without a figure; name one, as in --figure comparison.svg --dark")
    with training.progress_bar(console(stderr=True), steps * len(training.runs_of(options, over, chosen))) as bar:
        found = training.compare(options, corpus, over, chosen, bar.begin, bar.on_step)
    reply(as_json, lambda: training.comparison_as_json(found),
          lambda: training.comparison_view(found, corpus.name))
    if figure is not None:
        save_comparison(found, figure, dark=dark)
