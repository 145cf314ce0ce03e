"""Every CHECK constraint is broken once, and alone: the database refuses what no code may write.

The cases are held against the tables' metadata: a new CHECK without a case fails here. DESIGN.md, 5;
CASES.md B08 c (a lease without an end), B12 (a row without its fingerprint).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql

from app.storage.tables import metadata
from tests.support.factories import query

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(seconds=1)
KEY: dict[str, Any] = {"bucket": 1, "operation_id": uuid4()}
STEP: dict[str, Any] = {"step": "send", "item": 0, "direction": "forward"}

ROWS: dict[str, dict[str, Any]] = {
    "operations": {
        "bucket": 1,
        "id": uuid4(),
        "tenant": "t",
        "type": "t",
        "type_version": 1,
        "key_digest": bytes(32),
        "fingerprint": bytes(32),
        "fingerprint_version": 1,
        "input": b"{}",
        "payload_format": 1,
        "priority": 2,
        "retention_seconds": 1.0,
        "tombstone_seconds": 1.0,
        "created_at": NOW,
    },
    "work": {
        **KEY,
        "tenant": "t",
        "type": "t",
        "type_version": 1,
        "actor": "worker",
        "state": "running",
        "priority": 2,
        "due_at": NOW,
        "lease_generation": 0,
        "claims": 0,
        "version": 1,
        "changed_at": NOW,
        "epoch": 1,
        "suspect": False,
    },
    "steps": {
        **KEY,
        **STEP,
        "provider": "p",
        "downstream_key": "k",
        "key_ordinal": 0,
        "request_method": "POST",
        "request_path": "/",
        "request_headers": "[]",
        "request_body": b"",
        "payload_format": 1,
        "first_began_at": NOW,
    },
    "attempts": {
        **KEY,
        **STEP,
        "id": uuid4(),
        "key_ordinal": 0,
        "generation": 1,
        "began_at": NOW,
        "send_by": LATER,
        "arrives_by": LATER,
        "settled_at": LATER,
    },
    "findings": {**KEY, **STEP, "id": uuid4(), "source": "lookup", "asked_at": NOW},
    "installation": {
        "stamp": "s",
        "system_identifier": 1,
        "timeline": 1,
        "epoch": 1,
        "created_at": NOW,
    },
    "providers": {
        "name": "p",
        "breaker_state": "closed",
        "breaker_changed_at": NOW,
        "failures": 0,
        "openings": 0,
    },
    "provider_shares": {"provider": "p", "holder": uuid4(), "share": 0, "expires_at": NOW},
    "api_keys": {
        "id": "i",
        "tenant": "t",
        "name": "n",
        "secret_digest": bytes(32),
        "scopes": ["s"],
        "created_at": NOW,
    },
}
"""One good row of each table that has CHECKs."""

DONE: dict[str, Any] = {
    "state": "succeeded",
    "completed_at": NOW,
    "idempotency_expires_at": NOW,
    "version": 1,
}
PURGED: dict[str, Any] = {**DONE, "purged_at": NOW, "input": None}

CASES: dict[str, list[dict[str, Any]]] = {
    "ck_operations_bucket": [{"bucket": -1}, {"bucket": 256}],
    "ck_operations_key_digest": [{"key_digest": bytes(31)}],
    "ck_operations_fingerprint": [{"fingerprint": b""}],
    "ck_operations_state_terminal": [{**DONE, "state": "running"}, {**DONE, "state": ""}],
    "ck_operations_done_has_time": [{**DONE, "completed_at": None}, {"completed_at": NOW}],
    "ck_operations_done_has_version": [{**DONE, "version": None}, {"version": 1}],
    "ck_operations_done_expires": [
        {**DONE, "idempotency_expires_at": None},
        {"idempotency_expires_at": NOW},
    ],
    "ck_operations_result_or_error": [{**DONE, "result": b"{}", "error": b"{}"}],
    "ck_operations_result_succeeded": [
        {**DONE, "state": "failed", "result": b"{}"},
        {"result": b"{}"},
    ],
    "ck_operations_error_done": [{"error": b"{}"}],
    "ck_operations_purged_done": [{"purged_at": NOW, "input": None}],
    "ck_operations_purged_stripped": [
        {**PURGED, "input": b"{}"},
        {**PURGED, "result": b"{}"},
        {**PURGED, "state": "failed", "error": b"{}"},
        {**PURGED, "answer": b"{}"},
        {**PURGED, "idempotency_key": "k"},
        {**PURGED, "metadata": "{}"},
    ],
    "ck_operations_kept_has_input": [{"input": None}, {**DONE, "input": None}],
    "ck_operations_finished_by_whole": [
        {**DONE, "finished_by_token": uuid4()},
        {**DONE, "finished_by_generation": 1},
    ],
    "ck_operations_priority": [{"priority": -1}, {"priority": 4}],
    "ck_work_state_live": [{"state": "succeeded"}, {"state": "leased"}],
    "ck_work_actor": [{"actor": "janitor"}],
    "ck_work_ending": [{"ending": "succeeded"}],
    "ck_work_stop_cause": [{"stop_cause": "whim"}],
    "ck_work_attention_has_reason": [
        {"state": "needs_attention", "actor": "reconciler"},
        {"attention": "why"},
    ],
    "ck_work_doubt_is_reconciled": [
        {"state": "uncertain"},
        {"state": "needs_attention", "attention": "why"},
    ],
    "ck_work_compensating_has_ending": [{"state": "compensating"}],
    "ck_work_lease_has_end": [{"lease_owner_token": uuid4()}, {"lease_expires_at": NOW}],
    "ck_work_counts": [{"lease_generation": -1}, {"claims": -1}, {"version": 0}],
    "ck_work_priority": [{"priority": -1}, {"priority": 4}],
    "ck_steps_direction": [{"direction": "sideways"}],
    "ck_steps_counts": [{"item": -1}, {"key_ordinal": -1}],
    "ck_steps_outcome": [{"outcome": "unknown"}],
    "ck_attempts_direction": [{"direction": "sideways"}],
    "ck_attempts_outcome": [{"outcome": "failed", "recorded_at": NOW}],
    "ck_attempts_recorded": [{"outcome": "unknown"}, {"recorded_at": NOW}],
    "ck_attempts_times": [
        {"send_by": NOW},
        {"arrives_by": NOW},
        {"settled_at": NOW},
    ],
    "ck_findings_direction": [{"direction": "sideways"}],
    "ck_findings_kind": [{"kind": "maybe", "found_at": NOW}],
    "ck_findings_found": [{"kind": "absent"}, {"found_at": NOW}],
    "ck_findings_source": [{"source": "rumour"}],
    "ck_findings_late_answer": [
        {"source": "late_answer"},
        {"attempt_id": uuid4(), "attempt_outcome": "unknown"},
        {"source": "late_answer", "attempt_id": uuid4()},
        {"attempt_outcome": "unknown"},
    ],
    "ck_installation_singleton": [{"singleton": False}],
    "ck_providers_breaker_state": [{"breaker_state": "ajar"}],
    "ck_provider_shares_share": [{"share": -1}],
    "ck_api_keys_secret_digest": [{"secret_digest": bytes(33)}],
}


def _checks() -> dict[str, str]:
    """Every CHECK there is, and its table."""
    return {
        str(constraint.name): table.name
        for table in metadata.tables.values()
        for constraint in table.constraints
        if isinstance(constraint, sa.CheckConstraint)
    }


CHECKS = _checks()


def _insert(connection: psycopg.Connection[Any], table: str, row: dict[str, Any]) -> None:
    statement = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, row)),
        sql.SQL(", ").join(sql.Placeholder() * len(row)),
    )
    connection.execute(statement, list(row.values()))


@pytest.fixture(scope="module")
def connection(postgres_server: Any, template_database: str) -> Any:
    """One database for all cases: nothing of them is ever committed."""
    with postgres_server.database("checks", template=template_database) as name:
        url = postgres_server.url_of(name)
        query(url, "INSERT INTO tenants VALUES ('t', now())")
        query(url, "DELETE FROM installation")
        with psycopg.connect(url, autocommit=True) as opened:
            yield opened


def test_every_check_has_a_case() -> None:
    assert set(CASES) == set(CHECKS)
    assert set(ROWS) == set(CHECKS.values())


def test_the_database_has_these_checks(connection: psycopg.Connection[Any]) -> None:
    """What was migrated is what the tables say (autogenerate does not compare CHECKs)."""
    rows = connection.execute(
        "SELECT conname FROM pg_constraint WHERE contype = 'c' AND connamespace = 'public'::regnamespace"
    ).fetchall()
    assert {name for (name,) in rows} == set(CHECKS)


@pytest.mark.parametrize("table", ROWS)
def test_a_good_row_is_taken(table: str, connection: psycopg.Connection[Any]) -> None:
    with connection.transaction(force_rollback=True):
        _insert(connection, table, ROWS[table])


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name, changes in CASES.items() for change in changes],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_bad_row_is_refused(
    name: str, change: dict[str, Any], connection: psycopg.Connection[Any]
) -> None:
    """By this very constraint, and by no other one: without it the row is taken."""
    table = CHECKS[name]
    row = {**ROWS[table], **change}
    with connection.transaction(force_rollback=True):
        with pytest.raises(psycopg.errors.CheckViolation) as refused, connection.transaction():
            _insert(connection, table, row)
        assert refused.value.diag.constraint_name == name
        drop = sql.SQL("ALTER TABLE {} DROP CONSTRAINT {}")
        connection.execute(drop.format(sql.Identifier(table), sql.Identifier(name)))
        _insert(connection, table, row)
