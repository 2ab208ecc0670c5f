"""Commands that teach: the page that moves, the worked example, lost updates, mixed precision."""

from __future__ import annotations

from typing import Annotated

import typer

from zerosim.cli.shell import AsJson, TextFile, answer, busy, command, console, corpus_of


@command("explore", "zerosim explore --ranks 4")
def explore(
    out: Annotated[str, typer.Option(metavar="FILE", help="The page, for any browser.")] = "explore.html",
    ranks: Annotated[str, typer.Option(metavar="NUMBERS", help="Only these numbers of ranks, with commas between."
                                       )] = "1,2,3,4,8",
) -> None:
    """One page to play with: a training step under every setting, recorded from runs in a minute or two."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from zerosim.course.explore import save_page
    from zerosim.course.explored_runs import settings_on
    from zerosim.numerics.files import require_writable

    require_writable(out, "write the page")
    some, terminal = settings_on(ranks), console(stderr=True)
    with Progress(SpinnerColumn(), TextColumn("recorded {task.completed:,.0f} of {task.total:,.0f} settings"),
                  BarColumn(), TimeElapsedColumn(), console=terminal, transient=True,
                  disable=not terminal.is_terminal) as progress:
        task = progress.add_task("", total=len(some))
        path = save_page(out, some, lambda done: progress.advance(task, done))
    typer.echo(path)


@command("replay", "zerosim replay --stage 3")
def replay(
    stage: Annotated[str, typer.Option(help="0, 1, 2, 3 or all.")] = "all",
    weights: Annotated[str, typer.Option(help="The four weights that it starts from.")] = "2,-3,1,0.5",
    data: Annotated[str | None, typer.Option(help="Each rank's sample, x1,x2:t, as in '1,3:5; 2,1:7'.")] = None,
    ranks: Annotated[int | None, typer.Option(help="N; 2, or as many as there are samples.")] = None,
    steps: Annotated[int | None, typer.Option(help="How many training steps; 2.")] = None,
    optimizer: Annotated[str, typer.Option(help="adam or sgd.")] = "adam",
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", help="The learning rate.")] = 0.1,
    compute: Annotated[str, typer.Option(help="The format of weights, activations and gradients: fp16, bf16 or fp32."
                                         )] = "fp16",
    layout: Annotated[str | None, typer.Option(help="How the vector is cut: per_unit or contiguous.")] = None,
    recompute: Annotated[str | None, typer.Option(help="What is not kept: none, block or segment(k).")] = None,
    published: Annotated[bool, typer.Option(
        "--published", help="As printed: --steps 1 --layout contiguous --recompute 'segment(2)' --full.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Show every stage event by event, not one alone.")] = False,
    hops: Annotated[bool, typer.Option("--hops", help="The same, with every message of every collective.")] = False,
    mistakes: Annotated[bool, typer.Option(
        "--mistakes", help="Show which of the numbers seven common mistakes would change.")] = False,
    as_json: AsJson = False,
) -> None:
    """The worked example, 4 weights on 2 ranks, run under ZeRO's stages and printed number by number."""
    from zerosim.course.mistakes import mistakes_in
    from zerosim.course.worked_example import example_of, replays, stages_named

    example = example_of(weights, data, published=published, ranks=ranks, steps=steps, optimizer=optimizer,
                         learning_rate=learning_rate, compute=compute, layout=layout, recompute=recompute)
    if mistakes:
        answer(as_json, mistakes_in(example))
    else:
        answer(as_json, replays(example, stages_named(stage)), hops=hops, full=full or published or None)


@command("lost-updates", "zerosim lost-updates --format bf16 --update 1e-3")
def lost_updates(
    format: Annotated[str, typer.Option(help="fp16, bf16, fp8_e4m3, fp8_e5m2 or fp32.")] = "fp16",
    weight: Annotated[float, typer.Option(help="The weight w.")] = 1.0,
    update: Annotated[float, typer.Option(help="The update δ that is added to it.")] = 1e-5,
    steps: Annotated[int, typer.Option(help="How many times it is added.")] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Show what 16 bits lose of small updates, which cures help, and which does not."""
    from zerosim.course.lost_updates import LostUpdatesQuestion
    from zerosim.course.lost_updates import lost_updates as run

    question = LostUpdatesQuestion(format, weight, update, steps)
    with busy(f"adding {update:g} to {weight:g} {steps:,} times, in every way"):
        found = run(question)
    answer(as_json, found)


@command("precision", "zerosim precision --model gpt-nano")
def precision(
    text: TextFile = None,
    format: Annotated[str, typer.Option(help="fp16, bf16, fp8_e4m3, fp8_e5m2 or fp32.")] = "fp16",
    model: Annotated[str, typer.Option(help="A preset for training, as zerosim models lists them, whose gradients are "
                                           "counted.")] = "gpt-micro",
    steps: Annotated[int, typer.Option(help="Its training steps before that.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show what goes wrong in mixed precision: underflow, loss scalers, overflow in forward, weights that stall."""
    from zerosim.course.precision import PrecisionQuestion
    from zerosim.course.precision import precision as run

    question, corpus = PrecisionQuestion(format, model, steps), corpus_of(text)
    with busy(f"training in {format}, in every way"):
        found = run(question, corpus)
    answer(as_json, found)
