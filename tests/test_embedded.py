"""The embedded PostgreSQL, on real servers: started, adopted, killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from app import embedded_process
from app.embedded import EmbeddedPostgres, EmbeddedPostgresError, erase
from tests.support.postgres import ask
from tests.support.processes import (
    AS_ROOT,
    bystander,
    children,
    kill_all,
    python_programs,
    words,
)

# Starts a server in a process of its own, says which, and holds on to it.
OWNER = """
import sys, time
from pathlib import Path
from app.embedded import EmbeddedPostgres
server = EmbeddedPostgres.start(Path(sys.argv[1]))
print(server.pid, server.started, flush=True)
time.sleep(600)
"""
# The same, and commits one row after the other, naming each once it is committed.
WRITER = """
import sys
from pathlib import Path
import psycopg
from app.embedded import EmbeddedPostgres
server = EmbeddedPostgres.start(Path(sys.argv[1]))
print(server.pid, flush=True)
with psycopg.connect(server.url, autocommit=True) as connection:
    connection.execute("CREATE TABLE kept (n int PRIMARY KEY)")
    for n in range(1_000_000):
        connection.execute("INSERT INTO kept VALUES (%s)", [n])
        print(n, flush=True)
"""


@pytest.fixture
def python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python programs that can import the project."""
    with python_programs() as start:
        yield start


# --- start and stop -------------------------------------------------------------------------------


def test_first_start_and_the_next_one_keep_the_data(server_folder: Path) -> None:
    data = server_folder / "deep" / "data"
    said: list[str] = []
    with EmbeddedPostgres.start(data, say=said.append) as first:
        assert first.started
        assert re.fullmatch(
            r"postgresql://fencepost:[\w-]{40,}@127\.0\.0\.1:\d+/fencepost", first.url
        )
        assert re.fullmatch(r"\d+\.\d+", first.version)
        assert ask(first.url, "SELECT current_database()") == "fencepost"
        ask(first.url, "CREATE TABLE kept AS SELECT 42 AS n")
    assert said[-1] == f"Preparing PostgreSQL {first.version} in {data}."
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(first.url)

    with EmbeddedPostgres.start(data) as second:
        assert second.started
        assert ask(second.url, "SELECT n FROM kept") == 42
        second.stop()
        second.stop()  # once more does nothing


def test_the_cluster_is_as_promised(server_folder: Path) -> None:
    with EmbeddedPostgres.start(server_folder / "data") as server:
        settings = {
            "server_encoding": "UTF8",
            "lc_messages": "C",
            "fsync": "on",
            "synchronous_commit": "on",
            "full_page_writes": "on",
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "200",
            "TimeZone": "UTC",
        }
        for name, value in settings.items():
            assert ask(server.url, f"SELECT current_setting('{name}')") == value
        collation = "SELECT datcollate FROM pg_database WHERE datname = 'fencepost'"
        assert ask(server.url, collation) == "C"
        hashed = "SELECT rolpassword LIKE 'SCRAM-SHA-256$%' FROM pg_authid WHERE rolsuper"
        assert ask(server.url, hashed)
        # A session of its own: Ctrl-C in the owner's terminal does not reach it.
        assert os.getsid(server.pid) == server.pid


def test_nobody_gets_in_without_the_password(server_folder: Path) -> None:
    with EmbeddedPostgres.start(server_folder / "data", durable=False) as server:
        password = server.data_dir / "password"
        assert stat.S_IMODE(password.stat().st_mode) == 0o600
        assert stat.S_IMODE((server.data_dir / "pgdata").stat().st_mode) == 0o700
        wrong = server.url.replace(password.read_text().strip(), "guess")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(wrong)


def test_ends_with_connections_open(server_folder: Path) -> None:
    server = EmbeddedPostgres.start(server_folder / "data", durable=False)
    with server, closing(psycopg.connect(server.url)) as connection:
        connection.execute("SELECT 1")
        server.stop(timeout_seconds=20)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")


