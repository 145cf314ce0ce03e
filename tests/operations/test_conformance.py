"""What every operation type must hold to, shipped here or by somebody else: pure builders, fixed bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from app.bootstrap import load_plugins
from app.domain.identity import Direction, DownstreamKey, fingerprint
from app.domain.outcome import JsonObject
from app.domain.plan import EffectRequest, OperationType, ResultContext, StepContext
from app.domain.profile import ProviderProfile

PLUGINS = load_plugins({})
TYPES = [PLUGINS.registry.types[found] for found in PLUGINS.registry.type_versions()]
every_type = pytest.mark.parametrize("found", TYPES, ids=lambda found: found.name)


def examples(found: OperationType) -> list[dict[str, Any]]:
    """The inputs a type shows in its JSON Schema; each must have some."""
    shown = found.input.model_json_schema().get("examples", [])
    assert shown, f"{found.name} shows no example input"
    return list(shown)


def key_of(found: OperationType, step: str, key: bytes = b"k" * 32) -> DownstreamKey:
    return DownstreamKey.derive(
        installation="test",
        tenant="t",
        type=found.name,
        key_digest=key,
        step=step,
        item=0,
        direction=Direction.FORWARD,
    )


def built(found: OperationType, given: dict[str, Any]) -> Iterator[tuple[str, EffectRequest]]:
    """Each step's request for an input that is read anew, as after a restart."""
    read = found.input.model_validate(given)
    results: dict[str, JsonObject] = {step.name: {} for step in found.steps}
    for step in found.steps:
        yield step.name, step.build(StepContext(read, results, key_of(found, step.name)))


def meaning(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_defaults=True)


def profile_of(name: str) -> ProviderProfile:
    return PLUGINS.registry.profiles[name]


def test_names_and_versions_are_unique() -> None:
    assert len(PLUGINS.registry.type_versions()) == len(set(PLUGINS.registry.type_versions())) > 0


@every_type
def test_requests_are_the_same_bytes_when_built_again(found: OperationType) -> None:
    for given in examples(found):
        assert dict(built(found, given)) == dict(built(found, json.loads(json.dumps(given))))


@every_type
def test_requests_do_not_depend_on_the_order_of_members(found: OperationType) -> None:
    for given in examples(found):
        backwards = dict(reversed(given.items()))
        assert dict(built(found, given)) == dict(built(found, backwards))


@every_type
def test_building_changes_nothing_it_was_given(found: OperationType) -> None:
    for given in examples(found):
        read = found.input.model_validate(given)
        before = read.model_dump_json()
        for step in found.steps:
            step.build(StepContext(read, {}, key_of(found, step.name)))
        assert read.model_dump_json() == before


@every_type
def test_fingerprints_do_not_depend_on_order_or_on_members_that_equal_their_default(
    found: OperationType,
) -> None:
    for given in examples(found):
        one = fingerprint(meaning(found.input.model_validate(given)))
        backwards = found.input.model_validate(dict(reversed(given.items())))
        filled = found.input.model_validate(found.input.model_validate(given).model_dump())
        assert fingerprint(meaning(backwards)) == one
        assert fingerprint(meaning(filled)) == one


@every_type
def test_examples_that_differ_have_fingerprints_that_differ(found: OperationType) -> None:
    prints = {fingerprint(meaning(found.input.model_validate(given))) for given in examples(found)}
    assert len(prints) == len(examples(found))


@every_type
def test_keys_differ_by_step_and_operation_and_stay_the_same_otherwise(
    found: OperationType,
) -> None:
    steps = [step.name for step in found.steps]
    keys = {key_of(found, step, digest).value for step in steps for digest in (b"a", b"b")}
    assert len(keys) == 2 * len(steps)
    assert {key_of(found, step) for step in steps} == {key_of(found, step) for step in steps}


@every_type
def test_keys_fit_the_profile(found: OperationType) -> None:
    for step in found.steps:
        rules = profile_of(step.provider).keys
        assert rules is None or rules.refusal(key_of(found, step.name).value) is None


@every_type
def test_requests_can_be_looked_up_and_carry_no_credentials(found: OperationType) -> None:
    for given in examples(found):
        for step, request in built(found, given):
            assert request.lookup_reference
            assert request.lookup_reference in request.body.decode()
            assert key_of(found, step).value in request.body.decode()
            assert not {name.lower() for name, _ in request.headers} & {"authorization", "cookie"}
            assert request.path.startswith("/")


