"""Embedded PostgreSQL for `./dev up` and `./dev test`: start, adopt, stop.

The server lives in a session of its own, so Ctrl-C in a terminal does not reach it: its owner stops
it, after everything that uses it. Should the owner die, the server lives on, and the next start
on the same folder adopts it. It listens on 127.0.0.1 alone, without a Unix socket, and asks for a
password that only its owner can read.

Run as root, the server runs as an unprivileged user (see `app.embedded_host`). When that user
cannot reach the data folder, a place derived from the folder's path is used instead, and
`EmbeddedPostgres.data_dir` tells which. What lies in the folder is told in `app.embedded_data`.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from psycopg import sql

from app.embedded_data import (
    ROLE,
    cluster,
    data_major,
    delete,
    initialise,
    locked,
    os_errors,
    place,
    read_password,
)
from app.embedded_host import EmbeddedPostgresError, Say, find_binaries
from app.embedded_process import HOST, Postmaster, ends, interrupt, launch, running, shut_down

__all__ = ["DATABASE", "EmbeddedPostgres", "EmbeddedPostgresError", "erase"]

DATABASE = "fencepost"

_CONNECT_TIMEOUT_SECONDS = 10
_DYING_SECONDS = 5.0  # a killed process may still be seen for a moment, as if it lived
_SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "maintenance_work_mem": "64MB",
    "max_wal_size": "2GB",
    "jit": "off",
    "password_encryption": "scram-sha-256",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
    "cluster_name": "fencepost-embedded",
}
# Said aloud although they are the defaults: what these promise must not hang on a file's edit.
_DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
_FAST = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "128MB",
    "checkpoint_timeout": "30min",
}


@dataclass(frozen=True)
class _Answering:
    """A server that has answered; `durable` tells whether it keeps what it commits."""

    pid: int
    port: int
    version: str
    durable: bool


class EmbeddedPostgres:
    """One running server, made by `start`. As a context manager it stops the server at the end."""

    def __init__(
        self, home: Path, server: _Answering, process: subprocess.Popen[bytes] | None
    ) -> None:
        self._home = home
        self._server = server
        self._process = process

    @classmethod
    def start(
        cls,
        data_dir: Path,
        *,
        port: int | None = None,
        durable: bool = True,
        say: Say | None = None,
    ) -> EmbeddedPostgres:
        """A server for `data_dir`: the one still running there, else a new one.

        `port` is on 127.0.0.1, None picks a free one. `durable=False` is for tests: it is faster,
        and a crash of the machine loses data. `say` takes progress lines. Two starters at once are
        safe: one waits and adopts the other's server.

        Raises EmbeddedPostgresError: no binaries fit, the data is of another major version or
        cannot be written, the port is taken, initdb or the server fails.
        """
        say = say or _silent
        if port is not None and not 0 < port < 65536:
            raise EmbeddedPostgresError(f"{port} is not a port: it must lie in 1 to 65535.")
        with os_errors(data_dir):
            home, account = place(data_dir, say)
            with locked(home):
                found = _answering(home)
                if found is not None:
                    _check_adoptable(home, found, port, durable)
                    say(f"PostgreSQL {found.version} is running already (process {found.pid}).")
                    return cls(home, found, None)
                binaries = find_binaries(account, data_major(home), say)
                if not cluster(home).exists():
                    say(f"Preparing PostgreSQL {binaries.version} in {home}.")
                    initialise(home, account, binaries, durable)
                settings = _SETTINGS | (_DURABLE if durable else _FAST)
                postmaster, process = launch(home, account, binaries, port, settings)
                try:
                    return cls(home, _open_database(home, postmaster), process)
                except BaseException:
                    interrupt(process)
                    raise

    @property
    def url(self) -> str:
        """`postgresql://user:password@127.0.0.1:port/fencepost`; the user is a superuser."""
        password = read_password(self._home)
        return f"postgresql://{ROLE}:{password}@{HOST}:{self.port}/{DATABASE}"

    @property
    def started(self) -> bool:
        """True when this object started the server, False when it adopted a running one."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process id of the server's first process."""
        return self._server.pid

    @property
    def port(self) -> int:
        """The port on 127.0.0.1."""
        return self._server.port

    @property
    def version(self) -> str:
        """Such as `18.3`."""
        return self._server.version

    @property
    def data_dir(self) -> Path:
        """The folder in use; it differs from the one asked for when root's server could not reach
        that."""
        return self._home

    def stop(self, timeout_seconds: float = 30.0) -> None:
        """Stop the server, adopted or not: by a fast shutdown, which ends its connections, and by
        an immediate one should that take longer than `timeout_seconds`. Nothing committed is lost.
        Does nothing when the server has ended already.

        Raises EmbeddedPostgresError when it does not end even so.
        """
        if not self._home.exists():
            return
        with os_errors(self._home), locked(self._home):
            shut_down(self._home, self.pid, self._process, timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def erase(data_dir: Path, *, say: Say | None = None, timeout_seconds: float = 30.0) -> None:
    """Stop the server of `data_dir` if one runs and delete its data, wherever that was placed.

    Raises EmbeddedPostgresError when the server does not stop or the data cannot be deleted.
    """
    with os_errors(data_dir):
        home, _ = place(data_dir, say or _silent)
        with locked(home):
            found = running(home)
            if found is not None:
                shut_down(home, found.pid, None, timeout_seconds)
            delete(home)


def _answering(home: Path) -> _Answering | None:
    """The server that runs on the data in `home`, if one does and answers."""
    while (found := running(home)) is not None:
        try:
            return _open_database(home, found)
        except EmbeddedPostgresError:
            if not ends(home, found.pid, _DYING_SECONDS):
                raise
    return None


def _check_adoptable(home: Path, found: _Answering, port: int | None, durable: bool) -> None:
    if port is not None and port != found.port:
        raise EmbeddedPostgresError(
            f"The server for {home} is running already, on port {found.port} instead of {port}: "
            f"stop its process {found.pid} first."
        )
    if durable and not found.durable:
        raise EmbeddedPostgresError(
            f"The server for {home} is running without fsync, so it might lose what it accepted: "
            f"stop its process {found.pid} first."
        )


def _open_database(home: Path, postmaster: Postmaster) -> _Answering:
    """Prove that the server answers and is this folder's; make the database when it is absent."""
    try:
        with psycopg.connect(
            host=HOST,
            hostaddr=HOST,
            port=postmaster.port,
            user=ROLE,
            password=read_password(home),
            dbname="postgres",
            sslmode="disable",
            gssencmode="disable",
            connect_timeout=_CONNECT_TIMEOUT_SECONDS,
            autocommit=True,
        ) as connection:
            row = connection.execute(
                "SELECT current_setting('data_directory'), current_setting('server_version'),"
                " current_setting('fsync') = 'on',"
                " EXISTS (SELECT FROM pg_database WHERE datname = %s)",
                [DATABASE],
            ).fetchone()
            assert row is not None
            folder, version, keeps, exists = row
            if Path(folder) != cluster(home):
                raise EmbeddedPostgresError(
                    f"The server on port {postmaster.port} keeps its data in {folder} instead of "
                    f"{cluster(home)}."
                )
            if not exists:
                statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE))
                connection.execute(statement)
    except psycopg.Error as error:
        raise EmbeddedPostgresError(
            f"PostgreSQL (process {postmaster.pid}) for {home} takes no connections: {error}"
        ) from error
    return _Answering(postmaster.pid, postmaster.port, str(version).split(" ")[0], bool(keeps))


def _silent(line: str) -> None:
    del line
