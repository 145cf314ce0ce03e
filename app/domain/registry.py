"""Which operation types and providers there are, checked against each other once, at start, and frozen.

What is checked, and why a start is refused rather than an operation later:

- One type per (name, version), one profile per name; every step names a provider that is there.
- A provider that honours keys can carry ours: the 36-character UUID form (PROTOCOL.md R15, PROVIDERS.md).
- The tombstone horizon is longer than the memory of every provider used (R15): while a provider may still
  replay an old answer to a derived key, the scope that derives it must stay taken. An unpublished memory is
  taken as `CAREFUL_MEMORY_SECONDS` for re-sending, but counts as at least a day here, where long is careful.

What is not refused: a retry horizon longer than the resend window. Only sends known as not applied are
repeated for the whole horizon, and those left no memory at the provider; doubt is bounded by the resend
deadline of each step (R3), not by the horizon. And a provider that is neither keyed nor looked up: its doubt
goes to a human.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from app.domain.errors import ConfigurationError
from app.domain.identity import Direction, DownstreamKey
from app.domain.plan import Effect, OperationType
from app.domain.policy import DAY_SECONDS
from app.domain.profile import ProviderProfile

_NAME = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*")
_NAME_LIMIT = 100


@dataclass(frozen=True, slots=True)
class Registry:
    """The loaded types by (name, version) and the providers' profiles by name. Made by `Registry.of`."""

    types: Mapping[tuple[str, int], OperationType]
    profiles: Mapping[str, ProviderProfile]

    @classmethod
    def of(
        cls,
        types: Iterable[OperationType],
        profiles: Iterable[ProviderProfile],
    ) -> Registry:
        """The frozen registry of what passes `check`.

        Raises:
            ConfigurationError: see `check`.
        """
        types, profiles = tuple(types), tuple(profiles)
        check(types, profiles)
        return cls(
            MappingProxyType({(found.name, found.version): found for found in types}),
            MappingProxyType({profile.name: profile for profile in profiles}),
        )

    def get(self, name: str, version: int) -> OperationType | None:
        """That version of the type, or None where this process does not understand it (DESIGN.md I12)."""
        return self.types.get((name, version))

    def latest(self, name: str) -> OperationType | None:
        """The version new operations are admitted under: the highest one; None for an unknown name."""
        versions = [version for known, version in self.types if known == name]
        return self.types[name, max(versions)] if versions else None

    def knows(self, name: str, version: int) -> bool:
        """Whether this process can work on operations of that type and version."""
        return (name, version) in self.types

    def profile(self, name: str) -> ProviderProfile | None:
        """The profile of the provider of that name, or None."""
        return self.profiles.get(name)

    def type_versions(self) -> list[tuple[str, int]]:
        """Every (name, version), sorted: what claims may ask for."""
        return sorted(self.types)


def check(
    types: Iterable[OperationType],
    profiles: Iterable[ProviderProfile],
) -> None:
    """Refuse types and providers that cannot work together; the module says which and why.

    Raises:
        ConfigurationError: one sentence that names the type, the step and the provider.
    """
    by_name: dict[str, ProviderProfile] = {}
    for profile in profiles:
        if profile.name in by_name:
            raise ConfigurationError(f"provider {profile.name} is declared twice.")
        by_name[profile.name] = profile
        _check_profile(profile)
    seen: set[tuple[str, int]] = set()
    for found in types:
        identity = (found.name, found.version)
        if identity in seen:
            raise ConfigurationError(
                f"type {found.name}: version {found.version} is declared twice."
            )
        seen.add(identity)
        _check_type(found, by_name)


def _check_profile(profile: ProviderProfile) -> None:
    if not _is_name(profile.name):
        raise ConfigurationError(f"provider {profile.name!r}: {_NAME_RULE}")


def _check_type(found: OperationType, profiles: Mapping[str, ProviderProfile]) -> None:
    if not _is_name(found.name):
        raise ConfigurationError(f"type {found.name!r}: {_NAME_RULE}")
    for step in found.steps:
        where = f"type {found.name}, step {step.name}"
        if not _is_name(step.name):
            raise ConfigurationError(f"{where}: {_NAME_RULE}")
        profile = profiles.get(step.provider)
        if profile is None:
            raise ConfigurationError(f"{where}: there is no provider {step.provider}.")
        _check_effect(where, found, step, profile)


def _check_effect(where: str, found: OperationType, step: Effect, profile: ProviderProfile) -> None:
    if profile.keys is None:
        return
    refusal = profile.keys.refusal(_sample_key(found, step).value)
    if refusal is not None:
        raise ConfigurationError(
            f"{where}: provider {profile.name} cannot carry a derived key: {refusal}."
        )
    remembered = profile.keys.remembered_seconds
    if profile.keys.memory_seconds is None:
        remembered = max(remembered, DAY_SECONDS)
    if found.policy.tombstone_seconds <= remembered:
        raise ConfigurationError(
            f"{where}: the tombstone horizon of {found.policy.tombstone_seconds:g} s is not longer than "
            f"provider {profile.name} remembers a key ({remembered:g} s)."
        )


def _sample_key(found: OperationType, step: Effect) -> DownstreamKey:
    """A key as this step would derive it: every one has the same length and characters."""
    return DownstreamKey.derive(
        installation="",
        tenant="",
        type=found.name,
        key_digest=bytes(32),
        step=step.name,
        item=0,
        direction=Direction.FORWARD,
    )


_NAME_RULE = (
    "names are lower-case words of letters, digits and _, joined by dots, "
    f"of {_NAME_LIMIT} characters at most."
)


def _is_name(text: str) -> bool:
    return len(text) <= _NAME_LIMIT and _NAME.fullmatch(text) is not None
