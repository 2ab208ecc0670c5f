"""The cost of a collective as data: what the formulas say, in exact bytes, beside every other algorithm."""

import pytest

from zerosim.course import collective_cost as lesson
from zerosim.planning import ALGORITHMS, ceil_cut, cost, hardware, sent

NVLINK = hardware.Network(hardware.link("nvlink4"))


def data_of(nbytes, ranks, link, *asked, **options):
    return lesson.collective_cost(lesson.CostQuestion(nbytes, ranks, link, *asked, **options)).as_json()


def test_the_data_is_what_the_formulas_say():
    data = data_of(14 * 10**9, 8, "nvlink4")
    wanted = cost.cost("all_reduce", "ring", ceil_cut(14 * 10**9, 8), 1, NVLINK)
    assert (data["steps"], data["seconds"], data["latency_seconds"]) == (14, wanted.seconds, 14 * 3.4e-6)
    assert data["transfer_seconds"] == pytest.approx(2 * 7 / 8 * 14e9 / 450e9)
    assert data["sent_nbytes_by_rank"] == [24_500_000_000] * 8
    assert data["messages_by_rank"] == [14] * 8
    assert (data["largest_sent_nbytes"], data["total_sent_nbytes"]) == (24_500_000_000, 8 * 24_500_000_000)
    assert data["algorithm_bytes_per_second"] == pytest.approx(14e9 / data["seconds"])
    assert data["bus_bytes_per_second"] == pytest.approx(1.75 * 14e9 / data["seconds"])
    assert data["latency_wall_nbytes"] == 8 * 1_530_000
    assert data["latency_wall_ranks"] == pytest.approx(14e9 / 1_530_000)
    assert data["between"] is None


def test_bytes_are_exact_integers_and_chunks_are_whole_elements():
    data = data_of(10_000_000_000_000_002, 3, "pcie5", itemsize=2)
    assert data["nbytes"] == 10_000_000_000_000_002
    assert data["sent_nbytes_by_rank"] == list(sent("all_reduce", "ring", ceil_cut(5 * 10**15 + 1, 3), 2).nbytes)
    assert all(isinstance(nbytes, int) for nbytes in data["sent_nbytes_by_rank"])


def test_every_other_algorithm_stands_beside_it_with_where_they_cross_or_why_it_cannot():
    others = {other["algorithm"]: other for other in data_of(14 * 10**9, 8, "nvlink4")["others"]}
    assert set(others) == {name for of, name in ALGORITHMS if of == "all_reduce"} - {"ring"}
    assert others["doubling"]["break_even"] == [
        {"nbytes": pytest.approx(8.8 * 1_530_000), "faster_below": "doubling", "faster_above": "ring"}]
    assert (others["rabenseifner"]["break_even"], others["rabenseifner"]["faster_at_first"]) == ([], "rabenseifner")
    assert (others["naive"]["break_even"], others["naive"]["faster_at_first"]) == ([], "ring")
    for name, other in others.items():
        assert other["seconds"] == cost.cost("all_reduce", name, ceil_cut(14 * 10**9, 8), 1, NVLINK).seconds
    first, second, *_ = data_of(6 * 10**6, 6, "pcie4", "all_gather")["others"]
    assert first == {"algorithm": "doubling", "refused": "needs a power of two of ranks, which 6 is not"}
    assert second["refused"] is None


def test_a_barrier_has_no_wall_one_rank_no_seconds_and_vectors_of_no_bytes_say_who_is_faster_for_small_ones():
    barrier = data_of(0, 8, "nvlink4", "barrier")
    assert (barrier["latency_wall_nbytes"], barrier["bus_bytes_per_second"], barrier["others"]) == ("inf", None, [])
    alone = data_of(7, 1, "nvlink4")
    assert (alone["seconds"], alone["algorithm_bytes_per_second"], alone["steps"]) == (0, None, 0)
    # On three ranks ring and Rabenseifner have as many steps; only bytes tell them apart, and there are none.
    other = lesson.collective_cost(lesson.CostQuestion(0, 3, "nvlink4")).others[1]
    assert (other.algorithm, other.faster_at_first, other.points) == ("rabenseifner", 0, ())
