"""Other worlds for the same rank program: processes of MPI, GPUs through CuPy, and NCCL between GPUs.

Nothing below imports them: `zerosim.connect` and `zerosim.__getattr__` load them by name, when they are asked for.
"""

TIMEOUT_SECONDS = 5.0
