"""Types and providers that cannot work together are refused at start, by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from app.domain.errors import ConfigurationError
from app.domain.plan import Effect, EffectRequest, OperationType, StepContext
from app.domain.policy import DAY_SECONDS, TypePolicy
from app.domain.profile import KeyRules, LookupRules, ProviderProfile
from app.domain.registry import Registry


class Nothing(BaseModel):
    pass


def build(context: StepContext) -> EffectRequest:
    return EffectRequest("POST", "/x", b"{}")


def type_(name: str = "shop.charge", version: int = 1, **changes: Any) -> OperationType:
    facts: dict[str, Any] = {
        "title": "T",
        "input": Nothing,
        "result": Nothing,
        "steps": (Effect("charge", "pay", build),),
        "build_result": lambda _: {},
    }
    return OperationType(name=name, version=version, **(facts | changes))


def profile(name: str = "pay", **changes: Any) -> ProviderProfile:
    facts: dict[str, Any] = {
        "pinned_on": "2026-12-01",
        "answers": (),
        "keys": KeyRules("Idempotency-Key", memory_seconds=DAY_SECONDS),
    }
    return ProviderProfile(name=name, **(facts | changes))


def test_types_are_found_by_name_and_version() -> None:
    old, new, other = type_(version=2), type_(version=10), type_("a.b")
    registry = Registry.of([new, other, old], [profile()])
    assert registry.type_versions() == [("a.b", 1), ("shop.charge", 2), ("shop.charge", 10)]
    assert registry.latest("shop.charge") is new
    assert registry.get("shop.charge", 2) is old
    assert registry.knows("shop.charge", 2)
    assert registry.profile("pay") is not None


def test_what_is_not_known_is_not_there() -> None:
    registry = Registry.of([type_(version=2)], [profile()])
    assert registry.latest("shop.charg") is None
    assert registry.get("shop.charge", 1) is None
    assert not registry.knows("shop.charge", 3)
    assert registry.profile("other") is None


def test_a_registry_is_frozen() -> None:
    registry = Registry.of([type_()], [profile()])
    with pytest.raises(TypeError):
        registry.types["x", 1] = type_()  # type: ignore[index]
    with pytest.raises(AttributeError):
        registry.types = {}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("types", "profiles", "words"),
    [
        ([type_(), type_()], [profile()], ["type shop.charge", "version 1", "twice"]),
        ([], [profile(), profile()], ["provider pay", "twice"]),
        (
            [type_(steps=(Effect("a", "pay", build), Effect("b", "gone", build)))],
            [profile()],
            ["type shop.charge", "step b", "provider gone"],
        ),
        (
            [type_()],
            [profile(keys=KeyRules("K", max_length=15, memory_seconds=DAY_SECONDS))],
            ["type shop.charge", "step charge", "provider pay", "15"],
        ),
        (
            [type_()],
            [profile(keys=KeyRules("K", charset="[0-9]", memory_seconds=DAY_SECONDS))],
            ["type shop.charge", "step charge", "provider pay", "[0-9]"],
        ),
        (
            [type_(policy=TypePolicy(retention_seconds=1, tombstone_seconds=DAY_SECONDS))],
            [profile()],
            ["type shop.charge", "step charge", "provider pay", "86400"],
        ),
        (
            [type_(policy=TypePolicy(retention_seconds=1, tombstone_seconds=3600))],
            [profile(keys=KeyRules("K"))],
            ["tombstone", "provider pay"],
        ),
        ([type_("Shop")], [profile()], ["type 'Shop'"]),
        ([type_("shop.")], [profile()], ["type 'shop.'"]),
        ([type_("a" * 101)], [profile()], ["100 characters"]),
        (
            [type_(steps=(Effect("a b", "pay", build),))],
            [profile()],
            ["type shop.charge", "step a b"],
        ),
        ([], [profile("Pay")], ["provider 'Pay'"]),
    ],
)
def test_what_cannot_work_together_is_refused_by_name(
    types: list[OperationType], profiles: list[ProviderProfile], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Registry.of(types, profiles)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_tombstone_just_longer_than_the_memory_is_enough() -> None:
    policy = TypePolicy(retention_seconds=1, tombstone_seconds=DAY_SECONDS + 1)
    assert Registry.of([type_(policy=policy)], [profile()]).knows("shop.charge", 1)


def test_providers_without_keys_have_no_memory_to_outlast() -> None:
    policy = TypePolicy(retention_seconds=1, tombstone_seconds=2)
    for lookup in (LookupRules("reference"), None):
        registry = Registry.of([type_(policy=policy)], [profile(keys=None, lookup=lookup)])
        assert registry.knows("shop.charge", 1)


def test_a_long_retry_horizon_is_allowed() -> None:
    policy = TypePolicy(retry_horizon_seconds=30 * DAY_SECONDS)
    assert Registry.of([type_(policy=policy)], [profile()]).knows("shop.charge", 1)
