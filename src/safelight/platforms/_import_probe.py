"""The program that imports one attention package and says what it found; run as a process of its own, never imported.

Arguments: a JSON list [module, function, flag, flag_reason], then sys.path. On standard output: one JSON object with
`parameters` or `import_error`. Whatever the package prints goes nowhere.
"""

import sys


def main() -> None:
    """Import, look and answer."""
    # Before anything else is imported: this file's own folder must not hide a module.
    sys.path[:] = sys.argv[2:]
    import importlib
    import inspect
    import json
    import os
    from types import TracebackType
    from typing import Any

    # The answer has a descriptor of its own; those that the package knows lead nowhere, for its C code too.
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def answer(**found: Any) -> None:
        os.write(answers, json.dumps(found).encode())
        os._exit(0)  # what a package does at the end of a process is no matter here

    def first_line(text: object) -> str:
        lines = str(text).strip().splitlines()
        return lines[0].strip()[:2000].encode("utf-8", "backslashreplace").decode() if lines else ""

    def failed(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        cause = first_line(error)
        answer(import_error=f"{kind.__name__}: {cause}" if cause else kind.__name__)

    # The hook is given every kind of error but SystemExit, which ends a process without one.
    sys.excepthook = failed
    name, function, flag, flag_reason = json.loads(sys.argv[1])
    try:
        module = importlib.import_module(name)
        if flag is not None and not getattr(module, flag, None):
            reason = first_line(getattr(module, flag_reason or flag, None) or "")
            answer(import_error=reason or f"{name}.{flag} is {getattr(module, flag, 'missing')}")
        entry_point = None if function is None else getattr(module, function)
    except SystemExit as error:
        failed(SystemExit, error, None)
    else:
        try:
            parameters = None if entry_point is None else list(inspect.signature(entry_point).parameters)
        except (TypeError, ValueError):  # an operator that is written in C tells none
            parameters = None
        answer(parameters=parameters)


if __name__ == "__main__":
    main()
