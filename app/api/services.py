"""What the routes work with: the use cases of one process, made by `app.main`, found on the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request

from app.domain.operation import OperationView
from app.domain.registry import Registry
from app.service.admission import AdmissionService
from app.service.credentials import Verifier
from app.service.readiness import Readiness
from app.service.reading import Reading
from app.service.resolution import Operators
from app.service.standings import StandingsReader
from app.service.watching import Hub
from app.settings import Settings
from app.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Services:
    """One per process. `cancel` is `app.service.cancellation.cancel` with its first arguments given."""

    settings: Settings
    registry: Registry
    telemetry: Telemetry
    admission: AdmissionService
    reading: Reading
    cancel: Callable[..., Awaitable[OperationView | None]]
    operators: Operators
    verifier: Verifier
    hub: Hub
    readiness: Readiness
    standings: StandingsReader


def services_of(request: Request) -> Services:
    """The services of the application that serves `request`."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services
