"""What one running simulator is made of, settings and the record of calls included."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .faults import Rules
from .ledger import Ledger
from .wire import Cut, Reply, Request, rfc3339

_CALLS_KEPT = 10_000

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """What `PATCH /_control` changes; kept in the ledger's file.

    `key_memory_seconds` counts from a key's first execution (0: keys are not remembered at all);
    `lookup_lag_seconds` from an effect to its being shown; `latency_seconds` is added to every
    provider call (the key counts as under way meanwhile); `slow_seconds` is the delay of
    `tok_slow`; `seed` drives `tok_flaky`; above `rate_limit_per_second` (0: off) provider requests
    get 429 with `Retry-After: 1`. `lookup`: `down` answers 503, `lying_absent` finds nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    key_memory_seconds: _Seconds = 86_400.0
    lookup_lag_seconds: _Seconds = 0.0
    lookup: Literal["ok", "down", "lying_absent"] = "ok"
    latency_seconds: _Seconds = 0.0
    slow_seconds: _Seconds = 8.0
    rate_limit_per_second: Annotated[int, Field(ge=0)] = 0
    seed: int = 0


@dataclass(slots=True)
class CallRecord:
    """One request to a provider route, as `GET /_control/calls` shows it (without its body)."""

    method: str
    path: str
    query: str
    key: str | None
    connection: int
    body_sha256: str
    request_id: str
    at: float = field(default_factory=time.time)
    reference: str | None = None
    status: int | None = None
    ended: Literal["answered", "dropped"] | None = None

    @classmethod
    def of(cls, request: Request, request_id: str) -> CallRecord:
        """The record of a request that has just come; the key as sent, even where it is refused."""
        keys = request.header_lines(b"idempotency-key")
        return cls(
            method=request.method,
            path=request.path,
            query=request.query.decode("latin-1"),
            key=keys[0].decode("latin-1") if keys else None,
            connection=request.connection,
            body_sha256=hashlib.sha256(request.body).hexdigest(),
            request_id=request_id,
        )

    def end(self, reply: Reply) -> None:
        """Note how the call ended."""
        if isinstance(reply, Cut):
            self.ended = "dropped"
        else:
            self.ended, self.status = "answered", reply.status

    def listing(self) -> dict[str, object]:
        """As JSON; `status` and `ended` are null while the call is under way."""
        return {
            "at": rfc3339(self.at),
            "method": self.method,
            "path": self.path,
            "query": self.query,
            "key": self.key,
            "reference": self.reference,
            "body_sha256": self.body_sha256,
            "connection": self.connection,
            "request_id": self.request_id,
            "status": self.status,
            "ended": self.ended,
        }


class State:
    """The parts of a running simulator; `under_way` holds the keys of unanswered calls."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        saved = ledger.read_meta("settings")
        self.settings = Settings()
        if saved:
            with contextlib.suppress(ValidationError):  # written by another version: start anew
                self.settings = Settings.model_validate_json(str(saved))
        self.accepted: deque[float] = deque()
        self.rules = Rules()
        self.under_way: dict[bytes, object] = {}
        self.calls: deque[CallRecord] = deque(maxlen=_CALLS_KEPT)

    def change_settings(self, changes: dict[str, object]) -> None:
        """Replace some settings, durably with the next commit. Raises `ValidationError`."""
        self.settings = Settings.model_validate({**self.settings.model_dump(), **changes})
        self.ledger.write_meta("settings", self.settings.model_dump_json())

    def within_rate(self) -> bool:
        """Whether one more call fits into the last second; counts it if so."""
        limit = self.settings.rate_limit_per_second
        if limit == 0:
            return True
        now = time.monotonic()
        while self.accepted and self.accepted[0] <= now - 1:
            self.accepted.popleft()
        if len(self.accepted) >= limit:
            return False
        self.accepted.append(now)
        return True

    def reset(self) -> None:
        """Everything as on the first start."""
        self.ledger.reset()
        self.settings = Settings()
        self.rules.disarm()
        self.under_way.clear()
        self.accepted.clear()
        self.calls.clear()
