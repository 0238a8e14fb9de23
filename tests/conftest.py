"""Settings of all tests: one torch thread per worker, since workers already use the cores, and a
state folder of their own.

Owns nothing else; fixtures live beside the tests that use them.
"""

from __future__ import annotations

import os

import pytest

# Before anything imports torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What engines leave behind where a test breaks them is nothing for the user's own folder."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
