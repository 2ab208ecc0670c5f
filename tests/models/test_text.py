"""Text as tokens: the one that comes along, any file, and batches that depend on no cut."""

import hashlib
from importlib.resources import files

import numpy as np
import pytest

from zerosim.models import text


def test_the_shipped_text_is_the_one_of_its_provenance():
    provenance = files("zerosim.models").joinpath("texts", "moby_dick.md").read_text(encoding="utf-8")
    corpus = text.shipped()
    assert hashlib.sha256(corpus.tokens.tobytes()).hexdigest() in provenance
    assert f"{len(corpus.tokens):,} bytes" in provenance
    assert text.readable(corpus.tokens[:40]) == "CHAPTER 1. Loomings.\n\nCall me Ishmael. S"


def test_the_unigram_entropy_is_that_of_the_bytes_frequencies():
    assert text.Corpus("even", np.arange(256, dtype=np.uint8)).unigram_entropy == pytest.approx(np.log(256), abs=1e-12)
    assert text.Corpus("one", np.full(9, 7, np.uint8)).unigram_entropy == 0
    assert 3.0 < text.shipped().unigram_entropy < 3.2


def test_a_batch_is_text_and_what_follows_it_and_never_from_the_held_out_end():
    corpus = text.shipped()
    whole = corpus.tokens.tobytes()
    for step in range(20):
        x, target = corpus.batch(0, step, step % 3, 4, 32)
        assert (x.shape, x.dtype, target.shape) == ((4, 32), np.int64, (4, 32))
        np.testing.assert_array_equal(x[:, 1:], target[:, :-1])
        for row, last in zip(x, target[:, -1], strict=True):
            assert bytes([*row, last]) in whole[:corpus.trained]


def test_batches_differ_by_seed_step_and_number_and_by_nothing_else():
    corpus = text.shipped()
    keys = [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)]
    found = [corpus.batch(*key, 4, 16)[0].tobytes() for key in keys]
    assert len(set(found)) == 4
    assert corpus.batch(0, 1, 1, 4, 16)[0].tobytes() == found[3]
    whole = corpus.batch(0, 1, 0, 8, 16)[0]
    np.testing.assert_array_equal(whole[4:], corpus.batch(0, 1, 1, 4, 16)[0])  # the second half is the next one's


def test_held_out_sequences_are_of_the_end_of_the_text():
    corpus = text.shipped()
    x, target = corpus.held_out(5, 16)
    ends = corpus.tokens[corpus.trained:].tobytes()
    assert all(bytes(row.tolist()) in ends for row in x)
    np.testing.assert_array_equal(x[:, 1:], target[:, :-1])


def test_any_language_is_welcome(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Навчання, 学習, μάθηση\n" * 30, encoding="utf-8")
    assert text.readable(text.read(path).tokens) == "Навчання, 学習, μάθηση\n" * 30
    text.Corpus("long", np.zeros(91, np.uint8)).require_length(8)


def test_bytes_that_are_no_text_are_shown_without_harm():
    control, zero_width = [27, 7], list("\u200b".encode())
    assert text.readable(np.array([72, 105, 255, *control, *zero_width, 10])) == "Hi\\xff\\x1b\\x07\\u200b\n"
