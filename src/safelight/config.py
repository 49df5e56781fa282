"""Settings: what a person set outside the command line, and where. The only reader of environment and config file.

| variable | key in the file | holds |
|---|---|---|
| `SAFELIGHT_MODEL` | `model` | a model's path or hub id |
| `SAFELIGHT_DEVICE` | `device` | `cuda`, `cuda:1`, `rocm`, `mps`, `cpu`, ...: checked when the machine is asked |
| `SAFELIGHT_DTYPE` | `dtype` | `float32`, `bfloat16` or `float16` |
| `SAFELIGHT_ATTENTION` | `attention` | backends: `sdpa`, or `transformer.self=flash3,vae=sdpa`; in the file a table |
| `SAFELIGHT_CHECK_ATTENTION` | `check_attention` | `off`, `first` or `always`: hold kernels to the reference |
| `SAFELIGHT_CONFIG` | | the config file, if it isn't ~/.config/safelight/config.toml |

A launcher's variables are read here too: who this process is among the ranks of a parallel run.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from safelight.errors import RequestError

T = TypeVar("T")

DTYPES = ("float32", "bfloat16", "float16")
CHECKS = ("off", "first", "always")
# The roles of attention/requirements.py, which is a higher layer; a test holds the two together.
ROLES = ("self", "cross", "joint")
# What a config file may hold, with an example of each.
KEYS = {
    "model": '"Wan-AI/Wan2.1-T2V-1.3B-Diffusers"',
    "device": '"cuda:1"',
    "dtype": '"bfloat16"',
    "attention": '"sdpa"',
    "check_attention": '"first"',
}
# The ones that are a text each.
TEXTS = ("model", "device", "dtype", "check_attention")
# In a table of the config file: everything that the table doesn't name.
REST = "default"
UNATTRIBUTED = "settings that don't say who set them"
# What torch's launcher tells each process that it starts, and what `generate` tells the ranks that it starts itself.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK_VARIABLE = "SAFELIGHT_RANK"


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value and where it was set, in words: "`SAFELIGHT_MODEL`", "config.toml: model"."""

    value: T
    source: str


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """A choice of an attention backend. `names` is what for: "" everything, "vae", or "transformer.self".

    `explicit` means that a person made it; the choice of a default, or of nobody knows whom, isn't (S2).
    """

    names: str
    backend: str
    source: str
    explicit: bool = True


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting, None where nothing was set; `attention` holds one tuple per source, the nearest source first."""

    model: Setting[str] | None = None
    attention: tuple[tuple[AttentionChoice, ...], ...] = ()
    device: Setting[str] | None = None
    dtype: Setting[str] | None = None
    check_attention: Setting[str] | None = None

    @classmethod
    def from_environment(cls) -> Self:
        """The settings of this process: its environment, and the config file that it leads to. Creates nothing.

        Raises RequestError with everything that is wrong in both.
        """
        environ = dict(os.environ)
        problems: list[str] = []
        path = config_file(environ)
        text = None if path is None else _text_of(path, environ.get("SAFELIGHT_CONFIG"), problems)
        return cls._read(environ, text, path or Path(), problems)

    @classmethod
    def read(
        cls, environ: Mapping[str, str], config_text: str | None = None, config_path: str | Path = "config.toml"
    ) -> Self:
        """The settings of an environment and of a config file's text; RequestError with everything wrong in them.

        The environment is nearer than the file. A variable that is set but empty is refused, since it can't be told
        from a slip.
        """
        return cls._read(environ, config_text, Path(config_path), [])

    @classmethod
    def _read(cls, environ: Mapping[str, str], text: str | None, path: Path, problems: list[str]) -> Self:
        near = _from_variables(environ, problems)
        far = Settings() if text is None else _from_file(text, path, problems)
        _raise_all(problems)
        return cls(
            model=near.model or far.model,
            attention=near.attention + far.attention,
            device=near.device or far.device,
            dtype=near.dtype or far.dtype,
            check_attention=near.check_attention or far.check_attention,
        )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process's place among the ranks that a launcher started.

    `local_rank` counts on this machine alone. Ranks that `generate` started find each other through the file `meeting`
    and have a socket to it, the descriptor `channel`; both are None under torchrun, which has its own ways.
    """

    rank: int
    local_rank: int
    num_ranks: int
    meeting: str | None = None
    channel: int | None = None

    @classmethod
    def from_environment(cls) -> Self | None:
        """The place of this process, None if it was started alone. Raises RequestError where it isn't one."""
        if RANK_VARIABLE in os.environ:
            try:
                return cls(**json.loads(os.environ[RANK_VARIABLE]))
            except (ValueError, TypeError) as error:
                raise RequestError(
                    f"`{RANK_VARIABLE}` is Safelight's own, for ranks that it starts; unset it"
                ) from error
        if any(name not in os.environ for name in LAUNCHER_VARIABLES):
            return None
        texts = {name: os.environ[name] for name in LAUNCHER_VARIABLES if name != "MASTER_ADDR"}
        wrong = [f"`{name}` is {text!r}" for name, text in texts.items() if not re.fullmatch("[0-9]{1,9}", text)]
        if wrong:
            raise RequestError(f"{'; '.join(wrong)}; a launcher sets whole numbers, start ranks with torchrun")
        rank, local_rank, num_ranks, port = (int(texts[name]) for name in LAUNCHER_VARIABLES if name in texts)
        if not (local_rank <= rank < num_ranks and 0 < port < 1 << 16):
            shown = ", ".join(f"{name}={text}" for name, text in texts.items())
            raise RequestError(f"{shown} can't be a launcher's: RANK is below WORLD_SIZE; start ranks with torchrun")
        return cls(rank=rank, local_rank=local_rank, num_ranks=num_ranks)

    def environment(self, num_threads: int) -> dict[str, str]:
        """This process's environment with another's place in it, and how many threads it computes with if unset."""
        place = json.dumps(dataclasses.asdict(self))
        return {"OMP_NUM_THREADS": str(num_threads), **os.environ, RANK_VARIABLE: place}


