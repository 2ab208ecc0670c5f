"""The one primitive, as a program uses it: send to one rank while receiving from one, either half possibly absent."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.ranks.asking import KINDS, bits
from tests.ranks.data import FLOATS, INTEGERS, OTHERS, anything

TYPES = [*FLOATS.values(), *INTEGERS.values(), *OTHERS.values()]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, list[tuple[dict[int, int], list[np.ndarray]]]]:
    """A world, and in each round who sends to whom, at most one message to and from each; and every rank's vector."""
    ranks, found = draw(st.integers(1, 5)), []
    for seed in range(draw(st.integers(1, 5))):
        partners = draw(st.permutations(range(ranks)))
        sends = {rank: partners[rank] for rank in range(ranks) if draw(st.integers(0, 3))}
        vectors = []
        for rank in range(ranks):
            shape, dtype = draw(st.sampled_from([(), (4,), (2, 3), (0,), (3, 0)])), draw(st.sampled_from(TYPES))
            vectors.append(anything(1, math.prod(shape), dtype, 10 * seed + rank)[0].reshape(shape))
        found.append((sends, vectors))
    return ranks, found


@given(script=rounds(), kind=st.sampled_from(list(KINDS)), seed=st.integers(0, 50))
def test_every_message_arrives_as_it_was_and_is_counted_by_its_sender(script, kind: str, seed: int) -> None:
    """Of any shape and type, empty ones too; to any rank, itself too; in the order in which a rank asks, whatever comes
    first. What was sent may be changed as soon as the exchange returns."""
    ranks, found = script

    def program(rank):
        received = []
        for sends, vectors in found:
            source = next((sender for sender, to in sends.items() if to == rank.index), None)
            send = vectors[rank.index].copy() if rank.index in sends else None
            out = None if source is None else np.empty_like(vectors[source])
            if out is None and send is not None:
                rank.send(send, sends[rank.index])
            elif send is None and out is not None:
                assert rank.recv(out, source) is out
            else:
                assert rank.exchange(send, sends.get(rank.index), out, source) is out
            if send is not None:
                send[...] = np.zeros((), send.dtype)
            received.append(None if out is None else (out.shape, bits(out)))
        return received

    cluster = zs.Cluster(ranks, **({"seed": seed} | KINDS[kind]))
    results, rows = cluster.run(program), [list(of_rank.messages()) for of_rank in cluster.trace]
    for number, (sends, vectors) in enumerate(found):
        senders = {to: sender for sender, to in sends.items()}
        for rank in range(ranks):
            source, to = senders.get(rank), sends.get(rank)
            assert results[rank][number] == (None if source is None else (vectors[source].shape, bits(vectors[source])))
            row, nbytes = rows[rank][number], 0 if to is None else vectors[rank].nbytes
            assert (row.source, row.destination, row.sent_nbytes) == (source, to, nbytes)
