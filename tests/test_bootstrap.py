"""What is loaded, how it is configured, and what stops a start."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from app.bootstrap import Plugins, load_plugins
from app.domain.errors import ConfigurationError
from app.domain.policy import TypePolicy
from app.domain.profile import ProviderClass
from app.operations import payments_charge
from app.providers import payments
from app.providers.payments import PaymentsOptions
from app.settings import Settings

pytestmark = pytest.mark.anyio


class Point:
    """An installed entry point."""

    def __init__(self, name: str, found: object) -> None:
        self.name = name
        self.value = f"somewhere:{name}"
        self._found = found

    def load(self) -> object:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    groups: dict[str, list[Point]] = {}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: groups.get(group, []))

    def install(group: str, *points: Point) -> None:
        groups[f"fencepost.{group}"] = list(points)

    return install


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_plugins(environ)
    return str(caught.value)


async def test_everything_in_the_house_is_loaded_and_closed() -> None:
    plugins = load_plugins({})
    assert {"payments.charge", "payments.refund"} <= {
        name for name, _ in plugins.registry.type_versions()
    }
    assert set(plugins.adapters) == set(plugins.registry.profiles) >= {"payments"}
    await plugins.close()


def test_options_come_from_the_environment() -> None:
    plugins = load_plugins(
        {
            "FENCEPOST_PAYMENTS_TIMEOUT_SECONDS": "1.5",
            "FENCEPOST_PAYMENTS_HONOUR_KEYS": "false",
            "FENCEPOST_PAYMENTS_CONCURRENCY": "7",
            "FENCEPOST_PAYMENTS_DELIVERY_SECONDS": "",
            "fencepost_payments_send_window_seconds": "3",
            "FENCEPOST_LEASE_SECONDS": "30",
            "PAYMENTS_URL": "ignored",
        }
    )
    profile = plugins.registry.profiles["payments"]
    assert profile.timeout_seconds == 1.5
    assert profile.provider_class is ProviderClass.LOOKED_UP
    assert profile.concurrency == 7
    assert profile.send_window_seconds == 3.0
    assert profile.delivery_seconds is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FENCEPOST_PAYMENTS_TIMEOUT_SECONDS", "0"),
        ("FENCEPOST_PAYMENTS_TIMEOUT_SECONDS", "s3cret"),
        ("FENCEPOST_PAYMENTS_TIMEOUT_SECONDS", "inf"),
        ("FENCEPOST_PAYMENTS_TIMEOUT_SECONDS", "nan"),
        ("FENCEPOST_PAYMENTS_HONOUR_KEYS", "s3cret"),
        ("FENCEPOST_PAYMENTS_CONCURRENCY", "0"),
        ("FENCEPOST_PAYMENTS_LOOKUP_LAG_SECONDS", "-1"),
        ("FENCEPOST_PAYMENTS_URL", "ftp://s3cret"),
        ("FENCEPOST_PAYMENTS_URL", "s3cret"),
        ("FENCEPOST_PAYMENTS_URL", "http://user:s3cret@host"),
        ("FENCEPOST_PAYMENTS_URL", "http://host:s3cret"),
        ("FENCEPOST_PAYMENTS_URL", "http://[s3cret"),
        ("FENCEPOST_PAYMENTS_URL", "http://host?s3cret"),
        ("FENCEPOST_PAYMENTS_API_KEY", "s3cret\nX-Other: 1"),
        ("FENCEPOST_PAYMENTS_API_KEY", "s3cret with blanks"),
        ("FENCEPOST_PAYMENTS_API_KEYS", "s3cret"),
        ("fencepost_payments_nonsense", "s3cret"),
    ],
)
def test_an_option_that_does_not_hold_is_named_and_its_value_is_not(
    variable: str, value: str
) -> None:
    message = refusal({variable: value})
    assert variable in message
    assert "s3cret" not in message


def test_times_that_do_not_fit_together_stop_the_start() -> None:
    assert "provider payments" in refusal({"FENCEPOST_PAYMENTS_KEY_MEMORY_SECONDS": "100"})


def test_settings_give_horizons_where_a_type_is_silent(install: Any) -> None:
    """What a type says itself stays; what it does not say is the settings'."""
    charge = payments_charge.operation_type
    install(
        "operations",
        Point("silent", replace(charge, name="shop.silent", policy=TypePolicy())),
        Point("loud", replace(charge, name="shop.loud", policy=TypePolicy(retention_seconds=5.0))),
    )
    settings = Settings(retention_seconds=7.0, retention_tombstone_seconds=200 * 86_400.0)
    registry = load_plugins({}, settings).registry
    silent, loud = registry.latest("shop.silent"), registry.latest("shop.loud")
    assert silent is not None
    assert loud is not None
    assert silent.policy.retention_seconds == 7.0
    assert silent.policy.tombstone_seconds == 200 * 86_400.0
    assert loud.policy.retention_seconds == 5.0