def as_settings(values: object) -> Settings:
    """Settings as they are; or those in a mapping or a plain object with some of the fields `Settings` has.

    A plain value can't say who set it, so it may be a default: choices of attention in it are implicit (S2). They are
    written as for `attention_choices`.
    """
    if isinstance(values, Settings):
        return values
    found = {key: values.get(key) if isinstance(values, Mapping) else getattr(values, key, None) for key in KEYS}
    problems: list[str] = []
    texts = _texts(found, lambda key: UNATTRIBUTED, lambda key: f"{UNATTRIBUTED}: {key}", problems)
    attention = _layer(found["attention"], UNATTRIBUTED, problems, explicit=False)
    _raise_all(problems)
    return Settings(attention=attention, **texts)


def config_file(environ: Mapping[str, str]) -> Path | None:
    """The config file that an environment leads to, whether it is there or not; None where there is no home folder.

    The place is the same on every system, as command-line programs have it, so that one home folder serves several.
    """
    if "SAFELIGHT_CONFIG" in environ:
        return Path(os.path.expanduser(environ["SAFELIGHT_CONFIG"]))
    folder = _base_folder(environ, "XDG_CONFIG_HOME", ".config")
    return None if folder is None else folder / "safelight" / "config.toml"


def found_config_file() -> Path | None:
    """The config file that this process's environment leads to, whether it is there or not."""
    return config_file(os.environ)


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Where an environment has what can be made again, such as measured rankings; None where there is no home folder.

    It needn't be there.
    """
    folder = _base_folder(environ, "XDG_CACHE_HOME", ".cache")
    return None if folder is None else folder / "safelight"


def found_cache_folder() -> Path | None:
    """The cache folder that this process's environment leads to, whether it is there or not."""
    return cache_folder(os.environ)


def _base_folder(environ: Mapping[str, str], variable: str, in_home: str) -> Path | None:
    folder = environ.get(variable, "")
    if os.path.isabs(folder):
        return Path(folder)
    # Unset or empty; a relative one is to be ignored, says the XDG specification.
    home = environ.get("HOME") or environ.get("USERPROFILE")
    return Path(home, in_home) if home else None


def environment_switches(names: Iterable[str]) -> dict[str, str]:
    """The values that this process's environment has for some variables, by name: the switches of kernels' packages.

    One that isn't set is left out.
    """
    return {name: os.environ[name] for name in sorted(set(names)) if name in os.environ}


