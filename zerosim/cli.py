"""The command line: one small function for each command; what a command does stands in a lesson or in the doctor."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from zerosim.models.text import Corpus

app = typer.Typer(
    name="zerosim",
    help="ZeRO, the Zero Redundancy Optimizer, to run, read, step through and trust on a laptop.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TextFile = Annotated[str | None, typer.Option("--text", help="A UTF-8 text; without it, one that comes along.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the data as JSON instead.")]

LEAST_WIDTH = 40  # columns; some shells say 0
WRONG_INPUT, INTERRUPTED, NOBODY_READS = 2, 130, 1  # exit codes


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that has no δ gets a question mark, and no traceback
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command: wrong input ends it with one line and exit code 2, Ctrl-C with 130, and a reader
    that has gone away (``| head``) in silence."""

    def register(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def guarded(*args: Any, **options: Any) -> None:
            from zerosim.ranks.errors import OutOfMemoryError

            try:
                body(*args, **options)
                if sys.stdout is not None:
                    sys.stdout.flush()
            except (ValueError, OutOfMemoryError) as error:
                typer.echo(f"zerosim {name}: {' '.join(str(error).split())}", err=True)
                raise typer.Exit(WRONG_INPUT) from None
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None
            except BrokenPipeError:
                # Python flushes once more when it exits; what nobody reads must not fail a second time.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(NOBODY_READS) from None
            except OSError as error:
                typer.echo(f"zerosim {name}: what it has to say cannot be written: {error}", err=True)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                raise typer.Exit(NOBODY_READS) from None

        return app.command(name)(guarded)

    return register


def console(*, stderr: bool = False) -> Console:
    """Where text goes: as wide as the terminal, 80 columns in a pipe, without color there or under NO_COLOR."""
    from rich.console import Console

    found = Console(highlight=False, emoji=False, stderr=stderr)
    found.width = max(found.width, LEAST_WIDTH)
    return found


def corpus_of(text: str | None) -> Corpus:
    """The text to train on: a file, or the one that comes with the package."""
    from zerosim.models.text import read, shipped

    return shipped() if text is None else read(text)


def busy(what: str) -> Status:
    """For a ``with`` block that takes seconds: says what is going on, where somebody sits at a terminal."""
    from rich.console import Console

    return Console(stderr=True).status(what)


def print_json(data: dict[str, Any]) -> None:
    """The data on standard output; an infinity or NaN in it would be a mistake, since JSON has none."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """ZeRO, the Zero Redundancy Optimizer, to run, read, step through and trust on a laptop."""
    if version:
        from zerosim import __version__

        typer.echo(f"zerosim {__version__}")
        raise typer.Exit


@command("replay")
def replay(
    stage: Annotated[str, typer.Option(help="0, 1, 2, 3 or all.")] = "all",
    weights: Annotated[str, typer.Option(help="The four weights that it starts from.")] = "2,-3,1,0.5",
    data: Annotated[str | None, typer.Option(help="Each rank's sample, x1,x2:t, as in '1,3:5; 2,1:7'.")] = None,
    ranks: Annotated[int | None, typer.Option(help="N; 2, or as many as there are samples.")] = None,
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", help="Adam's learning rate.")] = 0.1,
    compute: Annotated[str, typer.Option(help="The format of weights, activations and gradients.")] = "fp16",
    layout: Annotated[str, typer.Option(help="How the vector is cut: contiguous or per_unit.")] = "contiguous",
    recompute: Annotated[str, typer.Option(help="What is not kept: none, block or segment(k).")] = "segment(2)",
    hops: Annotated[bool, typer.Option("--hops", help="Show every message of every collective.")] = False,
    as_json: AsJson = False,
) -> None:
    """The worked example, 4 weights on 2 ranks, run under ZeRO's stages and told number by number."""
    from zerosim.lessons.replay import replays, replays_as_json, stages_named
    from zerosim.lessons.worked_example import example_of

    example = example_of(weights, data, ranks, learning_rate, compute, layout, recompute)
    found = replays(example, stages_named(stage))
    if as_json:
        print_json(replays_as_json(example, found))
        return
    from zerosim.lessons.replay_text import print_replays

    print_replays(console(), example, found, hops=hops)


@command("lost-updates")
def lost_updates(
    format: Annotated[str, typer.Option(help="The number format to look at.")] = "fp16",
    weight: Annotated[float, typer.Option(help="The weight w.")] = 1.0,
    update: Annotated[float, typer.Option(help="The update δ that is added to it.")] = 1e-5,
    steps: Annotated[int, typer.Option(help="How many times it is added.")] = 10_000,
    as_json: AsJson = False,
) -> None:
    """What 16 bits lose of small updates, which cures help, and which does not."""
    from zerosim.lessons.lost_updates import Question
    from zerosim.lessons.lost_updates import lost_updates as answer
    from zerosim.lessons.lost_updates_text import print_lesson

    question = Question(format, weight, update, steps)
    with busy(f"adding {update:g} to {weight:g} {steps:,} times, in every way"):
        found = answer(question)
    if as_json:
        print_json(found.as_json())
    else:
        print_lesson(console(), found)


@command("train")
def train(
    text: TextFile = None,
    model: Annotated[str, typer.Option(help="A preset: gpt-nano, gpt-micro, ...")] = "gpt-micro",
    ranks: Annotated[int, typer.Option(help="N, the number of ranks.")] = 4,
    stage: Annotated[int, typer.Option(help="ZeRO's stage: 0, 1, 2 or 3.")] = 3,
    compute: Annotated[str, typer.Option(help="The format of weights, activations and gradients.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="The optimizer's name.")] = "adamw",
    lr: Annotated[float, typer.Option(help="The learning rate.")] = 3e-3,
    micro_batches: Annotated[int, typer.Option(help="k, the micro-batches of a step.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences in a micro-batch of one rank.")] = 4,
    recompute: Annotated[str, typer.Option(help="What is not kept: none, block, selective, ...")] = "none",
    layout: Annotated[str, typer.Option(help="How the vector is cut.")] = "per_unit",
    steps: Annotated[int, typer.Option(help="How many steps.")] = 200,
    seed: Annotated[int, typer.Option(help="Of first values, batches, dropout and the sample.")] = 0,
    loss_scale: Annotated[str | None, typer.Option(help="A number, or dynamic (the default in fp16).")] = None,
    capacity: Annotated[int | None, typer.Option(help="Bytes that each rank may hold.")] = None,
    sample: Annotated[int, typer.Option(help="Tokens that it writes at the end.")] = 160,
    as_json: AsJson = False,
) -> None:
    """Trains a GPT on a text, under any stage of ZeRO, and says what it came to."""
    from zerosim.lessons.training import Options
    from zerosim.lessons.training import train as run
    from zerosim.lessons.training_text import as_json as plain
    from zerosim.lessons.training_text import print_training, progress

    options = Options(model, ranks, stage, compute, optimizer, lr, micro_batches, batch, recompute, layout, steps, seed,
                      loss_scale=loss_scale, capacity_nbytes=capacity, sample_tokens=sample)
    corpus = corpus_of(text)
    with progress(console(stderr=True), options) as heard:
        found = run(options, corpus, heard)
    if as_json:
        print_json(plain(found))
    else:
        print_training(console(), found, corpus.name)


@command("compare")
def compare(
    text: TextFile = None,
    over: Annotated[str, typer.Option(help="What differs: stage, compute or optimizer.")] = "stage",
    values: Annotated[str | None, typer.Option(help="Its values, as in fp32,bf16; all of them without it.")] = None,
    model: Annotated[str, typer.Option(help="A preset: gpt-nano, gpt-micro, ...")] = "gpt-micro",
    ranks: Annotated[int, typer.Option(help="N, the number of ranks.")] = 4,
    compute: Annotated[str, typer.Option(help="The format of weights, activations and gradients.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="The optimizer's name.")] = "adamw",
    lr: Annotated[float, typer.Option(help="The learning rate.")] = 3e-3,
    micro_batches: Annotated[int, typer.Option(help="k, the micro-batches of a step.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences in a micro-batch of one rank.")] = 4,
    steps: Annotated[int, typer.Option(help="How many steps each.")] = 40,
    figure: Annotated[str | None, typer.Option(help="Draw it too, into this .svg or .png file.")] = None,
    as_json: AsJson = False,
) -> None:
    """The same training side by side: under every stage, in other formats, or with other optimizers."""
    from zerosim.lessons.comparing import compare as run
    from zerosim.lessons.comparing import values_of
    from zerosim.lessons.comparing_text import as_json as plain
    from zerosim.lessons.comparing_text import print_comparison
    from zerosim.lessons.figures.comparison import save_comparison
    from zerosim.lessons.training import Options

    options = Options(model, ranks, compute=compute, optimizer=optimizer, lr=lr, micro_batches=micro_batches,
                      batch=batch, steps=steps)
    corpus = corpus_of(text)
    with busy("training") as status:
        found = run(options, corpus, over, values_of(over, values), lambda what: status.update(f"training: {what}"))
    if figure is not None:
        save_comparison(found, figure)
    if as_json:
        print_json(plain(found))
    else:
        print_comparison(console(), found, corpus.name)


@command("figures")
def figures(
    names: Annotated[list[str] | None, typer.Argument(help="The figures; without names, all.", metavar="NAME")] = None,
    out: Annotated[str, typer.Option(help="The folder to draw into.")] = "figures",
    format: Annotated[str, typer.Option(help="svg or png.")] = "svg",
    dark: Annotated[bool, typer.Option("--dark", help="Draw the dark variant, NAME-dark.")] = False,
) -> None:
    """Draws the project's figures anew, each from a run."""
    from zerosim.lessons.figures import draw

    with busy("drawing"):
        paths = draw(names or (), out, format, dark)
    for path in paths:
        typer.echo(path)


@command("doctor")
def doctor(as_json: AsJson = False) -> None:
    """Versions, BLAS and its threads, and which backends can be used here, and why not."""
    from zerosim.doctor import examine, print_doctor

    found = examine()
    if as_json:
        print_json(found.as_json())
    else:
        print_doctor(console(), found)


if __name__ == "__main__":
    main()
