"""zerosim: ZeRO, the Zero Redundancy Optimizer, to run, read, step through and trust on a laptop.

A name is loaded when it is first asked for: `import zerosim` alone costs little more than NumPy and ml_dtypes, and a
program that plans loads no engine. (Lazy loading as in Scientific Python's SPEC 1.)
"""

from typing import TYPE_CHECKING

import ml_dtypes  # noqa: F401  # from here on NumPy knows "bfloat16" by name

from zerosim.connect import connect  # not lazily: the function hides the module of its name
from zerosim.face import face

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
    from zerosim.ranks import (
        AsymmetryError,
        BackendError,
        Cluster,
        DeadlockError,
        Hop,
        Memory,
        Mesh,
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
        faults,
        step_through,
    )
    from zerosim.zero import (
        STAGES,
        Engine,
        Group,
        Layout,
        NonFiniteGradients,
        Placement,
        SkippedStepWarning,
        Stage,
        StepResult,
        ZeroPlusPlus,
        layout_of,
        redistribute,
    )

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

__getattr__, __dir__ = face(__name__)