@every_type
def test_inputs_are_strict_and_frozen(found: OperationType) -> None:
    for given in examples(found):
        with pytest.raises(ValidationError, match="extra_forbidden"):
            found.input.model_validate(given | {"no_such_member": 1})
        read = found.input.model_validate(given)
        name = next(iter(given))
        with pytest.raises(ValidationError, match="frozen_instance"):
            setattr(read, name, given[name])


@every_type
def test_no_text_field_takes_what_cannot_be_stored(found: OperationType) -> None:
    for given in examples(found):
        for name, value in given.items():
            if isinstance(value, str):
                for bad in ("a\x00", "a\ud800"):
                    with pytest.raises(ValidationError):
                        found.input.model_validate(given | {name: bad})


@every_type
def test_every_member_is_described(found: OperationType) -> None:
    for model in (found.input, found.result):
        schema = model.model_json_schema()
        for name, shown in schema["properties"].items():
            assert shown.get("description"), f"{found.name}: {name} has no description"


@every_type
def test_a_result_can_be_built_also_where_the_provider_said_nothing(found: OperationType) -> None:
    for given in examples(found):
        context = ResultContext(found.input.model_validate(given), {}, {})
        result = found.build_result(context)
        assert result == found.build_result(context)
        found.result.model_validate(result)


def request_of(name: str, given: dict[str, Any]) -> EffectRequest:
    found = PLUGINS.registry.latest(name)
    assert found is not None
    return dict(built(found, given))[found.steps[0].name]


def test_the_bytes_of_a_charge_are_pinned() -> None:
    """A change here would make a provider that compares bodies refuse what an older release began."""
    request = request_of(
        "payments.charge",
        {
            "source": "tok_ok",
            "currency": "eur",
            "amount": 1250.0,
            "description": "J\u00e9 \"'\u2028",
        },
    )
    charge = PLUGINS.registry.latest("payments.charge")
    assert charge is not None
    key = key_of(charge, "charge").value
    assert request.method == "POST"
    assert request.path == "/v1/charges"
    assert request.body.decode() == (
        '{"amount":1250,"currency":"eur","description":"J\u00e9 \\"\'\u2028",'
        f'"metadata":{{"fencepost_key":"{key}"}},"reference":"{key}","source":"tok_ok"}}'
    )
    assert request.lookup_reference == key


def test_the_bytes_of_a_refund_are_pinned() -> None:
    request = request_of(
        "payments.refund", {"charge": "ch_1", "reference": "r-1", "amount": 3, "reason": "late"}
    )
    refund = PLUGINS.registry.latest("payments.refund")
    assert refund is not None
    assert request.path == "/v1/refunds"
    assert request.body.decode() == (
        '{"amount":3,"charge":"ch_1","metadata":'
        f'{{"fencepost_key":"{key_of(refund, "refund").value}"}},"reason":"late","reference":"r-1"}}'
    )
    assert request.lookup_reference == "r-1"
    assert b"amount" not in request_of("payments.refund", {"charge": "ch_1"}).body


@pytest.mark.parametrize(
    "wrong",
    [
        {"currency": "EUR"},
        {"currency": "eur\n"},
        {"currency": "euro"},
        {"amount": 0},
        {"amount": "1"},
        {"amount": True},
        {"amount": 2**53},
        {"source": ""},
        {"source": "x" * 256},
        {"reference": ""},
        {"reference": "x" * 201},
        {"description": "x" * 1001},
    ],
)
def test_what_a_charge_does_not_take(wrong: dict[str, Any]) -> None:
    charge = PLUGINS.registry.latest("payments.charge")
    assert charge is not None
    with pytest.raises(ValidationError):
        charge.input.model_validate({"amount": 1, "currency": "eur", "source": "tok_ok"} | wrong)


def test_results_show_what_the_provider_made() -> None:
    charge = PLUGINS.registry.latest("payments.charge")
    assert charge is not None
    read = charge.input.model_validate({"amount": 5, "currency": "eur", "source": "tok_ok"})
    made: JsonObject = {"id": "ch_1", "amount": 4, "currency": "usd", "status": "pending"}
    result = charge.build_result(ResultContext(read, {"charge": "ch_1"}, {"charge": made}))
    assert result == {"charge": "ch_1", "amount": 4, "currency": "usd", "status": "pending"}
