"""The database of `up`: the one that was given, else an embedded PostgreSQL in the data folder."""

from __future__ import annotations

import os
from collections.abc import Mapping

from app.cli.output import note
from app.cli.up.folder import DataFolder
from app.embedded import EmbeddedPostgres


class Store:
    """A running database. `embedded` None: it is somebody else's, and is never stopped."""

    def __init__(self, url: str, folder: DataFolder, embedded: EmbeddedPostgres | None) -> None:
        self.url = url
        self._folder = folder
        self._embedded = embedded

    @classmethod
    def open(cls, folder: DataFolder, environ: Mapping[str, str]) -> Store:
        """The database of the environment, else the folder's own, started or adopted.

        Raises:
            EmbeddedPostgresError: the embedded one cannot be had; says why.
        """
        given = environ.get("FENCEPOST_DATABASE_URL") or environ.get("DATABASE_URL")
        if given:
            return cls(given, folder, None)
        embedded = EmbeddedPostgres.start(folder.postgres, say=note)
        return cls(embedded.url, folder, embedded)

    @property
    def where(self) -> str:
        """The database in words, without its password."""
        if self._embedded is None:
            return "the one DATABASE_URL names"
        embedded = self._embedded
        return f"PostgreSQL {embedded.version} on 127.0.0.1:{embedded.port} (embedded)"

    @property
    def is_embedded(self) -> bool:
        """Whether `up` runs the server itself."""
        return self._embedded is not None

    @property
    def runs(self) -> bool:
        """Whether the embedded server's first process is alive; True for a database that was given."""
        if self._embedded is None:
            return True
        pid = self._embedded.pid
        try:
            # Asked without taking the answer, which is for the server's owner to take.
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # an adopted one
            return _exists(pid)

    def restart(self) -> None:
        """Start the embedded server again on its old port, where everybody looks for it.

        Raises:
            EmbeddedPostgresError: it does not start.
        """
        assert self._embedded is not None
        port = self._embedded.port
        self._embedded.stop()  # takes note of its end
        self._embedded = EmbeddedPostgres.start(self._folder.postgres, port=port, say=note)

    def stop(self) -> None:
        """Stop the embedded server."""
        if self._embedded is not None:
            self._embedded.stop()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
