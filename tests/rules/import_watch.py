"""Run as a program: import modules one by one and print, as JSON, what each did besides defining names.

Input: a JSON list of [modules to import beforehand, modules to watch]. What vendor packages do while they are imported
is not ours, so they come first.
"""

import importlib
import json
import logging
import os
import random
import signal
import sys
import threading
import warnings
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
LOUD = (
    "os.exec",
    "os.fork",
    "os.mkdir",
    "os.posix_spawn",
    "os.putenv",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.system",
    "os.unsetenv",
    "shutil.",
    "socket.",
    "subprocess.Popen",
    "tempfile.",
)


def state() -> dict[str, Any]:
    """What an import must leave as it was."""
    found: dict[str, Any] = {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "logging": (logging.root.level, list(logging.root.handlers)),
        "path": list(sys.path),
        "random": random.getstate(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "standard streams": (sys.stdout, sys.stderr, sys.excepthook),
        "warnings": list(warnings.filters),
    }
    torch = sys.modules.get("torch")
    if torch:
        found["torch"] = (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.random.get_rng_state().tolist(),
            torch.cuda.is_initialized(),
        )
    return found


def watch(names: list[str]) -> list[str]:
    """Import each module; a line for everything it did."""
    found: list[str] = []
    watching = ""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not watching:
            return
        if event == "open":
            path, mode, flags = str(args[0]), args[1], args[2]
            is_code = path.endswith((".py", ".pyc", ".so", ".pyd")) and not (flags or 0) & WRITING
            if not is_code:
                found.append(f"{watching} opened {path} ({mode or 'r'})")
        elif event.startswith(LOUD):
            found.append(f"{watching} called {event}{args}")

    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if watching:
            found.append(f"{watching} started a thread")
        start(thread)

    threading.Thread.start = started  # type: ignore[method-assign]
    sys.addaudithook(hook)
    for name in names:
        before = state()
        watching = name
        importlib.import_module(name)
        watching = ""
        after = state()
        found += [f"{name} changed {key}" for key in before if before[key] != after[key]]
    return found


def main() -> None:
    """Read the lists from standard input, print the findings."""
    beforehand, names = json.load(sys.stdin)
    for name in beforehand:
        importlib.import_module(name)
    json.dump(watch(names), sys.stdout)


if __name__ == "__main__":
    main()
