"""The one HTTP transport for effects, over httpx.

What a send came to is decided by one fact: whether the last check was passed. It is asked when httpx reports
`http11.send_request_headers.started`: after waiting for a slot, DNS, connect and TLS, on the open connection,
before the first byte (PROTOCOL.md R1).

| what happened | outcome |
|---|---|
| no slot, no address, refused, TLS failed, connect too slow, the check said no | `NotApplied`: no byte left |
| an answer arrived, however odd | what the profile says of its status and code; nothing: `Unknown` |
| anything else after the check | `Unknown` |
| cancelled | `CancelledError` goes on to the caller, for whom it is unknown; the connection is closed |

Nothing here sends twice. httpx and httpcore are told not to retry; should one of them pass the check again
with the same request, it is stopped there. Redirects are answers. Only a send that reached nobody is tried
again, a few times within milliseconds and inside the same send window; longer waits are durable and the
caller's.

A transport that does not report the event cannot be used for effects: an answer that came past the check is
`Unknown`, and every later send is refused before it connects.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt, wait_random

from app.domain.errors import SendWindowClosed
from app.domain.outcome import NotApplied, Outcome, Unknown
from app.domain.plan import EffectRequest
from app.domain.profile import ProviderAnswer, ProviderClass, ProviderProfile
from app.domain.provider import LastCheck
from app.domain.text import bounded_text
from app.providers.http_slots import ClientSlots, Slot, SlotsClosed, has_surplus
from app.providers.retry_after import retry_after_seconds

MAX_ANSWER_BYTES = 1_048_576
"""A body beyond this is not read; the answer then counts as unreadable."""

SENDS_AT_ONCE = 3
"""Tries of one call while nobody is reached, the first included."""

_RETRY_SPREAD_SECONDS = 0.05
_HEADER_LIMIT = 255
_BAD_PATH = "The path is not one that is sent exactly as it is written."
_CHECKPOINT = "http11.send_request_headers.started"
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_RESERVED = frozenset(
    {
        "accept",
        "accept-encoding",
        "authorization",
        "connection",
        "content-length",
        "content-type",
        "cookie",
        "host",
        "idempotency-key",
        "transfer-encoding",
        "user-agent",
    }
)
_FIXED_HEADERS = (
    ("Accept", "application/json"),
    ("Accept-Encoding", "identity"),  # what is read stays bounded by what was sent
    ("User-Agent", "fencepost"),  # without a version: a deploy must not change a request (B23)
)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """One answer. `body` is None where it did not arrive whole, was too large, or came encoded."""

    status: int
    headers: httpx.Headers
    body: bytes | None

    @property
    def retry_after_seconds(self) -> float | None:
        """0 to a day, or None (`app.providers.retry_after`)."""
        lines = self.headers.get_list("retry-after")
        if not lines:
            return None
        return retry_after_seconds(lines, date=self.header("date"), now=datetime.now(UTC))

    def header(self, name: str) -> str | None:
        """A header's value (several lines joined by commas), bounded and storable; None if absent."""
        value = self.headers.get(name)
        return None if value is None else bounded_text(value, _HEADER_LIMIT)


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """There is no answer. `sent` says whether the request may have left; `code` is stable.

    Not sent: `not-connected`, `connect-timeout`, `no-free-connection`, `send-window-closed`,
    `request-unsendable`, `transport-refused`, `adapter-closed`. Sent, perhaps: `timeout`, `connection-lost`,
    `protocol-error`, `second-send-stopped`, `unchecked-send`.
    """

    sent: bool
    code: str
    detail: str | None = None