def test_the_credential_is_in_no_representation() -> None:
    options = PaymentsOptions.model_validate({"api_key": "s3cret"})
    adapter = payments.provider.open(options)
    shown = f"{options!r} {adapter!r} {vars(adapter)!r} {adapter.profile!r}"
    assert "s3cret" not in shown


def test_an_empty_credential_is_none() -> None:
    assert PaymentsOptions.model_validate({"api_key": ""}).api_key is None


def test_entry_points_are_loaded_behind_the_house(install: Any) -> None:
    own = replace(payments_charge.operation_type, name="acme.charge")
    module = ModuleType("acme")
    module.operation_type = replace(own, name="acme.other")  # type: ignore[attr-defined]
    install("operations", Point("charge", own), Point("module", module))
    second = replace(
        payments.provider,
        name="payments_eu",
        open=lambda options: payments.PaymentsAdapter(
            options, payments.payments_profile(options, "payments_eu")
        ),
    )
    install("providers", Point("eu", second))
    plugins = load_plugins(
        {
            "FENCEPOST_PAYMENTS_TIMEOUT_SECONDS": "4",
            "FENCEPOST_PAYMENTS_EU_TIMEOUT_SECONDS": "9",
        }
    )
    assert plugins.registry.knows("acme.charge", 1)
    assert plugins.registry.knows("acme.other", 1)
    assert plugins.registry.profiles["payments"].timeout_seconds == 4
    assert plugins.registry.profiles["payments_eu"].timeout_seconds == 9


@pytest.mark.parametrize(
    ("group", "found", "word"),
    [
        ("operations", RuntimeError("secret of theirs"), "cannot be loaded"),
        ("operations", "no type", "OperationType"),
        ("operations", ModuleType("empty"), "OperationType"),
        ("providers", payments_charge.operation_type, "ProviderPlugin"),
    ],
)
def test_an_entry_point_that_is_none_stops_the_start(
    install: Any, group: str, found: object, word: str
) -> None:
    install(group, Point("theirs", found))
    message = refusal({})
    assert "theirs" in message
    assert word in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("group", "found", "words"),
    [
        ("operations", payments_charge.operation_type, ["payments.charge", "twice"]),
        ("providers", payments.provider, ["provider payments", "twice"]),
        ("providers", replace(payments.provider, name="other"), ["other", "named payments"]),
        ("providers", replace(payments.provider, name="lease"), ["lease", "FENCEPOST_LEASE"]),
        (
            "operations",
            replace(
                payments_charge.operation_type,
                name="acme.charge",
                steps=(replace(payments_charge.operation_type.steps[0], provider="gone"),),
            ),
            ["acme.charge", "charge", "gone"],
        ),
    ],
)
def test_what_cannot_be_together_stops_the_start(
    install: Any, group: str, found: object, words: list[str]
) -> None:
    install(group, Point("theirs", found))
    message = refusal({})
    assert [word for word in words if word not in message] == []


def test_modules_without_a_constant_and_packages_are_skipped() -> None:
    """In a process of its own: other tests import the simulator."""
    script = (
        "import sys, app.bootstrap; plugins = app.bootstrap.load_plugins({});"
        "assert 'app.providers.http' in sys.modules;"
        "print([name for name in sys.modules if name.startswith('app.providers.simulator')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


async def test_plugins_close_every_adapter() -> None:
    closed: list[str] = []

    class Adapter(payments.PaymentsAdapter):
        async def close(self) -> None:
            closed.append(self.profile.name)
            await super().close()

    options = PaymentsOptions()
    adapters = {
        name: Adapter(options, payments.payments_profile(options, name)) for name in ("a", "b")
    }
    await Plugins(load_plugins({}).registry, adapters).close()
    assert closed == ["a", "b"]
