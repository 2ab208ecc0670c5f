"""Numbers as one reads and types them."""

import pytest

from zerosim.numerics import units


@pytest.mark.parametrize(("text", "values"), [
    (units.seconds_text, {
        0: "0 s", 1: "1 s", 0.99999: "1 s", 0.9999: "999.9 ms", 1e-3: "1 ms", 999.96e-6: "1 ms", 999.94e-6: "999.9 µs",
        3.4e-6: "3.4 µs", 1.23456e-9: "1.235 ns", 2e-12: "0.002 ns", 12345.6: "12,350 s"}),
    (units.bytes_text, {
        0: "0 bytes", 999: "999 bytes", 1000: "1 kB", 999_960: "1 MB", 12_240_000: "12.24 MB", 1e12: "1 TB",
        4e18: "4,000,000 TB", 0.5: "0.5 bytes"}),
    (units.rate_text, {450e9: "450 GB/s"})])
def test_a_number_has_four_digits_and_the_unit_that_suits_what_is_written(text, values) -> None:
    assert {value: text(value) for value in values} == values


@pytest.mark.parametrize(("number", "texts"), [
    (units.count_of, {
        "7B": 7 * 10**9, "7b": 7 * 10**9, "0.5 T": 5 * 10**11, "124M": 124 * 10**6, "3k": 3000, "1,024": 1024,
        "7.5e9": 7_500_000_000, "1_000": 1000, "10000000000000001": 10**16 + 1, ".5k": 500, "2.e3": 2000}),
    (units.nbytes_of, {
        "14GB": 14 * 10**9, "8 MiB": 8 * 2**20, "8mb": 8 * 10**6, "0": 0, "1.5KiB": 1536, "5 bytes": 5, "5B": 5,
        "1,024 kB": 1_024_000, "1TiB": 2**40, "4611686018427387903": 2**62 - 1})])
def test_a_number_that_is_typed_has_the_unit_that_suits_and_every_digit(number, texts) -> None:
    assert {text: number(text, "n") for text in texts} == texts
    assert number(7_000, "n") == number(7e3, "n") == 7_000


@pytest.mark.parametrize(("number", "text", "said"), [
    (units.count_of, "7GB", r"n='7GB' is no number; write it as 7B, 7\.5e9 or 7,500,000,000, with k, M, B, T or no"),
    (units.count_of, "7,5e9", "is no number"), (units.count_of, "7 5", "is no number"), (units.count_of, "", "is no"),
    (units.count_of, "nan", "is no number"),
    (units.count_of, "0", r"n='0' must be a whole number, from 1 to below 2\^62"),
    (units.count_of, "1.5", "whole number"), (units.count_of, "5e18", "whole number"), (units.count_of, "-3", "whole"),
    (units.nbytes_of, "7G", r"n='7G' is no number; write it as 14GB, 8MiB"), (units.nbytes_of, "0.5B", "whole number"),
    (units.nbytes_of, "-1", r"from 0 to below 2\^62"), (units.nbytes_of, "1e999999", "whole number")])
def test_what_is_no_number_is_refused_with_what_to_write(number, text, said) -> None:
    with pytest.raises(ValueError, match=said):
        number(text, "n")
