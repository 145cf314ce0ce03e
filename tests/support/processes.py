"""Processes for tests: programs of their own, other users, sudden ends."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.embedded import EmbeddedPostgresError

CHECKOUT = Path(__file__).resolve().parents[2]
AS_ROOT = os.geteuid() == 0


@contextmanager
def python_programs() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python programs that can import the project, with their output to be read; kills what
    still runs at the end."""
    running: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        )
        running.append(process)
        return process

    try:
        yield start
    finally:
        for process in running:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def words(process: subprocess.Popen[str]) -> list[str]:
    """The words of a program's next line."""
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert line, "the program ended without a word"
    return line


def children(pid: int) -> list[int]:
    """The processes that `pid` started and that still run."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = each.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(each.parent.name))
    return found


@contextmanager
def bystander(
    user: int | None = None, group: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any of this."""
    with subprocess.Popen(["sleep", "60"], user=user, group=group) as process:
        try:
            yield process
        finally:
            process.kill()


def kill_all(postmaster: int) -> None:
    """Kill a server and all its processes at one moment, as far as there is one."""
    for pid in [postmaster, *children(postmaster)]:
        with suppress(ProcessLookupError):  # it saw the postmaster's end and left
            os.kill(pid, signal.SIGKILL)


def as_nobody(action: Callable[[], str]) -> str:
    """What `action` returns or the message it raises, in a process of the user `nobody`.

    A fork, since nobody may well be unable to start this Python or to read this checkout.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            nobody = pwd.getpwnam("nobody")
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            try:
                answer = action()
            except EmbeddedPostgresError as error:
                answer = f"refused: {error}"
            os.write(writer, json.dumps(answer).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, encoding="utf-8") as answers:
        text = answers.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "the process of the user nobody failed"
    answer = json.loads(text)
    assert isinstance(answer, str)
    return answer


def unprivileged(action: Callable[[], str]) -> str:
    """`as_nobody` for root; anyone else is unprivileged already."""
    if AS_ROOT:
        return as_nobody(action)
    try:
        return action()
    except EmbeddedPostgresError as error:
        return f"refused: {error}"
