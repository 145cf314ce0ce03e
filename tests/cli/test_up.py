"""`fencepost up` as a person runs it: a real start on an empty folder, its curl, its ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from app.embedded import erase
from tests.cli.test_processes import free_port
from tests.support import postgres
from tests.support.processes import CHECKOUT, children

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_PATIENCE_SECONDS = 90.0


@dataclass
class Up:
    """One running `fencepost up`, and what its message says."""

    process: subprocess.Popen[str]
    data: Path
    text: str = ""
    pids: set[int] = field(default_factory=set)

    def read(self) -> None:
        """Wait for the whole message."""
        assert self.process.stdout is not None
        while "In another terminal:" not in self.text:
            line = self.process.stdout.readline()
            assert line, f"it ended: {self.process.communicate()[1]}"
            self.text += line
        self.pids = set(children(self.process.pid))

    def value(self, name: str) -> str:
        """The word beside a name in the message."""
        found = re.search(rf"^  {name} +(\S+)", self.text, re.MULTILINE)
        assert found is not None, self.text
        return found[1]

    @property
    def curls(self) -> list[list[str]]:
        """The words of each curl, as a shell would read them."""
        joined = self.text.replace("\\\n", " ")
        return [shlex.split(each) for each in re.findall(r"^  (curl .+)$", joined, re.MULTILINE)]

    def paste(self, number: int) -> Any:
        """Do what pasting that curl does; the JSON it answers."""
        words = self.curls[number]
        url = next(word for word in words if word.startswith("http"))
        headers = dict(
            words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H"
        )
        body = words[words.index("-d") + 1] if "-d" in words else None
        return request("POST" if body else "GET", url, headers, body)

    def pid_of(self, role: str) -> int:
        """The process id of a child, by its command."""
        for pid in children(self.process.pid):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if role.encode() in words:
                    return pid
        raise AssertionError(f"there is no {role}")

    def stop(self, number: signal.Signals = signal.SIGINT) -> str:
        """Ask it to stop and wait; what it said on stderr."""
        self.pids |= set(children(self.process.pid))
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=_PATIENCE_SECONDS)
        return err


def request(method: str, url: str, headers: dict[str, str], body: str | None = None) -> Any:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    try:
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status in (200, 202), text
        return json.loads(text)
    finally:
        connection.close()


@contextmanager
def up(data: Path, *arguments: str, **variables: str) -> Iterator[Up]:
    """Start it on a free port; what is left at the end is killed."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("FENCEPOST_") and name != "DATABASE_URL"
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "up", "--data", str(data), *arguments],
        cwd=CHECKOUT,
        env={**kept, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Up(process, data)
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture
def data() -> Iterator[Path]:
    with postgres.temporary_folder() as folder:
        yield folder / "data"
        erase(folder / "data" / "postgres")


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(holds: Any) -> None:
    ends = time.monotonic() + _PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def succeeded(running: Up) -> dict[str, Any]:
    """Poll as the second curl does, until the operation is done; the operation."""
    found: dict[str, Any] = {}

    def done() -> bool:
        (found["operation"],) = running.paste(1)["data"]
        return bool(found["operation"]["done"])

    wait_until(done)
    operation: dict[str, Any] = found["operation"]
    return operation


def test_first_start_curl_and_second_start(data: Path) -> None:
    """The curl reaches `succeeded`; Ctrl-C leaves no process; a second start knows key and operation."""
    port = str(free_port())
    with up(data, "--port", port) as running:
        running.read()
        assert running.value("API") == f"http://127.0.0.1:{port}"
        admitted = running.paste(0)
        assert admitted["done"] is False
        operation = succeeded(running)
        assert (operation["id"], operation["state"]) == (admitted["id"], "succeeded")
        assert running.paste(0)["id"] == admitted["id"]
        ledger = request("GET", f"{running.value('provider')}/_control/ledger", {})
        assert len(ledger["effects"]) == 1
        key = running.value("API key")
        assert (data / "dev-key").read_text() == f"{key}\n"
        assert (data / "dev-key").stat().st_mode & 0o777 == 0o600
        shown = subprocess.run(
            ["sh", "-c", f". {data}/env && fencepost ops show {admitted['id']} --json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(shown.stdout)["attempts"][0]["outcome"] == "succeeded"
        err = running.stop()
        assert running.process.returncode == 0, err
        assert err.endswith("Stopping.\nStopped.\n")
        assert "killed" not in err
        assert len(running.pids) >= 5  # simulator, API, worker, reconciler, PostgreSQL
        assert not any(alive(pid) for pid in running.pids)
    assert "password" not in (data / "logs" / "api.log").read_text()

    with up(data, "--port", port, "--workers", "2") as again:
        again.read()
        assert again.value("API key") == key
        headers = {"Authorization": f"Bearer {key}"}
        kept = request("GET", f"{again.value('API')}/v1/operations/{admitted['id']}", headers)
        assert kept["state"] == "succeeded"
        assert (data / "logs" / "api.log.1").exists()
        again.pid_of("worker")
        assert {each.name for each in (data / "logs").glob("worker-?.log")} == {
            "worker-1.log",
            "worker-2.log",
        }
        err = again.stop(signal.SIGTERM)
        assert again.process.returncode == 0, err
        assert not any(alive(pid) for pid in again.pids)


def test_killed_parent_and_the_next_start(data: Path) -> None:
    """kill -9 of the parent: the children end by themselves, and the next start goes on with everything."""
    with up(data, "--port", "0") as running:
        running.read()
        key = running.value("API key")
        server = int((data / "postgres" / "pgdata" / "postmaster.pid").read_text().split()[0])
        admitted = running.paste(0)
        running.process.kill()
        running.process.wait()
    with up(data, "--port", urlsplit(running.value("API")).netloc.rpartition(":")[2]) as again:
        again.read()
        assert not any(alive(pid) for pid in running.pids - {server})
        assert again.value("API key") == key
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{again.value('API')}/v1/operations/{admitted['id']}"
        wait_until(lambda: request("GET", url, headers)["done"])
        assert request("GET", url, headers)["state"] == "succeeded"
        again.stop()
        assert not alive(server)
        assert not any(alive(pid) for pid in again.pids)


def test_what_crashes_is_started_again_and_a_revoked_key_is_replaced(data: Path) -> None:
    with up(data, "--port", "0") as running:
        running.read()
        key = running.value("API key")
        for role in ("worker", "reconciler", "api", "simulator"):
            victim = running.pid_of(role)
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda gone=victim, role=role: _replaced(running, role, gone))
        server = int((data / "postgres" / "pgdata" / "postmaster.pid").read_text().split()[0])
        os.kill(server, signal.SIGQUIT)
        wait_until(lambda: _admits(running))
        assert succeeded(running)["state"] == "succeeded"
        subprocess.run(["sh", "-c", f". {data}/env && fencepost keys revoke {key}"], check=True)
        err = running.stop()
        assert running.process.returncode == 0, err
        assert err.count("was ended by SIGKILL unexpectedly") == 4
        assert "PostgreSQL has ended unexpectedly" in err
    with up(data, "--port", "0") as again:
        again.read()
        assert again.value("API key") != key
        assert again.paste(0)["type"] == "payments.charge"
        again.stop()


def _replaced(running: Up, role: str, gone: int) -> bool:
    with suppress(AssertionError):
        return running.pid_of(role) != gone
    return False


def _admits(running: Up) -> bool:
    with suppress(OSError, http.client.HTTPException, AssertionError):
        return bool(running.paste(0)["id"])
    return False


def test_only_one_at_a_time_and_interrupted_starts_leave_nothing(data: Path) -> None:
    with up(data, "--port", "0") as running:
        running.read()
        with up(data, "--port", "0") as second:
            _, err = second.process.communicate(timeout=_PATIENCE_SECONDS)
            assert second.process.returncode == 1
            assert f"process {running.process.pid}" in err
        running.stop()
    server = data / "postgres" / "pgdata" / "postmaster.pid"
    with up(data, "--port", "0") as interrupted:
        wait_until(server.exists)
        started = set(children(interrupted.process.pid))
        err = interrupted.stop(signal.SIGTERM)
        assert interrupted.process.returncode == 130
        assert "Traceback" not in err
    wait_until(lambda: not server.exists())
    assert not any(alive(pid) for pid in started)


def test_on_a_given_database_with_fresh_and_a_given_provider(data: Path, database_url: str) -> None:
    """DATABASE_URL is used and not stopped; --fresh leaves it alone; FENCEPOST_PAYMENTS_URL is kept."""
    with up(data, "--port", "0", DATABASE_URL=database_url) as running:
        running.read()
        assert not (data / "postgres").exists()
        assert running.paste(0)["id"]
        assert succeeded(running)["state"] == "succeeded"
        running.stop()
    assert postgres.ask(database_url, "SELECT state FROM operations") == "succeeded"
    with up(
        data, "--port", "0", "--fresh", "--yes",
        DATABASE_URL=database_url, FENCEPOST_PAYMENTS_URL="http://127.0.0.1:1",
    ) as again:  # fmt: skip
        again.read()
        assert not (data / "simulator.db").exists()
        assert again.value("provider") == "http://127.0.0.1:1"
        assert "_control" not in again.text
        again.stop()
    assert postgres.ask(database_url, "SELECT count(*) FROM api_keys") == 2
    assert postgres.ask(database_url, "SELECT count(*) FROM operations") == 1


def test_a_database_that_is_away_is_told_and_nothing_starts(data: Path) -> None:
    with up(
        data, "--port", "0", DATABASE_URL="postgresql://u:s3cret-word@127.0.0.1:1/x"
    ) as running:
        out, err = running.process.communicate(timeout=_PATIENCE_SECONDS)
    assert (running.process.returncode, out) == (3, "")
    assert "Connection refused" in err
    assert "s3cret" not in err
    assert list((data / "logs").iterdir()) == []
