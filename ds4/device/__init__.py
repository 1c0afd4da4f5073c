"""The one client of the CUDA driver API: memory, launches, graphs, events."""

from ds4.device.client import Device
from ds4.device.context import DeviceInfo, Event, Stream
from ds4.device.graph import Graph
from ds4.device.kernels import Kernel
from ds4.device.memory import Buffer
from ds4.device.readback import Readback

__all__ = ["Buffer", "Device", "DeviceInfo", "Event", "Graph", "Kernel", "Readback", "Stream"]
