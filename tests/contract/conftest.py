"""The contract's counts, told at the end of every run: how many cases each backend ran, and how many it refuses."""

import pytest

COUNTS: "pytest.StashKey[list[str]]" = pytest.StashKey()


@pytest.fixture
def tell_count(pytestconfig: pytest.Config):
    """Adds a line to the counts."""
    return pytestconfig.stash.setdefault(COUNTS, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the counts."""
    if COUNTS in config.stash:
        terminalreporter.section("contract cases")
        for line in config.stash[COUNTS]:
            terminalreporter.write_line(line)
