"""From files to a module: every tensor checked first, then mapped, cast and assigned, one at a time."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from safelight.errors import CheckpointError
from safelight.weights.files import WeightFiles, read_headers
from safelight.weights.header import same_bytes
from safelight.weights.match import Match, Placement, Slot, match_tensors

_SPELLING = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did.

    `num_tensors` counts the module's names, `memory_bytes` what they take, a tied tensor once. `skipped` are stored
    tensors that the module does without, `tied` the names that share one tensor, `dequantised` the float8 weights.
    """

    files: tuple[Path, ...]
    num_tensors: int
    memory_bytes: int
    skipped: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    dequantised: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load_module(
    module: nn.Module,
    files: WeightFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    keep_float32: Callable[[str], bool] | tuple[str, ...] = (),
    tied: tuple[tuple[str, ...], ...] = (),
    skip_prefixes: tuple[str, ...] = (),
    rename: Callable[[str], str] | None = None,
) -> LoadReport:
    """Fill a module that was built on the meta device; it ends in eval mode without gradients.

    Floats become `dtype`, or float32 where `keep_float32` says so: a predicate of the module's name, or patterns that
    match whole dotted parts ("norm2" matches "blocks.0.norm2.weight"). Integers stay as they are. `tied` groups are
    names that hold one tensor: any that is stored fills all, and several must be equal bit for bit; names that share
    a parameter in the module are tied by themselves. `skip_prefixes` and `rename` are of the files' names.
    Float8 weights are turned back with their scale, and refused without one.

    On the CPU a tensor that needs no cast is a view of the file's private mapping: nothing is copied, and the file's
    pages are read when first used. Don't overwrite the file in place while the module lives.

    For what no file holds, such as rotary tables, the method `init_buffers(device)` of every submodule that has one is
    called; it puts real buffers where the meta ones are. Raises CheckpointError, before anything is
    allocated, with every missing, unexpected, misshapen or unsupported tensor.
    """
    entries = read_headers(files)
    where = str(files.files[0]) if len(files.files) == 1 else f"{files.folder} ({len(files.files)} files)"
    matched = match_tensors(
        entries,
        _slots(module),
        described=f"{where} and {type(module).__name__}",
        tied=chain(tied, _shared_parameters(module)),
        skip_prefixes=skip_prefixes,
        rename=rename,
    )
    unequal = [
        f"{placement.key} and {copy}"
        for placement in matched.placements
        for copy in placement.copies
        if not same_bytes(entries[placement.key], entries[copy])
    ]
    if unequal:
        raise CheckpointError(f"{where}: tied tensors are stored with different values: {', '.join(unequal)}")
    keeps = keep_float32 if callable(keep_float32) else _matches_part(keep_float32)
    target = torch.device(device)
    with ExitStack() as stack:
        shards = {file: stack.enter_context(_opened(file)) for file in files.files}

        def stored(key: str) -> Tensor:
            tensor: Tensor = shards[entries[key].file].get_tensor(key)
            return tensor

        state: dict[str, Tensor] = {}
        for placement in matched.placements:
            kept = {keeps(name) for name in placement.names}
            assert len(kept) == 1, f"keep_float32 must say the same of tied names: {placement.names}"
            wanted = torch.float32 if kept == {True} else dtype
            state.update(dict.fromkeys(placement.names, _read(placement, stored, dtype=wanted, device=target)))
    _assign(module, state, target)
    return _report(files, matched, state)


def _slots(module: nn.Module) -> dict[str, Slot]:
    return {name: Slot(tuple(tensor.shape), _SPELLING[tensor.dtype]) for name, tensor in module.state_dict().items()}


def _shared_parameters(module: nn.Module) -> list[tuple[str, ...]]:
    """The groups of names under which the module holds one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _matches_part(patterns: Iterable[str]) -> Callable[[str], bool]:
    dotted = [f".{pattern}." for pattern in patterns]
    return lambda name: any(pattern in f".{name}." for pattern in dotted)


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:  # a dtype or a layout that its own reader doesn't take
        raise CheckpointError(f"{file}: bad header: {error}", path=str(file)) from error


def _read(placement: Placement, stored: Callable[[str], Tensor], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One tensor in its final dtype, on its device."""
    tensor = stored(placement.key)
    if placement.scale is not None:
        scale = stored(placement.scale).float()
        per_row = scale.reshape(-1, *[1] * (tensor.dim() - 1)) if scale.numel() > 1 else scale.reshape(())
        tensor = tensor.float() * per_row
    if not tensor.is_floating_point():
        dtype = tensor.dtype
    if tensor.data_ptr() % tensor.element_size():  # an odd header leaves a mapped tensor between two elements
        tensor = tensor.clone()
    return tensor.to(device=device, dtype=dtype)


def _assign(module: nn.Module, state: dict[str, Tensor], device: torch.device) -> None:
    """Put the tensors into the module, complete its buffers, and see that nothing is left on meta."""
    owners = dict(module.named_modules(remove_duplicate=False))
    are_parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    parameters: dict[int, nn.Parameter] = {}
    for name, tensor in state.items():
        owner, _, attribute = name.rpartition(".")
        if name in are_parameters and id(tensor) not in parameters:
            parameters[id(tensor)] = nn.Parameter(tensor, requires_grad=False)
        # Tied names share one Parameter, not only its values, so that they stay tied when the module is moved.
        setattr(owners[owner], attribute, parameters[id(tensor)] if name in are_parameters else tensor)
    for part in module.modules():
        init_buffers = getattr(part, "init_buffers", None)
        if init_buffers is not None:
            init_buffers(device)
    left = [name for name, tensor in _tensors(module) if tensor.is_meta]
    assert not left, f"{type(module).__name__}: still on meta after loading: {left}; init_buffers must make them"
    module.to(device)
    module.eval()


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _report(files: WeightFiles, matched: Match, state: dict[str, Tensor]) -> LoadReport:
    return LoadReport(
        files=files.files,
        num_tensors=len(state),
        memory_bytes=sum(state[placement.names[0]].nbytes for placement in matched.placements),
        skipped=matched.skipped,
        tied=tuple(placement.names for placement in matched.placements if len(placement.names) > 1),
        dequantised=tuple(placement.names[0] for placement in matched.placements if placement.scale is not None),
        notes=files.notes,
    )
