"""zerosim: ZeRO, the Zero Redundancy Optimizer, to run, read, step through and trust on a laptop.

A name is loaded when it is first asked for (`zerosim.face`): `import zerosim` alone costs little more than NumPy and
ml_dtypes, and a program that plans loads no engine.
"""

from typing import TYPE_CHECKING

import ml_dtypes  # from here on NumPy knows "bfloat16" by name

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

__getattr__, __dir__ = face(__name__)
