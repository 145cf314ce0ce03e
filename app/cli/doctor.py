"""`fencepost doctor`: what is wrong, and what to do."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import typer

from app.cli.failing import OUT_OF_REACH, REFUSED
from app.cli.options import AsJson
from app.cli.output import columns, json, line, printable

if TYPE_CHECKING:
    from app.service.doctor import Check

OTHER_VARIABLES = frozenset({"FENCEPOST_DATABASE_URL", "FENCEPOST_SIMULATOR_DATA"})
"""What is read besides `Settings` and the providers' options."""


def doctor(as_json: AsJson = False) -> None:
    """Check settings, database, schema, clock, stamp, load and providers; say what to do.

    Exit status 0 where everything is fine or only deserves a look (warn), 1 where something fails, 3 where
    the database or a provider is out of reach.
    """
    from app.cli.failing import without_secrets
    from app.service.doctor import Health

    checks = asyncio.run(_examine())
    if as_json:
        json(
            {
                "healthy": all(each.health is not Health.FAIL for each in checks),
                "checks": [
                    {
                        "name": each.name,
                        "health": each.health,
                        "seen": without_secrets(each.seen, os.environ),
                        "advice": each.advice or None,
                    }
                    for each in checks
                ],
            }
        )
    else:
        columns(
            ("check", "health", "seen"),
            [(each.name, each.health, without_secrets(each.seen, os.environ)) for each in checks],
        )
        advised = [each for each in checks if each.advice]
        if advised:
            line()
        for each in advised:
            line(f"{each.health.value} {each.name}: {printable(each.advice)}")
    status = _status(checks)
    if status:
        raise typer.Exit(status)


async def _examine() -> list[Check]:
    from app.bootstrap import load_plugins, open_database, provider_options
    from app.domain.errors import ConfigurationError
    from app.service import doctor
    from app.settings import load_settings

    known = {
        f"{prefix}{name.upper()}"
        for prefix, options in provider_options().items()
        for name in options.model_fields
    }
    checks = doctor.check_variables(os.environ, known | OTHER_VARIABLES)
    try:
        settings = load_settings()
    except ConfigurationError as error:
        return [*checks, doctor.fail("settings", str(error), "Correct the variable it names.")]
    checks.append(doctor.ok("settings", f"They hold; environment {settings.environment}."))
    database = open_database(settings, "doctor", pool_size=2)
    try:
        plugins = load_plugins(os.environ, settings)
    except ConfigurationError as error:
        checks.append(doctor.fail("plug-ins", str(error), "Correct what it names."))
        checks += await doctor.check_database(database, settings, None)
        await database.close()
        return checks
    try:
        registry = plugins.registry
        seen = f"{len(registry.types)} types, {len(registry.profiles)} providers."
        checks.append(doctor.ok("plug-ins", seen))
        checks += await doctor.check_database(database, settings, registry)
        checks += await doctor.check_providers(plugins.adapters)
    finally:
        await plugins.close()
        await database.close()
    return checks


def _status(checks: list[Check]) -> int:
    from app.service.doctor import Health

    failed = [each for each in checks if each.health is Health.FAIL]
    if any(each.out_of_reach for each in failed):
        return OUT_OF_REACH
    return REFUSED if failed else 0
