"""Types, problems, description, health and metrics (CONTRACT, Resources; 7, 11, 18)."""

from __future__ import annotations

from typing import Any

import jsonschema
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.api.problems import PROBLEMS, Slug
from app.telemetry import METRICS, Metric
from tests.support.api import STATES, Api, api, charge, put_into

pytestmark = pytest.mark.anyio


async def test_operation_types(running: Api) -> None:
    """CONTRACT 11: JSON Schemas that hold, steps, and every window of time."""
    types = (await running.http.get("/v1/operation-types")).json()["data"]
    assert [found["type"] for found in types] == ["payments.charge", "payments.refund"]
    for found in types:
        jsonschema.Draft202012Validator.check_schema(found["input_schema"])
        jsonschema.Draft202012Validator.check_schema(found["result_schema"])
        policy = found["policy"]
        assert policy["tombstone_seconds"] >= policy["retention_seconds"] > 0
        assert policy["retry_horizon_seconds"] > 0
    jsonschema.validate(charge()["input"], types[0]["input_schema"])
    assert types[0]["steps"] == [{"name": "charge", "kind": "effect", "provider": "payments"}]
    one = await running.http.get("/v1/operation-types", params={"type": "payments.refund"})
    assert [found["type"] for found in one.json()["data"]] == ["payments.refund"]


@pytest.mark.parametrize("slug", Slug)
async def test_problem_pages(slug: Slug, shared: Api) -> None:
    """CONTRACT, Resources: what a problem type means and what to do, without a key, readable."""
    nobody = shared.of("")
    as_json = await nobody.http.get(f"/problems/{slug}")
    assert as_json.json()["title"] == PROBLEMS[slug].title
    assert as_json.json()["what_to_do"] == PROBLEMS[slug].advice
    page = await nobody.http.get(f"/problems/{slug}", headers={"Accept": "text/html,*/*;q=0.8"})
    assert page.headers["Content-Type"].startswith("text/html")
    assert PROBLEMS[slug].title.replace("'", "&#x27;") in page.text
    neither = await nobody.http.get(f"/problems/{slug}", headers={"Accept": "image/png"})
    assert neither.status_code == 406


async def test_description_covers_every_route(running: Api) -> None:
    """CONTRACT, Resources: the OpenAPI document and the page name each route, its scope and its problems."""
    described = (await running.http.get("/openapi.json")).json()
    served = {(route.path, method) for route in running.app.routes for method in route.methods}  # type: ignore[attr-defined]
    told = {
        (path, method.upper()) for path, methods in described["paths"].items() for method in methods
    }
    assert told == {(path, method) for path, method in served if method != "HEAD"}
    page = (await running.http.get("/docs")).text
    for path, _ in told:
        assert f"{path}</code>" in page
    assert "http://" not in page + page.replace("https://", "http://")
    names = [
        route["operationId"]
        for methods in described["paths"].values()
        for route in methods.values()
    ]
    assert len(set(names)) == len(names)


async def test_answers_fit_the_description(running: Api, database_url: str) -> None:
    """CONTRACT, 'An operation on the wire': every state's answer holds against the published schema."""
    described = (await running.http.get("/openapi.json")).json()
    schemas = described["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    operation = jsonschema.Draft202012Validator(
        schemas["operation"],
        format_checker=jsonschema.FormatChecker(),
    )
    request = schemas["operation_request"]["oneOf"][0]
    jsonschema.validate(charge(), request)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**charge(), "unknown": 1}, request)
    for state in STATES:
        id = (await running.post(charge())).json()["id"]
        put_into(database_url, id, state)
        operation.validate((await running.get(id)).json())
    page = (await running.http.get("/v1/operations")).json()
    for item in page["data"]:
        operation.validate(item)
    types = (await running.http.get("/v1/operation-types")).json()
    jsonschema.validate(types, schemas["operation_types"])


async def test_head(running: Api) -> None:
    """RFC 9110, 9.3.2: HEAD wherever there is GET."""
    for path in ("/livez", "/readyz", "/openapi.json", "/v1/operations", "/problems/not-found"):
        assert (await running.http.head(path)).status_code == 200


