"""The data folder of `fencepost up`: whose it is, where it lies, what may be deleted."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from app.cli.failing import Refused
from app.cli.up.folder import DataFolder, open_folder
from tests.cli.conftest import Run
from tests.support.processes import AS_ROOT, unprivileged


def test_a_new_folder_is_made_private(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "a" / "b", {})
    assert folder.path == tmp_path / "a" / "b"
    # Root's PostgreSQL runs as another user, who passes through; nobody may list it.
    assert folder.path.stat().st_mode & 0o777 == (0o711 if AS_ROOT else 0o700)
    assert folder.logs.stat().st_mode & 0o777 == 0o700
    assert open_folder(folder.path, {}).path == folder.path


@pytest.mark.parametrize("there", ["file", "foreign"])
def test_what_is_not_ours_is_refused(tmp_path: Path, there: str) -> None:
    path = tmp_path / "d"
    if there == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "mine").write_text("mine")
    with pytest.raises(Refused):
        open_folder(path, {})
    kept = path if there == "file" else path / "mine"
    assert kept.read_text() == "mine"


def test_an_unwritable_default_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import app

    checkout = tmp_path / "checkout"
    (checkout / "app").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    (checkout / ".fencepost").touch()  # in the way
    monkeypatch.setattr(app, "__file__", str(checkout / "app" / "__init__.py"))
    environ = {"HOME": str(tmp_path / "home"), "XDG_DATA_HOME": str(tmp_path / "share")}
    assert open_folder(None, environ).path == tmp_path / "share" / "fencepost"
    told = capsys.readouterr().err
    assert str(tmp_path / "share" / "fencepost") in told
    del environ["XDG_DATA_HOME"]
    assert open_folder(None, environ).path == tmp_path / "home" / ".local/share/fencepost"
    (checkout / ".fencepost").unlink()
    assert open_folder(None, environ).path == checkout / ".fencepost"
    assert capsys.readouterr().err.count("\n") == 1


def test_without_any_place_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import app.cli.up.folder as module

    blocked = tmp_path / "blocked"
    blocked.touch()
    monkeypatch.setattr(module, "_usual_places", lambda environ: iter([blocked]))
    with pytest.raises(Refused, match="--data"):
        open_folder(None, {})


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o711)
    if not AS_ROOT:
        tmp_path.chmod(0o555)

    def attempt() -> str:
        try:
            return str(open_folder(tmp_path / "d", {}).path)
        except Refused as error:
            return f"refused: {error}"

    assert unprivileged(attempt).startswith("refused: The folder ")


def test_one_at_a_time(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "d", {})
    with (
        folder.owned(),
        pytest.raises(Refused, match=f"process {os.getpid()}"),
        DataFolder(folder.path).owned(),
    ):
        pass
    with folder.owned():
        pass


def test_children_of_a_killed_parent_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = open_folder(tmp_path / "d", {})
    held = folder.presence()
    monkeypatch.setattr("app.cli.up.folder._LEFTOVER_SECONDS", 0.1)
    with pytest.raises(Refused, match="earlier start"), folder.owned():
        pass
    assert "Waiting" in capsys.readouterr().err
    os.close(held)
    with folder.owned():
        pass
    descriptor = os.open(folder.path / "owner", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nothing is held after all that
    os.close(descriptor)


def test_logs_are_rotated_once_per_start(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "d", {})
    folder.log("api").write_text("first")
    folder.log("api").write_text("second")
    assert not folder.log("api").exists()
    assert (folder.logs / "api.log.1").read_text() == "second"


def test_private_files(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "d", {})
    folder.write_private(folder.key, "a secret")
    folder.write_private(folder.key, "another")
    assert folder.key.read_text() == "another"
    assert folder.key.stat().st_mode & 0o777 == 0o600


def test_fresh_deletes_what_up_made_and_nothing_else(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "d", {})
    for name in ("dev-key", "env", "simulator.db", "simulator.db-wal", "mine", "logs/api.log"):
        (folder.path / name).write_text("x")
    assert folder.has_data
    with folder.owned():
        folder.empty()
    assert not folder.has_data
    left = {each.name for each in folder.path.iterdir()}
    assert left - {"postgres"} == {"FENCEPOST", "owner", "children", "mine", "logs"}
    assert list(folder.logs.iterdir()) == []


def test_fresh_without_a_terminal_needs_yes(bare: Run, tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "d", {})
    folder.key.write_text("kept")
    ran = bare("up", "--fresh", "--data", str(folder.path))
    assert (ran.status, ran.out) == (1, "")
    assert "--yes" in ran.err
    assert folder.key.read_text() == "kept"


def test_fresh_refuses_a_folder_that_is_not_ours(bare: Run, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    ran = bare("up", "--fresh", "--yes", "--data", str(tmp_path))
    assert (ran.status, ran.out) == (1, "")
    assert "not from `fencepost up`" in ran.err
    assert (tmp_path / "thesis.txt").read_text() == "years"


def test_production_is_refused(bare: Run, tmp_path: Path) -> None:
    ran = bare("up", "--data", str(tmp_path / "d"), FENCEPOST_ENVIRONMENT="production")
    assert (ran.status, ran.out) == (1, "")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("answer", [False, True])
def test_fresh_asks_in_a_terminal(
    bare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bool
) -> None:
    started: list[Path] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda text, err: answer)
    monkeypatch.setattr("app.cli.up.run.run", lambda folder, *_: started.append(folder.path))
    folder = open_folder(tmp_path / "d", {})
    folder.key.write_text("kept")
    ran = bare("up", "--fresh", "--data", str(folder.path))
    assert ran.status == (0 if answer else 1)
    assert folder.key.exists() is not answer
    assert started == ([folder.path] if answer else [])
