"""Links: absolute under FENCEPOST_PUBLIC_URL, else path-absolute under the ASGI root path (CONTRACT.md 14).

Forwarded headers are not looked at: anybody can send them, and a path-absolute link works behind every proxy
that keeps the path (CASES.md B42).
"""

from __future__ import annotations

from urllib.parse import quote

from starlette.requests import Request

from app.api.services import services_of


def link(request: Request, path: str) -> str:
    """`path` (it begins with a slash) as a client may follow it."""
    public_url = services_of(request).settings.public_url.rstrip("/")
    if public_url:
        return public_url + path
    root_path: str = request.scope.get("root_path", "")
    return quote(root_path.rstrip("/"), safe="/%") + path
