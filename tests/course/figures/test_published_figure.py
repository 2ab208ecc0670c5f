"""Published numbers beside runs: what a run settles is what pencil says, and the figure shows that and nothing else."""

import pytest

import zerosim as zs
from tests.cases import chosen
from tests.display import seen
from zerosim.course.figures.published import published, published_data
from zerosim.course.published import published as published_rows
from zerosim.course.published_runs import ALL_REDUCED, MEASURES, blocks, measured_quantity, settled, step
from zerosim.display.drawing import DARK, LIGHT

# What a run has beside what is counted: statistics of LayerNorm, softmax; many ranks that are not infinitely many; and
# a number of blocks is whole.
BESIDE = {"linear": 2e-4, "scores": 0.02, "vectors": 1e-3, "best segment": 0.04}


@pytest.fixture(scope="module")
def found():
    """Every number that a run settles, each run made once."""
    return list(settled())


def test_what_a_run_measures_is_what_pencil_says(found):
    for one in found:
        tolerance = max(one.row.tolerance, BESIDE.get(one.row.quantity, 0) * one.estimated)
        assert abs(one.measured - one.estimated) <= tolerance, one.row.name
        assert abs(one.measured - one.row.expected) <= 2 * tolerance, one.row.name
    assert len(found) > 100


def test_a_number_that_does_not_close_is_not_what_a_run_measures_either(found):
    still_open = [one for one in found if not one.row.closes]
    assert [one.row.name for one in still_open if abs(one.measured - one.row.stated) <= one.row.tolerance] == []
    assert len(still_open) > 10


def test_a_run_settles_every_quantity_that_there_is_a_measure_of(found):
    assert {one.row.quantity for one in found} == MEASURES.keys()
    assert measured_quantity("days", model="gpt2") is None
    assert measured_quantity("states", parameters=8, ranks=1, stage=0, convention="megatron-bf16") is None


def test_one_matrix_without_data_holds_and_sends_what_it_does_with_data():
    for stage in (*zs.STAGES, ALL_REDUCED):
        for ranks in (1, 2, 3, 4):
            found, cluster = step(60, ranks, stage, micro_batches=2), zs.Cluster(ranks)

            def program(rank, stage=stage):
                engine = zs.Engine(rank, zs.models.MLP([6, 10], bias=False), zs.optim.Adam(), stage=stage,
                                   policy=zs.Policy("bf16"))
                x, target = rank.xp.full((1, 6), rank.index + 1.0), rank.xp.zeros((1, 10))
                engine.step([(x, target)] * 2)
                return engine

            engines = cluster.run(program)
            assert found.resting_nbytes == cluster.memory[0].now_nbytes_by_kind
            assert found.sent_nbytes == sum(map(cluster.trace[0].sent_nbytes, ("gradients", "parameters")))
            assert len(engines) == ranks


def test_one_block_of_probabilities_is_left_where_blocks_run_again():
    sizes = {"batch": 2, "tokens": 8, "channels": 12, "heads": 3}
    for policy, alive in (("none", 5), ("block", 1), ("segment(2)", 2), ("selective", 1), ("tiled", 0)):
        assert blocks(5, policy, **sizes).probabilities_nbytes == alive * 2 * 2 * 3 * 8 * 8


def test_the_figures_numbers_are_the_tables_and_the_pencils(found):
    data, still_open = seen.data_of("published"), [one for one in found if not one.row.closes]
    open_rows = {row.label: row for row in published_rows() if row.label}
    assert {row.label for row in data.differing} == open_rows.keys()
    for row in data.differing:
        assert row.published == open_rows[row.label].printed
        assert row.brief == open_rows[row.label].brief
        assert row.measured == pytest.approx(open_rows[row.label].computed(), rel=0.04)
    assert data.unlabeled == len(still_open) - len(data.differing) == 1  # a printed zero has no place among ratios
    assert sum(len(group.ratios) for group in data.agreeing) + len(still_open) == len(found)
    closed = [one for one in found if one.row.closes]
    for one in closed:
        assert abs(one.measured - one.row.stated) <= max(one.row.tolerance, 1e-3 * one.measured)


@pytest.mark.parametrize("style", chosen([LIGHT], [LIGHT, DARK]), ids=lambda style: style.name)
def test_the_marks_are_the_data_and_words_keep_apart(style):
    for subjects in (("states",), ("activations", "flops", "collectives")):
        data = published_data(subjects)
        drawing = published(data, style)
        axes = drawing.figure.axes[0]
        diamonds = {line.get_ydata()[0]: line.get_xdata()[0] for line in axes.lines if line.get_marker() == "D"}
        assert list(diamonds.values()) == [row.published / row.measured for row in data.differing]
        dots = [line for line in axes.lines if line.get_marker() == "o" and line.get_ydata()[0] < len(data.agreeing)]
        assert [tuple(line.get_xdata()) for line in dots] == [group.ratios for group in data.agreeing]
        words = [text.get_text() for text in axes.texts]
        assert all(row.label in words and row.brief in words for row in data.differing)
        low, high = axes.get_xlim()
        assert all(low < row.ratio < high for row in data.differing)
        assert seen.misplaced(drawing) == []
        assert all(row.label in drawing.description for row in data.differing)
