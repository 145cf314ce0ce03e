"""The data folder of `fencepost up`: which one, whose, and what lies in it.

::

    FENCEPOST      says that the folder is ours; nothing is ever deleted from a folder without it
    owner          held by the `up` that runs; `children` by its children, as long as one lives
    postgres/      the embedded PostgreSQL
    simulator.db   the simulated provider's ledger
    dev-key        the development API key, mode 0600
    env            what `. DIR/env` sets for other commands in another terminal, mode 0600
    logs/          one per process; NAME.log.1 is that of the start before
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import app
from app.cli.failing import Refused
from app.cli.output import note
from app.embedded import erase

_MARKER = "FENCEPOST"
_ABOUT = "A data folder of `fencepost up`, which may delete what it made in here (--fresh).\n"
_LEFTOVER_SECONDS = 15.0
_POLL_SECONDS = 0.05


class DataFolder:
    """One data folder of ours; make it with `open_folder`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.postgres = path / "postgres"
        self.ledger = path / "simulator.db"
        self.key = path / "dev-key"
        self.environment = path / "env"

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Be the only `up` on this folder, and wait for the last children of one that was killed.

        Raises:
            Refused: another one runs, or its children do not end.
        """
        descriptor = self._open("owner")
        try:
            if not _taken(descriptor, fcntl.LOCK_EX):
                pid = os.pread(descriptor, 20, 0).decode().strip() or "unknown"
                raise Refused(f"Another `fencepost up` (process {pid}) runs on {self.path}.")
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            self._await_leftovers()
            yield
        finally:
            os.close(descriptor)

    def _await_leftovers(self) -> None:
        descriptor = self._open("children")
        try:
            gives_up_at = time.monotonic() + _LEFTOVER_SECONDS
            told = False
            while not _taken(descriptor, fcntl.LOCK_EX):
                if not told:
                    note("Waiting for the processes of an earlier start to end.")
                told = True
                if time.monotonic() > gives_up_at:
                    raise Refused(f"Processes of an earlier start on {self.path} do not end.")
                time.sleep(_POLL_SECONDS)
        finally:
            os.close(descriptor)

    def presence(self) -> int:
        """A descriptor for a child to hold as long as it lives; the caller closes its own copy."""
        descriptor = self._open("children")
        if not _taken(descriptor, fcntl.LOCK_SH):
            os.close(descriptor)
            raise Refused(f"Another program holds {self.path / 'children'}.")
        return descriptor

    def _open(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        return os.open(self.path / name, flags, 0o600)

    def write_private(self, path: Path, text: str) -> None:
        """Write a file that only its owner may read, whole or not at all."""
        aside = path.with_name(f"{path.name}.new")
        aside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(aside, flags, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)

    def log(self, name: str) -> Path:
        """The log of the process `name`, empty; that of the start before is kept as `.log.1`."""
        path = self.logs / f"{name}.log"
        if path.exists():
            os.replace(path, path.with_name(f"{name}.log.1"))
        return path

    def empty(self) -> None:
        """Delete everything `up` ever made here. Call it while `owned`; stops a PostgreSQL left running."""
        erase(self.postgres, say=note)
        shutil.rmtree(self.postgres, ignore_errors=True)
        shutil.rmtree(self.logs, ignore_errors=True)
        for path in (self.key, self.environment, *self.path.glob(f"{self.ledger.name}*")):
            path.unlink(missing_ok=True)
        self.logs.mkdir(mode=0o700, exist_ok=True)

    @property
    def has_data(self) -> bool:
        """Whether an earlier start left anything here."""
        return self.postgres.exists() or self.key.exists() or self.ledger.exists()


def _taken(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_folder(given: Path | None, environ: Mapping[str, str]) -> DataFolder:
    """The folder asked for, else the first of the usual places that can be written; made when absent.

    Raises:
        Refused: it cannot be used, or holds something that is not ours.
    """
    if given is not None:
        return _made(Path(os.path.abspath(given.expanduser())))
    why = ""
    for candidate in _usual_places(environ):
        try:
            folder = _made(candidate)
        except Refused as error:
            why = why or str(error)
            continue
        if why:
            note(f"The data is kept in {folder.path}. ({why})")
        return folder
    raise Refused(f"No folder can be written for the data: name one with --data. ({why})")


def _usual_places(environ: Mapping[str, str]) -> Iterator[Path]:
    checkout = Path(app.__file__).resolve().parents[1]
    yield (checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()) / ".fencepost"
    home = environ.get("HOME", "")
    share = environ.get("XDG_DATA_HOME") or (f"{home}/.local/share" if home else "")
    if os.path.isabs(share):
        yield Path(share) / "fencepost"
    yield Path(tempfile.gettempdir()) / f"fencepost-{os.geteuid()}"


def _made(path: Path) -> DataFolder:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.stat().st_uid != os.geteuid():
            raise Refused(f"The folder {path} belongs to another user.")
        marker = path / _MARKER
        if not marker.exists():
            if any(path.iterdir()):
                raise Refused(f"{path} holds files that are not from `fencepost up`.")
            # Root's PostgreSQL runs as another user, who must be able to pass through.
            path.chmod(0o711 if os.geteuid() == 0 else 0o700)
            marker.write_text(_ABOUT)
        folder = DataFolder(path)
        folder.logs.mkdir(mode=0o700, exist_ok=True)
        if not os.access(folder.logs, os.W_OK) or not os.access(path, os.W_OK):
            raise Refused(f"The folder {path} cannot be written.")
    except OSError as error:
        raise Refused(f"The folder {path} cannot be used: {error.strerror}.") from None
    return folder
