"""The plans of every statement: made on empty tables, kept while they fill, made anew on full ones.

BENCH.md, traps 4, 5 and 7: a plan cached while a table was empty, or taken after an ANALYZE while idle, must
still go by key. The statements are found by walking `app.storage`; a new one that reads a whole table fails
here until it is named with a reason. Everything runs under the session options that `Database` sets.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import tuple_row

import app.storage
from app.domain.identity import new_id
from app.storage import claims
from app.storage.database import Database, Statement
from tests.support import postgres
from tests.support.factories import Leased, Sent, Told, insert, query

pytestmark = pytest.mark.slow

ROWS = 20_000
TABLES = ("operations", "work", "steps", "attempts", "findings")
FEW_BUFFERS = 150
"""What one item may touch: a few index descents per table, the rows, the indexes of what is written."""
UNBOUNDED = {
    "inspection.newest": "an operator's list over all tenants, which walks until its filters fit"
}
"""Statements that go by an index and may still touch a lot, and why."""

WHOLE_TABLE = {
    "claims.claimed_before": "after an unknown COMMIT only; a token has no index, and needs none",
    "reports.standings": "a report over all live operations, once per scrape",
    "reports.unknown_types": "a report over all live operations, once per scrape",
    "reports.overdue_doubt": "a report over all live operations, once per scrape",
    "inspection.newest_live": "an operator's list, without a tenant",
}
"""Statements that may read a whole table, and why."""


def _statements() -> dict[str, Statement]:
    found = {}
    for info in pkgutil.walk_packages(app.storage.__path__, "app.storage."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, Statement):
                found[value.name] = value
    return found


ALL = _statements()
_OURS = re.compile(rf"\b(?:{'|'.join(TABLES)})\b")
BY_KEY = sorted(
    name for name, one in ALL.items() if _OURS.search(one.sql) and name not in WHOLE_TABLE
)
_PARAMETER = re.compile(r"%\((\w+)\)s(?:::([A-Z ]+(?:\[\])?))?")


# -- arguments -------------------------------------------------------------------------------------------


class Target:
    """One operation that every statement is about: leased, with a step, an attempt and a finding."""

    def __init__(self, url: str) -> None:
        self.attempt, self.asked = Sent(step="send"), Told(None)
        self.row = insert(
            url, key="target", leased=Leased(), attempts=[self.attempt], findings=[self.asked]
        )

    def value(self, parameter: str, kind: str | None) -> object:
        """Something that fits a parameter, by what its name ends in, else by its type."""
        held = self.row.held
        by_name: dict[str, object] = {
            "bucket": held.operation.bucket,
            "operation_id": held.operation.uuid,
            "id": held.operation.uuid,
            "owner_token": held.owner_token,
            "generation": held.generation,
            "attempt_id": self.attempt.id,
            "finding_id": self.asked.id,
            "key_digest": self.row.scope.key.digest,
            "fingerprint": self.row.scope.key.digest,
            "tenant": self.row.scope.tenant,
            "type": self.row.scope.type,
            "step": "send",
            "direction": "forward",
            "state": "succeeded",
            "actor": "worker",
            "new_actor": "worker",
            "new_state": "running",
            "outcome": "succeeded",
            "kind": "absent",
            "basis": "first",
            "metadata": "{}",
            "semantic_headers": "{}",
            "headers": "[]",
            "detail": "{}",
            "attention": None,
            "new_attention": None,
            "ending": None,
            "note_stop": None,
            "abandoned_seconds": None,
            "error": None,
            "result": b"{}",
            "input": b"{}",
            "priority": 0,
            "limit": 10,
            "type_version": 1,
            "lease_seconds": 30.0,
        }
        name = parameter
        while name not in by_name and "_" in name:
            name = name.partition("_")[2]
        plain = (kind or "").removesuffix("[]")
        value = by_name.get(name, _by_type(plain))
        return [value] if kind is not None and kind.endswith("[]") else value


def _by_type(kind: str) -> object:
    if kind in ("TEXT", "VARCHAR"):
        return "x"
    if kind == "UUID":
        return uuid4()
    if kind in ("BYTEA",):
        return b"x"
    if kind == "BOOLEAN":
        return False
    if kind.startswith("TIMESTAMP"):
        return datetime.now(UTC)
    return 1 if kind else 1.0


def arguments(statement: Statement, target: Target) -> dict[str, object]:
    """All arguments of one run; what differs between a statement and its like is put right here."""
    given = {
        name: target.value(name, kind or None)
        for name, kind in _PARAMETER.findall(statement.sql)
        if statement.parameters({})[name] is None
    }
    special: dict[str, dict[str, object]] = {
        "leases.release": {"l_state": ["running"]},
        "operations.admit": {
            "n_id": [new_id()],
            "n_key_digest": [bytes(31) + b"n"],
            "n_deadline": [None],
        },
        "steps.insert": {"b_step": ["new"]},
        "steps.insert_attempts": {"b_attempt_id": [new_id()], "b_basis": ["key"]},
        "findings.ask": {"f_finding_id": [new_id()]},
        "attempts.insert_late": {"a_finding_id": [new_id()], "a_kind": ["applied"]},
        "cancellation.cancel_at_once": {"error": b"{}"},
        "resolution.add_evidence": {"id": new_id()},
        "resolution.go_on": {"restarts_horizon": True},
    }
    return statement.parameters({**given, **special.get(statement.name, {})})


# -- databases -------------------------------------------------------------------------------------------


def _load(url: str) -> None:
    """Twenty thousand live operations, each with a step, an attempt and a finding; a quarter is leased."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE TEMP TABLE made AS SELECT n, (n %% 256)::smallint AS bucket, gen_random_uuid() AS id,"
            " sha256(n::text::bytea) AS digest, n %% 4 = 0 AS leased FROM generate_series(1, %s) AS n",
            [ROWS],
        )
        connection.execute(
            "INSERT INTO operations (bucket, id, tenant, type, type_version, key_digest, fingerprint,"
            " fingerprint_version, input, payload_format, metadata, semantic_headers, priority,"
            " retention_seconds, tombstone_seconds, created_at)"
            " SELECT bucket, id, 'tenant-' || n % 50, 'test.one', 1, digest, digest, 1, '{}', 1, '{}',"
            " '{}', 2, 60, 60, now() - n * interval '1 s' FROM made"
        )
        connection.execute(
            "INSERT INTO work (bucket, operation_id, tenant, type, type_version, actor, state, priority,"
            " due_at, lease_owner_token, lease_generation, lease_expires_at, claims, version, changed_at,"
            " epoch, suspect)"
            " SELECT bucket, id, 'tenant-' || n % 50, 'test.one', 1, 'worker', 'running', 2,"
            " now() + n * interval '1 s', CASE WHEN leased THEN gen_random_uuid() END, 1,"
            " CASE WHEN leased THEN now() + interval '1 h' END, 0, 1, now(), 1, false FROM made"
        )
        connection.execute(
            "INSERT INTO steps (bucket, operation_id, step, item, direction, provider, downstream_key,"
            " key_ordinal, request_method, request_path, request_headers, request_body, payload_format,"
            " first_began_at)"
            " SELECT bucket, id, 'send', 0, 'forward', 'test', 'k', 0, 'POST', '/', '[]', '', 1, now()"
            " FROM made"
        )
        connection.execute(
            "INSERT INTO attempts (bucket, operation_id, id, step, item, direction, key_ordinal,"
            " generation, began_at, send_by, arrives_by, settled_at)"
            " SELECT bucket, id, gen_random_uuid(), 'send', 0, 'forward', 0, 1, now(),"
            " now() + interval '1 s', now() + interval '1 s', now() + interval '1 s' FROM made"
        )
        connection.execute(
            "INSERT INTO findings (bucket, operation_id, id, step, item, direction, source, asked_at)"
            " SELECT bucket, id, gen_random_uuid(), 'send', 0, 'forward', 'lookup', now() FROM made"
        )


