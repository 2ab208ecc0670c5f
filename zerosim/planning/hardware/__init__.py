"""Machines: devices, links and networks, by name, with the source of each number."""

from zerosim.planning.hardware.rows import FORMATS, Device, Link, Network, network_of
from zerosim.planning.hardware.tables import Hardware, device, link, parse, presets, read

__all__ = ["FORMATS", "Device", "Hardware", "Link", "Network", "device", "link", "network_of", "parse", "presets",
           "read"]
