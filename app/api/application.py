"""The ASGI application: routes, the renderer of errors, what surrounds every request.

Routes are plain ones that take the request whole: the order of checks is part of the contract (CONTRACT.md
2), the body is read under a bound of our own, and no dependency commits after the answer has left.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI

from app.api.documents import document
from app.api.errors import handle_errors
from app.api.middleware import Cors, Observed
from app.api.routes import SERVED, routes
from app.settings import Settings

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


class Application(FastAPI):
    """FastAPI with the description made from our own table of routes."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI 3.1 document; it names the operation types that are loaded."""
        services = self.state.services
        server = services.settings.public_url.rstrip("/") or self.root_path
        return document([served.described for served in SERVED], services.registry, server)


def build(settings: Settings, lifespan: Lifespan) -> FastAPI:
    """The application; `lifespan` puts the `Services` on its state before the first request."""
    app = Application(
        title="Fencepost",
        routes=routes(),
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    handle_errors(app)
    app.add_middleware(Observed)
    if settings.cors_origin_list:
        app.add_middleware(Cors, origins=settings.cors_origin_list)
    return app
