"""Described machines: MachineFacts read from JSON, either shipped in `machines/` or a file that a person sends."""

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safelight.errors import RequestError
from safelight.media import PNG_SIGNATURE, read_metadata
from safelight.platforms.detect import platforms
from safelight.platforms.facts import DeviceFacts, MachineFacts, PackageFacts

SHIPPED = Path(__file__).with_name("machines")


def machine_names() -> tuple[str, ...]:
    """The names of the machines that are shipped."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def load_machine(name_or_path: str | Path) -> MachineFacts:
    """A described machine: a shipped one by its name, or the path of a JSON file as `safelight facts` writes it.

    A plan's JSON, the JSON of a result and a PNG or MP4 that safelight wrote are taken for the machine in them.
    RequestError for a name that isn't shipped and a file that isn't there, can't be read or describes no machine.
    """
    if name_or_path in machine_names():
        return _read(SHIPPED / f"{name_or_path}.json")
    # os.path rather than Path: it says no, instead of raising, to a name that no file could have. A pipe is welcome.
    if os.path.isdir(name_or_path):
        raise RequestError(f"machine file {name_or_path} is a directory; give a file as `safelight facts` writes it")
    if os.path.exists(name_or_path):
        return _read(Path(name_or_path))
    names = machine_names()
    near = difflib.get_close_matches(str(name_or_path).lower(), names, n=1)
    raise RequestError(
        f"machine {str(name_or_path)!r} is neither a file nor shipped{f', did you mean {near[0]!r}?' if near else ';'} "
        f"shipped are {', '.join(names)}",
        asked=str(name_or_path),
        allowed=list(names),
    )


def _read(path: Path) -> MachineFacts:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"machine file {path} can't be read: {error.strerror}") from error
    if content.startswith(PNG_SIGNATURE) or content[4:8] == b"ftyp":
        data = read_metadata(path)
    else:
        try:
            data = json.loads(content.decode("utf-8-sig"))  # some shells write a byte order mark
        except (ValueError, RecursionError) as error:  # what isn't UTF-8 or JSON
            raise RequestError(f"machine file {path} isn't JSON: {error}") from error
    data = _machine_in(data)
    problems = _problems(data)
    if problems:
        raise RequestError(f"machine file {path} doesn't describe a machine: {'; '.join(problems)}", problems=problems)
    return MachineFacts.from_json(data)


def _machine_in(data: Any) -> Any:
    """The machine in a plan's JSON, or in that of a result, which holds its plan; anything else as it is."""
    for key in ("plan", "machine"):
        if isinstance(data, dict) and "platform" not in data and key in data:
            data = data[key]
    return data


def _problems(data: Any) -> list[str]:
    """Everything that is wrong with the data of a machine file."""
    if not isinstance(data, dict):
        return [f"it holds a {type(data).__name__}, not an object"]
    problems = _wrong_fields("", data, MachineFacts, MACHINE)
    names = [platform.name for platform in platforms()]
    if isinstance(data.get("platform"), str) and data["platform"] not in names:
        problems.append(f"platform is {data['platform']!r}, there are {', '.join(names)}")
    if isinstance(data.get("devices"), list):
        for index, device in enumerate(data["devices"]):
            problems += _wrong_fields(f"devices[{index}]", device, DeviceFacts, DEVICE)
    if isinstance(data.get("packages"), dict):
        for key, package in data["packages"].items():
            problems += _wrong_fields(f"packages.{key}", package, PackageFacts, PACKAGE)
    return problems


def _wrong_fields(where: str, data: Any, kind: type, forms: Mapping[str, "Form"]) -> list[str]:
    if not isinstance(data, dict):
        return [f"{where} is {data!r}, it must be an object"]
    prefix = f"{where}." if where else ""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    problems = [f"{prefix}{key} is unknown, there are {', '.join(fields)}" for key in data if key not in fields]
    for name, field in fields.items():
        text, fits = forms[name]
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in data and not has_default:
            problems.append(f"{prefix}{name} is missing, it must be {text}")
        if name in data and not fits(data[name]):
            problems.append(f"{prefix}{name} is {data[name]!r}, it must be {text}")
    return problems


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_positive(value: Any) -> bool:
    return type(value) is int and value > 0  # True is an int too, but no number of bytes


# What a field must be: the words for a person, and the test.
Form = tuple[str, Callable[[Any], bool]]
TEXT: Form = ("text", _is_text)
MAYBE_TEXT: Form = ("text or null", lambda value: value is None or _is_text(value))
TEXTS: Form = ("a list of texts", _is_texts)
MAYBE_TEXTS: Form = ("a list of texts or null", lambda value: value is None or _is_texts(value))
LIST: Form = ("a list", lambda value: isinstance(value, list))
OBJECT: Form = ("an object", lambda value: isinstance(value, dict))
TEXT_BY_KEY: Form = ("an object of texts", lambda value: isinstance(value, dict) and _is_texts([*value.values()]))
MAYBE_BYTES: Form = ("a whole number above 0 or null", lambda value: value is None or _is_positive(value))

MACHINE = {
    "platform": TEXT,
    "devices": LIST,
    "torch_version": MAYBE_TEXT,
    "cuda_version": MAYBE_TEXT,
    "hip_version": MAYBE_TEXT,
    "driver_version": MAYBE_TEXT,
    "packages": OBJECT,
    "env": TEXT_BY_KEY,
    "notes": TEXTS,
}
DEVICE = {"arch": TEXT, "name": TEXT, "memory_bytes": MAYBE_BYTES}
PACKAGE = {
    "dist": TEXT,
    "version": MAYBE_TEXT,
    "variant": MAYBE_TEXT,
    "parameters": MAYBE_TEXTS,
    "import_error": MAYBE_TEXT,
}
