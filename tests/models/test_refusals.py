"""What models refuse, and in which words: layers, losses, units, GPTs, policies, texts, what one writes with them.

In a text, parts ... may be anything; ^ is its beginning and $ its end (`tests.support.literally`).
"""

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.models.contexts import context
from tests.models.runs import run_of
from tests.support import assert_refused, literally
from zerosim.models import (
    GPT,
    MLP,
    PRESETS,
    CrossEntropy,
    HalfSquaredError,
    LinearUnit,
    Llama,
    Llama3Scaling,
    Model,
    Recompute,
    decoder,
    first_weights,
    four_weights,
    gpt,
    layers,
    llama,
    one_pass,
    text,
    units,
)
from zerosim.numerics import kernels, policy

CTX, NANO = context("fp16"), PRESETS["gpt-nano"]
CORPUS = text.Corpus


def z(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


def linear_back(dw=(4, 5), db=(5,)):
    return layers.linear_backward(CTX, z(4, 5), z(3, 4), z(3, 5), z(*dw), z(*db))


def norm(**options):
    return layers.norm_forward(CTX, z(2, 4), z(4), z(4), **options)


X = z(4, 4)
WIDE = z(2, 2, dtype=np.float32)
LAYERS = [
    (lambda: layers.linear_forward(CTX, z(4), z(4, 5)),
     "^linear_forward asked for x of shape (B, I), and found (4,); reshape it to two dimensions$"),
    (lambda: layers.linear_forward(CTX, z(3, 4), z(4)), "^linear_forward asked for w of shape (I, O), and found (4,)"),
    *((call, "found one that shares memory with x, which it saves for backward") for call in (
        lambda: layers.linear_forward(CTX, X, X.copy(), out=X), lambda: layers.gelu_forward(CTX, X, out=X[:]))),
    (lambda: linear_back(dw=(5, 4)), "asked for dw of shape (4, 5), and found (5, 4); the gradient has the shape of t"),
    (lambda: linear_back(db=(4,)), "asked for db of shape (5,), and found (4,); the gradient has the shape of the bia"),
    (lambda: kernels.NumpyKernels().gelu(np.zeros(3), np.zeros(4)), "gelu needs arrays of one shape, got x (3,), out"),
    (lambda: kernels.NumpyKernels().gelu_gradient(np.zeros(3), np.zeros(3, int), np.zeros(3)),
     "gelu_gradient computes in floating point ... got dy of type int64"),
    (lambda: norm(epsilon=-1), "was given epsilon=-1; it is added to a variance, so take 0 or a small positive number"),
    (lambda: norm(epsilon="1e-5"), "was given epsilon='1e-5'"),
    (lambda: layers.embedding_forward(CTX, np.zeros((2, 3)), z(5, 3)),
     "^embedding_forward asked for tokens as integers, and found float64; a token is the index of a row"),
    *((lambda tokens=tokens: layers.embedding_forward(CTX, np.array(tokens), z(5, 3)),
       f"asked for tokens from 0 to 4, and found {min(tokens)} to {max(tokens)}; take a vocabulary that has them all")
      for tokens in ([0, 5], [-1, 2])),
    (lambda: layers.embedding_forward(CTX, z(2, dtype=int), z(5)), "asked for w of shape (V, C), and found (5,)"),
    *((lambda rate=rate: layers.dropout_forward(CTX, z(3), rate, "here"),
       f"^dropout_forward was given rate={rate!r}; it is the share of elements that are dropped, from 0 to less than "
       "1$")
      for rate in (-0.1, 1, 1.5, np.nan, "0.5", True)),
    *((lambda shape=shape: layers.attention_forward(CTX, z(*shape), 2),
       f"asked for qkv (B, T, C + 2K) of 2 heads of queries, 2 of keys, which divide them, and 2 of values, and found "
       f"shape {shape}; ")
      for shape in ((3, 12), (2, 3, 14))),
    (lambda: layers.attention_forward(CTX, z(2, 3, 12), 0), "was given heads=0; heads is a whole number, 1 or more"),
    (lambda: layers.attention_forward(CTX, z(2, 3, 12), 4, 3), "of 4 heads of queries, 3 of keys, which divide them"),
]


def loss(of, y, target):
    return of.forward(CTX, y, target)


LOSSES = [
    (lambda: loss(HalfSquaredError(), z(4, 1), z(4)), "asked for a target of shape (4, 1), and found (4,); a target "
     "has one value for each output of the model; broadcasting would compare every row"),
    (lambda: loss(HalfSquaredError(), z(0, 2), z(0, 2)), "asked for a batch, and found shape (0, 2); a mean needs a r"),
    (lambda: loss(HalfSquaredError(), z(1, 1), np.zeros((1, 1))),
     "computes in float32, and found a target in float64; round it first, with"),
    (lambda: loss(HalfSquaredError(), WIDE, WIDE), "computes in float16, and found y in float32"),
    *((lambda target=target: loss(CrossEntropy(), z(2, 4, 5), target), f"^CrossEntropy {said}")
      for target, said in (
        (z(2, 3, dtype=int), "asked for a target of shape (2, 4), and found (2, 3); there is one class for each"),
        (z(2, 4, dtype=float), "asked for targets as integers, and found float64; a target is a class"),
        (np.full((2, 4), 5), "asked for classes from 0 to 4, and -1 where there is none, and found 5 to 5; let the lo"),
        (np.full((2, 4), -2), "asked for classes from 0 to 4, and -1 where there is none, and found -2 to -2"),
        (np.full((2, 4), -1), "asked for the mean over valid targets, and found none among 8; leave such a batch out, "
         "or take normalization='global'$"))),
    (lambda: CrossEntropy("mean"), "^CrossEntropy was given normalization='mean'; choose one of 'own', 'global'$"),
]


def logits_of(shape):
    return run_of(GPT("gpt-nano")).output(z(*shape, dtype=np.int64))


def written(tokens=(0,), count=2, context=8, shares=(0.5, 0.5), **options):
    return gpt.generate(lambda t: np.broadcast_to(np.log(shares), (*t.shape, 2)), tokens, count, context=context,
                        **options)


PRESETS_TEXT = ("GPT was asked for 'gpt-mikro', which is no GPTConfig and no preset; the presets are gpt-nano, gpt-micr"
                "o, ...; did you mean 'gpt-micro'?")
GPTS = [
    (lambda: replace(NANO, layers=0), "GPTConfig was given layers=0; layers is a whole number, 1 or more"),
    (lambda: replace(NANO, heads=5), "a GPTConfig of 12 channels was asked for 5 heads, which do not divide them; take "
     "a number of heads that does$"),
    (lambda: replace(NANO, dropout=1.0), "GPTConfig was given dropout=1.0; it is the share of elements that are dropped"
     ", from 0 to less than 1"),
    *((lambda of=of: replace(NANO, epsilon=of), f"GPTConfig was given epsilon={of}; it keeps a norm from dividing by 0,"
       " so take a small positive number, as 1e-5") for of in (0, float("inf"))),
    *((lambda of=of: GPT("gpt-nano", units=of), f"GPT was asked for units={of!r}; a unit is a 'block', a 'sub_block', "
       "or a whole number of blocks, 1 o") for of in ("blocks", 0, -1, 1.5, None, True)),
    (lambda: GPT("gpt-mikro"), PRESETS_TEXT),
    *((lambda shape=shape: logits_of(shape), "unit 'embed' asked for tokens (B, T), B from 1, T from 1 to the context's"
       f" 8, and found shape {shape}; cut longer") for shape in ((2, 9), (8,), (2, 0), (0, 8), (1, 2, 3))),
    (lambda: replace(CTX, keep="some"), "a context was asked to keep 'some' of the inside of a unit; it keeps one of "
     "'all', 'sub_block', 'selective', 'tiled'"),
    (lambda: written(tokens=[]), "generate was asked to continue no tokens; give it one or more, as a prompt"),
    (lambda: written(temperature=-1), "generate was given temperature=-1; it is 0 for the likeliest token, 1 for the"),
    (lambda: written(context=0), "generate was given context=0; context is a whole number, 1 or more"),
    (lambda: written(count=1.5), "generate was given count=1.5; count is a whole number"),
    (lambda: written(shares=(np.nan, 1)), "asked for token 1, and found logits that are NaN or infinite; the model"),
]

LLAMA = llama.PRESETS["llama-nano"]
LLAMAS = [
    (lambda: replace(LLAMA, context=0), "LlamaConfig was given context=0; context is a whole number, 1 or more"),
    (lambda: replace(LLAMA, heads=5, head_channels=0), "a LlamaConfig of 12 channels was asked for 5 heads, which do no"
     "t divide them; take a number of heads that does, or say head_channels$"),
    (lambda: replace(LLAMA, key_value_heads=3), "2 heads were asked to share 3 key and value heads; each of these ser"),
    (lambda: replace(LLAMA, feed_forward=-1), "given feed_forward=-1; feed_forward is a whole number, 0 or more"),
    (lambda: replace(LLAMA, head_channels=5), "was given heads of 5 channels; rotary positions turn pairs of them, so"),
    (lambda: replace(LLAMA, base=0), "was given base=0; the rotary angles are its powers, so take a positive number"),
    (lambda: replace(LLAMA, base=np.inf), "was given base=inf; the rotary angles are its powers"),
    *((lambda of=of: Llama3Scaling(**{"factor": 8.0, "low": 1.0, "high": 4.0, "original_context": 64} | of), said)
      for of, said in (({"factor": 0}, "^Llama3Scaling was given factor=0; take a positive number$"),
                       ({"original_context": "64"}, "original_context='64'; take a positive number$"),
                       ({"high": 1.0}, "given low=1.0 and high=1.0, turns in the original context; high is to be"))),
    (lambda: replace(LLAMA, scaling=8.0), "was given scaling=8.0; it is a LinearScaling, a Llama3Scaling or None$"),
    (lambda: replace(LLAMA, biases=("ffn",)), "was given biases=('ffn',); name the layers that have one in a tuple: q"
     "kv, projection, feed_forward"),
    (lambda: replace(LLAMA, biases="qkv"), "LlamaConfig was given biases='qkv'; name the layers that have one in a"),
    (lambda: replace(LLAMA, head_norms="no"), "LlamaConfig was given head_norms='no'; head_norms is True or False"),
    (lambda: Llama("llama-mikro"), "^Llama was asked for 'llama-mikro', which is no LlamaConfig and no preset; the pres"
     "ets are llama-nano, llama-micro; did you mean 'llama-micro'?"),
    (lambda: GPT(LLAMA), "^GPT was asked for LlamaConfig(...), which is no GPTConfig and no preset"),
    (lambda: Llama(NANO), "^Llama was asked for GPTConfig(...), which is no LlamaConfig and no preset"),
    (lambda: decoder("lama-micro"), "a model was asked for 'lama-micro', which is no DecoderConfig and no preset; the p"
     "resets are gpt-nano, gpt-micro, ...; did you mean 'llama-micro'?"),
    (lambda: llama.swiglu_forward(CTX, z(2, 3)), "asked for gate and up side by side (M, 2F), and found shape (2, 3)"),
]


class TiedUnit(LinearUnit):
    @property
    def shapes(self):
        return LinearUnit("one", 2, 2).shapes


def unit(**keywords):
    return LinearUnit(**({"name": "one", "inputs": 2, "outputs": 2} | keywords))


def pass_of(change, of=None):
    model = MLP([3, 4, 2])
    return one_pass(model, change(first_weights(model)), of or policy.Policy(), *np.zeros((2, 2, 3), np.float32))


UNITS = [
    *((lambda start=start, count=count: LinearUnit("one", 2, 4).initial("one.weight", start, count),
       f"^one.weight was asked for {count} elements from {start}; it has 8, so ask for a piece that lies inside")
      for start, count in [(-1, 2), (0, 9), (8, 1), (0, -1)]),
    (lambda: LinearUnit("one", 2, 4).initial("one.gain", 0, 1),
     "unit 'one' was asked for the first values of 'one.gain'; its parameters are one.weight, one.bias"),
    (lambda: unit(inputs=0), "^LinearUnit('one') was given inputs=0; inputs is a whole number, 1 or more"),
    (lambda: unit(outputs=2.0), "was given outputs=2.0; outputs is a whole number"),
    (lambda: unit(inputs=True), "was given inputs=True"),
    (lambda: unit(activation="swish"), "was given activation='swish'; the activations are None, 'relu', 'gelu'"),
    (lambda: unit(bias=False, initializers={"bias": units.Normal(0, 1.0)}),
     "was given initializers for bias; its parameters are weight"),
    (lambda: Model([]), "Model was asked for with no units; give it one unit or more"),
    (lambda: Model([unit(), unit()]), "more than one unit named 'one'; state is kept by name, so give each unit a"),
    (lambda: Model([unit(), TiedUnit("two", 2, 2)]),
     "more than one parameter named 'one.weight', 'one.bias'; state is kept"),
    *((lambda widths=widths: MLP(widths), "MLP was asked for widths ...: the width of the input and that of each layer")
      for widths in ((), (3,), None, 3, "ab", {1: 2, 3: 4})),
    (lambda: MLP([2, 2], seed=None), "MLP was given seed=None; seed is a whole number"),
    (lambda: MLP([2, 2], seed=1.5), "MLP was given seed=1.5"),
    (lambda: MLP([2, 2], activation="rely"), "MLP was given activation='rely'; the activations are None, 'relu', 'gel"),
    (lambda: MLP([3, 0, 2]), "LinearUnit('layer0') was given outputs=0"),
    *((lambda weights=weights: four_weights(weights), "four_weights was asked for weights ...; it needs a list of at l")
      for weights in ((1, 2, 3), None, 3, "1234")),
    *((lambda weights=weights: four_weights(weights), f"four_weights was given {weights}; it takes four numbers: w1, ")
      for weights in ((1, 2, 3, 4, 5), [1, 2, 3, "4"], [1, 2, 3, None])),
    (lambda: pass_of(lambda w: {**w, "layer9.weight": w["layer0.bias"]}), "not of this model: layer9.weight"),
    (lambda: pass_of(lambda w: {"layer0.weight": w["layer0.weight"]}), "missing or not of this model: layer0.bias, la"),
    (lambda: pass_of(lambda w: {**w, "layer0.bias": 1.0}), "asked for layer0.bias as an array of shape (4,), and "
     "found float;"),
    (lambda: pass_of(lambda w: {**w, "layer0.bias": w["layer0.bias"][:1]}), "found ndarray of shape (1,)"),
    (lambda: pass_of(lambda w: {**w, "layer0.bias": [1.0] * 4}), "found list;"),
    (lambda: pass_of(lambda w: w, 16), "policy must be a Policy or the name of a format, found 16; write"),
    *((lambda of=of: Recompute.parse(of), "names no policy; write 'none', 'block' or 'segment(k)' with k of at")
      for of in ("", "all", "segment", "segment()", "segment(0)", "segment(-1)", "segment(2", "Block", "none+tiled",
                 "block+", "+tiled", "tiled+block", "block+all", "tiled+selective")),
    *((lambda k=k: Recompute(k), f"^segment(k) was given k={k}; k is a whole number, 1 or more")
      for k in (0, -2, 1.5, True)),
    (lambda: Recompute(None, "half"), "Recompute was asked to keep 'half' of the inside of a unit; it keeps one of 'all"
     "', 'sub_block', 'selective', 'tiled'"),
    *((lambda length=length: CORPUS("short", np.zeros(length, np.uint8)).require_length(8),
       f"the text short has {length} bytes...sequences of 8 need more") for length in (10, 80)),
]


@pytest.mark.parametrize("table", [LAYERS, LOSSES, GPTS, LLAMAS, UNITS],
                         ids=["layers", "losses", "GPTs", "Llamas", "units"])
def test_what_cannot_be_is_refused_in_words_that_help(table):
    for call, said in table:
        assert_refused(call, literally(said))


@pytest.mark.parametrize(("content", "said"), [
    (None, "cannot be read: No such file or directory; give the path of a text file"),
    (b"", "is empty; give a file of some thousand characters"), (b" \n ", "is empty"),
    (b"caf\xe9 au lait", "is no UTF-8 text: byte 3 is 0xe9; convert it, or give another file"),
    (b"a\0b", "has zero bytes and is no text")])
def test_a_file_that_is_no_text_is_refused_in_one_sentence(tmp_path, content, said):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        text.read(path)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        text.read(tmp_path)
