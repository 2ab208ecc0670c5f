"""What is wrong in any puzzle is refused in every one: nothing returned, a wrong shape, a deadlock, hidden arrays."""

import re

import numpy as np
import pytest

from tests.course.puzzles.answers import refusal
from zerosim.course.puzzles import PUZZLES, solutions

WRITES_ALL = ("broadcast", "zero2", "overlap")  # no array that may not be changed


def copied(value):
    """The same arrays, in new memory that no ledger knows."""
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def changes_what_it_reads(name, rank, *given):
    found = solutions.SOLUTIONS[name](rank, *given)
    if name not in WRITES_ALL:
        given_array = next(array for parameter, value in zip(PUZZLES[name].parameters, given, strict=True)
                    for array in [value[0] if isinstance(value, list) else value]
                    if parameter not in PUZZLES[name].changes and isinstance(array, np.ndarray))
        given_array += 1
    return copied(found)


def waits_on_rank_0(name, rank, *given):
    if rank.index == 0 and rank.size > 1:
        rank.recv(np.empty(1), 1)
    return solutions.SOLUTIONS[name](rank, *given)


def leaves_early_on_rank_0(name, rank, *given):
    if rank.size == 3 and rank.index == 0:
        return copied(PUZZLES[name].case(3, PUZZLES[name].sizes[3][0]).expected[0])
    return solutions.SOLUTIONS[name](rank, *given)


def fails_on_rank_2(name, rank, *given):
    if rank.index == 2:
        raise OSError("the disk is full. Really")
    return solutions.SOLUTIONS[name](rank, *given)


def returns_nothing(name, rank, *given):
    solutions.SOLUTIONS[name](rank, *given)


def returns_another_shape(name, rank, *given):
    solutions.SOLUTIONS[name](rank, *given)
    return np.zeros((9, 9), np.float32)


def returns_what_no_ledger_knows(name, rank, *given):
    return copied(solutions.SOLUTIONS[name](rank, *given))


UNKNOWN = (r"^On N=4 \(.*\) rank \d holds about [\d,]+ bytes that its ledger does not know: take arrays from "
           r"rank\.memory\.alloc\(shape, dtype, kind\), or charge them with ")
EVERYWHERE = {  # what the refusal says, FIRST standing for rank 0 in the first case
    returns_nothing: "^FIRST returned what is wrong: the result is None where ",
    returns_another_shape: r"^FIRST returned what is wrong: the result .*\(9, 9\)",
    # Where rank 1 does send something, it is of another size.
    waits_on_rank_0: r"On N=2 \(.*(no rank can go on: rank 0: in recv\(\(1,\), float64\) from rank 1 at "
                     r"test_wrong_everywhere\.py:|float32\) to rank 0, which expects \(\(1,\), float64\); both sides)",
    leaves_early_on_rank_0: r"On N=3 \(.* no rank can go on: ",
    changes_what_it_reads: "^FIRST changed its argument .*, which is read-only; work on a copy that you take from "
                             r"rank\.memory\.alloc\(\)\.$",
    returns_what_no_ledger_knows: UNKNOWN,
    fails_on_rank_2: r"^On N=3 \(.*rank 2 raised OSError in line \d+ of fails_on_rank_2: the disk is full\.$",
}


@pytest.mark.parametrize("name", PUZZLES)
def test_what_is_wrong_anywhere_is_refused_in_every_puzzle(name):
    first = re.escape(f"On N=1 ({PUZZLES[name].cases()[0].title}) rank 0")
    for answer, words in EVERYWHERE.items():
        if answer is changes_what_it_reads and name in WRITES_ALL:
            words = UNKNOWN
        if answer is returns_what_no_ledger_knows and not PUZZLES[name].audit_length:
            continue  # one number is too small to stand out
        said = refusal(name, lambda rank, *given, answer=answer: answer(name, rank, *given))
        assert re.search(words.replace("FIRST", first), said), (answer.__name__, said)
