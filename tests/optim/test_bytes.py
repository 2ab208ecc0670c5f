"""Bytes per parameter in mixed precision, and what ZeRO saves of them: the published table."""

import numpy as np
import pytest

from tests.optim.papers import named
from zerosim import optim
from zerosim.optim import bytes_per_parameter, state_nbytes

TABLE = [(optim.SGD(lr=0.1), 8), (optim.Momentum(lr=0.1), 12), (optim.AdaGrad(), 12), (optim.RMSprop(), 12),
         (optim.Adam(), 16), (optim.AdamW(), 16), (optim.Lion(), 12), (optim.Adan(), 22), (optim.LAMB(), 16),
         (optim.LARS(), 12), (optim.Muon(), 12)]


@pytest.mark.parametrize(("optimizer", "nbytes"), TABLE, ids=named)
def test_bytes_per_parameter_are_the_published_ones_and_those_of_the_arrays_that_slots_ask_for(optimizer, nbytes):
    assert bytes_per_parameter(optimizer) == nbytes
    assert bytes_per_parameter(optimizer, (7, 3)) == pytest.approx(nbytes, abs=1e-12)  # a quotient of doubles
    kept = 0
    for slot in optimizer.slots((6, 4)).values():
        kept += np.zeros(slot.shape, {"fp32": np.float32, "bf16": np.uint16}[slot.format]).nbytes
    assert kept == state_nbytes(optimizer, (6, 4)) == (nbytes - 8) * 24


def test_vectors_cost_what_their_own_update_keeps():
    assert [bytes_per_parameter(optimizer, (10,)) for optimizer in (
        optim.Muon(), optim.SOAP(), optim.Shampoo(), optim.Adafactor())] == [16, 16, 12, 12]
