"""Text as tokens: the one that comes along, any file, and batches that depend on no cut."""

import hashlib
import re
from importlib.resources import files

import numpy as np
import pytest

from zerosim.models.text import Corpus, read, readable, shipped


def test_the_shipped_text_is_the_one_of_its_provenance():
    provenance = files("zerosim.models").joinpath("texts", "moby_dick.md").read_text(encoding="utf-8")
    corpus = shipped()
    assert hashlib.sha256(corpus.tokens.tobytes()).hexdigest() in provenance
    assert f"{len(corpus.tokens):,} bytes" in provenance
    assert readable(corpus.tokens[:40]) == "CHAPTER 1. Loomings.\n\nCall me Ishmael. S"


def test_the_unigram_entropy_is_that_of_the_bytes_frequencies():
    assert Corpus("even", np.arange(256, dtype=np.uint8)).unigram_entropy == pytest.approx(np.log(256), abs=1e-12)
    assert Corpus("one", np.full(9, 7, np.uint8)).unigram_entropy == 0
    assert 3.0 < shipped().unigram_entropy < 3.2


def test_a_batch_is_text_and_what_follows_it_and_never_from_the_held_out_end():
    corpus = shipped()
    text = corpus.tokens.tobytes()
    for step in range(20):
        x, target = corpus.batch(0, step, step % 3, 4, 32)
        assert (x.shape, x.dtype, target.shape) == ((4, 32), np.int64, (4, 32))
        np.testing.assert_array_equal(x[:, 1:], target[:, :-1])
        for row, last in zip(x, target[:, -1], strict=True):
            assert bytes([*row, last]) in text[:corpus.trained]


def test_batches_differ_by_seed_step_and_number_and_by_nothing_else():
    corpus = shipped()
    keys = [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)]
    found = [corpus.batch(*key, 4, 16)[0].tobytes() for key in keys]
    assert len(set(found)) == 4
    assert corpus.batch(0, 1, 1, 4, 16)[0].tobytes() == found[3]
    whole = corpus.batch(0, 1, 0, 8, 16)[0]
    np.testing.assert_array_equal(whole[4:], corpus.batch(0, 1, 1, 4, 16)[0])  # the second half is the next one's


def test_held_out_sequences_are_of_the_end_of_the_text():
    corpus = shipped()
    x, target = corpus.held_out(5, 16)
    ends = corpus.tokens[corpus.trained:].tobytes()
    assert all(bytes(row.tolist()) in ends for row in x)
    np.testing.assert_array_equal(x[:, 1:], target[:, :-1])


@pytest.mark.parametrize(("content", "text"), [
    (None, r"cannot be read: No such file or directory; give the path of a text file"),
    (b"", "is empty; give a file of some thousand characters"), (b" \n ", "is empty"),
    (b"caf\xe9 au lait", "is no UTF-8 text: byte 3 is 0xe9; convert it, or give another file"),
    (b"a\0b", "has zero bytes and is no text")])
def test_a_file_that_is_no_text_is_refused_in_one_sentence(tmp_path, content, text):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        read(path)
    assert "\n" not in str(error.value)


def test_a_folder_is_refused_too(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read(tmp_path)


def test_any_language_is_welcome(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Навчання, 学習, μάθηση\n" * 30, encoding="utf-8")
    assert readable(read(path).tokens) == "Навчання, 学習, μάθηση\n" * 30


@pytest.mark.parametrize("length", [10, 80])
def test_a_text_too_short_for_a_sequence_is_refused(length):
    corpus = Corpus("short", np.zeros(length, np.uint8))
    with pytest.raises(ValueError, match=f"the text short has {length} bytes.*sequences of 8 need more"):
        corpus.require_length(8)
    Corpus("long", np.zeros(91, np.uint8)).require_length(8)


def test_bytes_that_are_no_text_are_shown_without_harm():
    assert readable(np.array([72, 105, 255, 7, 10])) == "Hi\ufffd \n"
