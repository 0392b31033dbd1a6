"""What goes on beside the requests: the log becomes Parquet, and a worker ends with its parent."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from urank.errors import DataError
from urank.serve.segments import WAL, durable_folder

__all__ = ["Compaction", "check_log", "live_with"]

COMPACT_SECONDS = 30.0
LOOK_SECONDS = 1.0

logger = logging.getLogger("urank.serve")


def check_log(folder: Path) -> None:
    """Refuse a log that cannot be written, before anything is served."""
    try:
        durable_folder(folder / WAL)
        with tempfile.TemporaryFile(dir=folder / WAL):
            pass
    except OSError as error:
        raise DataError(f"the feedback log {folder} cannot be written: {error.strerror}") from error


async def live_with(parent: int) -> None:
    """End as after SIGTERM when the process that watches over this one is gone."""
    while os.getppid() == parent:
        await asyncio.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


class Compaction:
    """Turns what is due into Parquet now and then, in a process of its own, which takes no time from requests.

    Args:
        folder: of the feedback log.
        join_seconds: how long a write-ahead file waits for clicks.
    """

    def __init__(self, folder: Path, join_seconds: float) -> None:
        self.folder = folder
        self.join_seconds = join_seconds
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Go on until cancelled."""
        window = f"{self.join_seconds:g}"
        command = (sys.executable, "-m", "urank", "feedback", str(self.folder), "--window", window, "--quiet")
        while True:
            await asyncio.sleep(COMPACT_SECONDS)
            if not self.is_due():
                continue
            try:
                self._process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
                if await self._process.wait():
                    logger.warning("the feedback log was not turned into Parquet this time; the line above says why")
            except OSError as error:  # no memory, or too many processes; next time perhaps
                logger.warning("the feedback log was not turned into Parquet this time: %s", error.strerror)

    async def stop(self) -> None:
        """End the process, which may be ended at any time."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()

    def is_due(self) -> bool:
        """Whether nothing was written to some write-ahead file for as long as it waits for clicks."""
        before = time.time() - self.join_seconds
        with suppress(FileNotFoundError):  # another compaction has just removed it
            return any(path.stat().st_mtime <= before for path in (self.folder / WAL).glob("*.*"))
        return True
