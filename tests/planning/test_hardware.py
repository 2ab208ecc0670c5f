"""Devices, links and networks: the presets and a user's own file."""

import re
from dataclasses import asdict, replace

import numpy as np
import pytest

from tests.planning.configurations import OWN_DEVICE, OWN_LINK
from zerosim.planning import Device, Link, Network, hardware

# What vendors and drivers say: GB, MiB reported, PCIe generation, and the sparse rate where the data sheet has it.
DEVICES = {"rtx-3090": (24, 24_576, 4, None), "rtx-4090": (24, 24_564, 4, None), "t4": (16, 15_360, 3, None),
           "a100-40": (40, 40_960, 4, None), "a100-80": (80, 81_920, 4, 624e12), "h100-80": (80, 81_559, 5, 1979e12),
           "h200": (141, 143_771, 5, 1979e12), "b200": (180, 183_359, 5, 4500e12), "l40s": (48, 46_068, 4, 733e12),
           "mi300x": (192, (192 * 2**30 - 2**24) / 2**20, 5, None)}
# GB/s one way: half of NVLink's figure for both, 128 of 130 bits on 16 lanes of PCIe, and the line rate of networks.
LINKS = {"nvlink2": 300 / 2, "nvlink3": 600 / 2, "nvlink4": 900 / 2, "nvlink5": 1800 / 2,
         "xgmi4": 7 * 128 / 2,
         **{f"pcie{generation}": gigatransfers * 16 * 128 / 130 / 8
            for generation, gigatransfers in ((3, 8), (4, 16), (5, 32))},
         "nvme-pcie4": 16 * 4 * 128 / 130 / 8, "infiniband-hdr": 200 / 8, "infiniband-ndr": 400 / 8,
         "infiniband-xdr": 800 / 8, "ethernet-10g": 10 / 8, "ethernet-100g": 100 / 8, "ethernet-400g": 400 / 8}


def test_the_promised_devices_come_along_with_the_vendors_capacity_the_drivers_and_dense_rates():
    assert list(hardware.presets().devices) == list(DEVICES)
    for name, (gigabytes, mebibytes, generation, sparse) in DEVICES.items():
        row = hardware.device(name)
        assert (row.capacity_nbytes, row.reported_nbytes) == (gigabytes * 10**9, mebibytes * 2**20), name
        assert hardware.presets().host_link(name) == hardware.link(f"pcie{generation}"), name
        rates = row.flops_per_second
        assert set(rates) <= set(hardware.RATED_FORMATS)
        if "tf32" in rates:
            assert rates["fp16"] == rates["bf16"] == pytest.approx(2 * rates["tf32"], rel=0.03), name
        if "fp8" in rates:
            assert rates["fp8"] == pytest.approx(2 * rates["bf16"], rel=0.02), name
        assert sparse is None or 2 * rates["bf16"] == pytest.approx(sparse, rel=0.02), name
        assert "smi" in row.source  # who reports the memory
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
    assert hardware.parse("", "nothing").devices == {}


def test_a_link_may_be_ideal_an_overhead_replaced_and_a_device_keeps_rates_of_its_own():
    assert replace(hardware.link("nvlink4"), latency_seconds=0).seconds(450) == 1e-9
    assert hardware.overheads_nbytes({"runtime context": 450_000_000})["runtime context"] == 450_000_000
    assert all(part.least_nbytes <= part.most_nbytes for part in hardware.OVERHEADS.values())
    rates = {"fp32": 1.0}
    mine = Device("mine", 1, 1, 1.0, rates, "a test", "today")
    rates["fp32"] = 2.0
    assert asdict(mine)["flops_per_second"] == {"fp32": 1.0}
    assert len({mine, replace(mine), hardware.device("t4")}) == 2


def test_ranks_of_one_node_share_the_fast_link_and_others_the_slow_one():
    nvlink, ndr = hardware.link("nvlink4"), hardware.link("infiniband-ndr")
    nodes, ranks = Network(nvlink, ndr, 4), np.arange(12)
    assert nodes.link(0, 3) == nodes.link(7, 4) == Network(nvlink).link(0, 9) == nvlink
    assert nodes.link(3, 4) == nodes.link(0, 7) == ndr
    assert [int(rank) for rank in ranks if nodes.crosses(rank, rank + 1)] == [3, 7, 11]
    assert not Network(nvlink).crosses(ranks, ranks + 1).any()
    assert hardware.network_of(16, 2, nvlink, ndr) == Network(nvlink, ndr, 8)
    assert hardware.network_of(16, 1, nvlink) == Network(nvlink)
