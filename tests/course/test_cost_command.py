"""``zerosim cost`` as one types it."""

import json
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from zerosim.cli import app
from zerosim.course.collective_cost import CostQuestion, collective_cost
from zerosim.planning import ceil_cut, sent
from zerosim.planning.collectives import ALGORITHMS
from zerosim.planning.cost import cost
from zerosim.planning.hardware import Network, link

ISSUE = ["--algorithm", "ring", "--collective", "all_reduce", "--nbytes", "14e9", "--ranks", "8", "--link", "nvlink4"]
NODES = ["--nbytes", "25e6", "--ranks", "12", "--nodes", "3", "--link", "nvlink4"]


def ask(*arguments: str):
    return CliRunner().invoke(app, ["cost", *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


def data_of(*arguments: str) -> dict:
    done = ask(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


BRACKETS = """
[link."[red]x[/]"]
bytes_per_second = 400e9
latency_seconds = 1e-6
source = "see [1] and [/bold]"
date = "2025"

[device."[red]d[/]"]
capacity_nbytes = 96e9
reported_nbytes = 96e9
memory_bytes_per_second = 4e12
flops_per_second = { bf16 = 1e15 }
source = "[/red]"
date = "2025"
"""


def test_brackets_in_a_file_of_ones_own_are_printed_as_they_are(tmp_path: Path) -> None:
    """Else they would be taken for styles, or for the ends of some that there are not."""
    (tmp_path / "mine.toml").write_text(BRACKETS)
    own = ["--link", "[red]x[/]", "--hardware", str(tmp_path / "mine.toml")]
    done = ask("--nbytes", "1e9", "--ranks", "4", *own)
    assert done.exit_code == 0, done.output
    assert "over [red]x[/]: 400 GB/s one way" in done.stdout
    assert "[red]x[/] (2025): see [1] and [/bold]." in done.stdout
    planned = CliRunner().invoke(app, ["plan", "--params", "1e9", "--device", "[red]d[/]", "--explain", *own],
                                 env={"COLUMNS": "160", "NO_COLOR": "1"})
    assert planned.exit_code == 0, planned.output
    assert "[red]d[/] reports" in planned.stdout
    assert "over [red]x[/]" in planned.stdout


# --- the data -----------------------------------------------------------------------------------------------


def test_the_data_is_what_the_formulas_say() -> None:
    data, wanted = data_of(*ISSUE), cost("all_reduce", "ring", ceil_cut(14 * 10**9, 8), 1, Network(link("nvlink4")))
    assert (data["steps"], data["seconds"], data["latency_seconds"]) == (14, wanted.seconds, 14 * 3.4e-6)
    assert data["transfer_seconds"] == pytest.approx(2 * 7 / 8 * 14e9 / 450e9)
    assert data["sent_nbytes_by_rank"] == [24_500_000_000] * 8
    assert data["messages_by_rank"] == [14] * 8
    assert (data["largest_sent_nbytes"], data["total_sent_nbytes"]) == (24_500_000_000, 8 * 24_500_000_000)
    assert data["algorithm_bytes_per_second"] == pytest.approx(14e9 / data["seconds"])
    assert data["bus_bytes_per_second"] == pytest.approx(1.75 * 14e9 / data["seconds"])
    assert data["latency_wall_nbytes"] == 8 * 1_530_000
    assert data["latency_wall_ranks"] == pytest.approx(14e9 / 1_530_000)


def test_bytes_are_exact_integers_and_chunks_are_whole_elements() -> None:
    data = data_of("--nbytes", "10000000000000002", "--ranks", "3", "--link", "pcie5", "--itemsize", "2")
    assert data["nbytes"] == 10_000_000_000_000_002
    assert data["sent_nbytes_by_rank"] == list(sent("all_reduce", "ring", ceil_cut(5 * 10**15 + 1, 3), 2).nbytes)
    assert all(isinstance(nbytes, int) for nbytes in data["sent_nbytes_by_rank"])


def test_every_other_algorithm_stands_beside_it_with_where_they_cross() -> None:
    others = {other["algorithm"]: other for other in data_of(*ISSUE)["others"]}
    assert set(others) == {name for of, name in ALGORITHMS if of == "all_reduce"} - {"ring"}
    point, = others["doubling"]["break_even"]
    assert point == {"nbytes": pytest.approx(8.8 * 1_530_000), "faster_below": "doubling", "faster_above": "ring"}
    assert (others["rabenseifner"]["break_even"], others["rabenseifner"]["faster_at_first"]) == ([], "rabenseifner")
    assert (others["naive"]["break_even"], others["naive"]["faster_at_first"]) == ([], "ring")
    for other in others.values():
        assert other["seconds"] == cost("all_reduce", other["algorithm"], ceil_cut(14 * 10**9, 8), 1,
                                        Network(link("nvlink4"))).seconds


def test_an_algorithm_that_cannot_serve_so_many_ranks_says_why() -> None:
    others = data_of("--collective", "all_gather", "--nbytes", "6e6", "--ranks", "6", "--link", "pcie4")["others"]
    assert others[0] == {"algorithm": "doubling", "refused": "needs a power of two of ranks, and 6 is none"}
    assert others[1]["refused"] is None


def test_several_nodes_have_a_link_between_them_which_the_data_names() -> None:
    data = data_of(*NODES)
    assert (data["nodes"], data["link"]["name"], data["between"]["name"]) == (3, "nvlink4", "infiniband-ndr")
    assert data["seconds"] == pytest.approx(22 * (14e-6 + 2_083_334 / 50e9), rel=1e-6)
    assert data_of(*NODES, "--between", "ethernet-10g")["seconds"] > 20 * data["seconds"]
    assert data_of(*ISSUE)["between"] is None


@pytest.mark.parametrize("switch", [["--nbytes", "14000000008"], ["--ranks", "4"], ["--link", "pcie5"],
                                    ["--collective", "all_gather"], ["--algorithm", "tree"], ["--nodes", "2"],
                                    ["--nodes", "2", "--between", "ethernet-400g"], ["--itemsize", "8"]], ids=" ".join)
def test_every_switch_changes_the_data(switch: list[str]) -> None:
    plain = data_of(*ISSUE, "--nodes", "2") if "--between" in switch else data_of(*ISSUE)
    assert data_of(*ISSUE, *switch) != plain


def test_without_an_algorithm_it_is_the_collectives_first() -> None:
    found = {collective: data_of("--collective", collective, "--nbytes", "0", "--ranks", "4", "--link", "pcie3")
             for collective in dict.fromkeys(of for of, _ in ALGORITHMS)}
    assert {collective: data["algorithm"] for collective, data in found.items()} == {
        "reduce_scatter": "ring", "all_gather": "ring", "all_reduce": "ring", "broadcast": "tree", "reduce": "tree",
        "gather": "pairwise", "all_to_all": "pairwise", "barrier": "dissemination"}


def test_a_barrier_has_no_wall_and_one_rank_has_no_seconds() -> None:
    barrier = data_of("--collective", "barrier", "--nbytes", "0", "--ranks", "8", "--link", "nvlink4")
    assert (barrier["latency_wall_nbytes"], barrier["bus_bytes_per_second"], barrier["others"]) == ("inf", None, [])
    alone = data_of("--nbytes", "7", "--ranks", "1", "--link", "nvlink4")
    assert (alone["seconds"], alone["algorithm_bytes_per_second"], alone["steps"]) == (0, None, 0)


def test_a_file_of_ones_own_adds_links(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[link.string]\nbytes_per_second = 2\nlatency_seconds = 1\n"
                                        "source = 'two cups'\ndate = 1950-01-01\n")
    data = data_of("--nbytes", "16", "--ranks", "2", "--link", "string", "--hardware", str(tmp_path / "mine.toml"))
    assert (data["seconds"], data["link"]["source"]) == (2 * (1 + 8 / 2), "two cups")


def test_vectors_of_no_bytes_still_say_who_is_faster_for_small_ones() -> None:
    # On three ranks ring and Rabenseifner have as many steps; only bytes tell them apart.
    other = collective_cost(CostQuestion(0, 3, "nvlink4")).others[1]
    assert (other.algorithm, other.faster_at_first, other.points) == ("rabenseifner", 0, ())


# --- the text -----------------------------------------------------------------------------------------------


def test_the_text_says_what_was_asked_what_it_takes_and_where_others_are_faster() -> None:
    done = ask(*ISSUE)
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in ("all_reduce by ring, 14,000,000,000 bytes, 8 ranks",
                 "over nvlink4: 450 GB/s one way, 3.4 µs a message", "steps 14",
                 "sent by each rank 24,500,000,000 bytes", "time 54.49 ms", "latency, 0.1 % 47.6 µs",
                 "transfer 54.44 ms", "algorithm bandwidth 256.9 GB/s", "bus bandwidth 449.6 GB/s",
                 "doubling 3 42 GB 93.34 ms 262.5 GB/s", "doubling is faster below 13.46 MB, ring above 13.46 MB.",
                 "rabenseifner is faster than ring at every size.", "ring is faster than naive at every size.",
                 "Below 12.24 MB latency takes more of its time than transfer.",
                 "That wall is N·α·β of nvlink4: 14 GB meet it on 9,150 ranks."):
        assert line in lines
    assert "latency: NCCL 2.20" in " ".join(lines)
    assert done.stderr == ""


def test_algorithms_are_listed_from_the_fastest_on() -> None:
    lines = ask(*ISSUE).stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == ["algorithm"] and "steps" in line)
    assert [line.split()[0] for line in lines[start + 1:start + 7]] == [
        "rabenseifner", "ring", "doubling", "tree", "everyone", "naive"]


def test_uneven_chunks_and_nodes_are_told() -> None:
    text = " ".join(ask(*NODES).stdout.split())
    assert "inside each of 3 nodes over nvlink4: 450 GB/s one way" in text
    assert "between them over infiniband-ndr: 50 GB/s one way, 14 µs a message" in text
    assert "sent by a rank, at least 45,833,332 bytes sent by a rank, at most 45,833,340 bytes" in text
    assert "That wall is N·α·β of infiniband-ndr: 25 MB meet it on 35 ranks." in text


@pytest.mark.parametrize(("arguments", "said"), [
    (["--nbytes", "0", "--ranks", "8", "--link", "pcie3", "--collective", "barrier"],
     "It carries no bytes, so all of its time is latency."),
    (["--nbytes", "5", "--ranks", "1", "--link", "pcie3"], "One rank sends nothing, by any algorithm."),
    (["--nbytes", "5", "--ranks", "2", "--link", "pcie3"],
     "ring and rabenseifner take as long as each other at every size."),
    (["--nbytes", "6", "--ranks", "6", "--link", "pcie3", "--collective", "reduce_scatter"],
     "halving needs a power of two of ranks, and 6 is none.")])
def test_special_cases_are_told_in_words(arguments: list[str], said: str) -> None:
    assert said in " ".join(ask(*arguments).stdout.split())


@pytest.mark.parametrize("arguments", [ISSUE, NODES, ["--nbytes", "4e18", "--ranks", "1024", "--link", "pcie3"]])
def test_the_text_fits_80_columns(arguments: list[str]) -> None:
    assert max(map(cell_len, ask(*arguments).stdout.splitlines())) <= 80


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "said"), [
    (["--ranks", "0"], "ranks must be at least 1, got 0"),
    (["--ranks", "8193"], "8193 ranks were asked for; every step of every rank is looked at, so take 8192 at most"),
    (["--nbytes", "-3"], "a vector has a whole number of bytes, from 0 to below 2^62, and -3 is none"),
    (["--nbytes", "1.5"], "a vector has a whole number of bytes, from 0 to below 2^62, and 1.5 is none"),
    (["--nbytes", "nan"], "from 0 to below 2^62, and nan is none"),
    (["--nbytes", "1e999999"], "from 0 to below 2^62, and 1e999999 is none"),
    (["--nbytes", "14GB"], "'14GB' is no number of bytes; write it in digits, as in 14e9 or 1048576"),
    (["--link", "nvlink"], "no link is called 'nvlink'; there are nvlink2, nvlink3, nvlink4,"),
    (["--algorithm", "rings"], "all_reduce has no algorithm 'rings'; there are ring, doubling, rabenseifner, tree, "
     "naive, everyone; did you mean 'ring'?"),
    (["--collective", "allreduce"], "no collective is called 'allreduce'; there are reduce_scatter, all_gather"),
    (["--nodes", "3"], "8 ranks do not spread evenly over 3 nodes; take as many ranks on each"),
    (["--nodes", "0"], "nodes must be at least 1, got 0"),
    (["--between", "pcie5"], "one node has no link between nodes, and pcie5 was asked for; take more nodes"),
    (["--nodes", "2", "--between", "x"], "no link is called 'x'; there are "),
    (["--itemsize", "3"], "14000000000 bytes are no whole number of elements of 3 bytes; take 13999999998, or"),
    (["--itemsize", "0"], "itemsize must be at least 1, got 0"),
    (["--hardware", "no-such.toml"], "the hardware file 'no-such.toml' cannot be read: No such file or directory"),
    (["--collective", "barrier", "--algorithm", "dissemination"], "a barrier carries no bytes, and 14000000000 were "
     "asked for; take 0"),
    (["--collective", "reduce_scatter", "--algorithm", "halving", "--ranks", "6"], "reduce_scatter halving swaps with "
     "partners at distances 1, 2, 4, ... and needs a power of two, got 6 ranks; take ring")])
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    done = ask(*ISSUE, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("zerosim cost: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_what_is_needed_and_not_given_is_named() -> None:
    done = ask("--ranks", "8", "--link", "nvlink4")
    assert done.exit_code == 2
    assert "--nbytes" in done.output
