"""Comparing versions that may be missing or unreadable: what a declaration's `why_not` needs."""


def is_at_least(version: str | None, minimum: str) -> bool | None:
    """Whether a version is `minimum` or later; None where it isn't known or isn't a version."""
    from packaging.version import InvalidVersion, Version  # few machines need it

    try:
        return None if version is None else Version(version) >= Version(minimum)
    except InvalidVersion:
        return None
