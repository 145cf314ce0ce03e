"""The composition root: the one module that knows concrete plug-ins.

`load_plugins` scans the packages `app.operations` and `app.providers`, then the entry-point groups
`fencepost.operations` and `fencepost.providers`; collects the constants `operation_type` and `provider`;
reads each provider's options from `FENCEPOST_<PROVIDER>_<OPTION>`; checks everything against everything
(`app.domain.registry`) and freezes it. Nothing registers itself: importing a plug-in has no effect.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ValidationError

import app.operations
import app.providers
from app.domain.errors import ConfigurationError
from app.domain.plan import OperationType
from app.domain.provider import ProviderAdapter, ProviderPlugin
from app.domain.registry import Registry
from app.failpoints import Failpoints
from app.service.admission import AdmissionService
from app.service.execution import Renewal
from app.service.installation import wait_until_verified
from app.service.listening import hear
from app.service.notifying import Notifier
from app.service.resolution import Operators
from app.service.turns import Turns
from app.settings import Settings
from app.storage.database import Database
from app.storage.installation import Stamp
from app.storage.notices import Channel
from app.telemetry import Telemetry, make_log

_PREFIX = "FENCEPOST_"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Plugins:
    """What is loaded: the checked registry, and one adapter per provider, by name."""

    registry: Registry
    adapters: Mapping[str, ProviderAdapter]

    async def close(self) -> None:
        """Close every adapter; calls under way end with an error."""
        for adapter in self.adapters.values():
            await adapter.close()


def load_plugins(environ: Mapping[str, str], settings: Settings | None = None) -> Plugins:
    """Everything there is, configured from `environ` and checked. Does no I/O beyond imports.

    `settings`: where given, its retention horizons hold for every type that gives none of its own.

    Raises:
        ConfigurationError: a plug-in that cannot be loaded, an option that does not hold or is not known
            (the variable is named, its value is not repeated), or parts that cannot work together.
    """
    types = [
        _with_horizons(_expect(found, OperationType, where), settings)
        for found, where in _find(app.operations, "operation_type", "fencepost.operations")
    ]
    plugins = [
        _expect(found, ProviderPlugin, where)
        for found, where in _find(app.providers, "provider", "fencepost.providers")
    ]
    adapters = _open(plugins, environ)
    registry = Registry.of(types, [adapter.profile for adapter in adapters.values()])
    return Plugins(registry, MappingProxyType(adapters))


def _with_horizons(found: OperationType, settings: Settings | None) -> OperationType:
    if settings is None:
        return found
    policy = found.policy.where_silent(
        retention_seconds=settings.retention_seconds,
        tombstone_seconds=settings.retention_tombstone_seconds,
    )
    return replace(found, policy=policy)


def provider_options() -> dict[str, type[BaseModel]]:
    """The options of every provider there is, by the prefix of their variables."""
    found = [
        _expect(plugin, ProviderPlugin, where)
        for plugin, where in _find(app.providers, "provider", "fencepost.providers")
    ]
    return {_prefix(plugin.name): plugin.options for plugin in found}


def _find(package: ModuleType, constant: str, group: str) -> Iterator[tuple[object, str]]:
    """Each constant of that name, and where it stands: the package's own modules first, by name."""
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        if info.ispkg:
            continue
        name = f"{package.__name__}.{info.name}"
        found = getattr(importlib.import_module(name), constant, None)
        if found is not None:
            yield found, name
    for point in sorted(importlib.metadata.entry_points(group=group), key=lambda point: point.name):
        try:
            found = point.load()
        except Exception as error:
            # Foreign code: whatever it raises while it is imported, the start ends with its name.
            raise ConfigurationError(
                f"entry point {point.name} ({point.value}) of {group} cannot be loaded: "
                f"{type(error).__name__}."
            ) from error
        if isinstance(found, ModuleType):
            found = getattr(found, constant, None)
        yield found, f"entry point {point.name} ({point.value})"


def _expect(found: object, kind: type[_T], where: str) -> _T:
    if not isinstance(found, kind):
        raise ConfigurationError(f"{where}: there is no {kind.__name__} there.")
    return found


def _open(plugins: list[ProviderPlugin], environ: Mapping[str, str]) -> dict[str, ProviderAdapter]:
    names = [plugin.name for plugin in plugins]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"provider {name} is declared twice.")
        _check_prefix(name)
    adapters: dict[str, ProviderAdapter] = {}
    for plugin in plugins:
        adapter = plugin.open(_options(plugin, names, environ))
        if adapter.profile.name != plugin.name:
            raise ConfigurationError(
                f"provider {plugin.name}: its profile is named {adapter.profile.name}."
            )
        adapters[plugin.name] = adapter
    return adapters


def _prefix(name: str) -> str:
    return f"{_PREFIX}{name.upper().replace('.', '_').replace('-', '_')}_"