async def test_health(running: Api, database_url: str) -> None:
    """CONTRACT, Resources: alive is not ready; readiness looks at the schema, and needs no key."""
    del running.http.headers["Authorization"]
    assert (await running.http.get("/livez")).json() == {"status": "alive"}
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'another'")
        answer = await running.http.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "not-ready")
        assert int(answer.headers["Retry-After"]) > 0
    assert (await running.http.get("/livez")).status_code == 200


async def test_ready_and_stopping(running: Api) -> None:
    """CONTRACT, Resources: ready while it serves, not while it stops."""
    ready = {"status": "ready", "circuits": {"payments": "closed"}}
    assert (await running.http.get("/readyz")).json() == ready
    running.services.hub.close()
    assert (await running.http.get("/readyz")).json()["code"] == "not-ready"
    assert (await running.http.get("/livez")).status_code == 200


def _samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _of(samples: Any, metric: Metric, **labels: str) -> float:
    value: float = samples[metric.value, frozenset(labels.items())]
    return value


async def test_metrics(running: Api, database_url: str) -> None:
    """CONTRACT, Resources: by route template and method, never by what a client may spell freely."""
    id = (await running.post(charge())).json()["id"]
    await running.get(id)
    await running.http.request("BREW", f"/{'x' * 50}")
    put_into(database_url, id, "uncertain")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE work SET uncertain_since = now() - interval '1 day'")
        connection.execute(
            "INSERT INTO work SELECT * FROM jsonb_populate_record(NULL::work, (SELECT to_jsonb(w) ||"
            " jsonb_build_object('operation_id', gen_random_uuid(), 'type_version', 9) FROM work w))"
        )
        connection.execute(
            "INSERT INTO providers (name, breaker_state, breaker_changed_at, failures, openings)"
            " VALUES ('payments', 'open', now(), 3, 1) ON CONFLICT (name) DO UPDATE SET"
            " breaker_state = 'open'"
        )
    text = (await running.http.get("/metrics")).text
    samples = _samples(text)
    posts = {"route": "/v1/operations", "method": "POST", "status": "202"}
    assert _of(samples, Metric.HTTP_REQUESTS, **posts) == 1
    assert _of(samples, Metric.ADMISSIONS, type="payments.charge", outcome="new") == 1
    gets = {"route": "/v1/operations/{id}", "method": "GET", "status": "200"}
    assert _of(samples, Metric.HTTP_REQUESTS, **gets) == 1
    odd = {"route": "unmatched", "method": "other", "status": "404"}
    assert _of(samples, Metric.HTTP_REQUESTS, **odd) == 1
    assert _of(samples, Metric.LIVE_OPERATIONS, state="uncertain") == 2
    assert _of(samples, Metric.LIVE_OPERATIONS, state="pending") == 0
    assert _of(samples, Metric.WORK_DUE, state="uncertain") == 2
    assert _of(samples, Metric.OLDEST_SECONDS, state="uncertain") >= 0
    unknown = {"type": "payments.charge", "version": "9"}
    assert _of(samples, Metric.UNKNOWN_TYPE_OPERATIONS, **unknown) == 1
    assert _of(samples, Metric.OVERDUE_DOUBT, type="payments.charge") == 1
    assert _of(samples, Metric.OVERDUE_DOUBT, type="payments.refund") == 0
    assert _of(samples, Metric.BREAKER_STATE, provider="payments") == 2
    assert (Metric.OLDEST_SNAPSHOT_SECONDS.value, frozenset()) in samples
    for metric, spec in METRICS.items():
        if spec.scraped:
            assert f"# HELP {metric.value} {spec.help}" in text
    assert id not in text
    assert "xxxx" not in text


async def test_metrics_can_be_hidden(database_url: str) -> None:
    """Setting METRICS_PUBLIC: off means there is nothing at this path."""
    async with api(database_url, metrics_public=False) as running:
        answer = await running.http.get("/metrics")
    assert (answer.status_code, answer.json()["code"]) == (404, "not-found")
