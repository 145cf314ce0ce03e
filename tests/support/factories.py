"""Operations in any state, with times in the past: rows are aged, never waited for.

    row = insert(url, state=State.RUNNING, leased=Leased(expires_in=-60), attempts=[Sent()])

Everything is direct SQL, so that a test of a storage verb does not stand on that verb.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.types.json import Jsonb

from app.domain.identity import Direction, DownstreamKey, IdempotencyKey, OperationId, Scope, new_id
from app.domain.lifecycle import TERMINAL, Actor, Ending, State, StopCause
from app.domain.operation import Lease, Trust
from app.storage.tables import metadata

TENANT = "tenant"
TYPE = "test.one"
STEP = "send"
FAR = float("inf")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Leased:
    """A lease as the row has it; `expires_in` is negative where it has ended."""

    expires_in: float = 30.0
    generation: int = 1
    token: UUID = field(default_factory=uuid4)


@dataclass(frozen=True)
class Sent:
    """One attempt, begun `began_ago` seconds ago; its windows follow each other, in seconds."""

    step: str = STEP
    began_ago: float = 10.0
    window: float = 5.0
    in_transit: float = 5.0
    lag: float = 0.0
    outcome: str | None = None
    code: str | None = None
    final: bool = False
    burned: bool = False
    reference: str | None = None
    result: bytes | None = None
    generation: int = 1
    id: UUID = field(default_factory=new_id)


@dataclass(frozen=True)
class Told:
    """One finding; without a kind it is a look-up that never came back."""

    kind: str | None
    step: str = STEP
    source: str = "lookup"
    asked_ago: float = 5.0
    found_ago: float = 4.0
    attempt_id: UUID | None = None
    attempt_outcome: str | None = None
    reference: str | None = None
    id: UUID = field(default_factory=new_id)


@dataclass(frozen=True)
class Inserted:
    """What stands now. `lease` is the one that holds the row; None where it is free or done."""

    id: OperationId
    scope: Scope
    lease: Lease | None = None

    @property
    def held(self) -> Lease:
        """The lease, where there must be one."""
        assert self.lease is not None
        return self.lease


def lease_of(id: OperationId, leased: Leased, trusted_until: float = FAR) -> Lease:
    """A lease as its owner carries it."""
    return Lease(id, leased.token, leased.generation, Trust(trusted_until))


def query(url: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Run one statement and commit; its rows, where it has any."""
    with psycopg.connect(url) as connection:
        cursor = connection.execute(statement.encode(), parameters)
        return cursor.fetchall() if cursor.description else []


