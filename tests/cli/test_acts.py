"""`fencepost ops resolve` and `retry`: exit status, the one sentence, and what was changed (CONTRACT 23)."""

from __future__ import annotations

import psycopg
import pytest

from tests.cli.conftest import Run
from tests.cli.test_ops import admitted
from tests.support.recovery import rows

RESOLVE = ("--step", "charge", "--evidence", "ticket 1", "--reason", "seen there")


def stuck(url: str, *, attempt_age_seconds: float | None = None) -> str:
    """An operation that needs attention; with an age, one that has an unknown attempt of that age."""
    id = str(admitted(url, key="k").id)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "UPDATE work SET state = 'needs_attention', attention = 'no-evidence-possible',"
            " actor = 'reconciler'"
        )
        if attempt_age_seconds is not None:
            connection.execute(
                "INSERT INTO attempts (bucket, operation_id, id, step, item, direction, key_ordinal,"
                " generation, began_at, send_by, arrives_by, settled_at, outcome, recorded_at)"
                " SELECT bucket, operation_id, gen_random_uuid(), 'charge', 0, 'forward', 0, 1, at,"
                " at + interval '1s', at + interval '60s', at + interval '61s', 'unknown', at"
                " FROM work, (SELECT now() - make_interval(secs => %s) AS at) begun",
                [attempt_age_seconds],
            )
    return id


@pytest.mark.parametrize("verdict", ["applied", "absent", "rejected"])
def test_resolve(verdict: str, fencepost: Run, database_url: str) -> None:
    id = stuck(database_url, attempt_age_seconds=3600)
    shown = fencepost("ops", "resolve", id, "--as", verdict, *RESOLVE, "--json").json
    assert shown["state"] == "running"
    [(action, by, evidence)] = rows(
        database_url, 'SELECT action, "by", evidence FROM operator_actions'
    )
    assert (action, evidence) == ("resolve", "ticket 1")
    assert "@" in by


def test_resolve_too_early(fencepost: Run, database_url: str) -> None:
    """R6: exit status 1, and the sentence says for how long."""
    id = stuck(database_url, attempt_age_seconds=0)
    ended = fencepost("ops", "resolve", id, "--as", "absent", *RESOLVE)
    assert ended.status == 1
    assert "attempt-not-settled" in ended.err
    assert rows(database_url, "SELECT count(*) FROM operator_actions") == [(0,)]


def test_retry(fencepost: Run, database_url: str) -> None:
    id = stuck(database_url)
    assert "goes on" in fencepost("ops", "retry", id, "--reason", "worker fixed").out
    assert rows(database_url, "SELECT state, actor, claims FROM work") == [("running", "worker", 0)]


def test_retry_in_doubt(fencepost: Run, database_url: str) -> None:
    id = stuck(database_url, attempt_age_seconds=3600)
    ended = fencepost("ops", "retry", id, "--reason", "r")
    assert ended.status == 1
    assert "in-doubt" in ended.err


def test_unknown_and_incomplete(fencepost: Run, database_url: str) -> None:
    """Exit status 1 for an id nobody knows, 2 for a missing reason or verdict."""
    nobody = "op_01a22f05-e164-76bd-9940-3b0079b63cff"
    assert fencepost("ops", "retry", nobody, "--reason", "r").status == 1
    id = stuck(database_url)
    assert fencepost("ops", "retry", id).status == 2
    assert fencepost("ops", "resolve", id, "--as", "perhaps", *RESOLVE).status == 2
