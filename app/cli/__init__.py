"""The command line: `fencepost COMMAND`, also `python -m app.cli COMMAND`.

Exit status 0, 1 (refused or not found), 2 (usage), 3 (database or provider out of reach). What a command
tells goes to stdout, errors go to stderr in one sentence. Commands import what they need when they run, so
that help and the small commands start at once.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (`arguments` None: the process's own) and return its exit status.

    Raises nothing but what ends a process: every error has become a status and a sentence.
    """
    from app.cli.application import build
    from app.cli.failing import run

    return run(build(), arguments)
