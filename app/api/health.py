"""`/livez`, `/readyz`, `/metrics`: for machines that watch, without a key."""

from __future__ import annotations

import os

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.requests import Request
from starlette.responses import Response

from app.api.answers import JsonResponse
from app.api.problems import Refusal, Slug
from app.api.services import services_of
from app.domain.errors import SchemaMismatch, StampMismatch, StoreUnavailable
from app.service.standings import StandingsCollector
from app.telemetry import Event, Metric

MULTIPROCESS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
READY_RETRY_SECONDS = 5


async def livez(request: Request) -> Response:
    """The process answers."""
    return JsonResponse({"status": "alive"}, headers={"Cache-Control": "no-store"})


async def readyz(request: Request) -> Response:
    """The process can serve: it is not stopping, the database answers, schema and stamp fit.

    An open circuit to a provider is shown and leaves it ready: operations are accepted and delayed.
    """
    services = services_of(request)
    if services.hub.closed:
        raise _not_ready("The process is stopping.")
    try:
        await services.readiness.check()
    except (SchemaMismatch, StampMismatch) as error:
        services.telemetry.event(Event.NOT_READY, "error", error=error.code, detail=str(error))
        raise _not_ready(f"The database does not fit ({error.code}); the log says how.") from error
    breakers = (await services.standings.read()).breakers
    circuits = {name: state.value for name, state in breakers.items()}
    return JsonResponse(
        {"status": "ready", "circuits": circuits}, headers={"Cache-Control": "no-store"}
    )


def _not_ready(detail: str) -> Refusal:
    return Refusal(Slug.NOT_READY, detail, headers={"Retry-After": str(READY_RETRY_SECONDS)})


async def metrics(request: Request) -> Response:
    """This process's metrics, or those of all processes that share a folder, and the database's standings.

    With the database away the standings are left out: the rest is worth most just then.
    """
    services = services_of(request)
    if not services.settings.metrics_public:
        raise Refusal(Slug.NOT_FOUND, "There is nothing at this path.")
    scraped = CollectorRegistry()
    try:
        scraped.register(StandingsCollector(await services.standings.read()))
    except StoreUnavailable:
        services.telemetry.count(Metric.STORE_ERRORS, where="scrape")
    text = generate_latest(_process_metrics(services.telemetry.registry))
    headers = {"Cache-Control": "no-store"}
    return Response(
        text + generate_latest(scraped), headers=headers, media_type=CONTENT_TYPE_LATEST
    )


def _process_metrics(own: CollectorRegistry) -> CollectorRegistry:
    if MULTIPROCESS_FOLDER not in os.environ:
        return own
    summed = CollectorRegistry()
    MultiProcessCollector(summed)  # type: ignore[no-untyped-call]
    return summed
