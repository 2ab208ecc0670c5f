"""Memory that a transformer keeps of its forward pass: by tensor, by recomputation policy, and by sequence length.

Legend: B batch, L tokens of a sequence, d channels, H heads. Tensors, bars and marks are measured
by runs without data, lines are estimates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from zerosim.course.measured import MeasuredActivations, measured_activations, measured_tensors
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, filled, log_log, scale_of, within_limits
from zerosim.display.style import BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILLION
from zerosim.planning.activations import EXAMPLE, Block
from zerosim.planning.step_activations import fullest_nbytes

TITLE = "What a transformer keeps for backward, and what recomputing it costs"
COLORS, MARKS = (VERMILLION, SKY_BLUE, BLUE, GREEN, ORANGE, PURPLE), ("o", "s", "v", "^", "D", "P", "X")
POLICIES = ("none", "selective", "tiled", "sub_block", "block", "segment(4)", "block+tiled")
LENGTHS = tuple(2**power for power in range(9, 17))
SQUARE = "probabilities"  # the one tensor that grows with the square of the length


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of each tensor of one block; a micro-batch under each policy; (L,) bytes at the peak by policy.

    ``lines`` are estimates at ``lengths``, ``marks`` measurements at ``marked``, some of them.
    """

    block: str
    model: str
    tensors: Mapping[str, int]
    policies: tuple[MeasuredActivations, ...]
    lengths: tuple[int, ...]
    lines: Mapping[str, tuple[int, ...]]
    marked: tuple[int, ...]
    marks: Mapping[str, tuple[int, ...]]

    @property
    def arithmetic(self) -> list[float]:
        """The arithmetic of each policy, as a share of what the first one does, less 1."""
        return [one.flops / self.policies[0].flops - 1 for one in self.policies]


def activations_data(block: Block = EXAMPLE, blocks: int = 32, vocabulary: int = 32_000,
                     policies: Sequence[str] = POLICIES, lengths: Sequence[int] = LENGTHS) -> Activations:
    """Runs a GPT of these blocks without data under each policy, and one block alone, and reads the ranks' memory."""

    def of_length(tokens: int) -> Block:
        return replace(block, tokens=tokens)

    marked = tuple(lengths[::3])
    return Activations(
        f"B = {block.batch}, L = {block.tokens:,}, d = {block.channels:,}, H = {block.heads}, in 16 bit",
        f"a GPT of {blocks} such blocks, {vocabulary:,} tokens in its vocabulary",
        MappingProxyType(measured_tensors(block)),
        tuple(measured_activations(block, blocks, vocabulary, policy) for policy in policies), tuple(lengths),
        MappingProxyType({policy: tuple(fullest_nbytes(of_length(tokens), blocks, vocabulary, policy)
                                        for tokens in lengths) for policy in policies}), marked,
        MappingProxyType({policy: tuple(measured_activations(of_length(tokens), blocks, vocabulary, policy).peak_nbytes
                                        for tokens in marked) for policy in policies}))


def activations(data: Activations, style: Style = LIGHT) -> Drawing:
    """Bars of tensors, bars of policies, and lines over the sequence's length."""
    height, words = 10.8, (f"Memory of runs without data: {data.block};\n{data.model}. "
                           "Lines are by formula, marks are measured.")
    with style.figure(13.6, height, TITLE, words, below=0.86) as figure:
        ((tensors, policies),) = figure.panels(1, 2, left=2.15, right=0.3, top=1.65, bottom=5.7, wspace=0.42)
        _tensors(tensors, data)
        _policies(policies, data, style)
        ((lines,),) = figure.panels(1, 1, left=1.05, right=0.3, top=height - 4.5, bottom=1.2)
        _lines(lines, data, style)
        figure.legend(*lines.get_legend_handles_labels(), ncols=7, columnspacing=1.5)
    return Drawing("activations", TITLE, _description(data), style, figure)


