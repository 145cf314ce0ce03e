"""The doctor: looks at everything a healthy installation needs, and says what to do about the rest.

Every check is a value; none changes anything. A check that cannot be made because an earlier one failed is
left out, so that one cause is told once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from app.domain.errors import ConfigurationError, StoreUnavailable
from app.domain.lifecycle import State
from app.domain.provider import ProviderAdapter
from app.domain.registry import Registry
from app.service import schema
from app.service.clock import elapsed
from app.settings import Settings
from app.storage import inspection, installation, reports
from app.storage.database import Database

OLDEST_SERVER = 15
CLOCK_SKEW_SECONDS = 1.0
OLD_SNAPSHOT_SECONDS = 60.0
OVERDUE_SECONDS = 60.0
"""Work that is due for longer has nobody who looks for it, or far too few."""

_PREFIX = "FENCEPOST_"


class Health(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was looked at, what was seen, what to do. `out_of_reach`: nobody answered."""

    name: str
    health: Health
    seen: str
    advice: str = ""
    out_of_reach: bool = False


def ok(name: str, seen: str) -> Check:
    """A check that found nothing wrong."""
    return Check(name, Health.OK, seen)


def warn(name: str, seen: str, advice: str) -> Check:
    """Something that works, and should be looked at."""
    return Check(name, Health.WARN, seen, advice)


def fail(name: str, seen: str, advice: str, *, out_of_reach: bool = False) -> Check:
    """Something that does not work."""
    return Check(name, Health.FAIL, seen, advice, out_of_reach)


def check_variables(environ: Mapping[str, str], known: Iterable[str]) -> list[Check]:
    """Variables that nothing reads (a misspelt setting is silent otherwise), and ones that contradict.

    `known`: the names that are read besides those of `Settings`, in upper case.
    """
    read = {f"{_PREFIX}{name.upper()}" for name in Settings.model_fields} | set(known)
    stray = sorted(
        name for name in environ if name.upper().startswith(_PREFIX) and name.upper() not in read
    )
    checks = []
    if stray:
        checks.append(
            warn(
                "variables",
                f"Nothing reads {', '.join(stray)}.",
                "Correct the spelling, or unset them.",
            )
        )
    ours, theirs = environ.get("FENCEPOST_DATABASE_URL"), environ.get("DATABASE_URL")
    if ours and theirs and ours != theirs:
        checks.append(
            warn(
                "variables",
                "FENCEPOST_DATABASE_URL and DATABASE_URL name two databases.",
                "The first one is used: unset one of them.",
            )
        )
    return checks or [ok("variables", "Every FENCEPOST_ variable is read.")]


async def check_database(
    database: Database, settings: Settings, registry: Registry | None
) -> list[Check]:
    """Reach, version, clock, schema, stamp and load of the database, as far as each can be told."""
    try:
        await schema.reach(database)
        await database.open()
        checks = await _server_checks(database)
        standing = await _schema_checks(database, settings)
        checks += standing
        if all(each.health is not Health.FAIL for each in standing):
            checks += await _load_checks(database, registry)
    except StoreUnavailable as error:
        return [
            fail(
                "database",
                f"It is out of reach: {' '.join(str(error).split())}.",
                "Start it, or correct DATABASE_URL.",
                out_of_reach=True,
            )
        ]
    except ConfigurationError as error:
        return [fail("database", str(error), "Correct DATABASE_URL.")]
    return checks


async def _server_checks(database: Database) -> list[Check]:
    asked = elapsed()
    sent_at = datetime.now(UTC)
    async with database.transaction() as tx:
        server = await inspection.server(tx)
    took = elapsed() - asked
    if server.version_number // 10_000 < OLDEST_SERVER:
        reached = fail(
            "database",
            f"PostgreSQL {server.version} answers.",
            f"Fencepost needs PostgreSQL {OLDEST_SERVER} or newer: upgrade the server.",
        )
    else:
        reached = ok("database", f"PostgreSQL {server.version} answers.")
    # The server read its clock at some moment of the exchange; half of it is the best guess.
    skew = (server.now - sent_at - timedelta(seconds=took / 2)).total_seconds()
    doubt = took / 2
    if abs(skew) - doubt <= CLOCK_SKEW_SECONDS:
        return [reached, ok("clock", f"This machine and the database differ by {skew:+.3f} s.")]
    return [
        reached,
        warn(
            "clock",
            f"The database's clock is {skew:+.1f} s off this machine's.",
            "Let both follow the same time server. Leases are safe, since the database's clock alone "
            "judges them; times in logs and `Retry-After` dates are not.",
        ),
    ]


