"""Other worlds for the same rank program: processes of MPI, GPUs through CuPy, and NCCL between GPUs.

Nothing below imports them: `zerosim.connect` and the face of `zerosim` load them when they are asked for.
"""

# What ranks in processes of their own wait for each other, whatever carries their arrays.
TIMEOUT_SECONDS = 5.0    # after which a rank that waits tells the others for what
FAREWELL_SECONDS = 30.0  # for the others to learn of a failed rank, which they do at their next call
DRAIN_SECONDS = 5.0       # after a failure, for a library or a device to end what all have begun
CAUSE_SECONDS = 5.0      # for the message about the failure that is the cause of a library's error