def _tensors(axes: Axes, data: Activations) -> None:
    unit, name_of_unit = scale_of(sorted(data.tensors.values())[len(data.tensors) // 2])  # that of most of them
    for place, (name, nbytes) in enumerate(data.tensors.items()):
        axes.barh(place, nbytes / unit, 0.7, color=VERMILLION if name == SQUARE else BLUE)
        axes.annotate(f"{nbytes / unit:,.4g}", (nbytes / unit, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(data.tensors)), list(data.tensors))
    axes.set(ylim=(len(data.tensors) - 0.4, -0.6), xlim=(0, 1.2 * max(data.tensors.values()) / unit),
             ylabel="tensor (name)", xlabel=f"kept by one block ({name_of_unit})")
    axes.set_title(f"One block: {sum(data.tensors.values()) / unit:,.5g} {name_of_unit}; only probabilities grow with "
                   "L²")
    _ticks(axes)


def _policies(axes: Axes, data: Activations, style: Style) -> None:
    unit, name_of_unit = scale_of(max(one.peak_nbytes for one in data.policies))
    for place, (one, more, color) in enumerate(zip(data.policies, data.arithmetic, (*COLORS, style.ink), strict=False)):
        kept, peak = one.kept_nbytes / unit, one.peak_nbytes / unit
        axes.barh(place, kept, 0.7, color=color)
        axes.barh(place, peak - kept, 0.7, left=kept, **filled(color, style, hatched=True))
        words = f"{more:+.0%} operations" if more else "nothing again"
        axes.annotate(f"{peak:.3g} {name_of_unit}\n{words}", (peak, place), (5, 0), textcoords="offset points",
                      va="center", linespacing=1.1, fontsize=11)
    axes.set_yticks(range(len(data.policies)), [one.policy for one in data.policies])
    axes.set(ylim=(len(data.policies) - 0.4, -0.6),
             xlim=(0, 1.42 * max(one.peak_nbytes for one in data.policies) / unit), ylabel="policy (name)",
             xlabel=f"held at most; hatched: only during backward ({name_of_unit})",
             title="The whole model, by what is recomputed")
    _ticks(axes)


def _ticks(axes: Axes) -> None:
    """Of horizontal bars: ticks in sight, and a grid."""
    within_limits(axes)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _lines(axes: Axes, data: Activations, style: Style) -> None:
    unit, name_of_unit = scale_of(max(map(max, data.lines.values())))
    if unit == 1e12:  # a device's memory is given in gigabytes, however much does not fit there
        unit, name_of_unit = 1e9, "GB"
    for (policy, column), color, mark in zip(data.lines.items(), (*COLORS, style.ink), MARKS, strict=False):
        axes.plot(data.lengths, [nbytes / unit for nbytes in column], color=color, linewidth=2.0)
        axes.plot(data.marked, [nbytes / unit for nbytes in data.marks[policy]], color=color, marker=mark, markersize=8,
                  linestyle="", label=policy)
    log_log(axes, data.lengths, [f"{tokens:,}" for tokens in data.lengths], base=2)
    axes.set(xlabel="L, the length of a sequence (tokens)", ylabel=f"held at most ({name_of_unit})",
             title="The whole model, as sequences grow")
    axes.grid(axis="y")


def _description(data: Activations) -> str:
    of_block = ", ".join(f"{name} {nbytes / 1e6:,.4g}" for name, nbytes in data.tensors.items())
    policies = "; ".join(f"{one.policy} {one.peak_nbytes / 1e9:.3g} GB, of which {one.kept_nbytes / 1e9:.3g} from "
                         f"forward on, with {more:+.1%} of operations"
                         for one, more in zip(data.policies, data.arithmetic, strict=True))
    ends = "; ".join(f"{policy} from {column[0] / 1e9:.3g} to {round(column[-1] / 1e9):,}"
                     for policy, column in data.lines.items())
    return (f"Three panels, of {data.block}. Bars: one block keeps, in MB, {of_block}. Bars: {data.model} holds at "
            f"most, by policy, {policies}. Lines: the same maximum in GB as L goes from {data.lengths[0]:,} to "
            f"{data.lengths[-1]:,} tokens: {ends}.")