async def _schema_checks(database: Database, settings: Settings) -> list[Check]:
    async with database.transaction() as tx:
        revision = await installation.revision(tx)
    trouble = schema.revision_trouble(revision)
    if trouble is not None:
        return [fail("schema", trouble.partition(":")[0] + ".", "Run `fencepost migrate`.")]
    checks = [ok("schema", f"At {revision}, as this program needs.")]
    standing = await schema.standing(database, settings.installation)
    if standing is None:
        checks.append(fail("stamp", "The database carries none.", "Run `fencepost migrate`."))
    elif standing.trouble is not None:
        checks.append(
            fail(
                "stamp",
                standing.trouble,
                "Nothing acts on this database until that is settled; `fencepost installation show`.",
            )
        )
    else:
        stamp = standing.stamp
        checks.append(ok("stamp", f"{stamp.stamp}, epoch {stamp.epoch}, on its own cluster."))
    return checks


async def _load_checks(database: Database, registry: Registry | None) -> list[Check]:
    async with database.transaction() as tx:
        snapshot = await reports.oldest_snapshot_seconds(tx)
        standings = await reports.standings(tx)
        known = [] if registry is None else registry.type_versions()
        unknown = await reports.unknown_types(tx, known) if known else []
    checks = []
    if snapshot > OLD_SNAPSHOT_SECONDS:
        checks.append(
            warn(
                "snapshots",
                f"A session has held a snapshot open for {snapshot:.0f} s.",
                "End it (pg_stat_activity, oldest xact_start): every claim walks the dead rows it keeps.",
            )
        )
    else:
        checks.append(ok("snapshots", f"The oldest is {snapshot:.0f} s old."))
    if unknown:
        named = ", ".join(f"{name} version {number} ({n})" for name, number, n in unknown)
        checks.append(
            warn(
                "types",
                f"Live operations of types that are not loaded here: {named}.",
                "They wait for a program that has them: deploy it, or load the plug-in.",
            )
        )
    return [*checks, *_work_checks(standings)]


def _work_checks(standings: Sequence[reports.Standing]) -> list[Check]:
    live = sum(each.operations for each in standings)
    overdue = max((each.oldest_due_seconds for each in standings), default=0.0)
    attention = sum(each.operations for each in standings if each.state is State.NEEDS_ATTENTION)
    checks = []
    if overdue > OVERDUE_SECONDS:
        checks.append(
            warn(
                "work",
                f"Something has been due for {overdue:.0f} s.",
                "Is a worker running, and a reconciler? Are there enough of them?",
            )
        )
    if attention:
        checks.append(
            warn(
                "work",
                f"{attention} operations need attention.",
                "Look at them: `fencepost ops list --state needs_attention`.",
            )
        )
    return checks or [ok("work", f"{live} live operations, none overdue.")]


async def check_providers(adapters: Mapping[str, ProviderAdapter]) -> list[Check]:
    """Whether each provider answers; asked all at once, none for longer than its own timeout allows."""
    names = sorted(adapters)
    answers = await asyncio.gather(
        *(_probe(adapters[name]) for name in names), return_exceptions=True
    )
    checks = []
    for name, answer in zip(names, answers, strict=True):
        if answer is None:
            checks.append(ok(f"provider {name}", "It answers."))
            continue
        said = answer if isinstance(answer, str) else f"Its probe failed: {type(answer).__name__}."
        checks.append(
            fail(
                f"provider {name}",
                said,
                f"Is it up, and does {_PREFIX}{name.upper().replace('.', '_')}_URL name it?",
                out_of_reach=True,
            )
        )
    return checks


async def _probe(adapter: ProviderAdapter) -> str | None:
    try:
        # A second over the adapter's own limit: it should say by itself what went wrong.
        async with asyncio.timeout(adapter.profile.timeout_seconds + 1.0):
            return await adapter.probe()
    except TimeoutError:
        return f"{adapter.profile.name} did not answer in time."
