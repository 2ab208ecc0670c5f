"""A recorded run replayed on any machine: what happens when, and how long a step is."""

from zerosim.planning.timeline.chrome import chrome_trace, save_chrome_trace
from zerosim.planning.timeline.collective import Hop
from zerosim.planning.timeline.critical_path import PathEvent, critical_path
from zerosim.planning.timeline.machine import Machine, SlowLink, SlowRank
from zerosim.planning.timeline.memory import MemoryCurve, memory
from zerosim.planning.timeline.timeline import COMMUNICATION, COMPUTATION, STREAMS, Event, Timeline, Usage, replay

__all__ = ["COMMUNICATION", "COMPUTATION", "STREAMS", "Event", "Hop", "Machine", "MemoryCurve", "PathEvent", "SlowLink",
           "SlowRank", "Timeline", "Usage", "chrome_trace", "critical_path", "memory", "replay", "save_chrome_trace"]
