"""Devices, links and networks: the presets, a user's own file, and what is wrong with one."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from zerosim.planning.hardware import (
    FORMATS,
    OVERHEADS,
    Device,
    Link,
    Network,
    device,
    link,
    network_of,
    overheads_nbytes,
    parse,
    presets,
    read,
)

DEVICES = ["rtx-3090", "rtx-4090", "t4", "a100-40", "a100-80", "h100-80", "h200", "b200", "l40s", "mi300x"]
LINKS = ["nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie3", "pcie4", "pcie5", "infiniband-hdr", "infiniband-ndr",
         "infiniband-xdr", "ethernet-10g", "ethernet-100g", "ethernet-400g"]
OWN_LINK = """
[link.mine]
bytes_per_second = 400e9
latency_seconds = 2.1e-6
source = "measured"
date = 2025-06-01
"""
OWN_DEVICE = """
[device.mine]
capacity_nbytes = 96e9
reported_nbytes = 95_000_000_000
memory_bytes_per_second = 4e12
flops_per_second = { bf16 = 1e15 }
source = "a data sheet"
date = "2025-06"
"""


# --- what comes along ---------------------------------------------------------------------------------------


def test_the_promised_devices_and_links_come_along() -> None:
    assert list(presets().devices) == DEVICES
    assert list(presets().links) == LINKS


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_says_where_its_numbers_are_from(name: str) -> None:
    row = device(name)
    assert len(row.source) > 20
    assert "smi" in row.source  # who reports the memory
    assert re.fullmatch(r"20\d\d-\d\d", row.date)


@pytest.mark.parametrize("name", LINKS)
def test_every_link_says_where_rate_and_latency_are_from(name: str) -> None:
    row = link(name)
    rate, latency = row.source.split("; latency: ")
    assert min(len(rate), len(latency)) > 20
    assert re.fullmatch(r"20\d\d-\d\d", row.date)


@pytest.mark.parametrize(("name", "gigabytes", "mebibytes"), [
    ("rtx-3090", 24, 24_576), ("rtx-4090", 24, 24_564), ("t4", 16, 15_360), ("a100-40", 40, 40_960),
    ("a100-80", 80, 81_920), ("h100-80", 80, 81_559), ("h200", 141, 143_771), ("b200", 180, 183_359),
    ("l40s", 48, 46_068)])
def test_capacity_is_the_vendors_and_reported_is_the_drivers(name: str, gigabytes: int, mebibytes: int) -> None:
    assert device(name).capacity_nbytes == gigabytes * 10**9
    assert device(name).reported_nbytes == mebibytes * 2**20


def test_an_mi300x_reports_16_mebibytes_less_than_192_gibibytes() -> None:
    assert device("mi300x").capacity_nbytes == 192 * 10**9
    assert 192 * 2**30 - device("mi300x").reported_nbytes == 2**24


@pytest.mark.parametrize("name", DEVICES)
def test_rates_are_dense_so_16_bit_is_about_twice_tf32_and_8_bit_twice_16(name: str) -> None:
    rates = device(name).flops_per_second
    assert set(rates) <= set(FORMATS)
    if "tf32" in rates:
        assert rates["fp16"] == rates["bf16"] == pytest.approx(2 * rates["tf32"], rel=0.03)
    if "fp8" in rates:
        assert rates["fp8"] == pytest.approx(2 * rates["bf16"], rel=0.02)


@pytest.mark.parametrize(("name", "sparse"), [("a100-80", 624e12), ("h100-80", 1979e12), ("h200", 1979e12),
                                              ("b200", 4500e12), ("l40s", 733e12)])
def test_the_vendors_sparse_figure_is_twice_the_rate(name: str, sparse: float) -> None:
    assert 2 * device(name).flops_per_second["bf16"] == pytest.approx(sparse, rel=0.02)


@pytest.mark.parametrize(("name", "both_ways"), [("nvlink2", 300e9), ("nvlink3", 600e9), ("nvlink4", 900e9),
                                                 ("nvlink5", 1800e9)])
def test_nvlink_is_counted_one_way(name: str, both_ways: float) -> None:
    assert link(name).bytes_per_second == both_ways / 2


@pytest.mark.parametrize(("name", "transfers"), [("pcie3", 8e9), ("pcie4", 16e9), ("pcie5", 32e9)])
def test_pcie_sends_128_of_130_bits_on_16_lanes(name: str, transfers: float) -> None:
    assert link(name).bytes_per_second == pytest.approx(transfers * 16 * 128 / 130 / 8, rel=1e-4)


@pytest.mark.parametrize(("name", "gigabits"), [
    ("infiniband-hdr", 200), ("infiniband-ndr", 400), ("infiniband-xdr", 800), ("ethernet-10g", 10),
    ("ethernet-100g", 100), ("ethernet-400g", 400)])
def test_networks_send_their_line_rate(name: str, gigabits: int) -> None:
    assert link(name).bytes_per_second == gigabits * 1e9 / 8


def test_a_device_without_a_format_says_which_it_has() -> None:
    assert device("h200").flops_per_second_in("bf16") == 989.5e12
    with pytest.raises(ValueError, match=r"^the device t4 has no rate in bf16; it has fp32, fp16$"):
        device("t4").flops_per_second_in("bf16")


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("look_up", "name", "near"), [
    (device, "h100", "'h100-80'"), (device, "A100", "'a100-80'"), (device, "rtx3090", "'rtx-3090'"),
    (link, "nvlink", "'nvlink4'"), (link, "NVLink4", "'nvlink4'"), (link, "infiniband", "'infiniband-ndr'"),
    (link, "pcie", "'pcie5'")])
def test_an_unknown_name_is_answered_with_the_nearest_ones(look_up, name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"is called '{name}'; there are .*; did you mean ") as caught:
        look_up(name)
    assert near in str(caught.value).partition("did you mean")[2]


def test_a_name_like_no_other_lists_all_there_are() -> None:
    with pytest.raises(ValueError, match=rf"^no link is called 'string and cups'; there are {', '.join(LINKS)}$"):
        link("string and cups")


# --- a file of one's own ------------------------------------------------------------------------------------


def test_a_users_file_adds_devices_and_links(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(OWN_LINK + OWN_DEVICE)
    hardware = read(tmp_path / "mine.toml")
    assert link("mine", hardware) == Link("mine", 400e9, 2.1e-6, "measured", "2025-06-01")
    assert hardware.device("mine").capacity_nbytes == 96 * 10**9
    assert isinstance(hardware.device("mine").capacity_nbytes, int)
    assert hardware.device("h200") == device("h200")
    with pytest.raises(ValueError, match="no link is called 'mine'"):
        link("mine")


@pytest.mark.parametrize(("text", "said"), [
    ("[links.x]\n", "no table 'links' is known; write [device.NAME] or [link.NAME]"),
    ("link = 3\n", "link must hold tables; write [link.NAME], and its fields under it"),
    ("[link]\nmine = 3\n", "link must hold tables"),
    ("[link.mine\n", "is no TOML: "),
    (OWN_LINK + "latency = 3\n", "link 'mine' has a field 'latency', which no link has; there are bytes_per_second, "
     "latency_seconds, source, date; did you mean 'latency_seconds'"),
    (OWN_LINK + "name = 'x'\n", "link 'mine' has a field 'name', which no link has"),
    (OWN_LINK.replace('source = "measured"', ""), "link 'mine' lacks source"),
    ("[device.mine]\nsource = 'x'\n", "device 'mine' lacks capacity_nbytes, reported_nbytes, "
     "memory_bytes_per_second, flops_per_second, date"),
    (OWN_LINK.replace("400e9", "0"), "link 'mine': bytes_per_second must be a finite number above 0, got 0"),
    (OWN_LINK.replace("400e9", "-1.5"), "link 'mine': bytes_per_second must be a finite number above 0, got -1.5"),
    (OWN_LINK.replace("400e9", "inf"), "bytes_per_second must be a finite number above 0, got inf"),
    (OWN_LINK.replace("400e9", "true"), "bytes_per_second must be a finite number above 0, got True"),
    (OWN_LINK.replace("400e9", '"400e9"'), "bytes_per_second must be a finite number above 0, got '400e9'"),
    (OWN_LINK.replace("2.1e-6", "-1e-6"), "latency_seconds must be a finite number that is not negative, got -1e-06"),
    (OWN_LINK.replace("2.1e-6", "nan"), "latency_seconds must be a finite number that is not negative, got nan"),
    (OWN_LINK.replace('"measured"', '" "'), "source must be a text, got ' '; a number without a source cannot be"),
    (OWN_LINK.replace("400e9", "1e-31"), "bytes_per_second must be between 1e-30 and 1e+30, got 1e-31; look at its"),
    (OWN_LINK.replace("400e9", "1" + 400 * "0"), "must be between 1e-30 and 1e+30, got 1000000000000000000000000"),
    (OWN_LINK.replace("2.1e-6", "1e31"), "latency_seconds must be between 0 and 1e+30, got 1e+31; look at its unit"),
    (OWN_LINK.replace("400e9", 5000 * "1"), "is no TOML: Exceeds the limit"),
    ("a = " + 5000 * "[", "is no TOML: maximum recursion depth exceeded"),
    (OWN_DEVICE.replace("96e9", "96.5"), "device 'mine': capacity_nbytes must be a whole number of bytes, got 96.5"),
    (OWN_DEVICE.replace("96e9", "0"), "device 'mine': capacity_nbytes must be a finite number above 0, got 0"),
    (OWN_DEVICE.replace("{ bf16 = 1e15 }", "{}"), "flops_per_second must give a dense rate for some of fp32, tf32"),
    (OWN_DEVICE.replace("{ bf16 = 1e15 }", "1e15"), "flops_per_second must give a dense rate for some of"),
    (OWN_DEVICE.replace("bf16 =", "bfp16 ="), "flops_per_second has no format 'bfp16'; there are fp32, tf32, bf16, "
     "fp16, fp8; did you mean "),
    (OWN_DEVICE.replace("1e15", "-1e15"), "flops_per_second.bf16 must be a finite number above 0"),
    (OWN_LINK.replace("mine", "nvlink4"), "the link 'nvlink4' comes along already; give yours a name of its own"),
    (OWN_DEVICE.replace("mine", "t4"), "the device 't4' comes along already; give yours a name of its own")])
def test_what_is_wrong_with_a_file_is_said_with_its_name_and_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no-such.toml' cannot be read: No such file or directory; give the path"):
        read(tmp_path / "no-such.toml")
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(ValueError, match=r"latin.toml' is no UTF-8 text: .* at byte 5; save it as UTF-8"):
        read(tmp_path / "latin.toml")


def test_an_empty_file_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert read(tmp_path / "empty.toml") == presets()
    assert parse("", "nothing").devices == {}


def test_a_link_may_be_ideal_and_rows_are_plain_data() -> None:
    ideal = replace(link("nvlink4"), latency_seconds=0)
    assert ideal.seconds(450) == 1e-9
    assert link("nvlink4").seconds(0) == 3.4e-6
    assert asdict(device("t4"))["flops_per_second"] == {"fp32": 8.1e12, "fp16": 65e12}
    assert len({device("t4"), device("t4"), link("pcie5"), ideal}) == 3


def test_a_device_keeps_rates_of_its_own() -> None:
    rates = {"fp32": 1.0}
    mine = Device("mine", 1, 1, 1.0, rates, "a test", "today")
    rates["fp32"] = 2.0
    assert mine.flops_per_second == {"fp32": 1.0}


# --- networks -----------------------------------------------------------------------------------------------


def test_ranks_of_one_node_share_the_fast_link_and_others_the_slow_one() -> None:
    network = Network(link("nvlink4"), link("infiniband-ndr"), 4)
    assert network.link(0, 3).name == network.link(7, 4).name == "nvlink4"
    assert network.link(3, 4).name == network.link(0, 7).name == "infiniband-ndr"
    assert {Network(link("nvlink4")).link(source, 9).name for source in range(9)} == {"nvlink4"}


def test_crossing_nodes_is_asked_of_many_messages_at_once() -> None:
    ranks = np.arange(6)
    crosses = Network(link("nvlink4"), link("infiniband-ndr"), 2).crosses(ranks, (ranks + 1) % 6)
    assert crosses.tolist() == [False, True, False, True, False, True]
    assert not Network(link("nvlink4")).crosses(ranks, (ranks + 1) % 6).any()


def test_ranks_are_spread_evenly_over_nodes() -> None:
    nvlink, ndr = link("nvlink4"), link("infiniband-ndr")
    assert network_of(16, 2, nvlink, ndr) == Network(nvlink, ndr, 8)
    assert network_of(16, 1, nvlink) == Network(nvlink)
    assert network_of(4, 4, nvlink, ndr).link(0, 1) == ndr


@pytest.mark.parametrize(("call", "text"), [
    (lambda: Network(link("pcie4"), link("ethernet-10g")), "a network of nodes needs a link between them and the ranks "
     "of a node, got between='ethernet-10g' and ranks_per_node=None; give both, or neither"),
    (lambda: Network(link("pcie4"), None, 4), "a network of nodes needs a link between them and the ranks of a node, "
     "got between=None and ranks_per_node=4; give both, or neither"),
    (lambda: Network(link("pcie4"), link("ethernet-10g"), 0), "ranks_per_node must be at least 1, got 0"),
    (lambda: Network(link("pcie4")).link(1, 1), "a link joins two ranks, numbered from 0, got 1 and 1"),
    (lambda: Network(link("pcie4")).link(-1, 1), "a link joins two ranks, numbered from 0, got -1 and 1"),
    (lambda: network_of(8, 3, link("pcie4"), link("ethernet-10g")), "8 ranks do not spread evenly over 3 nodes"),
    (lambda: network_of(8, 2, link("pcie4")), "2 nodes need a link between them; name one, such as infiniband-ndr"),
    (lambda: network_of(8, 1, link("pcie4"), link("ethernet-10g")), "one node has no link between nodes, and "
     "ethernet-10g was asked for; take more nodes, or leave it out"),
    (lambda: network_of(0, 1, link("pcie4")), "ranks must be at least 1, got 0"),
    (lambda: network_of(8, 0, link("pcie4")), "nodes must be at least 1, got 0")])
def test_networks_that_cannot_be_are_refused(call, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        call()


# -- overheads of a runtime -------------------------------------------------------------------------------------------


def test_two_to_four_gigabytes_of_overhead_are_less_than_their_own_parts() -> None:
    """A rule of thumb says 2-4 GB; its own three parts are 2.7 to 7."""
    parts = [OVERHEADS[name] for name in ("runtime context", "allocator fragmentation", "communication channels")]
    assert sum(part.least_nbytes for part in parts) == 2_700_000_000
    assert sum(part.most_nbytes for part in parts) == 7_000_000_000
    assert all(part.least_nbytes <= part.middle_nbytes <= part.most_nbytes for part in OVERHEADS.values())


def test_an_overhead_is_replaced_by_name_and_an_unknown_one_is_refused() -> None:
    assert overheads_nbytes({"runtime context": 450_000_000})["runtime context"] == 450_000_000
    with pytest.raises(ValueError, match=re.escape("no overhead is called 'cuda'; there are runtime context, alloc")):
        overheads_nbytes({"cuda": 1})
    with pytest.raises(ValueError, match="runtime context must be at least 0, got -1"):
        overheads_nbytes({"runtime context": -1})
