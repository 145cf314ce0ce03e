"""Running the command line in this process, as a script would see it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from app.cli import main

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, as JSON."""
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in an environment without any setting but those given by keyword."""
    for name in list(os.environ):
        if name.startswith("FENCEPOST_") or name == "DATABASE_URL":
            monkeypatch.delenv(name)

    def run(*arguments: str, **variables: str) -> Ran:
        capsys.readouterr()
        handlers = [(number, signal.getsignal(number)) for number in SIGNALS]
        try:
            with monkeypatch.context() as changed:
                for name, value in variables.items():
                    changed.setenv(name, value)
                status = main(arguments)
        finally:
            for number, handler in handlers:
                signal.signal(number, handler)
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return run


@pytest.fixture
def fencepost(bare: Run, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command on a fresh, migrated database."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    return bare
