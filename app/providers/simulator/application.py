"""Which part answers a path, and what all answers have: a `Request-Id`, and durability first.

`/v1/...` is the provider, `/_control...` the control interface, `GET /livez` answers 200 and is
counted nowhere.
"""

from __future__ import annotations

import logging
import secrets

from .connection import ConnectionLog
from .control import Control
from .ledger import LedgerError
from .provider import Provider
from .routes import find_route
from .state import CallRecord, State
from .wire import Answer, Cut, Refusal, Reply, Request, error_answer, invalid, json_answer

_LOG = logging.getLogger(__name__)
_BROKEN = error_answer(500, "api_error", "simulator_broken", "The simulator failed; see its log.")


class Application:
    """Answers every request of one simulator; never raises."""

    def __init__(self, state: State, connections: ConnectionLog) -> None:
        self._state = state
        self._provider = Provider(state)
        self._control = Control(state, connections)
        self._request_prefix = f"req_{secrets.token_hex(4)}"
        self._requests = 0

    async def handle(self, request: Request) -> Reply:
        """The reply to `request`; what it speaks of is committed when this returns."""
        self._requests += 1
        request_id = f"{self._request_prefix}{self._requests:08x}"
        try:
            if request.path.startswith("/v1/"):
                reply = await self._provider_call(request, request_id)
            else:
                reply = self._other(request)
                await self._state.ledger.commit()
        except LedgerError:
            _LOG.exception("the ledger failed during %s", request_id)
            reply = _BROKEN
        except Exception:
            _LOG.exception("unexpected failure during %s", request_id)
            reply = _BROKEN
        return _marked(reply, request_id)

    async def _provider_call(self, request: Request, request_id: str) -> Reply:
        self._state.ledger.count_call()
        record = CallRecord.of(request, request_id)
        self._state.calls.append(record)
        reply: Reply = _BROKEN
        try:
            route = find_route(request.method, request.path)
            reply = await self._provider.answer(request, route, record)
        except Refusal as refusal:
            reply = refusal.answer
        finally:
            record.end(reply)
        await self._state.ledger.commit()
        return reply

    def _other(self, request: Request) -> Answer:
        try:
            if request.path == "/livez" and request.method == "GET":
                return json_answer(200, {"status": "ok"})
            if request.path == "/_control" or request.path.startswith("/_control/"):
                return self._control.answer(request)
            raise invalid("route_unknown", "There is nothing at this path.", status=404)
        except Refusal as refusal:
            return refusal.answer


def _marked(reply: Reply, request_id: str) -> Reply:
    if isinstance(reply, Cut):
        if reply.answer is None:
            return reply
        return Cut(reply.style, reply.answer.with_header("Request-Id", request_id))
    return reply.with_header("Request-Id", request_id)
