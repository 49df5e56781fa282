"""Ranking: how fast backends were on this very machine, as data that is kept between runs. Imports no torch."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from safelight.attention.requirements import MASKS, ROLES, AttentionRequirements, Mask, Role
from safelight.config import found_cache_folder
from safelight.errors import OutputError
from safelight.naming import check_target, unwritable, write_whole
from safelight.platforms.facts import MachineFacts, PackageFacts

COMMAND = "safelight bench attention --save"
_COUNTS = ("batch", "queries", "keys", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The inputs of one attention call: q [batch, queries, num_heads, head_dim], k and v likewise.

    Causal with unequal lengths is aligned at the bottom right, as everywhere.
    """

    batch: int
    queries: int
    keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    causal: bool = False
    role: Role = "self"
    mask: Mask = "none"

    @classmethod
    def of(cls, need: AttentionRequirements, *, batch: int, queries: int, keys: int) -> Self:
        """The shape of a layer's call with so many tokens."""
        return cls(
            batch=batch,
            queries=queries,
            keys=keys,
            num_heads=need.num_heads,
            num_kv_heads=need.num_kv_heads,
            head_dim=need.head_dim,
            dtype=need.dtype,
            causal=need.causal,
            role=need.role,
            mask=need.mask,
        )

    @property
    def flops(self) -> float:
        """Floating-point operations of both products, a multiplication and an addition each; none for hidden keys.

        Causal hides half of the square in which queries and keys meet. A mask hides nothing: kernels compute under it.
        """
        pairs: float = self.queries * self.keys
        if self.causal:
            pairs -= self.queries * min(self.queries, self.keys) - min(self.queries, self.keys) ** 2 / 2
        return 4.0 * self.batch * self.num_heads * self.head_dim * pairs

    def requirements(self) -> AttentionRequirements:
        """What a layer that makes such calls asks of a kernel."""
        return AttentionRequirements(
            head_dim=self.head_dim,
            dtype=self.dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            role=self.role,
            causal=self.causal,
            mask=self.mask,
            equal_lengths=self.queries == self.keys,
        )

    def fits(self, need: AttentionRequirements) -> bool:
        """Whether what was measured in this shape says something about a layer: lengths and batch aside, they agree."""
        return (
            (self.dtype, self.head_dim, self.causal, self.role, self.mask)
            == (need.dtype, need.head_dim, need.causal, need.role, need.mask)
            and self.num_heads * need.num_kv_heads == self.num_kv_heads * need.num_heads
            and not (need.packed_varlen or need.needs_lse)
        )

    @property
    def tokens(self) -> str:
        """How many tokens attend, in words: "4096", or "4096 on 512"."""
        return f"{self.queries}" if self.queries == self.keys else f"{self.queries} on {self.keys}"

    def __str__(self) -> str:
        heads = f"{self.num_heads}" if self.num_heads == self.num_kv_heads else f"{self.num_heads}/{self.num_kv_heads}"
        extras = [*(["causal"] if self.causal else ()), *([f"mask {self.mask}"] if self.mask != "none" else ())]
        size = f"batch {self.batch}, {self.tokens} tokens, {heads} heads, head_dim {self.head_dim}"
        return ", ".join([self.role, size, self.dtype, *extras])

    def to_json(self) -> dict[str, Any]:
        """The shape as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data. Raises KeyError, TypeError and ValueError."""
        shape = cls(**data)
        wrong = [name for name in _COUNTS if type(data[name]) is not int or data[name] < 1]
        wrong += [] if type(shape.dtype) is str else ["dtype"]
        wrong += [] if type(shape.causal) is bool else ["causal"]
        wrong += [] if shape.role in ROLES else ["role"]
        wrong += [] if shape.mask in MASKS else ["mask"]
        if wrong:
            raise ValueError(f"a shape's {', '.join(wrong)} can't be right")
        return shape


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a call of one backend takes: the median of `num_runs`, and the rate that this is.

    `share_of_peak` is the rate's share of the machine's matrix products in the same dtype, None where those can't be
    measured.
    """

    backend: str
    median_s: float
    num_runs: int
    flops_per_s: float
    share_of_peak: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The timing as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data. Raises KeyError, TypeError and ValueError."""
        timing = cls(**data)
        numbers = [timing.median_s, timing.num_runs, timing.flops_per_s]
        numbers += [] if timing.share_of_peak is None else [timing.share_of_peak]
        are_right = all(type(number) in (int, float) and 0 < number < math.inf for number in numbers)
        if type(timing.backend) is not str or not are_right:
            raise ValueError(f"the timing of {timing.backend!r} can't be right")
        return timing


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured in one shape: the timings, fastest first."""

    shape: Shape
    timings: tuple[Timing, ...]

    def __post_init__(self) -> None:
        in_order = sorted(self.timings, key=lambda timing: timing.median_s)
        object.__setattr__(self, "timings", tuple(in_order))

    def to_json(self) -> dict[str, Any]:
        """Shape and timings as plain data."""
        return {"shape": self.shape.to_json(), "timings": [timing.to_json() for timing in self.timings]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data. Raises KeyError, TypeError and ValueError."""
        return cls(shape=Shape.from_json(data["shape"]), timings=tuple(map(Timing.from_json, data["timings"])))


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """What was measured on one machine, and the machine's fingerprint at that time."""

    fingerprint: Mapping[str, str]
    measured: tuple[Measured, ...]

    def fitting(self, need: AttentionRequirements) -> tuple[Measured, ...]:
        """What was measured in shapes that fit a layer: with as many heads first, then the one with the most work."""
        found = [measured for measured in self.measured if measured.shape.fits(need)]
        return tuple(
            sorted(found, key=lambda one: (one.shape.num_heads == need.num_heads, one.shape.flops), reverse=True)
        )

    def updated(self, newer: Self, failed: Mapping[Shape, Collection[str]] | None = None) -> Self:
        """This ranking with a newer one's timings; what the newer one hasn't measured stays, backend by backend.

        Nothing stays where the machine has changed in between, and not the time of a backend that has `failed` since.
        """
        if self.fingerprint != newer.fingerprint:
            return newer
        timings: dict[Shape, dict[str, Timing]] = {}
        for measured in self.measured:
            gone = (failed or {}).get(measured.shape, ())
            timings[measured.shape] = {t.backend: t for t in measured.timings if t.backend not in gone}
        for measured in newer.measured:
            timings.setdefault(measured.shape, {}).update({timing.backend: timing for timing in measured.timings})
        merged = (Measured(shape=shape, timings=tuple(own.values())) for shape, own in timings.items() if own)
        return dataclasses.replace(newer, measured=tuple(merged))

    def to_json(self) -> dict[str, Any]:
        """The ranking as plain data."""
        return {
            "fingerprint": dict(self.fingerprint),
            "measured": [measured.to_json() for measured in self.measured],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data. Raises KeyError, TypeError and ValueError."""
        fingerprint = data["fingerprint"]
        if not all(type(text) is str for pair in fingerprint.items() for text in pair):
            raise ValueError("the fingerprint can't be right")
        return cls(fingerprint=dict(fingerprint), measured=tuple(map(Measured.from_json, data["measured"])))


def fingerprint(machine: MachineFacts) -> dict[str, str]:
    """What measured times depend on, by name: the device, the driver, torch and the attention packages.

    What isn't there has no entry. A package that is there and broken counts like one that works: selection sees to it.
    """
    device = f"{machine.devices[0].name} ({machine.arch})" if machine.devices else None
    facts = {
        "platform": machine.platform,
        "device": device,
        "driver": machine.driver_version,
        "torch": machine.torch_version,
        "CUDA": machine.cuda_version,
        "HIP": machine.hip_version,
        **{package.dist: _version(package) for package in machine.packages.values()},
    }
    return {name: value for name, value in facts.items() if value is not None}


def _version(package: PackageFacts) -> str:
    variant = f" ({package.variant})" if package.variant else ""
    return f"{package.version or 'of unknown version'}{variant}"


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """How a fingerprint differs from an earlier one, item by item: "torch 2.12.0 -> 2.13.0"."""
    names = dict.fromkeys((*before, *now))
    return [
        f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in names
        if before.get(name) != now.get(name)
    ]


# The file


class SavedRanking(NamedTuple):
    """The ranking that counts on a machine, and what a person should know where there is one that doesn't."""

    ranking: Ranking | None = None
    note: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """The note, if there is one."""
        return () if self.note is None else (self.note,)


def ranking_file(folder: Path, machine: MachineFacts) -> Path:
    """Where the ranking of a machine's device is kept: a file for each kind of device."""
    device = machine.devices[0].name if machine.devices else ""
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine.platform} {machine.arch} {device}".lower()).strip("-")
    return folder / f"attention-{name[:120]}.json"


