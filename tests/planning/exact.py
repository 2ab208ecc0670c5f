"""A replay in fractions, message by message: the reference of the one in float64."""

from fractions import Fraction

import numpy as np

from zerosim.planning import Machine, Recording, Timeline, streams
from zerosim.planning import recording as recordings


class ExactPrices(streams.Prices):
    """Prices as fractions: links as their decimals are written, devices as their floats are."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._slow_links = {(slow.source, slow.destination): Fraction(slow.factor) for slow in machine.slow_links}
        self._paces = {slow.rank: streams.Pace(Fraction(slow.factor), Fraction(slow.from_seconds))
                       for slow in machine.slow_ranks}

    def work(self, program: recordings.RecordedProgram) -> streams.Array:
        flops_rate = Fraction(self.machine.peak_flops_per_second) * Fraction(self.machine.efficiency)
        memory_rate = Fraction(self.machine.device.memory_bytes_per_second)
        work = [Fraction(0)]
        for code, flops, nbytes in zip(program.codes.tolist(), program.first.tolist(), program.second.tolist(),
                                       strict=True):
            seconds = max(flops / flops_rate, nbytes / memory_rate) if code == recordings.COMPUTE else 0
            work.append(work[-1] + seconds)
        return np.array(work, object)

    def messages(self, sources: streams.Array, destinations: streams.Array, nbytes: streams.Array) -> streams.Array:
        ends = zip(sources.tolist(), destinations.tolist(), nbytes.tolist(), strict=True)
        return np.array([self._message(*one) for one in ends], object)

    def _message(self, source: int, destination: int, nbytes: int) -> Fraction:
        link = self.machine.network.link(source, destination)
        return (link.alpha + nbytes / link.beta) * self._slow_links.get((source, destination), 1)

    def transfer(self, nbytes: int) -> Fraction:
        link = self.machine.link_to_host
        return link.alpha + nbytes / link.beta


def exact_replay(recording: Recording, machine: Machine) -> Timeline:
    """The recording's times on this machine, exactly."""
    machine.check_ranks(recording.ranks)
    replayed = streams.Streams(recording, ExactPrices(machine))
    replayed.run()
    return Timeline(recording, machine, replayed)
