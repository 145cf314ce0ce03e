"""An operation as the API shows it, made by the API's own code outside of any request."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from app.api.representation import body_of
from app.api.services import Services
from app.bootstrap import load_plugins
from app.settings import load_settings

if TYPE_CHECKING:
    from app.domain.operation import OperationView


class Representation:
    """Shows operations; load it once for many."""

    def __init__(self) -> None:
        settings = load_settings()
        nothing = cast(Any, None)
        # Of its services the representation uses the registry (steps) and the settings (links).
        services = Services(
            settings=settings,
            registry=load_plugins(os.environ, settings).registry,
            telemetry=nothing,
            admission=nothing,
            reading=nothing,
            cancel=nothing,
            operators=nothing,
            verifier=nothing,
            hub=nothing,
            readiness=nothing,
            standings=nothing,
        )
        application = SimpleNamespace(state=SimpleNamespace(services=services))
        self._request = cast(Any, SimpleNamespace(app=application, scope={}))

    def of(self, view: OperationView) -> dict[str, Any]:
        """The JSON object that `GET /v1/operations/{id}` answers."""
        return body_of(self._request, view)
