"""The server process of an embedded PostgreSQL: finding it, starting it, ending it.

A process id alone proves nothing, since ids are used again. A postmaster is recognised by its
command line, which names the program and the data folder, and by its user; only such a process is
ever sent a signal. A server's own child is never mistaken for it: children rewrite theirs.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.embedded_data import cluster, log_file, server_environment, tail
from app.embedded_host import Account, Binaries, EmbeddedPostgresError

HOST = "127.0.0.1"

_START_TIMEOUT_SECONDS = 300.0  # replaying the log after a crash may take long
_ORPHANS_TIMEOUT_SECONDS = 30.0
_IMMEDIATE_STOP_TIMEOUT_SECONDS = 10.0
_POLL_SECONDS = 0.01
_PORT_TRIES = 5
_PID_FILE_STATUS_LINE = 7
_PID_FILE_PORT_LINE = 3


@dataclass(frozen=True)
class Postmaster:
    """A server's first process."""

    pid: int
    port: int


@dataclass(frozen=True)
class _PidFile:
    pid: int
    port: int
    ready: bool


def running(home: Path) -> Postmaster | None:
    """The server that runs on the data in `home`; one that is starting or stopping is waited for.

    Raises EmbeddedPostgresError when that takes too long.
    """
    give_up = time.monotonic() + _START_TIMEOUT_SECONDS
    while True:
        found = _pid_file(cluster(home))
        if found is None or not _is_postmaster(found.pid, cluster(home)):
            return None
        if found.ready:
            return Postmaster(found.pid, found.port)
        if time.monotonic() > give_up:
            raise EmbeddedPostgresError(
                f"Process {found.pid} has been starting or stopping the server for {home} for "
                f"{_START_TIMEOUT_SECONDS:.0f} s."
            )
        time.sleep(_POLL_SECONDS)


def launch(
    home: Path,
    account: Account | None,
    binaries: Binaries,
    port: int | None,
    settings: Mapping[str, str],
) -> tuple[Postmaster, subprocess.Popen[bytes]]:
    """Start a server and wait until it takes connections. The caller holds the folder's lock.

    Raises EmbeddedPostgresError: the port is taken, or the server fails (with its own words).
    """
    if log_file(home).exists():
        os.replace(log_file(home), log_file(home).with_suffix(".log.1"))
    orphans_until = time.monotonic() + _ORPHANS_TIMEOUT_SECONDS
    tries = 0
    while True:
        chosen = _free_port(port)
        process = _spawn(home, account, binaries, {**settings, "port": str(chosen)})
        try:
            if _becomes_ready(process, home):
                return Postmaster(process.pid, chosen), process
        except BaseException:  # Ctrl-C too: leave no server behind that nobody owns
            interrupt(process)
            raise
        output = tail(log_file(home).read_bytes())
        if "pre-existing shared memory block" in output and time.monotonic() < orphans_until:
            time.sleep(0.2)  # not every process of a killed server has noticed yet
        elif "Address already in use" in output and port is None and tries < _PORT_TRIES:
            tries += 1
        else:
            raise EmbeddedPostgresError(f"PostgreSQL did not start in {home}:\n{output}")


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """End a server of our own that is of no use."""
    process.send_signal(signal.SIGQUIT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_IMMEDIATE_STOP_TIMEOUT_SECONDS)


def shut_down(
    home: Path,
    pid: int,
    process: subprocess.Popen[bytes] | None,
    timeout_seconds: float,
) -> None:
    """End the server: a fast shutdown, after `timeout_seconds` an immediate one.

    Raises EmbeddedPostgresError when it does not end even so.
    """
    for kind, wait_seconds in (
        (signal.SIGINT, timeout_seconds),
        (signal.SIGQUIT, _IMMEDIATE_STOP_TIMEOUT_SECONDS),
    ):
        if not _is_postmaster(pid, cluster(home)):
            break
        with suppress(ProcessLookupError):
            os.kill(pid, kind)
        if ends(home, pid, wait_seconds):
            break
    else:
        raise EmbeddedPostgresError(f"PostgreSQL (process {pid}) for {home} does not stop.")
    if process is not None:
        process.wait()


def ends(home: Path, pid: int, wait_seconds: float) -> bool:
    """Whether the server for `home` is gone before `wait_seconds` are over."""
    give_up = time.monotonic() + wait_seconds
    while _is_postmaster(pid, cluster(home)):
        if time.monotonic() > give_up:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _spawn(
    home: Path, account: Account | None, binaries: Binaries, settings: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    command = [str(binaries.folder / "postgres"), "-D", str(cluster(home))]
    for name, value in settings.items():
        command += ["-c", f"{name}={value}"]
    environment = server_environment()
    stale = _pid_file(cluster(home))
    if stale is not None:
        # It names a process that is not this cluster's server. PostgreSQL would take any living
        # process of that id for one, except its grandparent's. It still checks by itself that
        # nothing is attached to the old server's shared memory, which deleting the file would
        # prevent.
        environment["PG_GRANDPARENT_PID"] = str(stale.pid)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
    log = os.open(log_file(home), flags, 0o600)
    try:
        return subprocess.Popen(  # noqa: S603 - a fixed program, no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home,
            env=environment,
            start_new_session=True,  # out of the reach of the terminal's Ctrl-C
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )
    finally:
        os.close(log)


def _becomes_ready(process: subprocess.Popen[bytes], home: Path) -> bool:
    """Wait for the server to say that it is ready; False when it ends instead."""
    give_up = time.monotonic() + _START_TIMEOUT_SECONDS
    while process.poll() is None:
        found = _pid_file(cluster(home))
        if found is not None and found.pid == process.pid and found.ready:
            return True
        if time.monotonic() > give_up:
            raise EmbeddedPostgresError(
                f"PostgreSQL was not ready within {_START_TIMEOUT_SECONDS:.0f} s in {home}:\n"
                f"{tail(log_file(home).read_bytes())}"
            )
        time.sleep(_POLL_SECONDS)
    return False


def _free_port(port: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port or 0))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise EmbeddedPostgresError(
                    f"Port {port} on {HOST} is taken by another program: name another one."
                ) from error
            raise EmbeddedPostgresError(f"Port {port} cannot be used: {error}.") from error
        chosen: int = probe.getsockname()[1]
        return chosen


def _pid_file(pgdata: Path) -> _PidFile | None:
    """What the cluster's pid file says, which may be out of date; None when it says nothing."""
    try:
        lines = (pgdata / "postmaster.pid").read_text().splitlines()
        pid, port = int(lines[0]), int(lines[_PID_FILE_PORT_LINE])
    except (FileNotFoundError, IndexError, ValueError):
        return None
    status = lines[_PID_FILE_STATUS_LINE] if len(lines) > _PID_FILE_STATUS_LINE else ""
    return _PidFile(pid, port, ready=status.strip() == "ready") if pid > 0 else None


def _is_postmaster(pid: int, pgdata: Path) -> bool:
    """Whether the process `pid` lives and is the first process of a server on `pgdata`."""
    command = _command_line(pid)
    return "postgres" in command and f"-D {pgdata} " in f"{command} "


def _command_line(pid: int) -> str:
    """The arguments of a process, a blank between; empty when it is gone (or waits for its parent
    to notice that it is)."""
    if Path("/proc/self/cmdline").exists():
        try:
            raw = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return ""
        return raw.replace(b"\0", b" ").decode(errors="replace").strip()
    answer = subprocess.run(  # noqa: S603 - a fixed program, no shell
        ["/bin/ps", "-ww", "-o", "command=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip()
