"""What `safelight doctor --verify` runs and prints: usable backends, held to the reference on the contract's cases."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from safelight.cli.options import nearest, quoted, wrong_command_line
from safelight.cli.tables import table, wrapped
from safelight.errors import BackendUnavailableError
from safelight.request import Progress

if TYPE_CHECKING:
    from safelight.attention.backend import AttentionBackend
    from safelight.attention.verify import Answer, Verification
    from safelight.cli.doctor import Finding
    from safelight.cli.progress import ProgressDisplay
    from safelight.platforms.facts import MachineFacts

# Failures of one backend that are listed for people; JSON has all of them.
MOST_LISTED = 10
SPARSE = "it leaves keys out on purpose, so that dense attention is no measure for it"


def names_of(given: Sequence[str], backends: "Mapping[str, AttentionBackend]", problems: list[str]) -> tuple[str, ...]:
    """The backends behind the names or aliases given, each once; what is wrong with them ends up among the problems."""
    from safelight.attention.select import canonical

    names = []
    for name in given:
        if (known := canonical(name, backends)) in backends:
            names.append(known)
            continue
        near = nearest(name, [*backends, *(alias for backend in backends.values() for alias in backend.aliases)])
        hint = "" if near is None else f"did you mean {near}? "
        listed = ", ".join(sorted(backends))
        problems.append(f"--backend names {quoted(name)}; no backend has this name. {hint}They are {listed}")
    return tuple(dict.fromkeys(names))


def chosen(
    names: Sequence[str],
    dtypes: Sequence[str],
    found: "Mapping[str, Finding]",
    backends: "Mapping[str, AttentionBackend]",
) -> "tuple[AttentionBackend, ...]":
    """The backends to verify: those named, by default all that are usable here, lossy ones included.

    Raises BackendUnavailableError for named ones that can't be run here, and RequestError for ones that nothing can be
    said about, each with every reason.
    """
    usable = sorted(name for name, finding in found.items() if finding.state == "usable")
    if not names:
        return tuple(backends[name] for name in usable if not backends[name].is_sparse)
    unusable = {name: found[name].reasons for name in names if name not in usable}
    if unusable:
        told = "; ".join(f"{name}: {' and '.join(reasons)}" for name, reasons in unusable.items())
        raise BackendUnavailableError(
            f"--backend names what isn't usable here: {told}. Usable are {', '.join(usable)}",
            rejected={name: list(reasons) for name, reasons in unusable.items()},
        )
    problems = [f"--backend {name} can't be verified: {SPARSE}" for name in names if backends[name].is_sparse]
    for name in names:
        declared = backends[name].dtypes
        if dtypes and not declared & set(dtypes):
            problems.append(f"--dtype {' and '.join(dtypes)}: {name} takes {', '.join(sorted(declared))}")
    if problems:
        raise wrong_command_line(problems)
    return tuple(backends[name] for name in names)


def verify_all(
    asked: "Sequence[AttentionBackend]",
    dtypes: Sequence[str],
    machine: "MachineFacts",
    backends: "Mapping[str, AttentionBackend]",
    device: str,
    progress: "ProgressDisplay",
) -> "tuple[Verification, ...]":
    """Verify one after the other; progress tells how far each is."""
    from safelight.attention.verify import dtypes_of, verify

    found = []
    for backend in asked:
        started_s = time.monotonic()

        def report(done: int, total: int, name: str = backend.name, started_s: float = started_s) -> None:
            elapsed_s = time.monotonic() - started_s
            progress(Progress(stage=f"verify {name}", step=done, num_steps=total or 1, elapsed_s=elapsed_s))

        own = dtypes_of(backend, dtypes)
        found.append(verify(backend, machine, backends, dtypes=own, device=device, report=report))
    return tuple(found)


def lines(found: "Sequence[Verification]", backends: "Mapping[str, AttentionBackend]") -> Iterator[str]:
    """The verifications for people: a row for each backend and dtype, then what failed."""
    rows: list[tuple[str, ...]] = [("backend", "dtype", "cases", "result", "largest error", "allowed", "seconds")]
    for one in found:
        dtypes = dict.fromkeys(answer.dtype for answer in one.answers)
        rows += [_row(one, dtype, is_lossy=backends[one.backend].is_lossy) for dtype in dtypes]
        if not one.num_cases:
            rows.append((one.backend, "", "0", "nothing to run", "", "", ""))
    yield from table(rows)
    for one in found:
        if one.num_cases and not one.has_passed:
            yield ""
            yield from _failures(one)


def _row(one: "Verification", dtype: str, *, is_lossy: bool) -> tuple[str, ...]:
    answers = [answer for answer in one.answers if answer.dtype == dtype]
    failed = sum(answer.problem is not None for answer in answers)
    compared = [answer for answer in answers if answer.error is not None and answer.tolerance is not None]
    worst = max(compared, key=_share, default=None)
    numbers = ("", "") if worst is None else (f"{worst.error:.2g}", f"{worst.tolerance:.2g}")
    kind = " of the output" if is_lossy and worst is not None else ""
    seconds = sum(answer.seconds for answer in answers)
    result = "pass" if not failed else f"{failed} FAILED"
    return (one.backend, dtype, str(len(answers)), result, numbers[0], f"{numbers[1]}{kind}", f"{seconds:.1f}")


def _share(answer: "Answer") -> float:
    assert answer.error is not None and answer.tolerance is not None
    return answer.error / answer.tolerance


def _failures(one: "Verification") -> Iterator[str]:
    yield f"{one.backend} failed"
    for answer in one.failures[:MOST_LISTED]:
        yield from wrapped(f"  {answer.case}: ", str(answer.problem))
    if len(one.failures) > MOST_LISTED:
        yield f"  and {len(one.failures) - MOST_LISTED} more; --json has all of them"
    if (missing := one.num_cases - len(one.answers)) > 0:
        yield f"  {missing} cases behind it didn't run"
