"""Shapes of attention calls as a person writes them: "tokens=4096,heads=12,head_dim=128,causal"."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from safelight.cli.options import nearest, quoted
from safelight.config import ROLES

if TYPE_CHECKING:
    from safelight.attention.ranking import Shape
    from safelight.attention.requirements import Mask, Role

# Those of attention/requirements.py, whose import `--help` has no need of; a test holds the two together.
MASKS = ("none", "key_padding", "dense", "bias")
EXAMPLE = "tokens=4096,heads=12,head_dim=128"
NOTES = (
    "SHAPE has tokens (or queries and keys), heads, head_dim, and where they differ from the usual batch, kv_heads,\n"
    f"causal, role ({', '.join(ROLES)}) and mask ({', '.join(MASKS)}): queries=4096,keys=512,heads=12,head_dim=128."
)

_COUNTS = ("batch", "tokens", "queries", "keys", "heads", "kv_heads", "head_dim")
_KEYS = (*_COUNTS, "causal", "role", "mask")


@dataclass(frozen=True, kw_only=True)
class WrittenShape:
    """A shape without its dtype, which another option has."""

    batch: int
    queries: int
    keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    role: "Role"
    mask: "Mask"

    def shape(self, dtype: str) -> "Shape":
        """The shape in a dtype."""
        from safelight.attention.ranking import Shape

        return Shape(**vars(self), dtype=dtype)


def shape(text: str) -> WrittenShape:
    """A shape; ValueError with everything that is wrong with it."""
    given: dict[str, str] = {}
    problems = []
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in _KEYS:
            near = nearest(key, _KEYS)
            hint = "" if near is None else f" (did you mean {near}?)"
            problems.append(f"{quoted(key)} is no part of a shape{hint}; write it as {EXAMPLE}")
        elif key in given:
            problems.append(f"{key} is given twice")
        elif bool(equals) == (key == "causal"):
            problems.append(
                "causal stands alone, without a value" if equals else f"{key} needs a value, as in {EXAMPLE}"
            )
        else:
            given[key] = value
    counts = {key: _count(key, given[key], problems) for key in _COUNTS if key in given}
    problems += _missing(counts)
    allowed: tuple[tuple[str, tuple[str, ...]], ...] = (("role", ROLES), ("mask", MASKS))
    problems += [
        f"{key} is {quoted(given[key])}; it can be {', '.join(names)}"
        for key, names in allowed
        if key in given and given[key] not in names
    ]
    heads, kv_heads = counts.get("heads", 1), counts.get("kv_heads", counts.get("heads", 1))
    if heads > 0 and kv_heads > 0 and heads % kv_heads:
        problems.append(f"{heads} heads can't share {kv_heads} kv_heads evenly")
    if problems:
        raise ValueError("; ".join(problems))
    queries, keys = (counts.get(side, counts.get("tokens", 0)) for side in ("queries", "keys"))
    return WrittenShape(
        batch=counts.get("batch", 1),
        queries=queries,
        keys=keys,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=counts["head_dim"],
        causal="causal" in given,
        # Both were found among those that there are.
        role=cast("Role", given.get("role", "self" if queries == keys else "cross")),
        mask=cast("Mask", given.get("mask", "none")),
    )


def _count(key: str, text: str, problems: list[str]) -> int:
    """A number of at least 1; 0 and a problem where it is none."""
    if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0:
        return int(text)
    problems.append(f"{key} is {quoted(text)}; it must be a whole number of at least 1")
    return 0


def _missing(counts: dict[str, int]) -> list[str]:
    lengths = {"tokens", "queries", "keys"} & counts.keys()
    problems = [] if lengths in ({"tokens"}, {"queries", "keys"}) else ["give tokens, or queries and keys"]
    return problems + [f"{key} is missing" for key in ("heads", "head_dim") if key not in counts]
