"""`fencepost api`, `worker`, `reconciler`, `simulator`: real processes where it matters."""

from __future__ import annotations

import http.client
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from app.cli.failing import Refused
from app.cli.processes import check_port
from app.storage.migrations import head
from tests.cli.conftest import Run
from tests.cli.test_ops import admitted
from tests.support.postgres import ask
from tests.support.processes import CHECKOUT, children
from tests.support.recovery import environment
from tests.support.simulator import SimulatorThread

_PATIENCE_SECONDS = 40.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(environ: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command as a process, killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", *arguments],
        env=environ,
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            for pid in children(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.kill()


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def wait_until_ready(port: int, process: subprocess.Popen[str]) -> None:
    """Until /readyz says 200; the process must not end meanwhile."""
    ends = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < ends:
        assert process.poll() is None, process.communicate()[1]
        with suppress(OSError, http.client.HTTPException):
            if get(port, "/readyz")[0] == 200:
                return
        time.sleep(0.05)
    raise TimeoutError("the API did not become ready")


@pytest.fixture
def api_environment(database_url: str) -> dict[str, str]:
    return environment(database_url, "http://127.0.0.1:1")


@pytest.mark.parametrize("role", ["worker", "reconciler"])
def test_once_with_nothing_to_do(fencepost: Run, role: str) -> None:
    ran = fencepost(role, "--once", FENCEPOST_LOG_LEVEL="error")
    assert (ran.status, ran.out, ran.err) == (0, "", "")


def test_worker_once_does_what_is_due(fencepost: Run, database_url: str) -> None:
    admitted(database_url, key="k")
    with SimulatorThread() as simulator:
        ran = fencepost(
            "worker", "--once", "--concurrency", "3", FENCEPOST_PAYMENTS_URL=simulator.url
        )
        assert ran.status == 0
        assert len(simulator.effects()) == 1
    assert ask(database_url, "SELECT state FROM operations") == "succeeded"


@pytest.mark.parametrize("role", ["worker", "reconciler"])
def test_a_role_refuses_another_installations_database(fencepost: Run, role: str) -> None:
    ran = fencepost(role, FENCEPOST_INSTALLATION="another", FENCEPOST_LOG_LEVEL="error")
    assert ran.status == 1
    assert "another" in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("role", ["worker", "reconciler"])
def test_a_role_stops_cleanly(
    database_url: str, api_environment: dict[str, str], role: str, number: signal.Signals
) -> None:
    listens = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND query ~* '^listen'"
    )
    with running(api_environment, role) as process:
        ends = time.monotonic() + _PATIENCE_SECONDS
        while not ask(database_url, listens):
            assert process.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=_PATIENCE_SECONDS)
        assert process.returncode == 0
        assert '"stopped"' in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_role_asked_to_stop_while_it_waits_for_the_database(
    api_environment: dict[str, str], number: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(_PATIENCE_SECONDS)
        url = f"postgresql://u:p@127.0.0.1:{silent.getsockname()[1]}/d"
        with running({**api_environment, "DATABASE_URL": url}, "worker") as process:
            connection, _ = silent.accept()
            with connection:
                process.send_signal(number)
                _, err = process.communicate(timeout=_PATIENCE_SECONDS)
    assert (process.returncode, err) == (0, "")


@pytest.mark.slow
def test_api_serves_and_stops_cleanly(api_environment: dict[str, str]) -> None:
    port = free_port()
    with running(api_environment, "api", "--port", str(port)) as process:
        wait_until_ready(port, process)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/livez")
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.getheader("server") is None
        connection.close()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=_PATIENCE_SECONDS)
        assert process.returncode == 0, err
        assert "Traceback" not in err


@pytest.mark.slow
def test_api_in_two_processes_adds_up_its_metrics(
    api_environment: dict[str, str], tmp_path: Path
) -> None:
    port = free_port()
    environ = {**api_environment, "TMPDIR": str(tmp_path)}
    with running(environ, "api", "--port", str(port), "--processes", "2") as process:
        wait_until_ready(port, process)
        (folder,) = tmp_path.glob("fencepost-metrics-*")
        for _ in range(20):
            assert get(port, "/livez")[0] == 200
        status, text = get(port, "/metrics")
        assert status == 200
        counted = [line for line in text.splitlines() if 'route="/livez"' in line]
        assert [float(line.split()[-1]) for line in counted] == [20.0]
        assert list(folder.glob("*.db"))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=_PATIENCE_SECONDS)
        assert process.returncode == 0
    assert not folder.exists()


