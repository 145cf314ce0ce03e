"""`fencepost keys`: shown once, listed without secrets, revoked for good."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from app.bootstrap import open_database
from app.service.credentials import Caller, Verifier
from app.settings import Settings
from tests.cli.conftest import Run

MAKE = ("keys", "create", "--tenant", "acme", "--scopes", "operations:write, operations:read")


def caller(url: str, presented: str) -> Caller | None:
    """Whom the API takes the bearer of a key for."""

    async def verify() -> Caller | None:
        database = open_database(Settings(database_url=url), "test", pool_size=1)
        await database.open()
        try:
            return await Verifier(database, "development").verify(presented)
        finally:
            await database.close()

    return asyncio.run(verify())


def test_create_prints_the_key_alone_on_stdout(fencepost: Run, database_url: str) -> None:
    ran = fencepost(*MAKE, "--name", "ci")
    assert ran.status == 0
    key = ran.out.removesuffix("\n")
    assert "\n" not in key
    found = caller(database_url, key)
    assert found is not None
    assert (found.tenant, found.scopes) == ("acme", {"operations:read", "operations:write"})
    assert found.key_id in ran.err
    assert key not in ran.err


def test_create_as_json(fencepost: Run, database_url: str) -> None:
    made = fencepost(*MAKE, "--expires-in", "90d", "--json").json
    assert list(made) == ["id", "key", "tenant", "scopes", "expires_at"]
    assert made["tenant"] == "acme"
    assert made["scopes"] == ["operations:read", "operations:write"]
    left = datetime.fromisoformat(made["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=89, hours=23) < left <= timedelta(days=90, minutes=1)
    found = caller(database_url, made["key"])
    assert found is not None
    assert found.key_id == made["id"]


def test_without_expiry_it_says_null(fencepost: Run) -> None:
    assert fencepost(*MAKE, "--json").json["expires_at"] is None


def test_unknown_scopes_and_tenants_are_refused(fencepost: Run) -> None:
    for arguments in (
        ("keys", "create", "--tenant", "acme", "--scopes", "everything"),
        ("keys", "create", "--tenant", "a b", "--scopes", "operator"),
        ("keys", "create", "--tenant", "acme", "--scopes", ","),
    ):
        ran = fencepost(*arguments)
        assert (ran.status, ran.out) == (1, "")
        assert ran.err.count("\n") == 1
    assert fencepost("keys", "list", "--json").json == []


def test_list_shows_no_secret(fencepost: Run) -> None:
    made = fencepost(*MAKE, "--name", "ci", "--json").json
    table, listed = fencepost("keys", "list"), fencepost("keys", "list", "--json")
    secret = made["key"].rsplit("_", 1)[1]
    assert secret not in table.out + listed.out
    row = table.out.splitlines()[1].split()
    assert row[:4] == [made["id"], "acme", "ci", "operations:read,operations:write"]
    assert row[-1] == "usable"
    (shown,) = listed.json
    assert shown["id"] == made["id"]
    assert shown["usable"] is True
    assert set(shown) == {
        "id", "tenant", "name", "scopes", "created_at", "expires_at", "revoked_at", "usable"
    }  # fmt: skip


def test_revoke(fencepost: Run, database_url: str) -> None:
    made = fencepost(*MAKE, "--json").json
    ran = fencepost("keys", "revoke", made["id"])
    assert ran.status == 0
    assert made["id"] in ran.out
    assert caller(database_url, made["key"]) is None
    assert fencepost("keys", "list").out.splitlines()[1].split()[-1] == "revoked"
    assert fencepost("keys", "revoke", made["id"]).status == 0


def test_revoke_takes_a_whole_key_and_does_not_show_it(fencepost: Run, database_url: str) -> None:
    made = fencepost(*MAKE, "--json").json
    ran = fencepost("keys", "revoke", made["key"])
    assert ran.status == 0
    assert made["key"] not in ran.out + ran.err
    assert caller(database_url, made["key"]) is None


def test_revoke_of_nothing_is_status_1(fencepost: Run) -> None:
    ran = fencepost("keys", "revoke", "0000000000000000")
    assert (ran.status, ran.out) == (1, "")
    assert "no key" in ran.err
