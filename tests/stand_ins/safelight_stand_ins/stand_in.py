"""StandIn: a vendor's package for the length of a `with` block, and the machine on which it would be used."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from safelight.platforms import MachineFacts, PackageFacts, load_machine
from safelight_stand_ins.recorded import Call, Recorder


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """A vendor's package in one release.

    `name` tells it from others ("flash-attn 2.8.3"), `backend` is the one that calls it. `machine` is a described
    machine that would use it; there `packages`, by Safelight's keys, are what a probe would have found. `modules` gives
    the package's modules by dotted name, each with its attributes, whose functions come from the recorder it is given.
    `operators` are torch's own (aten) that have no implementation for the CPU, by name: they have one inside the block.
    """

    name: str
    backend: str
    machine: str
    modules: Callable[[Recorder], Mapping[str, Mapping[str, Any]]]
    packages: Mapping[str, PackageFacts]
    operators: Callable[[Recorder], Mapping[str, Callable[..., Any]]] | None = None

    def facts(self) -> MachineFacts:
        """The machine, with this package installed."""
        machine = load_machine(self.machine)
        return machine.replace(packages={**machine.packages, **self.packages})

    @contextmanager
    def installed(self) -> Iterator[list[Call]]:
        """Put the package's modules where an import finds them, and take them away again; gives the calls."""
        recorder = Recorder()
        modules = {name: _module(name, attributes) for name, attributes in self.modules(recorder).items()}
        for name in list(modules):
            while "." in name:
                child = name
                name = name.rpartition(".")[0]
                parent = modules.setdefault(name, _module(name, {}))
                setattr(parent, child.rpartition(".")[2], modules[child])
        before = {name: sys.modules.get(name) for name in modules}
        sys.modules.update(modules)
        library = nullcontext() if self.operators is None else torch.library._scoped_library("aten", "IMPL", "CPU")
        try:
            with library as operators:
                for name, function in ({} if self.operators is None else self.operators(recorder)).items():
                    operators.impl(name, function)
                yield recorder.calls
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module


def _module(name: str, attributes: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []  # every one may hold others
    vars(module).update(attributes)
    return module
