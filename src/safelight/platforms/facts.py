"""MachineFacts: everything selection may know about a machine, as frozen data that survives JSON."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One device. `arch` is a string such as "sm90", "gfx942", "ascend910b" or "cpu-avx512"."""

    arch: str
    name: str
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PackageFacts:
    """One attention package: its distribution and version, and why it can't be imported, if so.

    `variant` tells builds of one package apart ("triton", "ck"). `parameters` are the entry point's names.
    """

    dist: str
    version: str | None = None
    variant: str | None = None
    parameters: tuple[str, ...] | None = None
    import_error: str | None = None


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """A machine, real or described. `cuda_version` is None on everything that isn't CUDA.

    `packages` is keyed by Safelight's own names, since import names collide. `env` holds the kernel switches that
    some backend's declaration names. `notes` are what a probe wants a person to know.
    """

    platform: str
    devices: tuple[DeviceFacts, ...] = ()
    torch_version: str | None = None
    cuda_version: str | None = None
    hip_version: str | None = None
    driver_version: str | None = None
    packages: Mapping[str, PackageFacts] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "packages", MappingProxyType(dict(self.packages)))
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))

    def __hash__(self) -> int:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["packages"] = frozenset(self.packages.items())
        values["env"] = frozenset(self.env.items())
        return hash(tuple(values.values()))

    def __getstate__(self) -> dict[str, Any]:
        # A mapping that can't be changed can't be copied or pickled either.
        return {**self.__dict__, "packages": dict(self.packages), "env": dict(self.env)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def arch(self) -> str:
        """The first device's architecture, or the platform's name where there is none."""
        return self.devices[0].arch if self.devices else self.platform

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The facts as plain data."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["devices"] = [dataclasses.asdict(device) for device in self.devices]
        data["packages"] = {key: dataclasses.asdict(package) for key, package in sorted(self.packages.items())}
        for package in data["packages"].values():
            package["parameters"] = None if package["parameters"] is None else list(package["parameters"])
        data["env"] = dict(sorted(self.env.items()))
        data["notes"] = list(self.notes)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data; an unknown key raises TypeError and a missing platform KeyError."""
        packages = {
            key: PackageFacts(
                **{**value, "parameters": None if value.get("parameters") is None else tuple(value["parameters"])}
            )
            for key, value in data.get("packages", {}).items()
        }
        return cls(
            **{
                **data,
                "platform": data["platform"],
                "devices": tuple(DeviceFacts(**device) for device in data.get("devices", ())),
                "packages": packages,
                "notes": tuple(data.get("notes", ())),
            }
        )