class HttpSender:
    """Sends one provider's requests under its profile. Safe for concurrent use in one event loop.

    At most `profile.concurrency` calls are under way at once. A call waits for its turn no longer than the
    send window, and takes no longer than `profile.timeout_seconds` from then on, connecting and the last byte
    of the answer included.
    """

    def __init__(self, profile: ProviderProfile, base_url: str) -> None:
        self._profile = profile
        self._base_url = base_url.rstrip("/")
        self._base_path = httpx.URL(self._base_url).raw_path.decode().rstrip("/")
        seconds = profile.timeout_seconds
        self._timeouts = {"connect": seconds, "read": seconds, "write": seconds, "pool": seconds}
        self._slots = ClientSlots(
            profile.concurrency,
            secure=self._base_url.lower().startswith("https:"),
            keep_connections=profile.provider_class is not ProviderClass.NEITHER,
            give_up_seconds=seconds,
        )
        self._refused = False

    async def perform(
        self,
        request: EffectRequest,
        headers: Sequence[tuple[str, str]],
        last_check: LastCheck,
        read: Callable[[HttpAnswer], ProviderAnswer],
    ) -> Outcome:
        """Send exactly the stored bytes of `request` and say what came of it.

        `headers` are the adapter's (key, credentials); `read` turns an answer into the provider's terms and
        the profile classifies it. Expected failures are outcomes; `CancelledError` and what `last_check` or
        `read` raise beyond `SendWindowClosed` go on to the caller.
        """
        unsendable = _unsendable(request)
        url = self._url(request.path)
        if unsendable is not None or url is None:
            # It was stored at the first attempt and is never rebuilt, so no later send can differ.
            return NotApplied("request-unsendable", unsendable or _BAD_PATH, final=True)
        sent_headers = (
            *_FIXED_HEADERS,
            ("Content-Type", "application/json"),
            *headers,
            *request.headers,
        )
        # One tenacity object per call: its state is not safe between tasks of one thread.
        tries = AsyncRetrying(
            stop=stop_after_attempt(SENDS_AT_ONCE),
            wait=wait_random(0, _RETRY_SPREAD_SECONDS),
            retry=retry_if_result(_reached_nobody),
            retry_error_callback=_last_result,
        )
        ended: HttpAnswer | NoAnswer = await tries(
            self._exchange, request.method, url, sent_headers, request.body, last_check
        )
        if isinstance(ended, HttpAnswer):
            return self._profile.classify(read(ended))
        if ended.sent:
            return Unknown(ended.code, ended.detail)
        return NotApplied(ended.code, ended.detail)

    async def ask(
        self, path_and_query: str, headers: Sequence[tuple[str, str]]
    ) -> HttpAnswer | NoAnswer:
        """GET something that has no effect (a look-up), once. The path is checked like a request's."""
        url = self._url(path_and_query)
        if url is None:
            return NoAnswer(False, "request-unsendable", _BAD_PATH)
        return await self._exchange("GET", url, (*_FIXED_HEADERS, *headers), None, _always)

    async def close(self) -> None:
        """Close every connection; calls under way end with an error."""
        await self._slots.close()

    def _url(self, path: str) -> httpx.URL | None:
        """Where `path` is, or None where httpx would send another one (`..`, blanks, a fragment)."""
        try:
            url = httpx.URL(self._base_url + path)
        except (httpx.InvalidURL, ValueError):
            return None
        exact = path.startswith("/") and url.raw_path == (self._base_path + path).encode()
        return url if exact else None

    async def _exchange(
        self,
        method: str,
        url: httpx.URL,
        headers: Sequence[tuple[str, str]],
        body: bytes | None,
        last_check: LastCheck,
    ) -> HttpAnswer | NoAnswer:
        """One send, on one slot."""
        if self._refused:
            return NoAnswer(False, "transport-refused", "It does not report the last check.")
        gate = _Gate(last_check)
        request = httpx.Request(
            method,
            url,
            headers=list(headers),
            content=body,
            extensions={"timeout": self._timeouts, "trace": gate.trace},
        )
        try:
            async with asyncio.timeout(self._profile.send_window_seconds):
                slot = await self._slots.take()
        except TimeoutError:
            return NoAnswer(False, "no-free-connection", "All connections were busy.")
        except SlotsClosed:
            return NoAnswer(False, "adapter-closed")
        try:
            return await self._on(slot, request, gate)
        finally:
            await self._slots.give_back(slot)

    async def _on(self, slot: Slot, request: httpx.Request, gate: _Gate) -> HttpAnswer | NoAnswer:
        response: httpx.Response | None = None
        body: bytes | None = None
        try:
            async with asyncio.timeout(self._profile.timeout_seconds):
                response = await slot.transport.handle_async_request(request)
                body = await _read_body(response)
                whole = body is not None and response.status_code >= 200
                slot.keep = whole and not has_surplus(response)
                await response.aclose()
        except (
            httpx.HTTPError,
            httpx.StreamError,
            httpx.InvalidURL,
            OSError,
            _SecondSend,
        ) as error:
            slot.keep = False
            if response is None:
                return _no_answer(error, gate)
            # The head arrived: what the profile says of the status holds, with or without a body.
            body = None
        except SendWindowClosed as error:
            return NoAnswer(False, error.code, bounded_text(str(error)) or None)
        if not gate.passed:
            self._refused = True
            slot.keep = False
            return NoAnswer(True, "unchecked-send", "The transport did not report the last check.")
        return HttpAnswer(response.status_code, response.headers, body)


