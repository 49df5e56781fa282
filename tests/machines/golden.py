"""What the golden files hold: the plan of known layers on every described machine, and one refusal of each kind.

`python -m tests.machines.golden` writes them anew and says which changed: read the difference before it is committed.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path

from safelight.attention import (
    AttentionBackend,
    AttentionRequirements,
    BackendPreference,
    LayerGroup,
    build_plan,
    declared_backends,
    select_backend,
)
from safelight.errors import SelectionError
from safelight.planning import layers_of
from safelight.platforms import MachineFacts, load_machine, machine_names, platform_named

PLANS = Path(__file__).with_name("plans")
ERRORS = Path(__file__).with_name("errors")
WIDTH = 110


def kinds_of_layers(machine: MachineFacts) -> dict[str, AttentionRequirements]:
    """The layers that every machine is asked about, by what they stand for."""
    dtype = platform_named(machine.platform).default_dtype(machine)
    groups = {
        f"{g.requirements.component}.{g.requirements.role}": g.requirements for g in layers_of("wan2.1-1.3b")(dtype)
    }
    own = groups["transformer.self"]
    text = groups["text_encoder.self"]
    return {
        "wan 1.3b self": own,
        "wan 1.3b cross": groups["transformer.cross"],
        "masked text encoder": text,
        "key padding": text.replace(mask="key_padding", scale=None, head_dim=128),
        "grouped-query": own.replace(num_heads=32, num_kv_heads=8),
        "head_dim 72": own.replace(head_dim=72),
        "head_dim 512": own.replace(head_dim=512),
        "float32": own.replace(dtype="float32"),
        "packed varlen": own.replace(packed_varlen=True),
        "needs LSE": own.replace(needs_lse=True),
    }


def plan_text(name: str) -> str:
    """The golden file of a described machine: a row for each kind of layer, and why others were refused."""
    machine = load_machine(name)
    backends = declared_backends()
    order = ", ".join(platform_named(machine.platform).automatic_order(machine))
    lines = [f"{machine.platform} {machine.arch}, order: {order}", ""]
    for title, need in kinds_of_layers(machine).items():
        try:
            selection = select_backend(need, machine, None, None, backends)
            chosen, rejected = selection.backend, selection.rejected
        except SelectionError as error:
            chosen, rejected = f"NONE ({type(error).__name__})", ()
        lines.append(f"{title:<20} {need.dtype:<9} {chosen}")
        for verdict in rejected:
            reasons = "; ".join(reason.detail for reason in verdict.reasons)
            lines += textwrap.wrap(
                f"    not {verdict.backend}: {reasons}", WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False
            )
    return "\n".join(lines) + "\n"


def errors() -> dict[str, str]:
    """A refusal of each kind of error (S9) by name, as a person reads it."""
    own = AttentionRequirements(head_dim=128, dtype="bfloat16", num_heads=12, num_kv_heads=12)
    text = own.replace(component="text_encoder", is_auxiliary=True, mask="bias", scale=1.0, head_dim=64)
    everything = frozenset(declared_backends())
    asked = {
        "capability": (text, "rtx4090", "sage", "text_encoder", None),
        "not_supported": (own, "h100", "flash2", "", everything - {"flash2"}),
        "unknown_name": (own, "h100", "flash33", "", None),
        "unavailable_package": (own, "a100", "flash2", "transformer.self", None),
        "unavailable_broken": (own, "mi300x-rocm7-flash2-broken", "flash2", "", None),
        "unavailable_hardware": (own, "mi300x-rocm7-aiter", "flash3", "", None),
    }
    found = {}
    for name, (need, machine, backend, names, supported) in asked.items():
        wish = BackendPreference(backend, "`--attention` flag", True, names)
        found[name] = _refusal(need, machine, wish, supported)
    found["nothing_supported"] = _refusal(own, "h100", None, frozenset())
    found["no_backend"] = _refusal(own, "h100", None, None, {})
    return found


def _refusal(
    need: AttentionRequirements,
    machine: str,
    wish: BackendPreference | None,
    supported: frozenset[str] | None,
    backends: Mapping[str, AttentionBackend] | None = None,
) -> str:
    try:
        build_plan(
            [LayerGroup(requirements=need, count=1, supported=supported)],
            load_machine(machine),
            [] if wish is None else [[wish]],
            declared_backends() if backends is None else backends,
        )
    except SelectionError as error:
        text = textwrap.fill(error.message, WIDTH, break_long_words=False, break_on_hyphens=False)
        return f"{type(error).__name__}, exit status {error.exit_status}\n\n{text}\n"
    raise AssertionError(f"{need} is served on {machine}")


def main() -> None:
    """Write every golden file."""
    files = {PLANS / f"{name}.txt": plan_text(name) for name in machine_names()}
    files |= {ERRORS / f"{name}.txt": text for name, text in errors().items()}
    for folder in (PLANS, ERRORS):
        folder.mkdir(exist_ok=True)
        for path in sorted(set(folder.iterdir()) - set(files)):
            print(f"removed {path.name}")
            path.unlink()
    for path, text in files.items():
        if not path.exists() or path.read_text() != text:
            print(f"wrote {path.name}")
            path.write_text(text)


if __name__ == "__main__":
    main()
