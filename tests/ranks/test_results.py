"""Every collective by every algorithm gives the right answer, on integers, which any order of additions adds alike."""

import numpy as np
import pytest

import zerosim as zs
from tests.cases import chosen, covering
from tests.ranks.asking import (
    KINDS,
    MANY,
    ROOTED,
    ROWS,
    TABLE,
    WORLDS,
    allowed,
    ask,
    ceil_cut,
    cuts_of,
    expected,
    same,
    takes_splits,
)
from tests.ranks.data import whole_numbers
from zerosim.ranks.collectives import ALGORITHMS


def check(kind: str, operation: str, algorithm: str, ranks: int, lengths: list[int], roots: list[int]) -> None:
    """All lengths, cuts and roots in one run."""
    vectors = {length: whole_numbers(ranks, length) for length in lengths}
    cases = [(length, cut, root) for length in lengths for root in roots
             for cut in (None, *(cuts_of(length, ranks) if takes_splits(operation, algorithm, ranks) else ()))]

    def program(rank: zs.Rank) -> list[np.ndarray]:
        return [ask(rank, operation, algorithm, vectors[length][rank.index], cut, root=root)
                for length, cut, root in cases]

    results = zs.Cluster(ranks, **KINDS[kind]).run(program)
    for position, (length, cut, root) in enumerate(cases):
        wanted = expected(operation, vectors[length], cut or ceil_cut(length, ranks), root)
        for rank in range(ranks):
            assert same(results[rank][position], wanted[rank]), (length, cut, root, rank)


def test_the_table_has_the_promised_rows_and_no_others() -> None:
    found = {operation: tuple(rows) for operation, rows in ALGORITHMS.items()}
    assert found == TABLE | {"barrier": ("dissemination",)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_every_length_and_cut_gives_the_right_result(operation: str, algorithm: str, kind: str) -> None:
    for ranks in [n for n in WORLDS if allowed(operation, algorithm, n)]:
        lengths = chosen([0, 1, ranks, 2 * ranks + 1], range(3 * ranks + 2))
        lengths += list(range(2, 3 * ranks + 2)) if kind == "plain" and ranks in (3, 4) else []
        check(kind, operation, algorithm, ranks, lengths, [0])


@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_other_worlds_give_the_right_result(operation: str, algorithm: str) -> None:
    for ranks, kind in covering((6, 7, 9, MANY), ("plain", "debug"), turn=ROWS.index((operation, algorithm))):
        if allowed(operation, algorithm, ranks):
            check(kind, operation, algorithm, ranks, [0, ranks - 1, 3 * ranks + 1], [0])


@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_64_ranks_give_the_right_result(operation: str, algorithm: str) -> None:
    check("plain", operation, algorithm, 64, [65], [0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [6, 7, 9, 16, 64])
@pytest.mark.parametrize(("operation", "algorithm"), ROWS)
def test_more_lengths_give_the_right_result(operation: str, algorithm: str, ranks: int, kind: str) -> None:
    if allowed(operation, algorithm, ranks):
        check(kind, operation, algorithm, ranks, [0, 1, ranks - 1, ranks, ranks + 1, 2 * ranks + 3, 3 * ranks + 1], [0])


@pytest.mark.parametrize("kind", ["plain", "seeded"])
@pytest.mark.parametrize(("operation", "algorithm"), [row for row in ROWS if row[0] in ROOTED])
def test_every_rank_can_be_the_root(operation: str, algorithm: str, kind: str) -> None:
    for ranks in (2, 3, 4, 5, 6, 8):
        check(kind, operation, algorithm, ranks, [1, 2 * ranks + 1], list(range(ranks)))


@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
@pytest.mark.parametrize(("operation", "algorithm"), [("reduce_scatter", "halving"), ("all_gather", "doubling")])
def test_an_algorithm_of_powers_of_two_refuses_other_worlds_and_names_others(operation, algorithm, ranks) -> None:
    text = (rf"{operation} by {algorithm} needs a power of two of ranks, because partners at distance 1, 2, 4, \.\.\. "
            rf"must all exist; this group has {ranks}. Use ring, (pairwise|bruck)\.")
    with pytest.raises(ValueError, match=text):
        zs.Cluster(ranks).run(lambda rank: ask(rank, operation, algorithm, np.arange(4) + rank.index))


@pytest.mark.parametrize(("op", "add"), [("max", np.maximum), ("min", np.minimum)])
@pytest.mark.parametrize(("operation", "algorithm"), [row for row in ROWS if "reduce" in row[0]])
def test_a_reduction_takes_the_largest_or_the_smallest(operation, algorithm, op, add) -> None:
    worlds = [n for n in WORLDS if allowed(operation, algorithm, n)]
    for ranks, kind in covering(worlds, KINDS, turn=ROWS.index((operation, algorithm))):
        vectors = whole_numbers(ranks, 2 * ranks + 1)
        results = zs.Cluster(ranks, **KINDS[kind]).run(
            lambda rank, vectors=vectors: ask(rank, operation, algorithm, vectors[rank.index], op=op))
        wanted = expected(operation, vectors, ceil_cut(2 * ranks + 1, ranks), add=add)
        assert all(same(found, right) for found, right in zip(results, wanted, strict=True))


def test_the_input_is_left_as_it_was() -> None:
    for operation, algorithm in ROWS:
        vectors = whole_numbers(4, 11)
        for kind in ("plain", "debug"):
            before = [vector.copy() for vector in vectors]
            zs.Cluster(4, **KINDS[kind]).run(
                lambda rank, o=operation, a=algorithm, v=vectors: ask(rank, o, a, v[rank.index]) is None)
            assert all(np.array_equal(x, y) for x, y in zip(vectors, before, strict=True)), (operation, algorithm)
