"""The data folder of an embedded PostgreSQL: where it lies, its lock, its password, its cluster.

::

    pgdata/        the cluster (made as pgdata.new-*, then renamed: one that exists is whole)
    password       of the role, mode 0600, so that other local users cannot connect
    lock           held while a server is being started or stopped
    server.log     the server's own output; server.log.1 is that of the run before

The folder belongs to whoever calls, so that root never writes where another user could have put a
link; only `pgdata` and `password` belong to the account that the server runs as.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.embedded_host import (
    Account,
    Binaries,
    EmbeddedPostgresError,
    Say,
    enterable,
    root_base,
    service_account,
)

ROLE = "fencepost"

_LOCK_TIMEOUT_SECONDS = 120.0
_INITDB_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.02
_TAIL_LINES = 12


def cluster(home: Path) -> Path:
    """Where the cluster lies in the folder `home`."""
    return home / "pgdata"


def log_file(home: Path) -> Path:
    """Where the server's own output goes."""
    return home / "server.log"


@contextmanager
def os_errors(data_dir: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a sentence."""
    try:
        yield
    except PermissionError as error:
        raise EmbeddedPostgresError(
            f"The data folder {data_dir} cannot be used by this user: {error}."
        ) from error
    except OSError as error:
        raise EmbeddedPostgresError(
            f"The data folder {data_dir} cannot be used: {error}."
        ) from error


def place(data_dir: Path, say: Say) -> tuple[Path, Account | None]:
    """The folder to use for `data_dir`, made when absent, and the account to run as.

    It is `data_dir` itself unless root calls and the account cannot get there; then it is a folder
    derived from that path, the same every time.

    Raises EmbeddedPostgresError, or OSError when the folder cannot be made.
    """
    wanted = Path(os.path.realpath(data_dir))
    if os.geteuid() != 0:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        return wanted, None
    account = service_account(cluster(wanted))
    wanted.parent.mkdir(parents=True, exist_ok=True)
    if enterable(wanted.parent, account):
        return _entered(wanted, account), account
    if cluster(wanted).exists():
        raise EmbeddedPostgresError(
            f"There is data in {wanted}, but the user {account.name}, which it belongs to, may not "
            "enter a folder above it."
        )
    home = root_base() / f"data-{hashlib.sha256(os.fsencode(wanted)).hexdigest()[:16]}"
    say(f"The user {account.name} cannot reach {wanted}; the data is kept in {home}.")
    account = service_account(cluster(home))
    return _entered(home, account), account


def _entered(home: Path, account: Account) -> Path:
    """`home`, made when absent and opened for passing through when new or empty."""
    home.mkdir(exist_ok=True)
    if not any(home.iterdir()):
        home.chmod(0o711)
    elif not enterable(home, account):
        raise EmbeddedPostgresError(
            f"The folder {home} is in use, and the user {account.name} may not enter it: name "
            "another data folder."
        )
    return home


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Hold the folder's lock; it ends with the process that holds it, however that ends."""
    descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        give_up = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > give_up:
                raise EmbeddedPostgresError(
                    f"Another process has been starting or stopping the server for {home} for "
                    f"{_LOCK_TIMEOUT_SECONDS:.0f} s."
                )
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def data_major(home: Path) -> int | None:
    """The major version of the data in `home`; None when there is no data yet.

    Raises EmbeddedPostgresError when what is there is not a cluster.
    """
    if not cluster(home).exists():
        return None
    try:
        return int((cluster(home) / "PG_VERSION").read_text().strip().split(".")[0])
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise EmbeddedPostgresError(f"{cluster(home)} is not a PostgreSQL data folder.") from None


def initialise(home: Path, account: Account | None, binaries: Binaries, durable: bool) -> None:
    """Make the cluster. Killed half-way it leaves a folder that the next call throws away.

    Raises EmbeddedPostgresError with the tail of initdb's output when that fails.
    """
    for left_over in home.glob("pgdata.new-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    fresh = home / f"pgdata.new-{secrets.token_hex(4)}"  # a killed initdb's child may still write
    fresh.mkdir(mode=0o700)
    if account is not None:
        os.chown(fresh, account.uid, account.gid)
    _write_password(home, account)
    command = [
        str(binaries.folder / "initdb"),
        f"--pgdata={fresh}",
        f"--username={ROLE}",
        f"--pwfile={home / 'password'}",
        "--auth=scram-sha-256",
        "--encoding=UTF8",
        "--locale=C",
        "--data-checksums",
        "--no-instructions",
    ]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed program, no shell
            [*command, *([] if durable else ["--no-sync"])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=home,
            env=server_environment(),
            timeout=_INITDB_TIMEOUT_SECONDS,
            check=False,
            start_new_session=True,
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )
    except subprocess.TimeoutExpired as error:
        raise EmbeddedPostgresError(
            f"initdb did not end within {_INITDB_TIMEOUT_SECONDS:.0f} s in {home}."
        ) from error
    if done.returncode != 0:
        shutil.rmtree(fresh, ignore_errors=True)
        raise EmbeddedPostgresError(f"initdb failed in {home}:\n{tail(done.stdout)}")
    os.replace(fresh, cluster(home))
    _sync_folder(home)


def server_environment() -> dict[str, str]:
    """What server processes see of this process's environment: no PG* variable, no secret."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {"LC_ALL": "C"}


def tail(output: bytes) -> str:
    """The last lines of a program's output."""
    return "\n".join(output.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:])


def read_password(home: Path) -> str:
    """The role's password.

    Raises EmbeddedPostgresError when its file is gone.
    """
    try:
        return (home / "password").read_text().strip()
    except FileNotFoundError:
        raise EmbeddedPostgresError(
            f"The file {home / 'password'} is missing, and without it the data cannot be used."
        ) from None


def _write_password(home: Path, account: Account | None) -> None:
    aside = home / "password.new"
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
        if account is not None:
            os.fchown(descriptor, account.uid, account.gid)  # initdb reads it
        file.flush()
        os.fsync(descriptor)
    os.replace(aside, home / "password")
    _sync_folder(home)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(home: Path) -> None:
    """Delete the data of a server that has ended; the password last, as data without it is lost."""
    for folder in (*home.glob("pgdata.new-*"), cluster(home)):
        if folder.exists():
            shutil.rmtree(folder)
    for name in ("server.log", "server.log.1", "password"):
        (home / name).unlink(missing_ok=True)
