"""zerosim: ZeRO, the Zero Redundancy Optimizer, to run, read, step through and trust on a laptop.

A name is loaded when it is first asked for: `import zerosim` alone costs little more than NumPy and ml_dtypes, and a
program that plans loads no engine. (Lazy loading as in Scientific Python's SPEC 1.)
"""

import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  # from here on NumPy knows "bfloat16" by name

from zerosim.connect import connect  # not lazily: the function hides the module of its name

if TYPE_CHECKING:
    from zerosim import models, numerics, optim, oracle, planning, ranks, testing, zero
    from zerosim.backends.cupy.cluster import CuPyCluster
    from zerosim.backends.nccl.cluster import NCCLCluster
    from zerosim.course import draw, museum, puzzles
    from zerosim.course.predictions import Predictions
    from zerosim.course.tuning import tune
    from zerosim.display.report import explore
    from zerosim.frameworks import from_deepspeed, from_fsdp
    from zerosim.numerics.formats import FORMATS, Format, format_of
    from zerosim.numerics.places import Offload
    from zerosim.numerics.policy import Policy
    from zerosim.numerics.rounding import round_to, spacing
    from zerosim.planning.plan import plan
    from zerosim.ranks import *  # type: ignore[assignment]  # its `explore`, of legal orders, is another
    from zerosim.ranks import faults
    from zerosim.zero import *

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
    "Mesh",
    "MismatchError",
    "NCCLCluster",
    "NonFiniteGradients",
    "NullCluster",
    "Offload",
    "OutOfMemoryError",
    "PendingWorkError",
    "Placement",
    "Policy",
    "Predictions",
    "Rank",
    "RankStopped",
    "RankUseError",
    "RemoteError",
    "Results",
    "Run",
    "SkippedStepWarning",
    "Stage",
    "StepResult",
    "Trace",
    "Work",
    "ZeroPlusPlus",
    "connect",
    "draw",
    "explore",
    "faults",
    "format_of",
    "from_deepspeed",
    "from_fsdp",
    "layout_of",
    "models",
    "museum",
    "numerics",
    "optim",
    "oracle",
    "plan",
    "planning",
    "puzzles",
    "ranks",
    "redistribute",
    "round_to",
    "spacing",
    "step_through",
    "testing",
    "tune",
    "zero",
]

_MODULES = {**{floor: floor for floor in ("numerics", "ranks", "models", "optim", "zero", "planning")},
            "draw": "course.draw", "faults": "ranks.faults", "museum": "course.museum", "puzzles": "course.puzzles",
            "testing": "testing", "oracle": "oracle"}
_HOMES = {"FORMATS": "numerics.formats", "Format": "numerics.formats", "format_of": "numerics.formats",
          "Offload": "numerics.places", "Policy": "numerics.policy", "round_to": "numerics.rounding",
          "spacing": "numerics.rounding",
          "Predictions": "course.predictions",
          "plan": "planning.plan", "tune": "course.tuning",
          "explore": "display.report",
          "from_deepspeed": "frameworks", "from_fsdp": "frameworks",
          "CuPyCluster": "backends.cupy.cluster", "NCCLCluster": "backends.nccl.cluster"}

_LOADING = threading.RLock()  # two threads that begin to import two floors, each of which needs the other's, both fail


def __getattr__(name: str) -> Any:
    """A public name from its home, or from the floor that offers it; it is kept, as if it had been imported here."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _LOADING:
        if name in _MODULES:
            value = import_module(f"zerosim.{_MODULES[name]}")
        else:
            homes = [_HOMES[name]] if name in _HOMES else ["ranks", "zero"]
            value = next(getattr(module, name) for module in (import_module(f"zerosim.{home}") for home in homes)
                         if hasattr(module, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
