"""Bytes that one rank sends in a step under each of ZeRO's stages, against the number of ranks: read from traces.

Legend: N ranks, P parameters, Ψ = 2P bytes, a vector of all parameters or gradients in 16 bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim.course.measured import measured_step
from zerosim.display.drawing import LIGHT, Drawing, Style
from zerosim.display.style import STAGE_COLORS, STAGE_MARKS
from zerosim.numerics.policy import Policy
from zerosim.optim.elementwise import Adam
from zerosim.zero.placements import STAGES

TITLE = "What one rank sends in a step, against the number of ranks"
SIZES = (13, 9, 5, 8)  # of the marks: the first three lie on each other

@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per parameter that one rank sends in a step, of parameters and gradients: [stage][place in worlds]."""

    model: str
    parameter_count: int
    worlds: tuple[int, ...]
    sent: tuple[tuple[float, ...], ...]


def traffic_data(worlds: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128), widths: Sequence[int] = (1024,) * 9) -> Traffic:
    """Runs one step of an MLP with Adam in bf16 without data, under every stage on every N, and reads what was sent.

    The widths are multiples of every N, so that nothing is padded but the borders of units.
    """
    rows = [[measured_step(widths, Adam(), ranks=ranks, stage=stage, policy=Policy("bf16"), with_data=False)
             for ranks in worlds] for stage in STAGES]
    count = rows[0][0].parameter_count
    return Traffic(f"an MLP of {len(widths) - 1} layers in bf16 with Adam", count, tuple(worlds), tuple(tuple(
        (one.sent_nbytes[0]["gradients"] + one.sent_nbytes[0]["parameters"]) / count for one in row) for row in rows))


def traffic(data: Traffic, style: Style = LIGHT) -> Drawing:
    """One line for each stage; dotted, the limits 2Ψ and 3Ψ of many ranks."""
    words = (f"Measured: {data.model}, {data.parameter_count:,} parameters; Ψ is 2 bytes for each.\nStages 0, 1 and 2 "
             "send the same, 2Ψ(N - 1)/N; stage 3 gathers once more, 3Ψ(N - 1)/N.")
    with style.figure(10.0, 6.4, TITLE, words, below=0.86) as figure:
        axes = figure.panel(left=1.1, right=0.8, top=1.3, bottom=1.45)
        for stage, sent in enumerate(data.sent):
            axes.plot(data.worlds, sent, color=STAGE_COLORS[stage], marker=STAGE_MARKS[stage], markersize=SIZES[stage],
                      linewidth=(7, 4, 1.6, 2.2)[stage], label=f"stage {stage}")
        for vectors in (2, 3):
            axes.axhline(2 * vectors, color=style.muted, linestyle=":", linewidth=1.4, zorder=1)
            axes.annotate(f"{vectors}Ψ", (1, 2 * vectors), (6, 0), xycoords=axes.get_yaxis_transform(), va="center",
                          textcoords="offset points", color=style.muted)
        axes.set_xscale("log", base=2)
        axes.set_xticks(data.worlds, [f"{ranks}" for ranks in data.worlds])
        axes.minorticks_off()
        axes.set(yticks=range(7), ylim=(0, 6.6), xlabel="N (ranks)",
                 ylabel="sent by one rank in a step\n(bytes per parameter)")
        axes.grid(axis="y")
        figure.legend(ncols=4)
    return Drawing("traffic", TITLE, _description(data), style, figure)


def _description(data: Traffic) -> str:
    said = "; ".join(f"stage {stage}: " + ", ".join(f"{sent:.3g} on {ranks}" for ranks, sent in zip(
        data.worlds, row, strict=True)) for stage, row in enumerate(data.sent))
    return f"Lines of bytes per parameter that one rank sends in a step, measured on {data.model}, by N: {said}."