def parse_attention(text: str | Sequence[str], source: str) -> tuple[AttentionChoice, ...]:
    """The choices in a text such as "sdpa" or "transformer.self=flash3,text_encoder=sdpa", in its order.

    The values of a repeated option are given together, as a sequence, so that a WHERE in two of them is noticed.
    Whether there is such a component or backend is not known here. Raises RequestError.
    """
    parts = [part.strip() for value in ([text] if isinstance(text, str) else text) for part in value.split(",")]
    pairs = []
    for part in parts:
        name, colon, options = part.partition(":")
        names, equals, backend = name.rpartition("=")
        pairs.append((part, names.strip() if equals else None, f"{backend.strip()}{colon}{options}"))
    return _choices(pairs, source)


def attention_choices(
    choices: str | Mapping[str, str], source: str, *, explicit: bool = True
) -> tuple[AttentionChoice, ...]:
    """The choices in a mapping such as {"transformer.self": "flash3"}, or in a text as for `parse_attention`.

    The key "" means everything. Raises RequestError.
    """
    if isinstance(choices, str):
        found = parse_attention(choices, source)
    elif isinstance(choices, Mapping):
        items = [(where or None, backend) for where, backend in choices.items()]
        found = _choices([(f"{w}={b}" if w else f"{b}", w, b) for w, b in items], source)
    else:
        problem = (
            f"{choices!r} is no choice; give a backend's name, or a mapping such as {{'transformer.self': 'sdpa'}}"
        )
        raise RequestError(f"{source}: {problem}", problems=[problem])
    return tuple(dataclasses.replace(choice, explicit=explicit) for choice in found)


def _choices(pairs: Iterable[tuple[str, Any, Any]], source: str) -> tuple[AttentionChoice, ...]:
    """Check (as written, WHERE or None for everything, backend) and make choices of it."""
    choices: dict[str, AttentionChoice] = {}
    problems: list[str] = []
    for written, where, backend in pairs:
        names = where or ""
        if problem := _wrong_backend(backend):
            problems.append(f"{written!r} {problem}; write NAME or WHERE=NAME, as in transformer.self=sdpa")
        elif where is not None and (problem := _wrong_where(where)):
            problems.append(f"{written!r}: {problem}")
        elif names in choices:
            problems.append(
                f"{names or 'everything'} is given both {choices[names].backend!r} and {backend!r}; keep one of them"
            )
        else:
            choices[names] = AttentionChoice(names=names, backend=backend, source=source)
    if problems:
        raise RequestError(f"{source}: {'; '.join(problems)}", problems=problems)
    return tuple(choices.values())


