"""`fencepost types` and `fencepost providers`: what is loaded."""

from __future__ import annotations

from tests.cli.conftest import Run


def test_types(bare: Run) -> None:
    listed = bare("types", "--json").json
    by_name = {each["name"]: each for each in listed}
    charge = by_name["payments.charge"]
    assert charge["version"] == 1
    assert {"name": "charge", "kind": "effect", "provider": "payments"} in charge["steps"]
    assert charge["policy"]["tombstone_seconds"] == 400 * 86_400
    assert "amount" in charge["input"]["properties"]
    assert "charge" in charge["result"]["properties"]
    table = bare("types").out.splitlines()
    assert table[0].split()[:3] == ["TYPE", "VERSION", "STEPS"]
    assert {line.split()[0] for line in table[1:]} == set(by_name)


def test_providers(bare: Run) -> None:
    (payments,) = [each for each in bare("providers", "--json").json if each["name"] == "payments"]
    assert payments["class"] == "honours_keys"
    assert payments["keys"]["name"] == "Idempotency-Key"
    assert payments["lookup"] == {"by": "key", "lag_seconds": 2.0, "absent_trusted": True}
    assert payments["answers"][0]["statuses"] == [500, 599]
    out = bare("providers").out
    assert "honours keys" in out
    assert "remembered for 1 d" in out


def test_providers_follow_their_options(bare: Run) -> None:
    ran = bare(
        "providers",
        FENCEPOST_PAYMENTS_HONOUR_KEYS="false",
        FENCEPOST_PAYMENTS_LOOK_UP="false",
        FENCEPOST_PAYMENTS_TIMEOUT_SECONDS="7",
    )
    assert "neither" in ran.out
    assert "not honoured" in ran.out
    assert "7 s" in ran.out


def test_no_secret_is_shown(bare: Run) -> None:
    ran = bare("providers", "--json", FENCEPOST_PAYMENTS_API_KEY="sk_hidden_value")
    assert ran.status == 0
    assert "sk_hidden_value" not in ran.out


def test_an_unknown_option_is_refused(bare: Run) -> None:
    ran = bare("types", FENCEPOST_PAYMENTS_URLL="x")
    assert (ran.status, ran.out) == (1, "")
    assert "FENCEPOST_PAYMENTS_URLL" in ran.err
