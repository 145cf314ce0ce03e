"""`fencepost types` and `fencepost providers`: what is loaded, with policies and profiles."""

from __future__ import annotations

import os
from typing import Any

from app.cli.options import AsJson
from app.cli.output import columns, json, line, pairs, plain, span


def types(as_json: AsJson = False) -> None:
    """List the operation types: their steps, and how long keys and results are kept."""
    from app.bootstrap import load_plugins
    from app.settings import load_settings

    registry = load_plugins(os.environ, load_settings()).registry
    loaded = [registry.types[identity] for identity in sorted(registry.types)]
    if as_json:
        json(
            [
                {
                    "name": each.name,
                    "version": each.version,
                    "title": each.title,
                    "steps": [
                        {"name": step.name, "kind": "effect", "provider": step.provider}
                        for step in each.steps
                    ],
                    "policy": each.policy,
                    "semantic_headers": each.semantic_headers,
                    "input": each.input.model_json_schema(),
                    "result": each.result.model_json_schema(mode="serialization"),
                }
                for each in loaded
            ]
        )
        return
    columns(
        ("type", "version", "steps", "retried for", "result kept", "key kept", "title"),
        [
            (
                each.name,
                each.version,
                ", ".join(f"{step.name} ({step.provider})" for step in each.steps),
                span(each.policy.retry_horizon_seconds),
                span(each.policy.retention_seconds),
                span(each.policy.tombstone_seconds),
                each.title,
            )
            for each in loaded
        ],
    )


def providers(as_json: AsJson = False) -> None:
    """List the providers: what each can do, and what follows from it when an answer is lost."""
    from app.bootstrap import load_plugins
    from app.settings import load_settings

    registry = load_plugins(os.environ, load_settings()).registry
    profiles = [registry.profiles[name] for name in sorted(registry.profiles)]
    if as_json:
        json([_profile(each) for each in profiles])
        return
    for number, each in enumerate(profiles):
        if number:
            line()
        keys, lookup = each.keys, each.lookup
        line(each.name)
        pairs(
            [
                ("class", each.provider_class.value.replace("_", " ")),
                (
                    "keys",
                    f"{keys.name} ({keys.placement}), remembered for {span(keys.remembered_seconds)}"
                    if keys
                    else "not honoured",
                ),
                ("re-sent for", span(each.resend_seconds) if keys else "never"),
                (
                    "looked up by",
                    f"{lookup.by}, {span(lookup.lag_seconds)} behind" if lookup else "nothing",
                ),
                ("timeout", span(each.timeout_seconds)),
                ("calls at once", each.concurrency),
                ("pinned on", each.pinned_on),
            ],
            indent="  ",
        )


def _profile(profile: Any) -> dict[str, Any]:
    shown: dict[str, Any] = plain(profile)
    shown["class"] = profile.provider_class.value
    shown["resend_seconds"] = profile.resend_seconds
    shown["in_transit_seconds"] = profile.in_transit_seconds
    return shown
