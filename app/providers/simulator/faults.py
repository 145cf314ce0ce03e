"""Faults: what goes wrong with one call, and the rules with which tests arrange for it.

**When a fault strikes.** `before`: the effect has not happened; with an answer or a drop the call
ends there and it never does, with a delay alone the call goes on (bytes delivered late: until
then the key is not under way). `after`: the effect has happened and its true answer is stored
under the key; then comes the delay, then the fault's answer or drop, or with a delay alone the
true answer, late (until then a second call with the key gets 409). `none`: the effect never
happens for this call; with a delay alone the request is swallowed and the connection closed.

**Answer and drop together**: the answer's head and half of its body leave, then the connection is
cut.

**Stored or not.** A rule's answer comes from something in front of the provider and is not stored
under the key, unless the rule says `"store": true`: `none` + 500 + store burns a key, `after` +
500 + store is Stripe's stored 500. `store` and the drop styles `"fin"` and `"rst"` (`true` is
`"fin"`) are additions to the contract's shape.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .wire import JSON_TYPE, Answer, Cut, CutStyle, Reply

When = Literal["before", "after", "none"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one call; see the module for how the members combine."""

    effect: When
    delay_seconds: float = 0.0
    answer: Answer | None = None
    drop: CutStyle | None = None
    store: bool = False
    forever: bool = False

    def reply(self, truth: Answer | None) -> Reply | None:
        """How the call ends if `truth` is the true answer; None (without truth): it goes on."""
        if self.drop is not None:
            return Cut(self.drop, self.answer)
        if self.answer is not None:
            return self.answer
        if self.effect == "none":
            return Cut("fin")
        return truth


@dataclass(frozen=True, slots=True)
class Traits:
    """What a rule can match in a call; `source` is the token the call carries."""

    method: str
    path: str
    reference: str | None = None
    source: str | None = None


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Match(_Shape):
    """Which calls a rule means; everything given must fit.

    `path` is exact, or has `*` for any run of characters; `nth` is the number of the first
    matching call (counted from 1, since the rule was armed) that is struck.
    """

    method: str | None = None
    path: str | None = None
    reference: str | None = None
    source: str | None = None
    nth: Annotated[int, Field(ge=1)] | None = None

    def fits(self, traits: Traits) -> bool:
        """Whether this call is one of those meant, its number aside."""
        return (
            (self.method is None or self.method.upper() == traits.method)
            and (self.path is None or fnmatchcase(traits.path, self.path.replace("[", "[[]")))
            and (self.reference is None or self.reference == traits.reference)
            and (self.source is None or self.source == traits.source)
        )


class FaultAnswer(_Shape):
    """The answer a rule gives.

    `body`: a text is sent as it is, any other JSON value encoded; or `body_base64` for any bytes.
    """

    status: Annotated[int, Field(ge=200, le=599)]
    headers: dict[str, str] = {}
    body: Any = None
    body_base64: str | None = None

    @field_validator("headers")
    @classmethod
    def _sendable(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) is None:
                raise ValueError(f"{name!r} is not a header name")
            if name.lower() in ("content-length", "transfer-encoding", "connection"):
                raise ValueError(f"{name} is set by the server")
            if re.fullmatch(r"[\x21-\x7e\xa0-\xff]([ \x21-\x7e\xa0-\xff]*\S)?|", value) is None:
                raise ValueError(f"the value of {name} cannot be sent")
        return headers

    @model_validator(mode="after")
    def _one_body(self) -> FaultAnswer:
        if self.body_base64 is not None:
            if self.body is not None:
                raise ValueError("give body or body_base64, not both")
            try:
                base64.b64decode(self.body_base64, validate=True)
            except binascii.Error as error:
                raise ValueError("body_base64 is not base64") from error
        return self

    def answer(self) -> Answer:
        """The bytes to send; JSON is announced unless the rule sets a Content-Type."""
        if self.body_base64 is not None:
            body = base64.b64decode(self.body_base64)
        elif isinstance(self.body, str):
            body = self.body.encode()
        else:
            body = b"" if self.body is None else orjson.dumps(self.body)
        headers = tuple(self.headers.items())
        if body and not any(name.lower() == "content-type" for name in self.headers):
            headers = (JSON_TYPE, *headers)
        return Answer(self.status, body, headers)


class Rule(_Shape):
    """One armed fault, shaped as in CONTRACT.md; `times: null` strikes until deleted."""

    match: Match = Match()
    times: Annotated[int, Field(ge=1)] | None = 1
    effect: When
    delay_seconds: Annotated[float, Field(ge=0, le=3600)] = 0.0
    answer: FaultAnswer | None = None
    drop: Literal[True, "fin", "rst"] | None = None
    store: bool = False

    @model_validator(mode="after")
    def _does_something(self) -> Rule:
        if self.answer is None and self.drop is None:
            if not self.delay_seconds and self.effect != "none":
                raise ValueError("a rule needs an answer, a drop or a delay")
            if self.store:
                raise ValueError("store needs an answer")
        if self.store and self.answer is None:
            raise ValueError("store needs an answer")
        return self

    def fault(self) -> Fault:
        """What the rule does to a call it strikes."""
        drop: CutStyle | None = "fin" if self.drop is True else self.drop
        answer = None if self.answer is None else self.answer.answer()
        return Fault(self.effect, self.delay_seconds, answer, drop, self.store)


class _Armed:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.fault = rule.fault()
        self.seen = 0
        self.struck = 0


class Rules:
    """The armed rules, oldest first. They live as long as the process, not in the ledger's file."""

    def __init__(self) -> None:
        self._armed: list[_Armed] = []

    def arm(self, rules: list[Rule]) -> None:
        """Add rules behind those already armed."""
        self._armed.extend(_Armed(rule) for rule in rules)

    def disarm(self) -> None:
        """Remove every rule."""
        self._armed.clear()

    def strike(self, traits: Traits) -> Fault | None:
        """Count this call at every rule it fits; the fault of the first one that is due."""
        struck: _Armed | None = None
        for armed in self._armed:
            rule = armed.rule
            if not rule.match.fits(traits):
                continue
            armed.seen += 1
            spent = rule.times is not None and armed.struck >= rule.times
            if struck is None and not spent and armed.seen >= (rule.match.nth or 1):
                armed.struck += 1
                struck = armed
        return None if struck is None else struck.fault

    def listing(self) -> list[dict[str, object]]:
        """Each rule as given, with `seen` (matching calls) and `struck` (calls it struck)."""
        return [
            {
                **armed.rule.model_dump(exclude_unset=True),
                "seen": armed.seen,
                "struck": armed.struck,
            }
            for armed in self._armed
        ]
