"""The oracle: whether somebody's recorded distributed step is right, and if not, why.

`judge` takes a folder that `zerosim.frameworks.hooks` recorded, or a `Record` made by hand.
"""

from zerosim.oracle.hypotheses import HYPOTHESES, Hypothesis
from zerosim.oracle.judgement import Cause, Judgement, judge
from zerosim.oracle.profiles import PROFILES, Profile
from zerosim.oracle.record import LAYOUTS, Record, StepSettings, read

__all__ = ["HYPOTHESES", "LAYOUTS", "PROFILES", "Cause", "Hypothesis", "Judgement", "Profile", "Record",
           "StepSettings", "judge", "read"]
