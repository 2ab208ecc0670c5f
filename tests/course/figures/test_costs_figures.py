"""What the figures of activations and of the latency wall show is what runs and formulas say, found another way."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

import zerosim as zs
from tests.display import seen
from zerosim.course.figures.activations import SQUARE, activations, activations_data
from zerosim.course.figures.latency_wall import ALGORITHMS, latency_wall, latency_wall_data
from zerosim.course.measured import FLOWING, measured_activations, measured_tensors
from zerosim.display.drawing import DARK, LIGHT
from zerosim.planning.activations import EXAMPLE, Block, kept, peak_nbytes
from zerosim.planning.hardware import Link

SMALL = Block(2, 8, 12, 3)
POLICIES = ("none", "selective", "tiled", "sub_block", "block", "segment(2)", "block+tiled")


# -- activations --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_with_data_keeps_holds_and_computes_what_the_one_without_measures(policy):
    found = measured_activations(SMALL, 3, 19, policy)
    gpt = zs.models.GPT(zs.models.GPTConfig(3, SMALL.channels, SMALL.heads, SMALL.tokens, 19))

    def program(rank):
        engine = zs.Engine(rank, gpt, zs.optim.SGD(lr=0.1), stage=1, policy=zs.Policy("bf16"), recompute=policy)
        x, target = np.random.default_rng(rank.index).integers(0, 19, (2, SMALL.batch, SMALL.tokens))
        tape = engine.forward(x, target)
        held = rank.memory.now_nbytes_by_kind
        engine.backward(tape)
        return sum(held.get(kind, 0) for kind in FLOWING)

    cluster = zs.Cluster(3)
    kept_by = cluster.run(program)
    for rank, memory in enumerate(cluster.memory):
        assert kept_by[rank] == found.kept_nbytes
        assert memory.peak_nbytes_of(FLOWING) == found.peak_nbytes
        assert sum(getattr(row, "flops", 0) for row in cluster.trace[rank].rows) == found.flops


@pytest.mark.parametrize("block", [SMALL, Block(3, 5, 8, 4)], ids=str)
def test_a_block_with_data_leaves_the_tensors_that_the_figure_names(block):
    found = measured_tensors(block)
    b, t, c, h = block.batch, block.tokens, block.channels, block.heads
    stream = 2 * b * t * c
    assert found == {"LayerNorm 1 input": stream, "LayerNorm 1 statistics": 8 * b * t, "QKV": 3 * stream,
                     "probabilities": 2 * b * h * t * t, "attention output": stream, "LayerNorm 2 input": stream,
                     "LayerNorm 2 statistics": 8 * b * t, "pre-GELU": 4 * stream, "post-GELU": 4 * stream}
    gpt = zs.models.GPT(zs.models.GPTConfig(1, c, h, t, 1))

    def program(rank):
        ctx = zs.models.Context.standalone(zs.Policy("bf16"))
        x = np.random.default_rng(rank.index).standard_normal((b, t, c)).astype(ctx.dtype)
        weights = {name: ctx.cast(gpt.units[1].initial(name, 0, int(np.prod(shape))).reshape(shape))
                   for name, shape in gpt.units[1].shapes.items()}
        return gpt.units[1].forward(ctx, weights, x)[1]

    (norm_1, attention, closing_1), (norm_2, gelu, closing_2) = zs.Cluster(1).run(program)[0]
    shapes = {"QKV": attention.qkv.shape, SQUARE: attention.p.shape, "attention output": closing_1.shape,
              "pre-GELU": gelu.shape, "post-GELU": closing_2.shape}
    assert {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()} == {name: found[name] for name in shapes}
    assert norm_1[0].nbytes == norm_2[0].nbytes == stream


def test_the_published_example_stands_in_the_committed_figure():
    """939.5 and 1073.7 MB per block, 64.4 GB in 32 of them: the figure's model holds its logits beside that."""
    data = activations_data(policies=("none", "block"), lengths=(512, 2048))
    linear = sum(nbytes for name, nbytes in data.tensors.items() if "statistics" not in name and name != SQUARE)
    assert round(linear / 1e6, 1) == 939.5
    assert round(data.tensors[SQUARE] / 1e6, 1) == 1073.7
    none, block = data.policies
    logits = 2 * 4 * 2048 * 32_000
    assert none.peak_nbytes - peak_nbytes(EXAMPLE, 32).nbytes == pytest.approx(2 * logits, rel=0.1)
    assert block.peak_nbytes < none.peak_nbytes / 10
    assert data.arithmetic == [0, pytest.approx(1 / 3, abs=1e-3)]
    assert sum(data.tensors.values()) == kept(EXAMPLE).nbytes


