"""A link and a device as a user writes them into a file of his own."""

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
