"""Which platforms there are, and which one this machine is: probe_machine()."""

import difflib
import re
from dataclasses import dataclass
from typing import Any, cast

from safelight.catalog import BROKEN, Found, built_in, cause_of, declarations
from safelight.errors import RequestError, SafelightError
from safelight.platforms.facts import MachineFacts
from safelight.platforms.spec import UNKNOWN_DEVICE, Platform, ask

GROUP = "safelight.platforms"
# The package's modules that aren't a platform.
APART = ("described", "detect", "facts", "packages", "spec")


def platforms() -> tuple[Platform, ...]:
    """Every platform: the built-in ones by name, then those that installed packages add."""
    return _found().declarations


def platform_named(name: str) -> Platform:
    """The platform of that name; RequestError, with the names there are, if there is none."""
    # Entry points take milliseconds to read, and a plug-in can't take a built-in platform's name.
    for platform in built_in("safelight.platforms", "PLATFORM", besides=APART):
        if platform.name == name:
            return cast(Platform, platform)
    return _platform_named(name, _found(), f"platform {name!r}")


def probe_machine(asked: str | None = None, torch: Any = None, *, source: str | None = None) -> MachineFacts:
    """This machine's facts, from asking torch (imported unless given).

    `asked` is a device as a person writes it: "cuda", "rocm", "cuda:1"; `source` says where they did. With a number,
    `devices` holds that device alone. A device that isn't known or isn't here raises RequestError; nothing else is
    taken instead. Without `asked` it is the first accelerator that can be used, or else the CPU, with notes on why.
    """
    found = _found()
    device = None if asked is None else _parse_device(asked, found, source)
    module = _import_torch() if torch is None else torch
    facts = _first_usable(module, found) if device is None else _asked(device, module, found)
    plugins = [f"the platform plug-in {failure.origin} doesn't load: {failure.cause}" for failure in found.failures]
    return facts.replace(notes=(*facts.notes, *plugins))


def torch_device(machine: MachineFacts, asked: str | None = None) -> str:
    """What torch calls the device that `probe_machine(asked)` gave: "cuda:1" for "rocm:1"."""
    number = (asked or "").partition(":")[2]
    return platform_named(machine.platform).torch_device + (f":{number}" if number else "")


@dataclass(frozen=True)
class _Device:
    platform: Platform
    number: int | None
    text: str  # what was asked and by what: "device 'cuda:1' (from `SAFELIGHT_DEVICE`)"


def _found() -> Found:
    return declarations("safelight.platforms", "PLATFORM", GROUP, besides=APART)


def _platform_named(name: str, found: Found, text: str) -> Platform:
    by_name: dict[str, Platform] = {platform.name: platform for platform in found.declarations}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.75)  # "gpu" doesn't mean "cpu"
    broken = [f"; the plug-in {failure.origin} doesn't load: {failure.cause}" for failure in found.failures]
    raise RequestError(
        f"{text} isn't known{f', did you mean {near[0]!r}?' if near else ';'} there are {', '.join(by_name)}"
        + "".join(broken),
        asked=name,
        allowed=list(by_name),
    )


def _parse_device(asked: str, found: Found, source: str | None) -> _Device:
    text = f"device {asked!r}" + (f" (from {source})" if source else "")
    name, colon, number = asked.partition(":")
    platform = _platform_named(name, found, text)
    if colon and not re.fullmatch("0|[1-9][0-9]{0,99}", number):
        raise RequestError(f"{text} has no device number behind its colon; write {name}:0, {name}:1 and so on")
    return _Device(platform, int(number) if colon else None, text)


def _import_torch() -> Any:
    try:
        import torch
    except BROKEN as error:
        raise SafelightError(
            f"PyTorch can't be imported: {_whole_cause(error)}. If a vendor's plug-in is to blame, "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment leaves it out; otherwise install PyTorch again"
        ) from error
    return torch


def _whole_cause(error: BaseException) -> str:
    """The error and what it was raised from: torch says which plug-in failed, and the plug-in's own error why."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return ", because of ".join(cause_of(link).removesuffix(".") for link in chain)


def _probe(platform: Platform, torch: Any) -> tuple[MachineFacts | None, tuple[str, ...]]:
    """A platform's facts if it has a usable device, and what its probe noted if it hasn't."""
    notes: list[str] = []
    # Built-in probes never raise; a plug-in's that does must not end a run that asked for nothing of it.
    facts = ask(f"the probe of {platform.name}", lambda: platform.probe(torch), notes)
    if facts is not None and facts.devices:
        return facts, ()
    return None, (*notes, *(facts.notes or ("torch is built for it but sees no device",) if facts is not None else ()))


def _first_usable(torch: Any, found: Found) -> MachineFacts:
    unusable: list[str] = []
    for platform in found.declarations:
        if platform.name == "cpu":
            continue
        facts, notes = _probe(platform, torch)
        if facts is not None:
            return facts
        if notes:
            unusable.append(f"no {platform.name} device can be used, so the CPU was chosen: {'; '.join(notes)}")
    cpu: Platform = _platform_named("cpu", found, "platform 'cpu'")
    facts, _ = _probe(cpu, torch)
    assert facts is not None, "the CPU is always there"
    return facts.replace(notes=(*unusable, *facts.notes))


def _asked(device: _Device, torch: Any, found: Found) -> MachineFacts:
    facts, notes = _probe(device.platform, torch)
    if facts is None:
        here = [there for platform in found.declarations if (there := _probe(platform, torch)[0]) is not None]
        causes = notes or (f"this torch ({getattr(torch, '__version__', 'no version')}) isn't built for it",)
        raise RequestError(
            f"{device.text} can't be used: {'; '.join(causes)}. Found here: {', '.join(map(_summary, here))}. "
            "Ask for one of these, or for none",
            found=[there.platform for there in here],
        )
    if device.number is None:
        return facts
    if device.number >= len(facts.devices):
        numbers = ", ".join(f"{device.platform.name}:{number}" for number in range(len(facts.devices)))
        raise RequestError(
            f"{device.text} asks for device number {device.number}, but {len(facts.devices)} can be seen: {numbers}. "
            "Numbers count the visible devices from 0"
        )
    if facts.devices[device.number] == UNKNOWN_DEVICE:
        raise RequestError(f"{device.text} can't be used: {'; '.join(facts.notes)}")
    return facts.replace(devices=(facts.devices[device.number],))


def _summary(facts: MachineFacts) -> str:
    return f"{facts.platform} ({len(facts.devices)} x {facts.devices[0].name})"
