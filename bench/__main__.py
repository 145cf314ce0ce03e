"""`./dev bench [NAME ...]`: measure, side by side in one run on one PostgreSQL with fsync on.

The machine is shared and noisy: every comparison alternates its two sides over several rounds and reports
medians and the spread; read ratios under 1.3 as equal (BENCH.md of the design). Load is bounded in count.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psycopg
import uvloop
from rich.console import Console
from rich.progress import Progress

from app.embedded import EmbeddedPostgres
from app.storage.migrations import upgrade
from bench import admission, worker

Measure = Callable[[str, int], Awaitable[float]]


@dataclass(frozen=True)
class Comparison:
    """Two sides of one question; each measures operations per second over `count` operations."""

    question: str
    ours: Measure
    against: Measure
    count: int


COMPARISONS = {
    "admission": Comparison(
        "admission service, 32 callers / plain psycopg pool of 16, one INSERT each",
        admission.through_the_service,
        admission.plain_inserts,
        4000,
    ),
    "worker": Comparison(
        "one worker loop, trivial effect / its own statements in batches of 50",
        worker.through_the_loop,
        worker.bare_statements,
        3000,
    ),
}


def main(arguments: list[str]) -> int:
    """Entry; exit status 0, or 2 on wrong usage."""
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COMPARISONS))
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side (default 5)")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in COMPARISONS]
    if unknown:
        parser.error(f"there is no bench {unknown[0]}; there are {', '.join(COMPARISONS)}")
    with ExitStack() as stack:
        url = _server(stack)
        for name in given.names or COMPARISONS:
            _compare(url, name, COMPARISONS[name], given.rounds)
    return 0


def _server(stack: ExitStack) -> str:
    given = os.environ.get("FENCEPOST_DATABASE_URL") or os.environ.get("DATABASE_URL")
    if given:
        return given
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
    folder.chmod(0o755)
    server = EmbeddedPostgres.start(folder / "postgres")
    stack.callback(server.stop)
    return server.url


def _compare(url: str, name: str, comparison: Comparison, rounds: int) -> None:
    console = Console(stderr=True)
    ours: list[float] = []
    against: list[float] = []
    with Progress(console=console, transient=True) as progress:
        shown = progress.add_task(name, total=2 * rounds)
        for _ in range(rounds):
            for side, measure in ((ours, comparison.ours), (against, comparison.against)):
                with _database(url) as database_url:
                    side.append(uvloop.run(measure(database_url, comparison.count)))
                progress.advance(shown)
    spread = [f"{min(side):,.0f} to {max(side):,.0f}" for side in (ours, against)]
    print(f"{name}: {comparison.question}")
    print(f"  {median(ours):,.0f}/s ({spread[0]})  /  {median(against):,.0f}/s ({spread[1]})")
    print(f"  ratio of medians {median(ours) / median(against):.2f}")


class _database:
    """A fresh migrated database for one measurement, dropped afterwards."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._name = f"fencepost_bench_{os.getpid()}"

    def __enter__(self) -> str:
        with psycopg.connect(self._server_url, autocommit=True) as admin:
            admin.execute(f"DROP DATABASE IF EXISTS {self._name} WITH (FORCE)")
            admin.execute(f"CREATE DATABASE {self._name}")
        url = self._server_url.rpartition("/")[0] + f"/{self._name}"
        upgrade(url)
        return url

    def __exit__(self, *_error: object) -> None:
        with psycopg.connect(self._server_url, autocommit=True) as admin:
            admin.execute(f"DROP DATABASE IF EXISTS {self._name} WITH (FORCE)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
