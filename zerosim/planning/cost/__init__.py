"""What collectives cost: steps, bytes and seconds by the α-β model, break-even sizes, and bandwidths."""

from zerosim.planning.cost.bandwidth import BUS_FACTORS, algorithm_bytes_per_second, bus_bytes_per_second
from zerosim.planning.cost.curves import (
    BreakEven,
    Curve,
    Line,
    break_even,
    curve,
    faster_at,
    latency_wall_nbytes,
    ring_wall_ranks,
)
from zerosim.planning.cost.seconds import Cost, cost

__all__ = ["BUS_FACTORS", "BreakEven", "Cost", "Curve", "Line", "algorithm_bytes_per_second", "break_even",
           "bus_bytes_per_second", "cost", "curve", "faster_at", "latency_wall_nbytes", "ring_wall_ranks"]
