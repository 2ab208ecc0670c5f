"""Runs an answer on the simulator, case by case, and says in one sentence what is wrong with it, or how good it is."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from zerosim.course.puzzles import watching
from zerosim.course.puzzles.compare import wrong_result
from zerosim.course.puzzles.judging import judged
from zerosim.course.puzzles.puzzle import Answer, Case, Puzzle
from zerosim.course.puzzles.score import Measured, Refused, Score
from zerosim.numerics.arrays import checksum
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank

OTHER_WORLDS = (3, 5)
UNWRITTEN = "With NaN in new and in freed memory it fails, as if it read what was not written"
UNSENT = "In another order of the ranks, which is as good, it fails, as if they shared something that is no message"
# Seeds of other legal orders in which ranks run; debug mode; what a failure then means.
OTHER_WAYS = ((0, True, UNWRITTEN), (1, False, UNSENT), (2, False, UNSENT))
AUDIT_RANKS, SILENCED_RANKS = 4, 3
# What the audit lets pass at rest; in between, a case says how many shards an expression may take for a moment.
AT_REST_SHARDS = 0.5


def check_answer(puzzle: Puzzle, answer: Answer) -> Score:
    """Runs ``answer`` on every case of the puzzle, under other orders of the ranks too, and audits its memory.

    A hole that is still open makes a Score that says so. Raises ValueError for what is no function.
    """
    if not callable(answer):
        raise ValueError(f"check() takes a function for {puzzle.name!r}, found {answer!r}; "
                         f"write check({puzzle.name!r}, my_function), without calling it")
    first = next(puzzle.cases())
    return judged(puzzle.name, _attempts(puzzle, answer), lambda rows: _right(puzzle, rows), first.reasons)


def _attempts(puzzle: Puzzle, answer: Answer) -> Iterator[Measured]:
    """The measurements of each case, and whatever else an answer must stand before and after them."""
    few = [puzzle.case(SILENCED_RANKS, length) for length in puzzle.sizes[SILENCED_RANKS]]
    for number, case in enumerate(puzzle.cases()):
        yield attempt(puzzle, case, answer)
        if number == 0:
            watching.refuse_unheard(few[-1].where, lambda: [attempt(puzzle, one, answer, silenced=True) for one in few])
    _try_other_worlds(puzzle, answer)
    _audit(puzzle, answer)


def _right(puzzle: Puzzle, rows: list[Measured]) -> str:
    worlds = ", ".join(map(str, sorted({row.ranks for row in rows})))
    how = "within the stated bound" if puzzle.case(2, puzzle.sizes[2][0]).bounds is not None else "bit for bit"
    return f"Right on N = {worlds} in {len(rows)} cases, {how}, and when the ranks run in other orders."


def attempt(puzzle: Puzzle, case: Case, answer: Answer, *, seed: int = 0, debug: bool = False,
            audit: watching.Audit | None = None, silenced: bool = False) -> Measured:
    """One case: what it measured. Raises Refused where the answer is wrong, Hole where it has one."""
    cluster = Cluster(case.ranks, seed=seed, debug=debug, workers=1)  # so that the audit sees all that it makes
    found = _run(cluster, puzzle, case, answer, audit=audit, silenced=silenced)
    if wrong := wrong_result(case, found, puzzle.returns):
        rank, what = wrong
        raise Refused(f"On {case.where} rank {rank} {what}")
    _refuse_forbidden_calls(puzzle, case, cluster)
    if (least := case.least_sent_nbytes) is None:
        least = sum(sum(one.nbytes) for one in case.collectives)
    watching.refuse_few_bytes(case.where, cluster, least)
    row = watching.measured(cluster, case.title, case.target)
    if said := case.look(cluster.trace):
        raise Refused(f"On {case.where} {said}")
    return row


def _run(cluster: Cluster, puzzle: Puzzle, case: Case, answer: Answer, *, audit: watching.Audit | None,
         silenced: bool) -> list[Any]:
    """The result of each rank; Refused for whatever is raised on the way."""
    changed: list[tuple[int, str]] = []

    def program(rank: Rank) -> Any:
        if audit is not None:
            from greenlet import getcurrent

            seen = audit[getcurrent()] = watching.AuditedRank(rank.memory)
        given = case.arguments(rank)
        before = [_bits(value) for value in given]
        result = answer(watching.SilencedRank.of(rank) if silenced else rank, *given)
        for name, value, bits in zip(puzzle.parameters, given, before, strict=True):
            if name not in puzzle.changes and _bits(value) != bits:
                changed.append((rank.index, name))
        del given
        if audit is not None:
            seen.pause()  # what the rank returns is now all that it holds
            seen.resume()
        return result

    found = list(watching.run(cluster, case.where, program))
    if changed:
        rank, name = min(changed)
        raise Refused(f"On {case.where} rank {rank} changed its argument {name}, which is read-only; write, and "
                      "receive messages, in memory of your own, from rank.memory.alloc()")
    return found


def _bits(value: Any) -> Any:
    """A checksum that shows whether an argument was changed; no copy, which the audit would see."""
    if isinstance(value, np.ndarray):
        return value.shape, checksum(value)
    return [_bits(item) for item in value] if isinstance(value, list | tuple) else None


def _refuse_forbidden_calls(puzzle: Puzzle, case: Case, cluster: Cluster) -> None:
    for row in cluster.trace[0].collectives():
        if row.call.operation not in puzzle.allowed:
            allowed = ", ".join(["exchange", *sorted(puzzle.allowed)])
            raise Refused(f"On {case.where} it calls {row.call.operation}, but this puzzle is to be solved with "
                          f"{allowed}")


def _try_other_worlds(puzzle: Puzzle, answer: Answer) -> None:
    """Refuses an answer that fails where new memory is NaN, or when the ranks run in another order."""
    for ranks in OTHER_WORLDS:
        case = puzzle.case(ranks, puzzle.sizes[ranks][-1])
        for seed, debug, how in OTHER_WAYS:
            try:
                attempt(puzzle, case, answer, seed=seed, debug=debug)
            except Refused as error:
                raise Refused(f"{how}: {error}") from error


def _audit(puzzle: Puzzle, answer: Answer) -> None:
    """Refuses arrays that a rank's memory does not know, on a run whose shards are long enough to stand out."""
    if not puzzle.audit_length:
        return
    case = puzzle.case(AUDIT_RANKS, puzzle.audit_length)
    with watching.audited() as audit:
        attempt(puzzle, case, answer, audit=audit)
        for index, rank in enumerate(audit.values()):
            missed = [nbytes for nbytes, share in ((rank.missed_at_rest_nbytes, AT_REST_SHARDS),
                                                   (rank.missed_in_between_nbytes, case.scratch_shards))
                      if nbytes > share * case.shard_nbytes]
            if missed:
                raise Refused(f"The values are right in every case, but on {case.where} rank {index} holds about "
                              f"{missed[0] // 1000 * 1000:,} bytes that its memory does not know: take arrays from "
                              "rank.memory.alloc(shape, dtype, kind), or charge them with rank.memory.hold(array, "
                              "kind), and write into them with out=")
