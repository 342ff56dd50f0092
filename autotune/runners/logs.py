"""What the user's code prints, one file a job: numbered on from search to search, and the oldest dropped."""

from __future__ import annotations

import contextlib
from pathlib import Path

from autotune.errors import StudyError
from autotune.files import drop_oldest

KEPT_LOGS, KEPT_LOG_BYTES = 500, 64 * 2**20  # of one study's jobs: the oldest go


class Logs:
    """The folder of a runner's logs.

    Args:
        folder: is made by `open`.

    Attributes:
        imports: the file for what importing the user's module prints.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.imports = self.folder / "import.log"
        self._num = 0

    def open(self) -> None:
        """Make the folder. Raises StudyError where that cannot be done."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StudyError(
                f"the folder for logs {self.folder} cannot be created: {error.strerror}; run it in a folder that may be written to"
            ) from None
        # an earlier search's logs are still named in its outcomes
        self._num = max(map(_number, self._numbered()), default=-1) + 1

    def begin(self, job: str) -> Path:
        """An empty log for a job of that name. Raises OSError: a log that cannot be written is no fault of the job's config."""
        drop_oldest(self._numbered(), KEPT_LOGS, KEPT_LOG_BYTES)
        log = self.folder / f"{self._num:04d}-{job}.log"
        log.write_bytes(b"")
        self._num += 1
        return log

    def tidy(self) -> None:
        """Leave no import's log without content, and no folder without logs."""
        with contextlib.suppress(OSError):
            if not self.imports.stat().st_size:
                self.imports.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _numbered(self) -> list[Path]:
        """The logs of jobs, the newest first."""
        return sorted(self.folder.glob("[0-9]*-*.log"), key=_number, reverse=True)


def _number(log: Path) -> int:
    return int(log.name.partition("-")[0])