@pytest.mark.slow
def test_api_processes_end_with_the_one_that_started_them(
    api_environment: dict[str, str], tmp_path: Path
) -> None:
    port = free_port()
    environ = {**api_environment, "TMPDIR": str(tmp_path)}
    with running(environ, "api", "--port", str(port), "--processes", "2") as process:
        wait_until_ready(port, process)
        process.kill()
        process.wait()
        ends = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < ends:
            try:
                check_port("127.0.0.1", port)
                return
            except Refused:
                time.sleep(0.05)
        raise AssertionError("somebody still listens on the port")


@pytest.mark.slow
def test_services_whose_database_does_not_come(
    api_environment: dict[str, str],
) -> None:
    """They wait for it (half a minute), then say why in one sentence."""
    down = "postgresql://u:s3cret-word@127.0.0.1:1/d"
    environ = {
        **api_environment,
        "DATABASE_URL": down,
        "FENCEPOST_DATABASE_TIMEOUT_SECONDS": "1",
        "FENCEPOST_LOG_LEVEL": "error",
    }
    with (
        running(environ, "worker") as worker,
        running(environ, "api", "--port", str(free_port())) as api,
    ):
        for process in (worker, api):
            out, err = process.communicate(timeout=90)
            assert (process.returncode, out) == (3, "")
            assert err.count("\n") == 1, err
            assert "s3cret" not in err
            if process is worker:
                assert "Connection refused" in err


@pytest.mark.parametrize("command", ["api", "up"])
def test_a_taken_port_is_told_before_anything_starts(
    fencepost: Run, tmp_path: Path, command: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        data = ["--data", str(tmp_path / "d")] if command == "up" else []
        ran = fencepost(command, "--port", port, *data)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == f"Port {port} on 127.0.0.1 is taken by another program.\n"
    assert not list(tmp_path.glob("d/logs/*"))


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"FENCEPOST_INSTALLATION": "another"}, "another"),
        ({"FENCEPOST_PAYMENTS_URL": "nonsense"}, "FENCEPOST_PAYMENTS_URL"),
    ],
)
def test_api_refuses_what_it_may_not_serve(
    fencepost: Run, variables: dict[str, str], named: str
) -> None:
    ran = fencepost("api", "--port", str(free_port()), **variables)
    assert (ran.status, ran.out) == (1, "")
    assert named in ran.err
    assert ran.err.count("\n") == 1


def test_api_refuses_a_schema_of_another_release(fencepost: Run, database_url: str) -> None:
    ask(database_url, "UPDATE alembic_version SET version_num = '0000'")
    ran = fencepost("api", "--port", str(free_port()))
    assert ran.status == 1
    assert head() in ran.err


def test_api_runs_with_the_options_it_should(
    fencepost: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwarded headers are nobody's word, and every slow request gets its drain."""
    import uvicorn

    given: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: given.update(options, app=app))
    port = free_port()
    assert fencepost("api", "--port", str(port), FENCEPOST_DRAIN_SECONDS="7").status == 0
    assert given["app"] == "app.main:app"
    assert given["factory"] is True
    assert (given["proxy_headers"], given["server_header"], given["access_log"]) == (False,) * 3
    assert (given["host"], given["port"], given["workers"]) == ("127.0.0.1", port, 1)
    assert (given["loop"], given["http"]) == ("uvloop", "httptools")
    assert given["timeout_graceful_shutdown"] == 7
    assert "PROMETHEUS_MULTIPROC_DIR" not in os.environ


@pytest.mark.slow
def test_simulator_keeps_its_ledger_where_the_setting_says(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    environ = {**os.environ, "FENCEPOST_SIMULATOR_DATA": str(ledger)}
    with running(environ, "simulator", "--port", "0") as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], _PATIENCE_SECONDS)[0]
        assert process.stdout.readline().startswith("simulator listening on http://127.0.0.1:")
        assert ledger.exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(_PATIENCE_SECONDS) == 0


def test_simulator_that_cannot_start_is_status_3(bare: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = bare("simulator", "--port", str(taken.getsockname()[1]))
    assert ran.status == 3
    assert ran.err.count("\n") == 1


def test_the_default_provider_is_the_default_simulator() -> None:
    """A simulator and a worker, both started without options, find each other."""
    import inspect

    from app.cli.processes import simulator
    from app.providers.payments import PaymentsOptions

    port = inspect.signature(simulator).parameters["port"].default
    assert PaymentsOptions().url == f"http://127.0.0.1:{port}"
