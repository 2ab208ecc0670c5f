"""What a collective refuses, it refuses on the rank that asked, with what was asked, what was found and what to do."""

import re

import numpy as np
import pytest

import zerosim as zs
from tests.ranks.asking import ROWS, allowed, ask
from tests.ranks.refusals import CASES, x

SUMMING = [row for row in ROWS if row[0] in ("reduce_scatter", "all_reduce")]


@pytest.mark.parametrize("kind", [{}, {"debug": True}], ids=["plain", "debug"])
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_refused_by_what_was_asked_and_found(name: str, kind: dict) -> None:
    ask_wrongly, text = CASES[name]
    cluster = zs.Cluster(3, **kind)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}") as raised:
        cluster.run(ask_wrongly)
    assert raised.value.__notes__ == ["raised by rank 0 of 3"]
    # A refused call takes no number and holds nothing: the ranks can go on as if it had not been made.
    assert cluster.memory.now_nbytes == [0, 0, 0]
    assert cluster.run(lambda rank: rank.all_reduce(np.array([rank.index])))[2].tolist() == [3]


@pytest.mark.parametrize("name", CASES)
def test_a_program_may_catch_the_refusal_and_go_on(name: str) -> None:
    ask_wrongly, text = CASES[name]

    def program(rank):
        if rank.index == 0:
            with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
                ask_wrongly(rank)
        return rank.all_reduce(np.array([rank.index])).tolist()

    assert list(zs.Cluster(3).run(program)) == [[3]] * 3


@pytest.mark.parametrize("options", [{"wire": "fp32"}, {"wire": "fp16"}])
@pytest.mark.parametrize(("operation", "algorithm"), [row for row in SUMMING if row[1] != "ring"])
def test_a_wire_format_is_refused_where_no_partial_sums_travel_by_ring(operation, algorithm, options) -> None:
    text = (f"wire={options['wire']!r} is served by algorithm='ring' of reduce_scatter and all_reduce, where partial "
            f"sums travel; found {operation} by {algorithm!r}")
    with pytest.raises(ValueError, match=re.escape(text)):
        zs.Cluster(4).run(lambda rank: ask(rank, operation, algorithm, x(rank, 8, np.float16), **options))


@pytest.mark.parametrize(("operation", "algorithm"),
                         [row for row in SUMMING if row[1] not in ("pairwise", "everyone")])
def test_adding_in_fp32_is_refused_where_there_is_one_addition_per_hop(operation: str, algorithm: str) -> None:
    text = (f"accumulate='fp32' would change nothing in {operation} by {algorithm!r}: it makes one addition per hop, "
            "and one addition rounded to the wire's format is the addition in fp32, rounded. Use wire='fp32', or "
            "algorithm='pairwise' (reduce_scatter) or 'everyone' (all_reduce)")
    for ranks in [n for n in (1, 2, 4) if allowed(operation, algorithm, n)]:
        with pytest.raises(ValueError, match=re.escape(text)):
            zs.Cluster(ranks).run(
                lambda rank: ask(rank, operation, algorithm, x(rank, 8, np.float16), accumulate="fp32"))


@pytest.mark.parametrize(("call", "text"), [
    (lambda r: r.all_reduce(x(r, 3, np.int64), wire="fp32"),
     "wire= and accumulate= are about rounding sums of floats; found op='sum' of int64"),
    (lambda r: r.all_reduce(x(r), wire="fp32", op="max"),
     "wire= and accumulate= are about rounding sums of floats; found op='max' of float32"),
    (lambda r: r.all_reduce(x(r), wire="fp31"), "fp31")])
def test_a_wire_format_that_makes_no_sense_is_refused(call, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        zs.Cluster(2).run(call)


OVERLAPS = {  # memory (20,), the rank's own chunk of a cut of 12 elements
    "all_reduce": lambda r, memory, own: r.all_reduce(memory[:12], out=memory[1:13]),
    "broadcast": lambda r, memory, own: r.broadcast(memory[:12], out=memory[4:16]),
    "reduce": lambda r, memory, own: r.reduce(memory[:12], out=None if r.index else memory[1:13]),
    "reduce_scatter": lambda r, memory, own: r.reduce_scatter(memory[:12], out=memory[own.start + 1:own.stop + 1]),
    "all_gather": lambda r, memory, own: r.all_gather(memory[own.start + 1:own.stop + 1], out=memory[:12]),
    "gather": lambda r, memory, own: r.gather(memory[own.start + 1:own.stop + 1], out=None if r.index else memory[:12]),
    # A chunk as long as the vector must be the same elements all the same.
    "all_gather of all that one rank has": lambda r, memory, own: r.all_gather(
        memory[:0 if r.index else 12], splits=(0, *[12] * r.size), out=memory[1:13]),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OVERLAPS)
def test_an_output_that_overlaps_the_input_elsewhere_than_it_may_is_refused(name: str, ranks: int) -> None:
    def program(rank: zs.Rank) -> None:
        chunk = 12 // rank.size
        OVERLAPS[name](rank, np.arange(20.0) + rank.index, slice(rank.index * chunk, (rank.index + 1) * chunk))

    with pytest.raises(ValueError, match="out= overlaps the input without being the same elements; pass the input"):
        zs.Cluster(ranks).run(program)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_all_to_all_in_place_is_refused(ranks: int) -> None:
    def program(rank):
        vector = np.arange(6.0) + rank.index
        return rank.all_to_all(vector, out=vector)

    text = "out= overlaps the input, which is still sent from when the first elements arrive; pass memory of its own"
    with pytest.raises(ValueError, match=text):
        zs.Cluster(ranks).run(program)


@pytest.mark.parametrize(("options", "text"), [
    ({"ranks": 0}, "a cluster needs at least one rank, found ranks=0; pass a whole number from 1 on"),
    ({"ranks": 2.0}, "a cluster needs at least one rank, found ranks=2.0;"),
    ({"ranks": True}, "a cluster needs at least one rank, found ranks=True;"),
    ({"ranks": 2, "capacity_nbytes": -1}, "capacity_nbytes=-1 must be a number of bytes")])
def test_a_cluster_refuses_what_it_cannot_be(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        zs.Cluster(**options)


@pytest.mark.parametrize("program", [None, 3, "train"])
def test_a_program_that_cannot_be_called_is_refused_and_the_cluster_goes_on(program) -> None:
    cluster = zs.Cluster(3)
    text = f"run() takes a function of a rank, found {program!r}; write run(program), not run(program())"
    with pytest.raises(ValueError, match=re.escape(text)):
        cluster.run(program)
    assert list(cluster.run(lambda rank: rank.index)) == [0, 1, 2]


def test_no_blas_thread_is_refused_when_a_program_runs() -> None:
    with pytest.raises(ValueError, match="blas_threads=0, but arithmetic needs a whole number of threads"):
        zs.Cluster(2, blas_threads=0).run(lambda rank: None)
