"""zerosim: ZeRO, the Zero Redundancy Optimizer, to run, read, step through and trust on a laptop."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zerosim import models, optim, planning, zero
from zerosim.connect import connect
from zerosim.numerics.formats import FORMATS, Format, format_of
from zerosim.numerics.policy import Policy
from zerosim.numerics.rounding import round_to, spacing
from zerosim.planning.plan import plan
from zerosim.ranks import (
                           AsymmetryError,
                           BackendError,
                           Cluster,
                           DeadlockError,
                           Hop,
                           Memory,
                           MismatchError,
                           NullCluster,
                           OutOfMemoryError,
                           PendingWorkError,
                           Rank,
                           RankStopped,
                           RankUseError,
                           RemoteError,
                           Results,
                           Run,
                           Trace,
                           Work,
                           step_through,
)
from zerosim.zero import STAGES, Engine, Group, Layout, Placement, Stage, StepResult, layout_of, redistribute

if TYPE_CHECKING:
    from zerosim.backends.cupy.cluster import CuPyCluster
    from zerosim.backends.nccl.cluster import NCCLCluster
    from zerosim.course import puzzles

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "STAGES",
    "AsymmetryError",
    "BackendError",
    "Cluster",
    "CuPyCluster",
    "DeadlockError",
    "Engine",
    "Format",
    "Group",
    "Hop",
    "Layout",
    "Memory",
    "MismatchError",
    "NCCLCluster",
    "NullCluster",
    "OutOfMemoryError",
    "PendingWorkError",
    "Placement",
    "Policy",
    "Rank",
    "RankStopped",
    "RankUseError",
    "RemoteError",
    "Results",
    "Run",
    "Stage",
    "StepResult",
    "Trace",
    "Work",
    "connect",
    "format_of",
    "layout_of",
    "models",
    "optim",
    "plan",
    "planning",
    "puzzles",
    "redistribute",
    "round_to",
    "spacing",
    "step_through",
    "zero",
]


# Loaded when they are first asked for: most programs never do, and nothing here depends on them.
_LAZY = {"CuPyCluster": "zerosim.backends.cupy.cluster", "NCCLCluster": "zerosim.backends.nccl.cluster",
         "puzzles": "zerosim.course.puzzles"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LAZY[name])
    return module if name == "puzzles" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
