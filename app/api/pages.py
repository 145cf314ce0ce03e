"""Pages for people: problem types and the API's documentation; nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from app.api.answers import JSON, JsonResponse
from app.api.headers import accepts
from app.api.links import link
from app.api.problems import PROBLEMS, Refusal, Slug

HTML = "text/html"
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:.1em .3em;border-radius:.2em}h2{margin-top:2rem}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:.2rem 1rem .2rem 0;vertical-align:top}"
)
_POLICY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


async def problem(request: Request) -> Response:
    """What one problem type means and what to do, as HTML or JSON."""
    name = request.path_params["slug"]
    if name not in set(Slug):
        raise Refusal(Slug.NOT_FOUND, "There is no problem type of this name.")
    slug = Slug(name)
    kind = PROBLEMS[slug]
    form = _form(request)
    if form == JSON:
        body = {
            "type": link(request, f"/problems/{slug}"),
            "code": slug.value,
            "title": kind.title,
            "status": kind.status,
            "retryable": kind.retryable,
            "meaning": kind.meaning,
            "what_to_do": kind.advice,
        }
        return JsonResponse(body, headers={"Vary": "Accept"})
    again = "may work later" if kind.retryable else "will not work later"
    return _page(
        kind.title,
        f"<p><code>{slug}</code>, HTTP status {kind.status}. The same request {again}.</p>"
        f"<h2>What happened</h2><p>{_prose(kind.meaning)}</p>"
        f"<h2>What to do</h2><p>{_prose(kind.advice)}</p>",
    )


def _form(request: Request) -> str:
    form = accepts(request.scope, JSON, HTML)
    if form is None:
        raise Refusal(Slug.NOT_ACCEPTABLE, "This page exists as text/html and application/json.")
    return form


async def documentation(request: Request) -> Response:
    """The API in one page, made from the same document that `/openapi.json` serves."""
    described: Mapping[str, Any] = request.app.openapi()
    parts = [f"<p>{_prose(described['info']['description'])}</p>"]
    parts.append(f'<p>Machine-readable: <a href="{escape(link(request, "/openapi.json"))}">')
    parts.append("<code>/openapi.json</code></a>.</p>")
    for path, methods in described["paths"].items():
        for method, route in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{_prose(route.get('description') or route.get('summary', ''))}</p>")
            parts.append(_parameters(route.get("parameters", [])))
            parts.append(_answers(route.get("responses", {})))
    return _page("Fencepost: the HTTP API", "".join(parts))


def _parameters(parameters: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        f"<tr><td><code>{escape(found['name'])}</code></td><td>{escape(found['in'])}</td>"
        f"<td>{_prose(found.get('description', ''))}</td></tr>"
        for found in parameters
    ]
    head = "<tr><th>parameter</th><th>where</th><th>meaning</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>" if rows else ""


def _answers(answers: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        f"<tr><td>{escape(status)}</td><td>{_prose(answer['description'])}</td></tr>"
        for status, answer in answers.items()
    ]
    return f"<table><tr><th>status</th><th>meaning</th></tr>{''.join(rows)}</table>"


def _prose(text: str) -> str:
    """Text with `code` in backticks, as HTML."""
    parts = escape(text).split("`")
    return "".join(
        f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts)
    )


def _page(title: str, body: str) -> Response:
    name = escape(title)
    return HTMLResponse(
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>{name}</title><style>{_STYLE}</style><h1>{name}</h1>{body}</html>",
        headers={**_POLICY, "Vary": "Accept"},
    )
