"""Plans beside what any program of Python pays: the import of NumPy and ml_dtypes by a new process."""

import subprocess
import sys

from zerosim.course.measured import measured_row
from zerosim.planning.plan import plan_config

from . import Action, Row


def plan(small: bool) -> Action:
    """Four stages under three policies of recomputation of a 7B model."""
    asked = plan_config("llama-2-7b", ranks=8)
    return lambda: asked.plan() and None


def engine_without_data(small: bool) -> Action:
    """A step of the engine and its layers on arrays without data, of 10^12 parameters on 1,024 ranks; or of GPT-2."""
    asked = (plan_config("gpt2", ranks=8, runtime="zerosim") if small else
             plan_config("megatron-1t", ranks=1024, nodes=128, runtime="zerosim"))
    row = asked.plan().rows[-1]
    return lambda: measured_row(asked, row.stage, row.recompute) and None


def from_prompt(small: bool) -> Action:
    """The command, a whole process."""
    command = [sys.executable, "-m", "zerosim", "plan", "--model", "llama-2-7b", "--ranks", "8"]
    return lambda: subprocess.run(command, check=True, capture_output=True) and None


def imports(small: bool) -> Action:
    """A new process that imports both."""
    return _process("import numpy, ml_dtypes")


def _process(program: str) -> Action:
    return lambda: subprocess.run([sys.executable, "-c", program], check=True, capture_output=True) and None


AGAINST = "a process that imports numpy and ml_dtypes"
ROWS = (
    Row("plan", "A plan of 12 rows for Llama 2 7B on 8 ranks", AGAINST, 2.0, plan, imports),
    Row("null", "A step without data, 10^12 parameters on 1,024 ranks, stage 3", AGAINST, None, engine_without_data,
        imports, repetitions=1),
    Row("import", "import zerosim", AGAINST, 1.3, lambda small: _process("import zerosim"), imports),
    Row("plan-prompt", "zerosim plan, from the prompt", AGAINST, 4.0, from_prompt, imports),
)