def insert(
    url: str,
    *,
    state: State = State.PENDING,
    key: str | None = None,
    tenant: str = TENANT,
    type: str = TYPE,
    type_version: int = 1,
    actor: Actor | None = None,
    ending: Ending | None = None,
    stop_cause: StopCause | None = None,
    attention: str | None = None,
    priority: int = 2,
    due_in: float = -1.0,
    deadline_in: float | None = None,
    created_ago: float = 60.0,
    leased: Leased | None = None,
    generation: int = 0,
    claims: int = 0,
    suspect: bool = False,
    input: bytes = b'{"amount":100}',
    provider: str = "test",
    resend_in: float | None = None,
    attempts: Sequence[Sent] = (),
    findings: Sequence[Told] = (),
    purged: bool = False,
) -> Inserted:
    """One operation with everything it has. In doubt it is the reconciler's, else the worker's."""
    scope = Scope(tenant, type, IdempotencyKey(key or f"key-{next(_numbers)}"))
    id = OperationId.new(scope.bucket)
    done = state in TERMINAL
    if actor is None:
        doubtful = state in (State.UNCERTAIN, State.NEEDS_ATTENTION)
        actor = Actor.RECONCILER if doubtful else Actor.WORKER
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO operations (bucket, id, tenant, type, type_version, key_digest,"
            " idempotency_key, fingerprint, fingerprint_version, input, payload_format, metadata,"
            " semantic_headers, deadline, priority, retention_seconds, tombstone_seconds, created_at,"
            " state, result, result_version, error, version, completed_at, idempotency_expires_at,"
            " purged_at)"
            " VALUES (%(bucket)s, %(id)s, %(tenant)s, %(type)s, %(type_version)s, %(digest)s,"
            " %(key)s, %(fingerprint)s, 1, %(input)s, 1, %(metadata)s, '{}',"
            " now() + %(deadline_in)s * interval '1 s', %(priority)s, 3600, 7200,"
            " now() - %(created_ago)s * interval '1 s', %(state)s, %(result)s, %(result_version)s,"
            " %(error)s, %(version)s, CASE WHEN %(done)s THEN now() END,"
            " CASE WHEN %(done)s THEN now() + interval '1 h' END, CASE WHEN %(purged)s THEN now() END)",
            {
                "bucket": id.bucket,
                "id": id.uuid,
                "tenant": tenant,
                "type": type,
                "type_version": type_version,
                "digest": scope.key.digest,
                "key": None if purged else scope.key.value,
                "fingerprint": scope.key.digest,
                "input": None if purged else input,
                "metadata": None if purged else Jsonb({}),
                "deadline_in": deadline_in,
                "priority": priority,
                "created_ago": created_ago,
                "state": state.value if done else None,
                "result": b"{}" if state is State.SUCCEEDED and not purged else None,
                "result_version": 1 if state is State.SUCCEEDED and not purged else None,
                "error": b"{}" if done and state is not State.SUCCEEDED and not purged else None,
                "version": 3 if done else None,
                "done": done,
                "purged": purged,
            },
        )
        if not done:
            connection.execute(
                "INSERT INTO work (bucket, operation_id, tenant, type, type_version, actor, state,"
                " ending, stop_cause, attention, priority, due_at, deadline, lease_owner_token,"
                " lease_generation, lease_expires_at, claims, version, changed_at, uncertain_since,"
                " epoch, suspect)"
                " VALUES (%(bucket)s, %(id)s, %(tenant)s, %(type)s, %(type_version)s, %(actor)s,"
                " %(state)s, %(ending)s, %(stop_cause)s, %(attention)s, %(priority)s,"
                " CASE WHEN %(due_in)s = 'infinity'::float8 THEN 'infinity'::timestamptz"
                "  ELSE now() + %(due_in)s * interval '1 s' END,"
                " now() + %(deadline_in)s * interval '1 s', %(token)s, %(generation)s,"
                " now() + %(expires_in)s * interval '1 s', %(claims)s, 1, now(),"
                " CASE WHEN %(doubtful)s THEN now() END, 1, %(suspect)s)",
                {
                    "bucket": id.bucket,
                    "id": id.uuid,
                    "tenant": tenant,
                    "type": type,
                    "type_version": type_version,
                    "actor": actor.value,
                    "state": state.value,
                    "ending": ending and ending.value,
                    "stop_cause": stop_cause and stop_cause.value,
                    "attention": attention
                    or ("no-evidence-possible" if state is State.NEEDS_ATTENTION else None),
                    "priority": priority,
                    "due_in": leased.expires_in if leased else due_in,
                    "deadline_in": deadline_in,
                    "token": leased and leased.token,
                    "generation": leased.generation if leased else generation,
                    "expires_in": leased and leased.expires_in,
                    "claims": claims,
                    "doubtful": state in (State.UNCERTAIN, State.NEEDS_ATTENTION),
                    "suspect": suspect,
                },
            )
        for step in dict.fromkeys(sent.step for sent in attempts):
            _insert_step(connection, id, scope, step, provider, resend_in)
        for sent in attempts:
            _insert_attempt(connection, id, sent)
        for told in findings:
            _insert_finding(connection, id, told)
    return Inserted(id, scope, lease_of(id, leased) if leased else None)


def _insert_step(
    connection: psycopg.Connection[Any],
    id: OperationId,
    scope: Scope,
    step: str,
    provider: str,
    resend_in: float | None,
) -> None:
    connection.execute(
        "INSERT INTO steps (bucket, operation_id, step, item, direction, provider, downstream_key,"
        " key_ordinal, request_method, request_path, request_headers, request_body, payload_format,"
        " first_began_at, resend_by)"
        " VALUES (%s, %s, %s, 0, 'forward', %s, %s, 0, 'POST', '/effects', '[]', %s, 1,"
        " now() - interval '10 s', now() + %s * interval '1 s')",
        [id.bucket, id.uuid, step, provider, key_of(scope, step).value, b"stored", resend_in],
    )


def key_of(scope: Scope, step: str = STEP, installation: str = "test") -> DownstreamKey:
    """The key that a step of this operation derives."""
    return DownstreamKey.derive(
        installation=installation,
        tenant=scope.tenant,
        type=scope.type,
        key_digest=scope.key.digest,
        step=step,
        item=0,
        direction=Direction.FORWARD,
    )