def saved_ranking(machine: MachineFacts) -> SavedRanking:
    """The ranking that was saved for this machine, if it is as it was then. Never raises."""
    folder = found_cache_folder()
    if folder is None:
        return SavedRanking()
    return read_ranking(ranking_file(folder, machine), machine)


def read_ranking(path: Path, machine: MachineFacts) -> SavedRanking:
    """The ranking in a file, if it is one and the machine is as it was then. Never raises."""
    # A folder that may not be looked into holds no file of this person's.
    if not os.path.lexists(path):
        return SavedRanking()
    try:
        ranking = Ranking.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        why = f"can't be read: {error.strerror}"
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        why = f"isn't a ranking that this version knows ({type(error).__name__})"
    else:
        changed = changes(ranking.fingerprint, fingerprint(machine))
        if not changed:
            return SavedRanking(ranking)
        why = f"is of this machine before it changed: {', '.join(changed)}"
    # Without its folder: the note goes into files that people pass on.
    note = f"the measured order of attention backends isn't used: {path.name} {why}; measure again with {COMMAND}"
    return SavedRanking(note=note)


def target_file(machine: MachineFacts) -> Path:
    """Where a ranking of this machine will be saved; its folder is made. Raises OutputError if it can't be."""
    folder = found_cache_folder()
    if folder is None:
        raise OutputError("there is no home folder to save the ranking in; set XDG_CACHE_HOME to a folder")
    path = ranking_file(folder, machine)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    check_target(path, overwrite=True)
    return path


def save_ranking(
    path: Path, ranking: Ranking, machine: MachineFacts, failed: Mapping[Shape, Collection[str]] | None = None
) -> Ranking:
    """Add a ranking of this machine to what its file has, and return both as one.

    What the file has of backends that have `failed` since isn't kept. Raises OutputError and WriteError.
    """
    before = read_ranking(path, machine).ranking
    together = ranking if before is None else before.updated(ranking, failed)
    write_whole(path, json.dumps(together.to_json(), indent=2) + "\n", overwrite=True)
    return together
