"""The parent of `up`: restarts with pauses, last words, order of stopping. Children are real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.cli.failing import Refused
from app.cli.up import supervisor as module
from app.cli.up.folder import DataFolder, open_folder
from app.cli.up.processes import Child, Program, Stage, said
from app.cli.up.signals import Signals
from app.cli.up.supervisor import Supervisor
from tests.support.processes import CHECKOUT

_PATIENCE_SECONDS = 20.0


class Database:
    """Stands in for the store: remembers what was asked of it."""

    def __init__(self, folder: DataFolder) -> None:
        self.runs = True
        self.restarts = 0
        self._stops = folder.path / "order"

    def restart(self) -> None:
        self.restarts += 1
        self.runs = True

    def stop(self) -> None:
        with self._stops.open("a") as file:
            file.write("database\n")


class House:
    """A supervisor over children that are small programs."""

    def __init__(self, folder: DataFolder, signals: Signals, lifeline: int) -> None:
        self.folder = folder
        self.signals = signals
        self.database = Database(folder)
        self.children: list[Child] = []
        self._lifeline = lifeline

    def child(self, name: str, stage: Stage, program: str) -> Child:
        """A child that runs `program` where a real one would run a command of ours."""
        directory = self.folder.path / f"stub-{name}"
        (directory / "app/cli/up").mkdir(parents=True)
        (directory / "app/cli/up/child.py").write_text(program)
        environ = {**os.environ, "PYTHONPATH": str(directory), "NAME": name}
        environ["ORDER"] = str(self.folder.path / "order")
        made = Child(Program(name, (), stage), environ, self.folder, self._lifeline)
        self.children.append(made)
        return made

    def supervisor(self) -> Supervisor:
        database: Any = self.database
        return Supervisor(self.children, database, self.signals)

    def order(self) -> list[str]:
        """Who ended, in that order."""
        path = self.folder.path / "order"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, holds: Callable[[], object]) -> None:
        ends = time.monotonic() + _PATIENCE_SECONDS
        while not holds():
            assert time.monotonic() < ends
            time.sleep(0.02)


SERVES = """
import os, signal, sys
def leave(number, frame):
    with open(os.environ["ORDER"], "a") as file:
        file.write(os.environ["NAME"] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("serving", flush=True)
while True:
    signal.pause()
"""
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("serving", flush=True)
while True:
    signal.pause()
"""
CRASHES = 'import sys; print("all is lost", flush=True); sys.exit(7)'


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.chdir(tmp_path)  # `python -m` looks here first
    reader, writer = os.pipe()
    with Signals() as signals:
        made = House(open_folder(tmp_path / "d", {}), signals, reader)
        yield made
    for child in made.children:
        child.kill()
    os.close(reader)
    os.close(writer)


def serving(child: Child) -> Callable[[], bool]:
    return lambda: child.log.exists() and "serving" in child.log.read_text()


@contextmanager
def beside(action: Callable[[], None]) -> Iterator[None]:
    """Run `action` in a thread while the main thread supervises."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failure:
        raise failure[0]


def test_stages_end_in_order_and_the_database_last(house: House) -> None:
    for name, stage in (
        ("provider", Stage.PROVIDING),
        ("api", Stage.SERVING),
        ("worker", Stage.WORKING),
    ):
        house.child(name, stage, SERVES)
    parent = house.supervisor()
    parent.start([serving(child) for child in house.children])
    parent.stop()
    assert house.order() == ["api", "worker", "provider", "database"]
    assert not any(child.runs for child in house.children)


def test_a_child_that_does_not_come_up_stops_the_start(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    child = house.child("api", Stage.SERVING, CRASHES)
    with pytest.raises(Refused, match="api ended with status 7") as caught:
        house.supervisor().start([lambda: False])
    assert str(child.log) in str(caught.value)
    assert "all is lost" in capsys.readouterr().err


def test_a_start_that_takes_too_long(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READY_SECONDS", 0.2)
    house.child("api", Stage.SERVING, SERVES)
    with pytest.raises(Refused, match="Not ready"):
        house.supervisor().start([lambda: False])


def test_asked_to_stop_during_the_start(house: House) -> None:
    house.child("api", Stage.SERVING, SERVES)
    with beside(lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(KeyboardInterrupt):
        house.supervisor().start([lambda: False])


def test_what_crashes_is_started_again(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    child = house.child("worker", Stage.WORKING, SERVES)
    parent = house.supervisor()
    parent.start([serving(child)])
    first = child.pid
    assert first is not None

    def crash() -> None:
        os.kill(first, signal.SIGKILL)
        house.wait_for(lambda: child.pid not in (None, first))
        house.wait_for(lambda: child.log.read_text().count("serving") == 2)
        os.kill(os.getpid(), signal.SIGINT)

    with beside(crash):
        parent.watch()
    told = capsys.readouterr().err
    assert "worker was ended by SIGKILL unexpectedly; starting it again" in told
    assert "  serving" in told
    parent.stop()
    assert house.order() == ["worker", "database"]


def test_pauses_grow_and_are_never_under_a_second(house: House) -> None:
    child = house.child("worker", Stage.WORKING, CRASHES)
    pauses = []
    for _ in range(7):
        child.start()
        house.wait_for(lambda: not child.runs)
        assert child.ended() == 7
        assert child.ended() is None
        pauses.append(child.plan_restart())
    for pause, expected in zip(pauses, [1, 2, 4, 8, 16, 30, 30], strict=True):
        assert expected - 1 < pause <= expected


def test_a_healthy_while_starts_the_count_anew(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = house.child("worker", Stage.WORKING, CRASHES)
    child.start()
    assert child.plan_restart() > 0.5
    assert child.plan_restart() > 1.5
    monkeypatch.setattr("app.cli.up.processes._HEALTHY_SECONDS", 0.0)
    assert child.plan_restart() <= 1.0


def test_a_database_that_ends_is_started_again(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = house.supervisor()
    house.database.runs = False

    def stop() -> None:
        house.wait_for(lambda: house.database.restarts)
        os.kill(os.getpid(), signal.SIGTERM)

    with beside(stop):
        parent.watch()
    assert house.database.restarts == 1
    assert "PostgreSQL has ended" in capsys.readouterr().err


def test_what_does_not_drain_is_killed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STOP_SECONDS", 0.3)
    monkeypatch.setattr(
        module, "_PATIENCE", {Stage.SERVING: 0.1, Stage.WORKING: 0.3, Stage.PROVIDING: 0.1}
    )
    for name, stage in (("api", Stage.SERVING), ("worker", Stage.WORKING), ("p", Stage.PROVIDING)):
        house.child(name, stage, STUBBORN)
    parent = house.supervisor()
    parent.start([serving(child) for child in house.children])
    parent.stop()
    assert not any(child.runs for child in house.children)
    assert house.order() == ["database"]


def test_a_second_request_kills_at_once(house: House) -> None:
    house.child("api", Stage.SERVING, STUBBORN)
    house.child("worker", Stage.WORKING, STUBBORN)
    parent = house.supervisor()
    parent.start([serving(child) for child in house.children])
    os.kill(os.getpid(), signal.SIGINT)
    started = time.monotonic()
    with beside(lambda: os.kill(os.getpid(), signal.SIGINT)):
        parent.watch()
        parent.stop()
    assert time.monotonic() - started < 5.0
    assert not any(child.runs for child in house.children)
    assert house.order() == ["database"]


def test_signal_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        signals.wait(5.0)
        assert signals.asked == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("status", "text"),
    [(3, "ended with status 3"), (-9, "was ended by SIGKILL"), (-99, "was ended by signal 99")],
)
def test_statuses_in_words(status: int, text: str) -> None:
    assert said(status) == text


@pytest.mark.slow
def test_a_child_ends_with_its_parent() -> None:
    """Whatever becomes of the parent: the pipe it held comes to its end."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli.up.child", str(reader), "simulator", "--port", "0"],
        cwd=CHECKOUT,
        pass_fds=(reader,),
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"simulator listening")
            os.close(writer)
            assert process.wait(_PATIENCE_SECONDS) == 0
        finally:
            process.kill()
            os.close(reader)


@pytest.mark.slow
def test_a_child_that_hangs_ends_with_its_parent_too(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    program = (
        "import runpy, signal, sys\n"
        f"sys.argv = ['child', '{reader}', '--version']\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "import app.cli\n"
        "app.cli.main = lambda arguments: (print('up', flush=True), signal.pause())\n"
        "runpy.run_module('app.cli.up.child', run_name='__main__')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=CHECKOUT,
        pass_fds=(reader,),
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            os.close(writer)
            assert process.wait(_PATIENCE_SECONDS) == 1
        finally:
            process.kill()
            os.close(reader)
