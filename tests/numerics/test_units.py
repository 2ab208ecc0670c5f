"""Numbers as one reads them."""

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
