"""What docs/backends.md says, from the declarations alone.

`PYTHONPATH=tests/stand_ins python -m tests.rules.backends_page` writes it anew.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from safelight.attention import AttentionBackend, declared_backends
from safelight.attention.requirements import MASKS
from safelight.platforms import load_machine, machine_names, platform_named
from tests.contract.subjects import SUBJECTS, refusals
from tests.rules.source import ROOT

PAGE = ROOT / "docs" / "backends.md"

HEAD = """# Attention backends

Every kernel that is declared, what it can do, and where it runs. The page is made from the declarations, by
`PYTHONPATH=tests/stand_ins python -m tests.rules.backends_page`, and a test holds it to them.
[Adding a backend](adding-a-backend.md) says what the words mean; `safelight doctor` says which of them this machine can
use, and `safelight doctor --verify` whether they compute what they should.
"""

CAPABILITIES = {
    "grouped-query": "grouped_query",
    "causal": "causal",
    "packed": "packed_varlen",
    "LSE": "lse",
    "scale": "custom_scale",
    "cross lengths": "cross_lengths",
}


def page() -> str:
    """The whole page."""
    backends = sorted(declared_backends().values(), key=lambda backend: (_kind(backend) != "exact", backend.name))
    parts = [HEAD, "## What each can do\n", *_table(_can(backends)), ""]
    parts += ["A mask column says which forms it takes. Exact kernels may be taken unasked; lossy and sparse ones only"]
    parts += ["where a person names them.", "", "## Where each runs\n", *_table(_where(backends)), ""]
    parts += ["## What is taken unasked\n", *_table(_orders()), "", "## One by one", ""]
    for backend in backends:
        parts += _about(backend)
    return "\n".join(parts).rstrip() + "\n"


def _kind(backend: AttentionBackend) -> str:
    return "sparse" if backend.is_sparse else "lossy" if backend.is_lossy else "exact"


def _can(backends: Iterable[AttentionBackend]) -> Iterator[tuple[str, ...]]:
    yield ("backend", "kind", "dtypes", "head_dim", "masks", *CAPABILITIES)
    for b in backends:
        masks = ", ".join(mask.replace("_", " ") for mask in MASKS if mask in b.masks and mask != "none")
        yield (
            f"[{b.name}](#{b.name})",
            _kind(b),
            ", ".join(sorted(b.dtypes)),
            b.head_dims_text,
            masks or "none",
            *("yes" if getattr(b, name) else "no" for name in CAPABILITIES.values()),
        )


def _where(backends: Iterable[AttentionBackend]) -> Iterator[tuple[str, ...]]:
    yield ("backend", "platforms and devices", "package")
    for b in backends:
        places = [
            platform + (f" ({', '.join(b.arches[platform])})" if platform in b.arches else "")
            for platform in sorted(b.platforms)
        ]
        package = "torch's own"
        if b.package is not None:
            version = f" {b.package.min_version} and later" if b.package.min_version else ""
            package = " or ".join(b.package.dists) + version
        yield (b.name, "; ".join(places) or "every one", package)


def _orders() -> Iterator[tuple[str, ...]]:
    """The automatic order of each described machine, those of one kind of device and one order together."""
    yield ("device", "automatic order", "described machines")
    machines: dict[tuple[str, str], list[str]] = {}
    for name in machine_names():
        machine = load_machine(name)
        order = platform_named(machine.platform).automatic_order(machine)
        machines.setdefault((f"{machine.platform} {machine.arch}", ", ".join(order)), []).append(name)
    for (device, listed), names in sorted(machines.items()):
        yield (device, listed, ", ".join(names))


def _about(backend: AttentionBackend) -> Iterator[str]:
    yield f"### {backend.name}\n"
    yield f"{backend.summary}. {_state(backend)}\n"
    if backend.aliases:
        yield f"- Other names: {', '.join(f'`{alias}`' for alias in backend.aliases)}."
    limits = (backend.why_not.__doc__ or "").strip()
    if limits and backend.why_not.__name__ == "why_not":
        yield f"- Beyond the tables: {limits}"
    if backend.self_only:
        yield "- Made for self-attention alone."
    if backend.env:
        yield f"- Looks at the switches {', '.join(f'`{name}`' for name in backend.env)}."
    if backend.package is not None:
        yield f"- To install it: {backend.package.remedy}."
    yield ""


def _state(backend: AttentionBackend) -> str:
    """How the contract is applied to it."""
    from safelight.attention.cases import cases

    if backend.load is None:
        return "Its adapter isn't built yet: plans for other machines may name it, nothing runs it."
    subjects = [subject for subject in SUBJECTS if subject.backend == backend.name]
    counts = [sum(not refusals(subject, case) for case in cases(backend)) for subject in subjects]
    runs = "; ".join(f"{subject.name}: {count}" for subject, count in zip(subjects, counts, strict=True))
    return f"Held to the contract of {len(cases(backend))} cases, of which it has promised so many: {runs}."


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    head, *body = rows
    return [_row(head), _row(("---",) * len(head)), *map(_row, body)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(path: Path = PAGE) -> None:
    """Write the page."""
    path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
