"""`python -m tests.support.schema_check`: do the migrations make the tables that the code declares?

Runs all migrations, then `alembic check`, on a database that exists only for this.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.postgres import server


def main() -> int:
    """The exit status of the first alembic command that fails, else 0."""
    with server() as running, running.database("schema") as name:
        environment = os.environ | {"DATABASE_URL": running.url_of(name)}
        for arguments in (["upgrade", "head"], ["check"]):
            command = [sys.executable, "-m", "alembic", *arguments]
            status = subprocess.run(command, env=environment, check=False).returncode
            if status:
                return status
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
