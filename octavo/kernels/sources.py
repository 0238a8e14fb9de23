"""Which sources compiled kernels belong to: a library made from others must not be called.

Owns ``digest``. Run by setup.py, where nothing is installed yet, so it imports the standard library
only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(folder: Path) -> str:
    """16 hexadecimal digits that follow from the names and contents of the C++ files in
    ``folder``.
    """
    made = hashlib.sha256()
    for path in sorted((*folder.glob("*.cpp"), *folder.glob("*.h"))):
        made.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return made.hexdigest()[:16]
