"""Platform: the declaration of one kind of accelerator, and how every probe asks torch without ever failing."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from safelight.catalog import BROKEN, NOT_BROKEN, cause_of
from safelight.platforms.facts import DeviceFacts, MachineFacts

T = TypeVar("T")

UNKNOWN_DEVICE = DeviceFacts(arch="unknown", name="unknown")


def _nothing_preferred(machine: MachineFacts) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One kind of accelerator. A file in `platforms/` holds one, named PLATFORM, and imports no torch.

    `torch_device` is torch's name for it ("cuda" for rocm too). `automatic_order` gives backend names, best first, for
    a machine of this platform, and `default_dtype` a torch dtype's name; both are pure. `probe` is given the torch
    module and never raises: None means that this torch isn't built for the platform, facts without devices that it is
    but no device can be used, with the causes in `notes`. `preference` may name a backend that the platform would
    rather have than its order says: an implicit preference, which falls back wherever it doesn't fit. `collectives` is
    what ranks on it exchange with, as torch calls it: a library, or one for each kind of device.
    """

    name: str
    torch_device: str
    automatic_order: Callable[[MachineFacts], tuple[str, ...]]
    default_dtype: Callable[[MachineFacts], str]
    probe: Callable[[Any], MachineFacts | None]
    preference: Callable[[MachineFacts], str | None] = _nothing_preferred
    collectives: str = "gloo"


def look(module: Any, path: str) -> Any:
    """A dotted attribute such as "version.hip", or None where a part is missing or can't be read."""
    for name in path.split("."):
        try:
            module = getattr(module, name, None)
        except BROKEN:
            return None
    return module


def version_of(torch: Any, what: str) -> str | None:
    """A version that torch's build states, as text: "__version__", "version.cuda", "version.hip"."""
    value = look(torch, what)
    return str(value) if value else None


def ask(what: str, question: Callable[[], T], notes: list[str]) -> T | None:
    """Answer a question about a device, or note the first line of why not and give None.

    A warning is noted too: that is how torch says that a driver is too old.
    """
    answer: T | None = None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            answer = question()
        except NOT_BROKEN:
            raise
        except BROKEN as error:
            notes.append(f"{what} failed: {cause_of(error)}")
    for warning in heard:
        note = f"{what} warned: {_first_line(str(warning.message))}"
        if issubclass(warning.category, UserWarning | RuntimeWarning) and note not in notes:
            notes.append(note)
    return answer


def call(torch: Any, path: str, notes: list[str]) -> Any:
    """`ask` a function of torch that takes nothing, such as "backends.mps.get_name"; None where torch hasn't got it."""
    function = look(torch, path)
    return None if function is None else ask(f"torch.{path}()", function, notes)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()


def has_namespace(torch: Any, name: str, notes: list[str]) -> bool:
    """Whether torch has the namespace ("npu") that a vendor's plug-in adds; one that can't be read is noted."""
    try:
        return getattr(torch, name, None) is not None
    except BROKEN as error:
        notes.append(f"torch.{name} can't be read: {cause_of(error)}")
        return False


@dataclass(frozen=True, kw_only=True)
class PlugIn:
    """A vendor's distribution that adds a namespace to torch. `is_autoloaded`: torch imports it by itself."""

    dist: str
    version: str
    is_autoloaded: bool


def plug_in(dist: str) -> PlugIn | None:
    """A vendor's plug-in by the name of its distribution, read without importing it; None if it isn't installed."""
    from importlib.metadata import distribution  # costs more than the rest of this file

    try:
        found = distribution(dist)
        is_autoloaded = any(point.group == "torch.backends" for point in found.entry_points)
        return PlugIn(dist=found.name, version=found.version, is_autoloaded=is_autoloaded)
    except BROKEN:  # not installed, or what is left of it tells neither name nor version
        return None


def unloaded(plug_in: PlugIn) -> str:
    """The note that an installed plug-in's namespace isn't in torch."""
    return (
        f"{plug_in.dist} {plug_in.version} is installed, but torch hasn't loaded it: "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment leaves it out"
    )


def ask_devices(
    torch: Any, namespace: str, arch: Callable[[Any, int], str], notes: list[str]
) -> tuple[DeviceFacts, ...]:
    """The devices of a torch namespace ("cuda", "xpu"), by the logical index that torch itself counts with.

    Which physical devices those are is the driver's business: no visibility variable is read here. A device that
    can't be asked keeps its place as UNKNOWN_DEVICE; if none can, there is none. `arch` is given the namespace and the
    index.
    """

    def asked(what: str, question: Callable[[Any], T]) -> T | None:
        return ask(f"torch.{namespace}.{what}", lambda: question(getattr(torch, namespace)), notes)

    def device(index: int) -> DeviceFacts | None:
        def question(module: Any) -> DeviceFacts:
            properties = module.get_device_properties(index)
            memory_bytes = int(properties.total_memory)
            return DeviceFacts(arch=arch(module, index), name=str(properties.name), memory_bytes=memory_bytes)

        return asked(f"get_device_properties({index})", question)

    if not asked("is_available()", lambda module: bool(module.is_available())):
        return ()
    count = asked("device_count()", lambda module: int(module.device_count())) or 0
    devices = [device(index) for index in range(count)]
    return tuple(facts or UNKNOWN_DEVICE for facts in devices) if any(devices) else ()
