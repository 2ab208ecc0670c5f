"""Layers as pairs of functions: a forward that says what it kept, and a backward that needs no more.

Every value at rest is in the compute dtype (2 bytes for a 16-bit format), statistics in fp32. What happens in between
is what hardware does: a matmul widens its inputs, adds up in fp32, adds the bias in fp32 and rounds once on the way
out; an elementwise function, a softmax and a normalization compute in fp32 and round once. No layer has hidden state,
and nothing kept is a weight.
"""

from zerosim.models.layers.activations import gelu_backward, gelu_forward, relu_backward, relu_forward
from zerosim.models.layers.attention import KeptAttention, attention_backward, attention_forward
from zerosim.models.layers.dropout import dropout_backward, dropout_forward
from zerosim.models.layers.embedding import embedding_backward, embedding_forward
from zerosim.models.layers.linear import linear_backward, linear_forward
from zerosim.models.layers.normalization import layernorm_backward, layernorm_forward, layernorm_output

__all__ = [
    "KeptAttention",
    "attention_backward",
    "attention_forward",
    "dropout_backward",
    "dropout_forward",
    "embedding_backward",
    "embedding_forward",
    "gelu_backward",
    "gelu_forward",
    "layernorm_backward",
    "layernorm_forward",
    "layernorm_output",
    "linear_backward",
    "linear_forward",
    "relu_backward",
    "relu_forward",
]
