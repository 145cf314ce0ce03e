"""The rows (DESIGN.md, 5). Every table of an operation begins its primary key with `bucket`.

CHECK constraints are made from `domain.lifecycle`, so a state exists here if and only if it exists there.
Text columns that are compared use the C collation: no locale may merge two keys (CASES.md B20).
"""

from __future__ import annotations

from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from app.domain.identity import Direction
from app.domain.lifecycle import LIVE, TERMINAL, Actor, Ending, State, StopCause
from app.domain.outcome import FindingKind, OutcomeKind

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Text = sa.Text(collation="C")
Instant = sa.TIMESTAMP(timezone=True)
Uuid = pg.UUID(as_uuid=True)


def _one_of(column: str, values: type[StrEnum] | tuple[StrEnum, ...]) -> str:
    return f"{column} IN ({', '.join(repr(value.value) for value in values)})"


def _operation_key() -> tuple[sa.Column[int], sa.Column[object]]:
    return (
        sa.Column("bucket", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("operation_id", Uuid, primary_key=True),
    )


def _step_key() -> tuple[sa.Column[str], sa.Column[int], sa.Column[str]]:
    return (
        sa.Column("step", Text, nullable=False),
        sa.Column("item", sa.Integer, nullable=False),
        sa.Column("direction", Text, nullable=False),
    )


operations = sa.Table(
    "operations",
    metadata,
    sa.Column("bucket", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("id", Uuid, primary_key=True),
    sa.Column("tenant", Text, nullable=False),
    sa.Column("type", Text, nullable=False),
    sa.Column("type_version", sa.Integer, nullable=False),
    sa.Column("key_digest", sa.LargeBinary, nullable=False),
    sa.Column("idempotency_key", Text),
    sa.Column("fingerprint", sa.LargeBinary, nullable=False),
    sa.Column("fingerprint_version", sa.SmallInteger, nullable=False),
    sa.Column("input", sa.LargeBinary),
    sa.Column("payload_format", sa.SmallInteger, nullable=False),
    sa.Column("metadata", pg.JSONB),
    sa.Column("semantic_headers", pg.JSONB),
    sa.Column("not_before", Instant),
    sa.Column("deadline", Instant),
    sa.Column("priority", sa.SmallInteger, nullable=False),
    sa.Column("retention_seconds", sa.Double, nullable=False),
    sa.Column("tombstone_seconds", sa.Double, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("state", Text),
    sa.Column("result", sa.LargeBinary),
    sa.Column("result_version", sa.SmallInteger),
    sa.Column("error", sa.LargeBinary),
    sa.Column("answer_status", sa.SmallInteger),
    sa.Column("answer", sa.LargeBinary),
    sa.Column("cancel_requested", sa.Boolean),
    sa.Column("finished_by_token", Uuid),
    sa.Column("finished_by_generation", sa.BigInteger),
    sa.Column("version", sa.BigInteger),
    sa.Column("completed_at", Instant),
    sa.Column("idempotency_expires_at", Instant),
    sa.Column("purged_at", Instant),
    sa.UniqueConstraint("bucket", "tenant", "type", "key_digest", name="uq_operations_scope"),
    sa.CheckConstraint("bucket BETWEEN 0 AND 255", "bucket"),
    sa.CheckConstraint("octet_length(key_digest) = 32", "key_digest"),
    sa.CheckConstraint("octet_length(fingerprint) = 32", "fingerprint"),
    sa.CheckConstraint(f"state IS NULL OR {_one_of('state', TERMINAL)}", "state_terminal"),
    sa.CheckConstraint("(state IS NULL) = (completed_at IS NULL)", "done_has_time"),
    sa.CheckConstraint("(state IS NULL) = (version IS NULL)", "done_has_version"),
    sa.CheckConstraint("(state IS NULL) = (idempotency_expires_at IS NULL)", "done_expires"),
    sa.CheckConstraint("result IS NULL OR error IS NULL", "result_or_error"),
    sa.CheckConstraint(
        f"result IS NULL OR coalesce(state = '{State.SUCCEEDED}', false)", "result_succeeded"
    ),
    sa.CheckConstraint("error IS NULL OR state IS NOT NULL", "error_done"),
    sa.CheckConstraint("purged_at IS NULL OR state IS NOT NULL", "purged_done"),
    sa.CheckConstraint(
        "purged_at IS NULL OR (input IS NULL AND result IS NULL AND error IS NULL AND answer IS NULL "
        "AND idempotency_key IS NULL AND metadata IS NULL)",
        "purged_stripped",
    ),
    sa.CheckConstraint("purged_at IS NOT NULL OR input IS NOT NULL", "kept_has_input"),
    sa.CheckConstraint(
        "(finished_by_token IS NULL) = (finished_by_generation IS NULL)", "finished_by_whole"
    ),
    sa.CheckConstraint("priority BETWEEN 0 AND 3", "priority"),
)
# Lists read newest first by (created_at, id) within one tenant (CONTRACT.md 15).
sa.Index("ix_operations_list", operations.c.tenant, operations.c.created_at, operations.c.id)

work = sa.Table(
    "work",
    metadata,
    *_operation_key(),
    sa.Column("tenant", Text, nullable=False),
    sa.Column("type", Text, nullable=False),
    sa.Column("type_version", sa.Integer, nullable=False),
    sa.Column("actor", Text, nullable=False),
    sa.Column("state", Text, nullable=False),
    sa.Column("ending", Text),
    sa.Column("stop_cause", Text),
    sa.Column("attention", Text),
    sa.Column("priority", sa.SmallInteger, nullable=False),
    sa.Column("due_at", Instant, nullable=False),
    sa.Column("deadline", Instant),
    sa.Column("lease_owner_token", Uuid),
    sa.Column("lease_generation", sa.BigInteger, nullable=False),
    sa.Column("lease_expires_at", Instant),
    sa.Column("claims", sa.Integer, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("changed_at", Instant, nullable=False),
    sa.Column("uncertain_since", Instant),
    sa.Column("retried_at", Instant),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("suspect", sa.Boolean, nullable=False),
    sa.CheckConstraint(_one_of("state", LIVE), "state_live"),
    sa.CheckConstraint(_one_of("actor", Actor), "actor"),
    sa.CheckConstraint(f"ending IS NULL OR {_one_of('ending', Ending)}", "ending"),
    sa.CheckConstraint(f"stop_cause IS NULL OR {_one_of('stop_cause', StopCause)}", "stop_cause"),
    sa.CheckConstraint(
        f"(state = '{State.NEEDS_ATTENTION}') = (attention IS NOT NULL)", "attention_has_reason"
    ),
    sa.CheckConstraint(
        f"actor = '{Actor.RECONCILER}' OR state NOT IN "
        f"('{State.UNCERTAIN}', '{State.NEEDS_ATTENTION}')",
        "doubt_is_reconciled",
    ),
    sa.CheckConstraint(
        f"state <> '{State.COMPENSATING}' OR ending IS NOT NULL", "compensating_has_ending"
    ),
    sa.CheckConstraint("(lease_owner_token IS NULL) = (lease_expires_at IS NULL)", "lease_has_end"),
    sa.CheckConstraint("lease_generation >= 0 AND claims >= 0 AND version >= 1", "counts"),
    sa.CheckConstraint("priority BETWEEN 0 AND 3", "priority"),
    postgresql_with={"fillfactor": "70"},
)
# The claim walks this index, one priority after the other; it holds no state, so that a plan made while
# idle cannot turn a fenced write into a walk over all leased rows (BENCH.md, trap 4).
sa.Index("ix_work_due", work.c.actor, work.c.priority, work.c.due_at)

steps = sa.Table(
    "steps",
    metadata,
    *_operation_key(),
    sa.Column("step", Text, primary_key=True),
    sa.Column("item", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("direction", Text, primary_key=True),
    sa.Column("provider", Text, nullable=False),
    sa.Column("downstream_key", Text, nullable=False),
    sa.Column("key_ordinal", sa.SmallInteger, nullable=False),
    sa.Column("burned_keys", pg.ARRAY(sa.Text)),
    sa.Column("request_method", Text, nullable=False),
    sa.Column("request_path", Text, nullable=False),
    sa.Column("request_headers", pg.JSONB, nullable=False),
    sa.Column("request_body", sa.LargeBinary, nullable=False),
    sa.Column("payload_format", sa.SmallInteger, nullable=False),
    sa.Column("lookup_reference", Text),
    sa.Column("first_began_at", Instant, nullable=False),
    sa.Column("resend_by", Instant),
    sa.Column("outcome", Text),
    sa.Column("provider_reference", Text),
    sa.Column("result", sa.LargeBinary),
    sa.CheckConstraint(_one_of("direction", Direction), "direction"),
    sa.CheckConstraint("item >= 0 AND key_ordinal >= 0", "counts"),
    sa.CheckConstraint(
        "outcome IS NULL OR outcome IN ('succeeded', 'rejected', 'skipped', 'unconfirmed')",
        "outcome",
    ),
)

attempts = sa.Table(
    "attempts",
    metadata,
    *_operation_key(),
    sa.Column("id", Uuid, primary_key=True),
    *_step_key(),
    sa.Column("key_ordinal", sa.SmallInteger, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("began_at", Instant, nullable=False),
    sa.Column("send_by", Instant, nullable=False),
    sa.Column("arrives_by", Instant, nullable=False),
    sa.Column("settled_at", Instant, nullable=False),
    sa.Column("outcome", Text),
    sa.Column("recorded_at", Instant),
    sa.Column("code", Text),
    sa.Column("detail", Text),
    sa.Column("final", sa.Boolean),
    sa.Column("burned", sa.Boolean),
    sa.Column("provider_request_id", Text),
    sa.Column("provider_reference", Text),
    sa.Column("result", sa.LargeBinary),
    sa.CheckConstraint(f"outcome IS NULL OR {_one_of('outcome', OutcomeKind)}", "outcome"),
    sa.CheckConstraint("(outcome IS NULL) = (recorded_at IS NULL)", "recorded"),
    sa.CheckConstraint(
        "began_at < send_by AND send_by <= arrives_by AND arrives_by <= settled_at", "times"
    ),
    sa.CheckConstraint(_one_of("direction", Direction), "direction"),
)

FINDING_SOURCES = ("lookup", "late_answer", "operator")

findings = sa.Table(
    "findings",
    metadata,
    *_operation_key(),
    sa.Column("id", Uuid, primary_key=True),
    *_step_key(),
    sa.Column("source", Text, nullable=False),
    sa.Column("generation", sa.BigInteger),
    sa.Column("asked_at", Instant, nullable=False),
    sa.Column("kind", Text),
    sa.Column("found_at", Instant),
    sa.Column("attempt_id", Uuid),
    sa.Column("attempt_outcome", Text),
    sa.Column("code", Text),
    sa.Column("detail", Text),
    sa.Column("final", sa.Boolean),
    sa.Column("provider_reference", Text),
    sa.Column("result", sa.LargeBinary),
    sa.CheckConstraint(f"kind IS NULL OR {_one_of('kind', FindingKind)}", "kind"),
    sa.CheckConstraint("(kind IS NULL) = (found_at IS NULL)", "found"),
    sa.CheckConstraint(
        f"source IN ({', '.join(repr(source) for source in FINDING_SOURCES)})", "source"
    ),
    sa.CheckConstraint(
        "(source = 'late_answer') = (attempt_id IS NOT NULL) "
        "AND (attempt_id IS NULL) = (attempt_outcome IS NULL)",
        "late_answer",
    ),
    sa.CheckConstraint(_one_of("direction", Direction), "direction"),
)
# R7: the answer to an attempt is stored as a finding at most once.
sa.Index(
    "uq_findings_late_answer",
    findings.c.bucket,
    findings.c.operation_id,
    findings.c.attempt_id,
    unique=True,
    postgresql_where=findings.c.attempt_id.is_not(None),
)

operator_actions = sa.Table(
    "operator_actions",
    metadata,
    *_operation_key(),
    sa.Column("id", Uuid, primary_key=True),
    sa.Column("action", Text, nullable=False),
    sa.Column("by", Text, nullable=False),
    sa.Column("at", Instant, nullable=False),
    sa.Column("key_digest", sa.LargeBinary),
    sa.Column("step", Text),
    sa.Column("item", sa.Integer),
    sa.Column("direction", Text),
    sa.Column("reason", Text),
    sa.Column("evidence", Text),
    sa.Column("detail", pg.JSONB),
)
# Operators' keys are unique per operation (CONTRACT.md, shapes that scripts rely on).
sa.Index(
    "uq_operator_actions_key",
    operator_actions.c.bucket,
    operator_actions.c.operation_id,
    operator_actions.c.key_digest,
    unique=True,
    postgresql_where=operator_actions.c.key_digest.is_not(None),
)

signals = sa.Table(
    "signals",
    metadata,
    *_operation_key(),
    sa.Column("name", Text, primary_key=True),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.Column("payload_format", sa.SmallInteger, nullable=False),
    sa.Column("payload_digest", sa.LargeBinary, nullable=False),
    sa.Column("by", Text, nullable=False),
    sa.Column("at", Instant, nullable=False),
)

tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("created_at", Instant, nullable=False),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("tenant", Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("name", Text, nullable=False),
    sa.Column("secret_digest", sa.LargeBinary, nullable=False),
    sa.Column("scopes", pg.ARRAY(sa.Text), nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("expires_at", Instant),
    sa.Column("revoked_at", Instant),
    sa.CheckConstraint("octet_length(secret_digest) = 32", "secret_digest"),
)

installation = sa.Table(
    "installation",
    metadata,
    sa.Column("singleton", sa.Boolean, primary_key=True, server_default=sa.true()),
    sa.Column("stamp", Text, nullable=False),
    sa.Column("system_identifier", sa.BigInteger, nullable=False),
    sa.Column("timeline", sa.Integer, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("restore_point", Instant),
    sa.Column("adopted_at", Instant),
    sa.CheckConstraint("singleton", "singleton"),
)

providers = sa.Table(
    "providers",
    metadata,
    sa.Column("name", Text, primary_key=True),
    sa.Column("breaker_state", Text, nullable=False),
    sa.Column("breaker_changed_at", Instant, nullable=False),
    sa.Column("breaker_open_until", Instant),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("openings", sa.Integer, nullable=False),
    sa.Column("tokens", sa.Double),
    sa.Column("tokens_at", Instant),
    sa.CheckConstraint("breaker_state IN ('closed', 'open', 'half_open')", "breaker_state"),
)

provider_shares = sa.Table(
    "provider_shares",
    metadata,
    sa.Column("provider", Text, primary_key=True),
    sa.Column("holder", Uuid, primary_key=True),
    sa.Column("share", sa.Integer, nullable=False),
    sa.Column("expires_at", Instant, nullable=False),
    sa.CheckConstraint("share >= 0", "share"),
)
