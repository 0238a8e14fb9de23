"""Settings of all tests: one torch thread per worker, since workers already use the cores.

Owns nothing else; fixtures live beside the tests that use them.
"""

from __future__ import annotations

import os

# Before anything imports torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
