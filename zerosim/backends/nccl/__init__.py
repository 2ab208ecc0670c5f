"""NCCL: ranks on GPUs of their own, all in this process or each in a process, and the library's own collectives."""
