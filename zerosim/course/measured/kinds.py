"""The kinds of memory that are looked at together."""

from collections.abc import Mapping

BytesByKind = Mapping[str, int]
FLOWING = ("activation", "checkpointed_input", "activation_gradient")
GRADIENTS, BUFFERS = ("gradient", "unit_gradient"), ("communication_buffer", "workspace")
