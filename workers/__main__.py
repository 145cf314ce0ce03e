"""`python -m workers worker|reconciler [--once] [--concurrency N]`: one process each."""

from __future__ import annotations

import argparse
import os
import sys

import uvloop

from app.domain.errors import FencepostError, StoreUnavailable
from app.settings import load_settings
from workers.roles import ROLES, run_role


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 1 (refused), 2 (usage), 3 (database out of reach)."""
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    parser.add_argument("role", choices=sorted(ROLES))
    parser.add_argument("--once", action="store_true", help="make one pass and exit")
    parser.add_argument("--concurrency", type=int, help="operations carried at once")
    given = parser.parse_args(arguments)
    try:
        settings = load_settings()
        uvloop.run(
            run_role(
                given.role,
                settings,
                os.environ,
                once=given.once,
                concurrency=given.concurrency,
            )
        )
    except StoreUnavailable as error:
        sys.stderr.write(f"{error}\n")
        return 3
    except FencepostError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
