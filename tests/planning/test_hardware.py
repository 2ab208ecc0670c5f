"""Devices, links and networks: the presets and a user's own file."""

import re
from dataclasses import asdict, replace

import numpy as np
import pytest

from tests.planning.configurations import OWN_DEVICE, OWN_LINK
from zerosim.planning import Device, Link, Network, hardware

# What vendors and drivers say: GB, MiB reported, host link, and the sparse rate where the data sheet has it.
DEVICES = {"rtx-3090": (24, 24_576, "pcie4", None), "rtx-4090": (24, 24_564, "pcie4", None),
           "t4": (16, 15_360, "pcie3", None), "a100-40": (40, 40_960, "pcie4", None),
           "a100-80": (80, 81_920, "pcie4", 624e12), "h100-80": (80, 81_559, "pcie5", 1979e12),
           "h200": (141, 143_771, "pcie5", 1979e12), "b200": (180, 183_359, "pcie5", 4500e12),
           "l40s": (48, 46_068, "pcie4", 733e12), "mi300x": (192, 192 * 1024 - 16, "pcie5", None),
           "v100-16": (16, 16_384, "pcie3", None), "v100-32": (32, 32_768, "pcie3", None),
           "a10g": (24, 23_028, "pcie4", 140e12), "l4": (24, 23_034, "pcie4", 242e12),
           "rtx-5090": (32, 32_607, "pcie5", 419e12), "rtx-a6000": (48, 49_140, "pcie4", 309.7e12),
           "h100-pcie": (80, 81_559, "pcie5", 1513e12), "h100-nvl": (94, 95_830, "pcie5", 1671e12),
           "gh200": (96, 97_871, "nvlink-c2c", 1979e12), "mi250": (64, 64 * 1024 - 16, "pcie4", None),
           "mi325x": (256, 256 * 1024 - 16, "pcie5", None), "tpu-v4": (32, 31_488, None, None),
           "tpu-v5e": (16, 16_128, None, None), "tpu-v5p": (95, 98_037, None, None)}
# GB/s one way: half of NVLink's figure for both, 128 of 130 bits on 16 lanes of PCIe, and the line rate of networks.
LINKS = {"nvlink2": 300 / 2, "nvlink3": 600 / 2, "nvlink4": 900 / 2, "nvlink5": 1800 / 2,
         "nvlink-c2c": 900 / 2, "xgmi3": 350 / 2, "xgmi4": 7 * 128 / 2, "ici-v4": 6 * 45, "ici-v5e": 4 * 45,
         "ici-v5p": 6 * 90,
         **{f"pcie{generation}": gigatransfers * 16 * 128 / 130 / 8
            for generation, gigatransfers in ((3, 8), (4, 16), (5, 32))},
         "nvme-pcie4": 16 * 4 * 128 / 130 / 8, "infiniband-edr": 100 / 8, "infiniband-hdr": 200 / 8,
         "infiniband-ndr": 400 / 8, "infiniband-xdr": 800 / 8, "ethernet-10g": 10 / 8,
         "ethernet-100g": 100 / 8, "ethernet-400g": 400 / 8}


def test_the_promised_devices_come_along_with_the_vendors_capacity_the_drivers_and_dense_rates():
    assert list(hardware.presets().devices) == list(DEVICES)
    for name, (gigabytes, mebibytes, host_link, sparse) in DEVICES.items():
        row = hardware.device(name)
        assert (row.capacity_nbytes, row.reported_nbytes) == (gigabytes * 10**9, mebibytes * 2**20), name
        assert row.host_link == host_link, name
        assert 0.93 * row.reported_nbytes < row.usable_nbytes <= row.reported_nbytes, name
        assert {row.link, row.host_link, row.network} <= {*LINKS, None}
        rates = row.flops_per_second
        assert set(rates) <= set(hardware.RATED_FORMATS)
        if "tf32" in rates:
            assert rates["fp16"] == rates["bf16"] == pytest.approx(2 * rates["tf32"], rel=0.03), name
        if "fp8" in rates:
            assert rates["fp8"] == pytest.approx(2 * rates["bf16"], rel=0.02), name
        assert sparse is None or 2 * rates["bf16"] == pytest.approx(sparse, rel=0.02), name
        assert "smi" in row.source or "XLA" in row.source  # who reports the memory
        assert re.fullmatch(r"20\d\d-\d\d", row.date)
    assert hardware.device("h200").flops_per_second_in("bf16") == 989.5e12


