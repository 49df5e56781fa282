"""Values of options: text in; the value out, or ValueError with what can be given instead."""

import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from safelight.cli.options import nearest
from safelight.config import CHECKS, DTYPES
from safelight.errors import RequestError
from safelight.request import parse_fps


def whole(text: str) -> int:
    """A whole number, such as a seed."""
    if not re.fullmatch(r"[+-]?[0-9]{1,100}", text):
        raise ValueError("give a whole number such as 7")
    return int(text)


def number(text: str) -> float:
    """A number; not infinity, and not NaN."""
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", text, re.IGNORECASE):
        raise ValueError("give a number such as 5 or 3.5")
    return float(text)


def size(text: str) -> tuple[int, int]:
    """Width and height in pixels."""
    found = re.fullmatch(r"(-?[0-9]{1,100})[xX×](-?[0-9]{1,100})", text)
    if found is None:
        raise ValueError("give WIDTHxHEIGHT in pixels, such as 64x64")
    return int(found[1]), int(found[2])


def fps(text: str) -> Fraction:
    """A frame rate, as exact as it is written."""
    if not re.fullmatch(r"[+-]?[0-9]{1,12}(\.[0-9]{0,12}|/[0-9]{1,12})?", text):
        raise ValueError("give a number such as 16, 23.976 or 24000/1001")
    try:
        return parse_fps(text)
    except RequestError as error:
        raise ValueError(error.message.partition("; ")[2]) from None


def name(text: str) -> str:
    """A name that isn't empty."""
    if not text.strip():
        raise ValueError("give a name, or leave the option out")
    return text


def path(text: str) -> Path:
    """A file's path."""
    if not text or "\0" in text or text == "-":
        raise ValueError("give a file's name, or leave the option out")
    return Path(text)


def dtype(text: str) -> str:
    """One of the dtypes that a model can run in."""
    return _one_of(text, DTYPES)


def check(text: str) -> str:
    """When kernels are held to the reference."""
    return _one_of(text, CHECKS)


def _one_of(text: str, allowed: Sequence[str]) -> str:
    if text not in allowed:
        near = nearest(text, allowed)
        raise ValueError(f"{'' if near is None else f'did you mean {near}? '}it can be {', '.join(allowed)}")
    return text
