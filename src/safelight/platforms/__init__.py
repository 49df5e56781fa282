"""Machines: what they are (facts), which this one is (detect), and what each platform prefers. Imports no torch."""

from safelight.platforms.described import load_machine, machine_names
from safelight.platforms.detect import platform_named, platforms, probe_machine, torch_device
from safelight.platforms.facts import DeviceFacts, MachineFacts, PackageFacts
from safelight.platforms.spec import Platform

__all__ = [
    "DeviceFacts",
    "MachineFacts",
    "PackageFacts",
    "Platform",
    "load_machine",
    "machine_names",
    "platform_named",
    "platforms",
    "probe_machine",
    "torch_device",
]
