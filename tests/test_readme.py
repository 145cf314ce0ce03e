"""The README says what the code says: picture, settings, metrics, failpoints, types, curls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.readme import BLOCKS, README, made


def test_made_blocks_are_the_codes() -> None:
    """Every table and the picture are what `python -m tests.support.readme` makes of the code."""
    text = README.read_text()
    assert set(re.findall(r"<!-- made: (\w+) -->", text)) == set(BLOCKS)
    assert made(text) == text


@pytest.mark.parametrize("command", ["./dev up", "./dev test", "./dev check", "./dev bench"])
def test_commands_are_named(command: str) -> None:
    """The commands a new user needs stand in the README and exist in `dev`."""
    assert command in README.read_text()
    assert re.search(rf"^\s*{command.split()[1]}\b", (README.parent / "dev").read_text(), re.M)


def test_links_lead_somewhere() -> None:
    """Every relative link in the README points at a file that exists."""
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", README.read_text()):
        assert (Path(README.parent) / target).exists(), target
