"""Settings of other programs, DeepSpeed's and PyTorch's FSDP, as arguments of an engine and of a plan.

`from_deepspeed` and `from_fsdp` read them; `FrameworkSettings` is what they come to. Neither program is needed for it.
"""

from zerosim.frameworks.deepspeed import from_deepspeed
from zerosim.frameworks.fsdp import from_fsdp
from zerosim.frameworks.settings import FrameworkSettings

__all__ = ["FrameworkSettings", "from_deepspeed", "from_fsdp"]
