"""Safelight generates images and video with diffusion transformers, and can account for every attention kernel.

Names are loaded when they are first used, so `import safelight` costs next to nothing and imports no torch.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safelight.engine import Engine
    from safelight.errors import SafelightError
    from safelight.request import CancelToken, Output, Progress, Request, Result

__version__ = "0.1.0"

__all__ = [
    "CancelToken",
    "Engine",
    "Output",
    "Progress",
    "Request",
    "Result",
    "SafelightError",
    "__version__",
]

# Where each public name lives. The imports above say the same to type checkers; a test holds the two together.
_HOMES = MappingProxyType(
    {
        "CancelToken": "safelight.request",
        "Engine": "safelight.engine",
        "Output": "safelight.request",
        "Progress": "safelight.request",
        "Request": "safelight.request",
        "Result": "safelight.request",
        "SafelightError": "safelight.errors",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
