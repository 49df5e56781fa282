"""What every test gets: no network, no settings of whoever runs it, and the same examples every time."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

# Read by huggingface_hub when it is imported, so it can't wait for a fixture. Child processes inherit all of this.
os.environ["HF_HUB_OFFLINE"] = "1"
for name in [name for name in os.environ if name.startswith("SAFELIGHT_")]:
    del os.environ[name]

# A loaded machine is no failure, and a red test must be red again when somebody looks.
hypothesis.settings.register_profile("safelight", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("safelight")


@pytest.fixture(autouse=True, scope="session")
def own_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Look for configuration and caches in an empty folder instead of the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def _is_local(address: Any) -> bool:
    host = address[0] if isinstance(address, tuple) else None
    if host is None or host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that reaches for another machine."""
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

    def local_connect(self: socket.socket, address: Any) -> None:
        assert _is_local(address), f"a test reached for the network: {address}"
        connect(self, address)

    def local_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        assert _is_local((host,)), f"a test reached for the network: {host}"
        return getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", local_connect)
    monkeypatch.setattr(socket, "getaddrinfo", local_getaddrinfo)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of devices where there is none."""
    on_device = [item for item in items if item.get_closest_marker("device")]
    if not on_device:
        return
    import torch

    if not torch.accelerator.is_available():
        for item in on_device:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator, and this machine has none"))
