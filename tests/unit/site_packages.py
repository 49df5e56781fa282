"""Distributions written into a folder of modules, as an installer leaves them."""

import base64
import hashlib


def install(site, name, version="1.0", *, files=(), entry_points="", metadata=None, record=True):
    """Install a distribution: its files ({path: text}), METADATA, RECORD with their hashes, and entry points."""
    files = dict(files)
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if metadata is not None:
        files[f"{info}/METADATA"] = metadata
    if entry_points:
        files[f"{info}/entry_points.txt"] = entry_points
    rows = []
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text, encoding="utf-8")
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text.encode())}\n")
    if record:
        (site / info / "RECORD").write_text("".join(rows) + f"{info}/RECORD,,\n", encoding="utf-8")
    return site / info
