"""`python -m app.cli.up.child FD COMMAND...`: a command that does not outlive the parent that started it.

FD is the reading end of a pipe whose other end the parent alone holds: nothing is ever written, so that it
comes to its end when the parent ends, for whatever reason.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

ORPHANED_SECONDS = 3.0
"""How long an orphan may take to stop cleanly: what it had begun is in the database, and leases end."""


def _watch(lifeline: int) -> None:
    while os.read(lifeline, 1):
        continue
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHANED_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_watch, args=(int(sys.argv[1]),), name="lifeline", daemon=True).start()
    from app.cli import main

    sys.exit(main(sys.argv[2:]))