def _insert_attempt(connection: psycopg.Connection[Any], id: OperationId, sent: Sent) -> None:
    connection.execute(
        "INSERT INTO attempts (bucket, operation_id, id, step, item, direction, key_ordinal,"
        " generation, began_at, send_by, arrives_by, settled_at, outcome, recorded_at, code, final,"
        " burned, provider_reference, result)"
        " SELECT %(bucket)s, %(operation)s, %(id)s, %(step)s, 0, 'forward', 0, %(generation)s, began,"
        " began + %(window)s * interval '1 s', began + %(arrives)s * interval '1 s',"
        " began + %(settled)s * interval '1 s', %(outcome)s,"
        " CASE WHEN %(outcome)s::text IS NOT NULL THEN now() END, %(code)s, %(final)s, %(burned)s,"
        " %(reference)s, %(result)s"
        " FROM (SELECT now() - %(ago)s * interval '1 s') AS t (began)",
        {
            "bucket": id.bucket,
            "operation": id.uuid,
            "id": sent.id,
            "step": sent.step,
            "generation": sent.generation,
            "window": sent.window,
            "arrives": sent.window + sent.in_transit,
            "settled": sent.window + sent.in_transit + sent.lag,
            "outcome": sent.outcome,
            "code": sent.code,
            "final": sent.final,
            "burned": sent.burned,
            "reference": sent.reference,
            "result": sent.result,
            "ago": sent.began_ago,
        },
    )


def _insert_finding(connection: psycopg.Connection[Any], id: OperationId, told: Told) -> None:
    connection.execute(
        "INSERT INTO findings (bucket, operation_id, id, step, item, direction, source, generation,"
        " asked_at, kind, found_at, attempt_id, attempt_outcome, provider_reference)"
        " VALUES (%(bucket)s, %(operation)s, %(id)s, %(step)s, 0, 'forward', %(source)s, 1,"
        " now() - %(asked)s * interval '1 s', %(kind)s,"
        " CASE WHEN %(kind)s::text IS NOT NULL THEN now() - %(found)s * interval '1 s' END,"
        " %(attempt)s, %(attempt_outcome)s, %(reference)s)",
        {
            "bucket": id.bucket,
            "operation": id.uuid,
            "id": told.id,
            "step": told.step,
            "source": told.source,
            "asked": told.asked_ago,
            "found": told.found_ago,
            "kind": told.kind,
            "attempt": told.attempt_id,
            "attempt_outcome": told.attempt_outcome,
            "reference": told.reference,
        },
    )


def supersede(url: str, id: OperationId) -> Leased:
    """Let somebody else hold the operation: one generation on, another token."""
    token = uuid4()
    [(generation,)] = query(
        url,
        "UPDATE work SET lease_owner_token = %s, lease_generation = lease_generation + 1,"
        " lease_expires_at = now() + interval '30 s', due_at = now() + interval '30 s'"
        " WHERE operation_id = %s RETURNING lease_generation",
        token,
        id.uuid,
    )
    return Leased(generation=generation, token=token)


def age(url: str, seconds: float = 3600.0) -> None:
    """Move everything live into the past: leases end, what waits is due, what was sent is long sent."""
    with psycopg.connect(url) as connection:
        by = [seconds]
        connection.execute(
            "UPDATE work SET due_at = due_at - %s * interval '1 s',"
            " lease_expires_at = lease_expires_at - %s * interval '1 s'",
            by * 2,
        )
        connection.execute(
            "UPDATE attempts SET began_at = began_at - %s * interval '1 s',"
            " send_by = send_by - %s * interval '1 s', arrives_by = arrives_by - %s * interval '1 s',"
            " settled_at = settled_at - %s * interval '1 s'",
            by * 4,
        )
        connection.execute(
            "UPDATE steps SET first_began_at = first_began_at - %s * interval '1 s',"
            " resend_by = resend_by - %s * interval '1 s'",
            by * 2,
        )
        connection.execute(
            "UPDATE findings SET asked_at = asked_at - %s * interval '1 s',"
            " found_at = found_at - %s * interval '1 s'",
            by * 2,
        )
        connection.execute(
            "UPDATE operations SET created_at = created_at - %s * interval '1 s',"
            " deadline = deadline - %s * interval '1 s' WHERE state IS NULL",
            by * 2,
        )
        connection.execute("UPDATE work SET deadline = deadline - %s * interval '1 s'", by)


def end_leases(url: str) -> None:
    """Every lease is over, and what waits is due; nothing else is any older."""
    query(
        url,
        "UPDATE work SET due_at = least(due_at, now() - interval '1 s'),"
        " lease_expires_at = CASE WHEN lease_expires_at IS NOT NULL"
        "  THEN least(lease_expires_at, now() - interval '1 s') END",
    )


def snapshot(url: str) -> dict[str, list[str]]:
    """Every row of every table, as text."""
    with psycopg.connect(url) as connection:
        return {
            table.name: [
                text
                for (text,) in connection.execute(
                    f"SELECT t::text FROM {table.name} AS t ORDER BY 1".encode()
                )
            ]
            for table in metadata.sorted_tables
        }