class _SecondSend(Exception):
    """The transport was about to send a request again whose bytes may have left."""


class _Gate:
    """Stands between the open connection and the first byte; one per request, opens once."""

    __slots__ = ("_last_check", "passed", "reported")

    def __init__(self, last_check: LastCheck) -> None:
        self._last_check = last_check
        self.passed = False
        self.reported = False

    async def trace(self, event: str, info: Mapping[str, object]) -> None:
        """httpx' trace callback. What it raises reaches our caller, and nothing is sent."""
        self.reported = True
        if event != _CHECKPOINT:
            return
        if self.passed:
            raise _SecondSend("The transport tried to send the request again.")
        self._last_check()
        self.passed = True


def _no_answer(error: Exception, gate: _Gate) -> NoAnswer:
    """What an exception before any answer says; only the check proves that nothing left."""
    detail = _describe(error)
    connecting = isinstance(
        error,
        (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol),
    )
    if not gate.passed and (connecting or gate.reported):
        timed_out = isinstance(error, (httpx.TimeoutException, TimeoutError))
        return NoAnswer(False, "connect-timeout" if timed_out else "not-connected", detail)
    if not gate.passed:
        return NoAnswer(True, "unchecked-send", detail)
    match error:
        case _SecondSend():
            code = "second-send-stopped"
        case httpx.TimeoutException() | TimeoutError():
            code = "timeout"
        case httpx.ProtocolError() if "disconnected" not in str(error):
            code = "protocol-error"
        case _:
            code = "connection-lost"
    return NoAnswer(True, code, detail)


def _describe(error: Exception) -> str:
    return bounded_text(f"{type(error).__name__}: {error}".removesuffix(": "))


async def _read_body(response: httpx.Response) -> bytes | None:
    """The whole body, or None where it is too large or encoded although we asked for neither."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        return None
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.aiter_raw():
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            return None
        chunks.append(chunk)
    return b"".join(chunks)


def _unsendable(request: EffectRequest) -> str | None:
    """Why a stored request cannot be sent as it is, or None. Nothing is repaired on the way out."""
    if _TOKEN.fullmatch(request.method) is None:
        return "The method is not an HTTP token."
    for name, value in request.headers:
        if _TOKEN.fullmatch(name) is None or _FIELD_VALUE.fullmatch(value) is None:
            return "A header cannot be written as HTTP."
        if name.lower() in _RESERVED:
            return f"The header {name.lower()} is not the request's to set."
    return None


def _reached_nobody(ended: HttpAnswer | NoAnswer) -> bool:
    return isinstance(ended, NoAnswer) and not ended.sent and ended.code == "not-connected"


def _last_result(state: RetryCallState) -> HttpAnswer | NoAnswer:
    assert state.outcome is not None  # this callback follows a try
    ended: HttpAnswer | NoAnswer = state.outcome.result()
    return ended


def _always() -> None:
    """The last check of what has no effect."""
