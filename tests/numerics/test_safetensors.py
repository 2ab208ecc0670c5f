"""Headers that no safetensors file can have, and what is said of them."""

import json

import numpy as np
import pytest

from tests.support import assert_refused, literally
from zerosim.numerics import safetensors


def stored(dtype="F32", shape=(2,), place=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(place)}


HARMED = [  # a header, or its text, before 8 bytes of tensors; and what is said
    ('{"a', "has a header that a safetensors file cannot have (Unterminated string"),
    ("[" * 100_000, "has a header that a safetensors file cannot have ("),
    ('"a text"', "has a header that a safetensors file cannot have ("),
    ('{"a": %s, "a": %s}' % ((json.dumps(stored()),) * 2), "(the key 'a' stands there twice)"),
    ({"a": 5}, "has a header that a safetensors file cannot have"),
    ({"a": {"dtype": "F32"}}, "has a header that a safetensors file cannot have ('shape')"),
    ({"__metadata__": {"x": 5}, "a": stored()}, "(its metadata hold something else than texts)"),
    ({"a": stored(shape=(-2,))}, "(the tensor a has a shape or a place that no tensor can have: [-2], 0 to 8)"),
    ({"a": stored(shape=(2.0,))}, "(the tensor a has a shape or a place that no tensor can have: [2.0], 0 to 8)"),
    ({"a": stored(shape=(3,))}, "(the tensor a (3,) of F32 takes 12 bytes, not 8)"),
    ({"a": stored(place=(4, 12))}, "the tensor a begins at byte ..., where ... is the next; take another copy"),
    ({"a": stored(), "b": stored(place=(4, 12))}, "the tensor b begins at byte"),
    ({"a": stored(shape=(4,), place=(0, 16))}, "was cut off at ... bytes, inside the tensor a, which ends at"),
    ({"a": stored(shape=(1,), place=(0, 4))}, "bytes, and its tensors end at ...; take another copy of it"),
    ({"a": stored(), "b": stored("F4", (0,), (8, 8))}, "x: the tensor b is of type 'F4', which zerosim does not read; i"
     "t reads F32, F16, ...; convert it"),
]


@pytest.mark.parametrize(("header", "words"), HARMED, ids=[words[:40] for _, words in HARMED])
def test_a_header_that_is_none_is_refused_by_its_fault(tmp_path, header, words):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert_refused(lambda: safetensors.read_header(tmp_path / "x"), literally(words))


def test_a_type_that_the_format_has_not_is_refused_and_nothing_is_written(tmp_path):
    kinds = {"a": (np.dtype(np.complex64), (2,))}
    assert_refused(lambda: safetensors.write_tensors(tmp_path / "x", kinds, {}.__getitem__, {}),
                   "x: a is of type complex64, which the safetensors format has not; it has F32, F16")
    assert list(tmp_path.iterdir()) == []