class Session:
    """A connection with the options of a `Database`, and every statement prepared on it by name."""

    def __init__(self, url: str) -> None:
        options = Database(url, application="plans")._connect_arguments()
        self.connection: psycopg.Connection[Any] = psycopg.connect(
            url, autocommit=True, **{**options, "row_factory": tuple_row, "prepare_threshold": None}
        )
        self._prepared: set[str] = set()

    def explain(self, name: str, given: dict[str, object], *, how: str, run: bool = False) -> Any:
        """The plan as JSON: `custom`, `generic`, or what the session's own mode has `cached` by now."""
        if how == "custom":
            text = self._render(ALL[name].sql, given)
        else:
            if how == "generic":
                self.connection.execute("SET plan_cache_mode = force_generic_plan")
            text = self._execute(name, given)
        options = "ANALYZE, BUFFERS, FORMAT JSON" if run else "FORMAT JSON"
        with self.connection.transaction(force_rollback=True):
            row = self.connection.execute(f"EXPLAIN ({options}) {text}".encode()).fetchone()
        assert row is not None
        return row[0][0]["Plan"]

    def execute(self, name: str, given: dict[str, object]) -> None:
        """Run it as prepared, and take back what it did."""
        text = self._execute(name, given)
        with self.connection.transaction(force_rollback=True):
            self.connection.execute(text.encode())

    def _execute(self, name: str, given: dict[str, object]) -> str:
        order = list(dict.fromkeys(found for found, _ in _PARAMETER.findall(ALL[name].sql)))
        if name not in self._prepared:
            numbered = _PARAMETER.sub(
                lambda found: (
                    f"${order.index(found[1]) + 1}" + (f"::{found[2]}" if found[2] else "")
                ),
                ALL[name].sql,
            ).replace("%%", "%")
            self.connection.execute(f'PREPARE "{name}" AS {numbered}'.encode())
            self._prepared.add(name)
        values = ", ".join(self._render("%s", [given[parameter]]) for parameter in order)
        return f'EXECUTE "{name}"' + (f" ({values})" if order else "")

    def _render(self, text: str, given: Any) -> str:
        return psycopg.ClientCursor(self.connection).mogrify(text, given)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for inner in plan.get("Plans", ()):
        yield from _nodes(inner)