def test_an_interrupted_start_leaves_no_server(
    server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[subprocess.Popen[bytes]] = []

    def interrupted(process: subprocess.Popen[bytes], home: Path) -> bool:
        spawned.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded_process, "_becomes_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        EmbeddedPostgres.start(server_folder / "data", durable=False)
    assert spawned[0].poll() is not None


def test_not_durable_is_never_taken_for_durable(server_folder: Path) -> None:
    with EmbeddedPostgres.start(server_folder / "data", durable=False) as server:
        assert ask(server.url, "SELECT current_setting('fsync')") == "off"
        with pytest.raises(EmbeddedPostgresError, match="running without fsync"):
            EmbeddedPostgres.start(server_folder / "data")
        assert not EmbeddedPostgres.start(server_folder / "data", durable=False).started


def test_erase_stops_and_deletes(server_folder: Path) -> None:
    server = EmbeddedPostgres.start(server_folder / "data", durable=False)
    ask(server.url, "CREATE TABLE gone ()")
    erase(server_folder / "data")
    server.stop()
    assert [each.name for each in server.data_dir.iterdir()] == ["lock"]
    erase(server_folder / "data")
    with EmbeddedPostgres.start(server_folder / "data", durable=False) as fresh:
        assert ask(fresh.url, "SELECT to_regclass('gone')") is None


# --- ports ----------------------------------------------------------------------------------------


def test_a_given_port_is_used_and_a_taken_one_refused(server_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedPostgresError, match=f"Port {port} on 127.0.0.1 is taken"):
            EmbeddedPostgres.start(server_folder / "data", port=port, durable=False)
    with EmbeddedPostgres.start(server_folder / "data", port=port, durable=False) as server:
        assert server.port == port
        with pytest.raises(EmbeddedPostgresError, match="running already, on port"):
            EmbeddedPostgres.start(server_folder / "data", port=port - 1, durable=False)
    with pytest.raises(EmbeddedPostgresError, match="70000 is not a port"):
        EmbeddedPostgres.start(server_folder / "data", port=70000)


def test_a_free_port_that_is_snatched_is_replaced(
    server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        snatched = taken.getsockname()[1]
        free_port = embedded_process._free_port
        offered = iter([snatched])
        monkeypatch.setattr(
            embedded_process, "_free_port", lambda port: next(offered, None) or free_port(port)
        )
        with EmbeddedPostgres.start(server_folder / "data", durable=False) as server:
            assert server.port != snatched


# --- what survives --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_outlives_its_owner_and_is_adopted(
    server_folder: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    owner = python(OWNER, server_folder / "data")
    pid = int(words(owner)[0])
    owner.kill()
    owner.wait()
    with EmbeddedPostgres.start(server_folder / "data") as adopted:
        assert not adopted.started
        assert adopted.pid == pid
        assert ask(adopted.url, "SELECT current_setting('data_directory')") == str(
            adopted.data_dir / "pgdata"
        )
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(adopted.url)


@pytest.mark.slow
def test_killing_everything_loses_nothing_committed(
    server_folder: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    writer = python(WRITER, server_folder / "data")
    pid = int(words(writer)[0])
    committed = [int(words(writer)[0]) for _ in range(200)][-1]
    writer.kill()
    kill_all(pid)
    with EmbeddedPostgres.start(server_folder / "data") as again:
        assert again.started
        assert again.pid != pid
        assert ask(again.url, f"SELECT count(*) FROM kept WHERE n <= {committed}") == committed + 1


@pytest.mark.slow
def test_killing_only_the_postmaster(server_folder: Path) -> None:
    """The backends are still there when the next start comes."""
    with EmbeddedPostgres.start(server_folder / "data") as server:
        ask(server.url, "CREATE TABLE kept AS SELECT 42 AS n")
        os.kill(server.pid, signal.SIGKILL)
        with EmbeddedPostgres.start(server_folder / "data") as again:
            assert again.started
            assert ask(again.url, "SELECT n FROM kept") == 42


@pytest.mark.slow
def test_a_stale_pid_file_that_names_a_living_process(server_folder: Path) -> None:
    with EmbeddedPostgres.start(server_folder / "data") as server:
        ask(server.url, "CREATE TABLE kept AS SELECT 42 AS n")
        pgdata = server.data_dir / "pgdata"
        kill_all(server.pid)
        owner = pgdata.stat()
        # Of the server's own user: PostgreSQL alone would take it for a server and give up.
        with bystander(*((owner.st_uid, owner.st_gid) if AS_ROOT else ())) as stranger:
            pid_file = pgdata / "postmaster.pid"
            _, *rest = pid_file.read_text().splitlines(keepends=True)
            pid_file.write_text("".join([f"{stranger.pid}\n", *rest]))
            with EmbeddedPostgres.start(server_folder / "data") as again:
                assert again.started
                assert ask(again.url, "SELECT n FROM kept") == 42
            assert stranger.poll() is None


def test_no_stranger_is_ever_sent_a_signal(server_folder: Path) -> None:
    with bystander() as stranger:
        embedded_process.shut_down(server_folder, stranger.pid, None, timeout_seconds=1)
        assert stranger.poll() is None


@pytest.mark.slow
def test_a_half_finished_initdb_is_done_again(
    server_folder: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    data = server_folder / "data"
    owner = python(OWNER, data)
    while not (begun := [*data.glob("pgdata.new-*/PG_VERSION")]):
        assert owner.poll() is None
        time.sleep(0.002)
    initdb = children(owner.pid)
    owner.kill()
    for pid in initdb:
        kill_all(pid)
    assert begun[0].exists(), "initdb was faster than this test"
    assert not (data / "pgdata").exists()
    with EmbeddedPostgres.start(data) as server:
        assert server.started
        assert ask(server.url, "SELECT 1") == 1
        assert not [*data.glob("pgdata.new-*")]


@pytest.mark.slow
def test_of_two_starters_one_adopts(
    server_folder: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    owners = [python(OWNER, server_folder / "data") for _ in range(3)]
    answers = [words(owner) for owner in owners]
    assert len({pid for pid, _ in answers}) == 1
    assert sorted(started for _, started in answers) == ["False", "False", "True"]