def test_the_bars_and_lines_of_the_activations_are_its_data():
    data = activations_data(SMALL, 3, 19, ("none", "tiled", "block"), (8, 16, 32, 64))  # in kB
    of_tensors, of_policies, lines = activations(data).figure.axes
    assert [bar.get_width() for bar in of_tensors.patches] == [*data.tensors.values()]  # in bytes
    of_square = [to_hex(bar.get_facecolor()) for bar in of_tensors.patches][[*data.tensors].index(SQUARE)]
    assert [to_hex(bar.get_facecolor()) for bar in of_tensors.patches].count(of_square) == 1
    solid, hatched = ([bar for bar in of_policies.patches if bool(bar.get_hatch()) is sign] for sign in (False, True))
    assert [bar.get_width() for bar in solid] == [one.kept_nbytes / 1e3 for one in data.policies]
    assert [bar.get_x() + bar.get_width() for bar in hatched] == pytest.approx(
        [one.peak_nbytes / 1e3 for one in data.policies])
    assert [list(line.get_ydata()) for line in lines.lines[::2]] == [
        [n / 1e3 for n in column] for column in data.lines.values()]
    assert [list(line.get_ydata()) for line in lines.lines[1::2]] == [
        [n / 1e3 for n in column] for column in data.marks.values()]
    assert data.marked == (8, 64)
    for policy, column in data.marks.items():
        assert column == data.lines[policy][::3]


# -- the latency wall ---------------------------------------------------------------------------------------------

ALPHA, BETA = 3e-6, 20e9
WIRE = Link("wire", BETA, ALPHA, "made up for a test", "2025-01-01")


def milliseconds(name, ranks, nbytes):
    """By the table of Thakur, Rabenseifner & Gropp 2005, for powers of two."""
    rounds, share = np.log2(ranks), 2 * (ranks - 1) / ranks
    steps, vectors = {"ring": (2 * (ranks - 1), share), "rabenseifner": (2 * rounds, share),
                      "doubling": (rounds, rounds), "tree": (2 * rounds, 2 * rounds)}[name]
    return 1e3 * (steps * ALPHA + vectors * nbytes / BETA)


def test_lines_and_marks_of_the_latency_wall_are_the_published_formulas():
    sizes, worlds, nbytes = (2**14, 2**18, 2**22, 2**26, 2**30), (2, 4, 16, 64), 2**20
    data = latency_wall_data(WIRE, 16, nbytes, sizes, worlds, most_run=16)
    assert data.by_nbytes.marked == sizes[::4]
    assert data.by_ranks.marked == worlds[:3]
    for name in ALGORITHMS:
        assert data.by_nbytes.lines[name] == pytest.approx([milliseconds(name, 16, size) for size in sizes])
        assert data.by_ranks.lines[name] == pytest.approx([milliseconds(name, ranks, nbytes) for ranks in worlds])
        assert data.by_nbytes.marks[name] == pytest.approx(data.by_nbytes.lines[name][::4])
        assert data.by_ranks.marks[name] == pytest.approx(data.by_ranks.lines[name][:3])
    assert data.by_nbytes.wall == pytest.approx(16 * ALPHA * BETA)
    assert data.by_ranks.wall == pytest.approx(nbytes / (ALPHA * BETA))
    for panel in (data.by_nbytes, data.by_ranks):
        both = [a + b for a, b in zip(panel.latency, panel.transfer, strict=True)]
        assert both == pytest.approx(panel.lines["ring"])
        before = [value < panel.wall for value in panel.values]
        latency_rules = [a > b for a, b in zip(panel.latency, panel.transfer, strict=True)]
        assert latency_rules == [early is (panel is data.by_nbytes) for early in before]


def test_the_lines_of_the_latency_wall_are_its_data():
    data = latency_wall_data(WIRE, 8, 2**20, (2**14, 2**16, 2**24), (2, 8, 32), most_run=8)
    for axes, panel in zip(latency_wall(data).figure.axes, (data.by_nbytes, data.by_ranks), strict=True):
        drawn = [tuple(line.get_ydata()) for line in axes.lines]
        assert drawn[:8:2] == list(panel.lines.values())
        assert drawn[1:8:2] == list(panel.marks.values())
        assert drawn[8:10] == [panel.latency, panel.transfer]
        assert list(axes.lines[10].get_xdata()) == [panel.wall] * 2
        assert len({to_hex(line.get_color()) for line in axes.lines[:8]}) == 4


@pytest.mark.parametrize("style", [LIGHT, DARK], ids=lambda style: style.name)
def test_other_costs_keep_their_words_apart(style):
    for drawing in (activations(activations_data(SMALL, 2, 19, POLICIES, (8, 16, 32, 64)), style),
                    latency_wall(latency_wall_data(WIRE, 8, 2**20, (2**12, 2**20, 2**28), (2, 8, 32), 8), style)):
        assert seen.misplaced(drawing) == []