def reads_by_key(plan: dict[str, Any]) -> None:
    """Fail where one of our tables, or one of their indexes, is read from end to end."""
    for node in _nodes(plan):
        relation = node.get("Relation Name") or node.get("Index Name", "")
        if not _OURS.search(relation.replace("_", " ")) or not node["Node Type"].endswith("Scan"):
            continue
        assert node["Node Type"] != "Seq Scan", node
        if node["Node Type"] != "Bitmap Heap Scan":
            assert node.get("Index Cond"), f"all of {node.get('Index Name')} is read: {node}"


def buffers(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@contextmanager
def _database(server: postgres.Server, template: str) -> Iterator[str]:
    with server.database("plans", template=template) as name:
        yield server.url_of(name)


@pytest.fixture(scope="module")
def empty(
    postgres_server: postgres.Server, template_database: str
) -> Iterator[tuple[Session, Target]]:
    """Tables that were never filled nor analysed. The target is gone again."""
    with _database(postgres_server, template_database) as url:
        target = Target(url)
        query(url, f"TRUNCATE {', '.join(TABLES)}")
        session = Session(url)
        yield session, target
        session.connection.close()


@pytest.fixture(scope="module")
def full(
    postgres_server: postgres.Server, template_database: str
) -> Iterator[tuple[Session, Target]]:
    """Full tables, analysed."""
    with _database(postgres_server, template_database) as url:
        target = Target(url)
        _load(url)
        query(url, f"ANALYZE {', '.join(TABLES)}")
        session = Session(url)
        yield session, target
        session.connection.close()


@pytest.fixture(scope="module")
def filled_since(
    postgres_server: postgres.Server, template_database: str
) -> Iterator[tuple[dict[str, Session], Target]]:
    """Plans cached while the tables were empty; the tables were filled since, and never analysed."""
    with _database(postgres_server, template_database) as url:
        for table in TABLES:  # an ANALYZE would throw the cached plans away
            query(url, f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        target = Target(url)
        sessions = {mode: Session(url) for mode in ("auto", "force_generic_plan")}
        for mode, session in sessions.items():
            session.connection.execute(f"SET plan_cache_mode = {mode}".encode())
            for name in BY_KEY:
                for _ in range(7):
                    session.execute(name, arguments(ALL[name], target))
        _load(url)
        yield sessions, target
        for session in sessions.values():
            session.connection.close()


# -- tests -----------------------------------------------------------------------------------------------


def test_the_list_of_exceptions_is_true(full: tuple[Session, Target]) -> None:
    """Each exists, and really may read a table from end to end: none stands there out of habit."""
    session, target = full
    assert set(WHOLE_TABLE) <= set(ALL)
    for name in WHOLE_TABLE:
        plan = session.explain(name, arguments(ALL[name], target), how="generic")
        with pytest.raises(AssertionError):
            reads_by_key(plan)


@pytest.mark.parametrize("how", ["generic", "custom"])
@pytest.mark.parametrize("name", BY_KEY)
def test_on_empty_tables(name: str, how: str, empty: tuple[Session, Target]) -> None:
    session, target = empty
    reads_by_key(session.explain(name, arguments(ALL[name], target), how=how))


@pytest.mark.parametrize("how", ["generic", "custom"])
@pytest.mark.parametrize("name", BY_KEY)
def test_on_full_tables(name: str, how: str, full: tuple[Session, Target]) -> None:
    session, target = full
    plan = session.explain(name, arguments(ALL[name], target), how=how, run=True)
    reads_by_key(plan)
    assert name in UNBOUNDED or buffers(plan) < FEW_BUFFERS


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
@pytest.mark.parametrize("name", BY_KEY)
def test_cached_while_the_tables_were_empty(
    name: str, mode: str, filled_since: tuple[dict[str, Session], Target]
) -> None:
    """BENCH.md, trap 7: as PostgreSQL would have it, and with the plan for any arguments, the worst case."""
    sessions, target = filled_since
    plan = sessions[mode].explain(name, arguments(ALL[name], target), how="cached", run=True)
    reads_by_key(plan)
    assert name in UNBOUNDED or buffers(plan) < FEW_BUFFERS


CLAIM = claims._CLAIM.name


@pytest.mark.parametrize("how", ["generic", "custom"])
def test_a_claim_does_not_read_what_waits(how: str, database_url: str) -> None:
    """Fifty thousand operations wait for a later day: a claim finds the due ones, and looks at no other."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO work (bucket, operation_id, tenant, type, type_version, actor, state, priority,"
            " due_at, lease_generation, claims, version, changed_at, epoch, suspect)"
            " SELECT (n % 256)::smallint, gen_random_uuid(), 't', 'test.one', 1, 'worker', 'pending',"
            " n % 4, now() + interval '1 h' + n * interval '1 s', 0, 0, 1, now(), 1, false"
            " FROM generate_series(1, 50000) AS n"
        )
        connection.execute("ANALYZE work")
    due = [insert(database_url, priority=priority) for priority in (0, 2, 3)]
    session = Session(database_url)
    given = claims._CLAIM.parameters(
        {
            "actor": "worker",
            "owner_token": UUID(int=1),
            "lease_seconds": 30.0,
            "limit": 100,
            "abandoned_seconds": None,
            "p_priority": [0, 1, 2, 3],
            "k_type": ["test.one"],
            "k_type_version": [1],
        }
    )
    plan = session.explain(CLAIM, given, how=how, run=True)
    assert plan["Actual Rows"] == len(due)
    assert "ix_work_due" in {node.get("Index Name") for node in _nodes(plan)}
    scans = [node for node in _nodes(plan) if node.get("Index Name") == "ix_work_due"]
    assert sum(node.get("Rows Removed by Filter", 0) for node in scans) == 0
    assert buffers(plan) < FEW_BUFFERS
    session.connection.close()