def _check_prefix(name: str) -> None:
    """A provider's variables must not look like settings of Fencepost itself."""
    for field in Settings.model_fields:
        if f"{_PREFIX}{field.upper()}".startswith(_prefix(name)):
            raise ConfigurationError(
                f"provider {name}: its options would begin like the setting {_PREFIX}{field.upper()}."
            )


def _options(plugin: ProviderPlugin, names: list[str], environ: Mapping[str, str]) -> BaseModel:
    """The provider's validated options. A variable set to nothing counts as not set."""
    given: dict[str, Any] = {}
    prefix = _prefix(plugin.name)
    longer = [
        _prefix(name) for name in names if _prefix(name).startswith(prefix) and name != plugin.name
    ]
    for variable, value in environ.items():
        upper = variable.upper()
        if not upper.startswith(prefix) or any(upper.startswith(other) for other in longer):
            continue
        option = upper.removeprefix(prefix).lower()
        if option not in plugin.options.model_fields:
            raise ConfigurationError(f"{variable}: provider {plugin.name} has no such option.")
        if value:
            given[option] = value
    try:
        return plugin.options.model_validate(given)
    except ValidationError as error:
        problems = [
            f"{prefix}{'_'.join(str(part) for part in item['loc']).upper()}: {item['msg']}"
            for item in error.errors(include_input=False, include_url=False, include_context=False)
        ]
        raise ConfigurationError("; ".join(problems)) from None


@dataclass(frozen=True, slots=True)
class Core:
    """What every role of one process is built from. Open it in the loop that uses it."""

    settings: Settings
    plugins: Plugins
    database: Database
    telemetry: Telemetry
    failpoints: Failpoints
    notifier: Notifier
    stamp: Stamp

    def turns(self) -> Turns:
        """The machinery of a worker or a reconciler."""
        return Turns(
            self.database,
            self.plugins.registry,
            self.plugins.adapters,
            self.stamp.stamp,
            self.settings.lease_policy,
            self.notifier,
            self.telemetry,
            self.failpoints,
        )

    def admission(self) -> AdmissionService:
        """The machinery of the API's POST."""
        return AdmissionService(
            self.database,
            self.plugins.registry,
            self.notifier,
            self.telemetry,
            self.failpoints,
            patience_seconds=self.settings.database_timeout_seconds,
        )

    def operators(self) -> Operators:
        """What people with the scope `operator` may do."""
        return Operators(
            self.database,
            self.plugins.registry,
            {name: adapter.profile for name, adapter in self.plugins.adapters.items()},
            self.notifier,
            self.telemetry,
        )

    def hear_of_work(self) -> AsyncIterator[object]:
        """Something for each notice that work may have become due, and whenever one may be missed."""
        return hear(self.database, [Channel.WORK], self.telemetry)

    async def close(self) -> None:
        """Send what is left to send, close every connection."""
        await self.notifier.drain()
        await self.plugins.close()
        await self.database.close()


def open_database(
    settings: Settings, application: str, *, pool_size: int | None = None
) -> Database:
    """The pool of one process, not yet opened."""
    return Database(
        settings.database_url.get_secret_value(),
        application=f"fencepost-{application}",
        pool_size=settings.database_pool_size if pool_size is None else pool_size,
        timeout_seconds=settings.database_timeout_seconds,
        prepared_statements=settings.database_prepared_statements,
    )


def make_renewal(settings: Settings, role: str) -> Renewal:
    """What a keeper of leases renews with, on connections of its own."""
    database = open_database(settings, f"{role}-keeper", pool_size=2)
    return Renewal(database, settings.lease_policy)


async def open_core(
    settings: Settings,
    environ: Mapping[str, str],
    role: str,
    *,
    registry: CollectorRegistry | None = None,
    patience_seconds: float = 30.0,
) -> Core:
    """Load plug-ins, reach the database, compare schema and stamp: what a role does before anything else.

    Raises:
        ConfigurationError: settings or plug-ins that do not hold.
        SchemaMismatch, StampMismatch: this process may not act on this database.
        StoreUnavailable: the database stayed out of reach for `patience_seconds`.
    """
    failpoints = Failpoints.parse(settings.failpoints)
    plugins = load_plugins(environ, settings)
    log = make_log(role, log_format=settings.log_format, level=settings.log_level)
    telemetry = Telemetry(registry or CollectorRegistry(), log)
    database = open_database(settings, role)
    await database.open()
    try:
        stamp = await wait_until_verified(
            database, settings.installation, patience_seconds=patience_seconds
        )
    except BaseException:
        await plugins.close()
        await database.close()
        raise
    return Core(
        settings=settings,
        plugins=plugins,
        database=database,
        telemetry=telemetry,
        failpoints=failpoints,
        notifier=Notifier(database, telemetry),
        stamp=stamp,
    )
