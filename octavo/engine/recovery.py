"""How often a scheduler may break, and what is left behind for whoever mends it.

Owns ``Recovery``: the count, the clock, and the folder of dumps. A dump is a file with the record
of the scheduler that broke; ``octavo sim --replay FILE`` asks a new scheduler the same. What can go
wrong with files is logged and harms nobody: a dump is for later, the requests are for now.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from octavo.base import handled
from octavo.engine.record import RECORD_BYTES, Recorder

MAX_FAILURES, WINDOW_SECONDS = 3, 60.0
"""An engine that breaks this often within this time has something that recovery does not heal."""

MAX_DUMPS = 8
"""Dumps that stay in a folder; the oldest go first."""

NAME = "octavo-dump-*.json.gz"

LOG = logging.getLogger(__name__)


class Recovery:
    """What an engine does about a scheduler that broke, beside making a new one.

    dumps: folder for dumps; None writes none. clock: seconds that only grow. record_bytes: most
    bytes kept of requests that have ended. count: recoveries so far.
    """

    def __init__(
        self,
        *,
        dumps: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        record_bytes: int = RECORD_BYTES,
    ) -> None:
        self.record_bytes, self.count = record_bytes, 0
        self._dumps, self._clock = dumps, clock
        self._times: deque[float] = deque(maxlen=MAX_FAILURES)

    def note(self, error: Exception, recorder: Recorder) -> bool:
        """A scheduler broke: log it, write a dump. False where it was once too often."""
        self._times.append(self._clock())
        often = len(self._times) == MAX_FAILURES
        last = often and self._times[-1] - self._times[0] <= WINDOW_SECONDS
        self.count += not last
        LOG.error(
            "the scheduler broke while it handled %s; %s; %s",
            handled(error) or "no request in particular",
            f"{MAX_FAILURES} times within {WINDOW_SECONDS:.0f} seconds, so the engine stops"
            if last
            else "all other requests are computed again",
            self._dump(error, recorder),
            exc_info=error,
        )
        return not last

    def _dump(self, error: Exception, recorder: Recorder) -> str:
        """Write a dump; returns what there is to say of it."""
        if self._dumps is None:
            return "no dump was asked for"
        try:
            record = recorder.record(error)
            if record is None:
                return "too much was going on for a dump"
            path = write_dump(self._dumps, json.dumps(record.as_json()))
        except Exception as failed:
            LOG.warning("no dump could be written", exc_info=failed)
            return "no dump could be written"
        return f"`octavo sim --replay {path}` shows it again"


def write_dump(folder: Path, text: str) -> Path:
    """A new file in ``folder``, for its owner's eyes only; the oldest beyond ``MAX_DUMPS`` go."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    path = folder / NAME.replace("*", f"{now}-{os.getpid()}")
    # Whole or not at all; and never readable by others, not even for a moment.
    draft = path.with_suffix(".part")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(gzip.compress(text.encode("ascii"), compresslevel=1))
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
    for old in sorted(folder.glob(NAME))[:-MAX_DUMPS]:
        with suppress(OSError):
            old.unlink()
    return path
