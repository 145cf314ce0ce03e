"""Which migrations there are beside the program."""

from __future__ import annotations

from pathlib import Path

from alembic.script import ScriptDirectory


def revisions() -> list[str]:
    """Every revision, oldest first."""
    scripts = ScriptDirectory(str(Path(__file__).resolve().parents[2] / "alembic"))
    return [each.revision for each in reversed(list(scripts.walk_revisions()))]