def _wrong_backend(backend: object) -> str | None:
    if isinstance(backend, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", backend):
        return None
    name, colon, _ = backend.partition(":") if isinstance(backend, str) else ("", "", "")
    return f"gives options to {name}, and no backend takes any" if name and colon else "names no backend"


def _wrong_where(where: object) -> str | None:
    if where in ROLES:
        return f"{where!r} is a role; name its component too, as in transformer.{where}"
    component, dot, role = where.partition(".") if isinstance(where, str) else ("", "", "")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", component):
        return f"{where!r} must be COMPONENT or COMPONENT.ROLE, as in transformer or transformer.self"
    if dot and role not in ROLES:
        return f"{role!r} is no role; the roles are {', '.join(ROLES)}{_hint(role, ROLES)}"
    return None


def _wrong_value(key: str, value: object) -> str | None:
    """What is to be written instead of a setting's value, if it can't be right."""
    if not isinstance(value, str):
        return f"it must be text in quotes, such as {KEYS[key]}"
    if key == "model" and not value.strip():
        return "give a model's path or hub id, or leave it unset"
    if key == "device" and not value.strip():
        return "give a device such as cuda:1 or cpu, or leave it unset"
    if key == "dtype" and value not in DTYPES:
        return f"it must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}{_hint(value, DTYPES)}"
    if key == "check_attention" and value not in CHECKS:
        return f"it must be {', '.join(CHECKS[:-1])} or {CHECKS[-1]}{_hint(value, CHECKS)}"
    return None


def _hint(word: str, candidates: Iterable[str]) -> str:
    from difflib import get_close_matches  # only a mistake needs it

    near = get_close_matches(word.lower(), list(candidates), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise RequestError("; ".join(problems), problems=problems)


def _layer(
    attention: Any, source: str, problems: list[str], *, explicit: bool
) -> tuple[tuple[AttentionChoice, ...], ...]:
    """One source's choices as `Settings.attention` holds them; nothing if there are none or they are wrong."""
    try:
        choices = () if attention is None else attention_choices(attention, source, explicit=explicit)
    except RequestError as error:
        problems.append(error.message)
        return ()
    return (choices,) if choices else ()


def _texts(
    values: Mapping[str, Any], source: Callable[[str], str], where: Callable[[str], str], problems: list[str]
) -> dict[str, Any]:
    """The settings that are texts, of values by key. `source` names a key's source, `where` does so in a message."""
    settings: dict[str, Any] = {}
    for key in TEXTS:
        value = values.get(key)
        if value is not None:
            settings[key] = Setting(value, source(key))
            if problem := _wrong_value(key, value):
                problems.append(f"{where(key)} is {_shown(value)}; {problem}")
    return settings


def _from_variables(environ: Mapping[str, str], problems: list[str]) -> Settings:
    """What the environment's variables set."""

    def variable(key: str) -> str:
        return f"`SAFELIGHT_{key.upper()}`"

    values = {key: environ.get(f"SAFELIGHT_{key.upper()}") for key in KEYS}
    texts = _texts(values, variable, variable, problems)
    return Settings(attention=_layer(values["attention"], variable("attention"), problems, explicit=True), **texts)


def _text_of(path: Path, named: str | None, problems: list[str]) -> str | None:
    """A config file's text; `named` is what `SAFELIGHT_CONFIG` holds. One that nobody named needn't be there."""
    if named is not None and not named.strip():
        problems.append(f"`SAFELIGHT_CONFIG` is {named!r}; name a TOML file, or unset it")
        return None
    # A home that may not be looked into, as in a container that runs under another user's number, holds no file of
    # this person's; a link that leads nowhere was made by somebody.
    if named is None and not os.path.lexists(path):
        return None
    what = f"`SAFELIGHT_CONFIG` is {named!r}; {path}" if named is not None else str(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        remedy = "name a TOML file, or unset it" if named is not None else "make it a readable file, or remove it"
        problems.append(f"{what} can't be read: {error.strerror}; {remedy}")
    except UnicodeDecodeError as error:
        problems.append(f"{what} isn't UTF-8 text: byte {error.start} is wrong")
    return None


def _from_file(text: str, path: Path, problems: list[str]) -> Settings:
    """What a config file sets."""
    import tomllib  # few have such a file

    try:
        table = tomllib.loads(f"{text}\n")  # a mistake in a last line without an end is said to be behind it
    except (ValueError, RecursionError) as error:
        found = re.search(r"at line (\d+)", str(error))
        line = text.split("\n")[int(found[1]) - 1].strip() if found else ""
        problems.append(f"{path} isn't TOML: {error}{line and f': {line}'}")
        return Settings()
    for key in table:
        if key not in KEYS:
            problems.append(f"{path}: there is no key {key!r}; the keys are {', '.join(KEYS)}{_hint(key, KEYS)}")

    texts = _texts(table, lambda key: f"{path.name}: {key}", lambda key: f"{path}: {key}", problems)
    wrong: list[str] = []
    choices = tuple(
        AttentionChoice(names=names, backend=backend, source=f"{path.name}: {key}")
        for key, names, backend in _places(table.get("attention", {}), "attention", "", wrong)
    )
    problems += [f"{path}: {problem}" for problem in wrong]
    return Settings(attention=(choices,) if choices else (), **texts)


def _places(value: Any, key: str, names: str, wrong: list[str]) -> Iterator[tuple[str, str, str]]:
    """(key in the file, what it names, backend) for a place: a backend's name, or a table of the places inside it.

    Everything has components inside, a component has roles; what a table doesn't name is its `default`.
    """
    if not isinstance(value, dict) or key.endswith(f".{REST}") or "." in names:
        problem = _wrong_backend(value)
        if problem is None:
            yield key, names, value
        else:
            is_text = isinstance(value, str)
            wrong.append(
                f"{key} is {_shown(value)}{f', which {problem}' if is_text else ''}; "
                f'write a backend\'s name, as in {key} = "sdpa"'
            )
        return
    for inner, narrower in value.items():
        where = f"{names}.{inner}" if names else inner
        if inner == REST:
            yield from _places(narrower, f"{key}.{REST}", names, wrong)
        elif not names and "." in inner:
            wrong.append(f"{key} has {inner!r} in quotes, which is one key; write {inner} without quotes")
        elif problem := _wrong_where(where):
            wrong.append(f"{key}.{inner}: {problem}{f'; {REST} is for the rest' if names else ''}")
        else:
            yield from _places(narrower, f"{key}.{inner}", where, wrong)


def _shown(value: object) -> str:
    """A TOML value in a message."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "an array"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)
