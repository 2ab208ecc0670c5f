"""One part, as a process: ``python -m benchmarks.gpu_check NAME FILE``."""

import sys
from pathlib import Path

from benchmarks.gpu_check import carry_out

carry_out(sys.argv[1], Path(sys.argv[2]))
