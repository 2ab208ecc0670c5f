"""Plans beside what any program of Python pays: the import of NumPy and ml_dtypes by a new process."""

import subprocess
import sys

from zerosim.planning.plan import plan_config

from . import Action, Row


def plan(small: bool) -> Action:
    """Four stages under three policies of recomputation of a 7B model."""
    asked = plan_config("llama-2-7b", ranks=8)
    return lambda: asked.plan() and None


def from_prompt(small: bool) -> Action:
    """The command, a whole process."""
    command = [sys.executable, "-m", "zerosim", "plan", "--model", "llama-2-7b", "--ranks", "8"]
    return lambda: subprocess.run(command, check=True, capture_output=True) and None


def imports(small: bool) -> Action:
    """A new process that imports both."""
    command = [sys.executable, "-c", "import numpy, ml_dtypes"]
    return lambda: subprocess.run(command, check=True, capture_output=True) and None


AGAINST = "a process that imports numpy and ml_dtypes"
ROWS = (
    Row("plan", "A plan of 12 rows for Llama 2 7B on 8 ranks", AGAINST, 2.0, plan, imports),
    Row("plan-prompt", "zerosim plan, from the prompt", AGAINST, 4.0, from_prompt, imports),
)