def test_the_promised_links_come_along_at_their_rate_one_way_and_say_where_rate_and_latency_are_from():
    assert list(hardware.presets().links) == list(LINKS)
    for name, gigabytes in LINKS.items():
        row = hardware.link(name)
        assert row.bytes_per_second == pytest.approx(gigabytes * 1e9, rel=1e-4), name
        assert min(map(len, row.source.split("; latency: "))) > 20
        assert len(row.source.split("; latency: ")) == 2
        assert re.fullmatch(r"20\d\d-\d\d", row.date)


def test_a_users_file_adds_devices_and_links(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(OWN_LINK + OWN_DEVICE)
    own = hardware.read(path)
    assert own.link("mine") == Link("mine", 400e9, 2.1e-6, "measured", "2025-06-01")
    assert own.device("mine").capacity_nbytes == 96 * 10**9
    assert isinstance(own.device("mine").capacity_nbytes, int)
    assert own.device("h200") == hardware.device("h200")
    path.write_text("")
    assert hardware.read(path) == hardware.presets()
    assert hardware.parse({}, "nothing").devices == {}


def test_a_link_may_be_ideal_an_overhead_replaced_and_a_device_keeps_rates_of_its_own():
    assert replace(hardware.link("nvlink4"), latency_seconds=0).seconds(450) == 1e-9
    assert hardware.overheads_nbytes({"runtime context": 450_000_000})["runtime context"] == 450_000_000
    assert all(part.least_nbytes <= part.most_nbytes for part in hardware.OVERHEADS.values())
    rates = {"fp32": 1.0}
    mine = Device("mine", 1, 1, 1.0, rates, "a test", "today")
    rates["fp32"] = 2.0
    assert asdict(mine)["flops_per_second"] == {"fp32": 1.0}
    assert len({mine, replace(mine), hardware.device("t4")}) == 2


def test_programs_take_what_torch_says_and_a_users_device_all_that_it_reports():
    taken = {name: round(hardware.device(name).usable_nbytes / 2**30, 2) for name in ("a100-80", "h100-80", "v100-32")}
    assert taken == {"a100-80": 79.15, "h100-80": 79.19, "v100-32": 31.75}  # of 80, 79.65 and 32 GiB that are reported
    mine = Device("mine", 96, 95, 1.0, {"fp32": 1.0}, "a test", "today")
    assert (mine.usable_nbytes, replace(mine, usable_nbytes=90).usable_nbytes) == (95, 90)


def test_names_that_people_type_and_programs_print_find_their_device_or_link():
    found = {"4090": "rtx-4090", "NVIDIA GeForce RTX 4090": "rtx-4090", "h100": "h100-80", "A100": "a100-80",
             "a100 40GB": "a100-40", "NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA H100 80GB HBM3": "h100-80",
             "Tesla V100-SXM2-32GB": "v100-32", "MI300X": "mi300x", "AMD Instinct MI325X": "mi325x",
             "a6000": "rtx-a6000", "NVIDIA H100 PCIe": "h100-pcie", "H100_NVL": "h100-nvl", "TPU v5p": "tpu-v5p",
             "v5e": "tpu-v5e"}
    assert {name: hardware.device(name).name for name in found} == found
    found = {"ndr": "infiniband-ndr", "PCIe 4": "pcie4", "InfiniBand HDR": "infiniband-hdr", "400g": "ethernet-400g"}
    assert {name: hardware.link(name).name for name in found} == found


def test_between_nodes_lies_what_the_devices_machines_have_unless_another_link_is_named():
    known = hardware.presets()
    for device, between, cards in (("a100-80", "infiniband-hdr", 1), ("v100", "infiniband-edr", 0.5),
                                   ("h100", "infiniband-ndr", 1), ("l4", "ethernet-100g", 0.125)):
        network = known.network(16, "pcie4", 2, device=device)
        assert network == Network(hardware.link("pcie4"), hardware.link(between), 8, cards)
        assert known.network(16, "pcie4", 2, "ethernet-10g", device).between == hardware.link("ethernet-10g")
    assert known.network(8, "pcie4", device="4090") == Network(hardware.link("pcie4"))


def test_ranks_of_one_node_share_the_fast_link_and_others_the_slow_one():
    nvlink, ndr = hardware.link("nvlink4"), hardware.link("infiniband-ndr")
    nodes, ranks = Network(nvlink, ndr, 4), np.arange(12)
    assert [bool(nodes.crosses(*pair)) for pair in ((0, 3), (7, 4), (3, 4), (0, 7))] == [False, False, True, True]
    assert [int(rank) for rank in ranks if nodes.crosses(rank, rank + 1)] == [3, 7, 11]
    assert not Network(nvlink).crosses(ranks, ranks + 1).any()
    assert hardware.presets().network(16, "nvlink4", 2) == Network(nvlink, ndr, 8)
    assert hardware.presets().network(16, "nvlink4") == Network(nvlink)
