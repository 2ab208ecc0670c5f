"""The largest model that trains in a given memory, with and without offload, beside what the papers say of theirs.

The model is a GPT of blocks of so many channels, one sequence of 1,024 tokens in bf16 with Adam; blocks are added until
a memory is full, their inputs alone kept for backward. The number is found by the plan, and then the engine takes the
step on arrays without data, in exactly these capacities: with one block more it runs out of memory.

Memories: the 32 GiB of a Tesla V100, less what a plan takes a runtime to hold; 1.5 TB of its host,
and 28 TB on disk, shared by 16 devices where there are so many (NVIDIA DGX-2).
Sources of the published figures: Ren et al. 2021 (ZeRO-Offload, arXiv:2101.06840) and Rajbhandari et al. 2021
(ZeRO-Infinity, arXiv:2104.07857), abstracts.
"""

import sys
import time
from dataclasses import dataclass, replace

import zerosim as zs
from zerosim.course.measured import run_planned
from zerosim.numerics.places import DISK, HOST
from zerosim.planning import Device, PlanConfig, Transformer, hardware, model_of, plan_config

V100 = Device("Tesla V100, 32 GB", 32 * 2**30, 32 * 2**30, 900e9, {"bf16": 125e12},
              "NVIDIA Tesla V100 data sheet (fp16's rate: it has no bf16)", "2018-03")
MOVED_NBYTES = 2 * 10**7  # a few stretches
HOST_NBYTES, DISK_NBYTES = 1_500 * 10**9, 28_000 * 10**9


@dataclass(frozen=True)
class Case:
    """A row: devices, a stage, blocks of so many channels, places of state, and the published figure."""

    ranks: int
    stage: int
    channels: int
    offload: object
    published: str = ""


CASES = (
    Case(1, 0, 4096, None, "1.4 (PyTorch)"),
    Case(1, 0, 4096, zs.Offload("host", "host"), "13 (ZeRO-Offload)"),
    Case(1, 0, 4096, "host"),
    Case(16, 3, 8192, None),
    Case(16, 3, 8192, zs.Offload("host", "host")),
    Case(16, 3, 8192, "host"),
    Case(16, 3, 8192, "disk", "1,000 (ZeRO-Infinity)"),
)


def configured(case: Case, blocks: int) -> PlanConfig:
    model = model_of(f"{blocks} blocks", Transformer(case.channels, blocks, case.channels // 128, 50257, positions=1024,
                                                     tied=True, fused=True))
    on_disk = case.offload == "disk"
    base = plan_config("gpt2", ranks=case.ranks, link="nvlink2", stage=case.stage, recompute="block",
                       runtime="zerosim", offload=case.offload, disk_link="nvme-pcie4" if on_disk else None,
                       host_capacity_nbytes=HOST_NBYTES // case.ranks if case.offload else None,
                       disk_capacity_nbytes=DISK_NBYTES // case.ranks if on_disk else None)
    return replace(base, model=model, sequence=1024, device=V100, margin=0.0)


def capacities(config: PlanConfig) -> tuple[int, int, int]:
    """Bytes of a rank's device, host and disk."""
    overhead = sum(hardware.overheads_nbytes(config.overheads).values())
    return config.device.reported_nbytes - overhead, HOST_NBYTES // config.ranks, DISK_NBYTES // config.ranks


def fits(case: Case, blocks: int) -> bool:
    """The plan's answer, of device, host and disk.

    The host also holds updated parameters until they are on the device, and what is being moved; the disk each file
    that an update writes beside the one before.
    """
    config = configured(case, blocks)
    held, job, places = config.held(case.stage, "block"), config.job(case.stage, "block"), config.options.offload
    on_host, on_disk = (sum(one.nbytes for one in held if one.place == place) for place in (HOST, DISK))
    _, host, disk = capacities(config)
    fresh = 2 * job.held(job.states.optimizer_sharded) if places.parameters != places.optimizer else 0
    drafts = on_disk - (on_disk and 2 * job.held(job.states.gradients_sharded))
    return (on_host + fresh + (MOVED_NBYTES if fresh or on_host else 0) <= host
            and on_disk + drafts <= disk and config.has_margin(case.stage, "block"))


def largest(case: Case) -> int:
    """The most blocks that fit."""
    low, high = 1, 2
    while fits(case, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(case, middle) else (low, middle)
    return low


def measured(case: Case, blocks: int) -> tuple[int, int, int]:
    """Bytes that a step without data holds at most on device, host and disk; OutOfMemoryError beyond the capacities."""
    config = configured(case, blocks)
    device, host, disk = capacities(config)
    cluster = zs.NullCluster(case.ranks, representative=0, capacity_nbytes=device)
    (memory,) = cluster.memory
    memory.host.capacity_nbytes, memory.disk.capacity_nbytes = host, disk
    run_planned(cluster, config, case.stage, "block")
    return memory.peak_nbytes, memory.host.peak_nbytes, memory.disk.peak_nbytes


def main() -> None:
    """Prints the table; with a number, the rows up to that one."""
    rows = CASES[:int(sys.argv[1])] if len(sys.argv) > 1 else CASES
    print(f"{'devices':>7} {'stage':>5} {'offload':<22} {'10^9 parameters':>15} {'device GB':>9} {'host GB':>9} "
          f"{'disk GB':>9} {'seconds':>8}  published, 10^9")
    for case in rows:
        began, blocks = time.process_time(), largest(case)
        held = measured(case, blocks)
        try:
            measured(case, blocks + 1)
        except zs.OutOfMemoryError:
            pass
        else:
            print(f"one block more fits too: the plan is a little careful about {case}")
        parameters = configured(case, blocks).model.parameters
        print(f"{case.ranks:>7} {case.stage:>5} {case.offload!s:<22.22} {parameters / 1e9:>15,.1f} "
              + " ".join(f"{nbytes / 1e9:>9,.1f}" for nbytes in held)
              + f" {time.process_time() - began:>8.1f}  {case.published}", flush=True)


if __name__ == "__main__":
    main()
