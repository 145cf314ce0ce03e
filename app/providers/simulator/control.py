"""The control interface, for tests and demonstrations. Never counted, slowed or struck by faults.

| request | answer |
|---|---|
| `GET /_control` | the settings (`state.Settings`) |
| `PATCH /_control` | changes some of them; the settings |
| `POST /_control/faults` | arms one rule or a list (`faults.Rule`); `{"armed": [...]}` |
| `GET`, `DELETE /_control/faults` | `{"armed": [rule + "seen", "struck"]}` |
| `GET /_control/ledger` `?reference= &key= &kind=` | every effect, oldest first, and two counters |
| `GET /_control/calls` `?reference= &key=` | the last 10,000 requests to provider routes |
| `GET /_control/connections` | `{"connections": [...]}`: open ones and the last 10,000 closed |
| `POST /_control/forget_keys` | forgets every stored answer now; `{"forgotten": N}` |
| `POST /_control/reset` | empties everything: as on the first start |

Effects, keys, settings and the two counters are durable; faults and the records of calls and
connections last as long as the process. The ledger: `{"effects": [{"id", "kind", "key",
"reference", "amount", "currency", "at", "calls", "target"}], "calls",
"connections_without_bytes"}`; `calls` counts every request to a provider route, look-ups
included; an effect's `calls` those that asked for it under its key. Unknown members or parameters
are refused with 400 and a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from . import objects
from .bodies import first_complaint, read_json
from .connection import ConnectionLog
from .faults import Rule
from .state import State
from .wire import Answer, Refusal, Request, error_answer, invalid, json_answer, read_query


class Control:
    """Answers `/_control...` of one simulator."""

    def __init__(self, state: State, connections: ConnectionLog) -> None:
        self._state = state
        self._connections = connections
        self._routes: dict[str, dict[str, Callable[[Request], Answer]]] = {
            "": {"GET": self._settings, "PATCH": self._change},
            "/faults": {"GET": self._faults, "POST": self._arm, "DELETE": self._disarm},
            "/ledger": {"GET": self._ledger},
            "/calls": {"GET": self._calls},
            "/connections": {"GET": self._connection_list},
            "/forget_keys": {"POST": self._forget_keys},
            "/reset": {"POST": self._reset},
        }

    def answer(self, request: Request) -> Answer:
        """The answer. Raises `Refusal`."""
        methods = self._routes.get(request.path.removeprefix("/_control"))
        if methods is None:
            raise invalid("route_unknown", "There is nothing at this path.", status=404)
        chosen = methods.get(request.method)
        if chosen is None:
            allowed = ", ".join(methods)
            raise Refusal(
                error_answer(
                    405, "invalid_request_error", "method_not_allowed", f"Only {allowed}.",
                    ("Allow", allowed),
                )
            )  # fmt: skip
        return chosen(request)

    def _settings(self, request: Request) -> Answer:
        read_query(request.query, ())
        return json_answer(200, self._state.settings.model_dump())

    def _change(self, request: Request) -> Answer:
        changes = read_json(request)
        if not isinstance(changes, dict):
            raise invalid("control_invalid", "The body must be a JSON object.")
        with _explained():
            self._state.change_settings(changes)
        return json_answer(200, self._state.settings.model_dump())

    def _faults(self, request: Request) -> Answer:
        read_query(request.query, ())
        return json_answer(200, {"armed": self._state.rules.listing()})

    def _arm(self, request: Request) -> Answer:
        given: Any = read_json(request)
        with _explained():
            # All or none: a list with one bad rule arms nothing.
            listed = given if isinstance(given, list) else [given]
            rules = [Rule.model_validate(rule) for rule in listed]
        self._state.rules.arm(rules)
        return json_answer(200, {"armed": self._state.rules.listing()})

    def _disarm(self, request: Request) -> Answer:
        self._state.rules.disarm()
        return self._faults(request)

    def _ledger(self, request: Request) -> Answer:
        asked = read_query(request.query, ("reference", "key", "kind"))
        kind = asked.get("kind")
        effects = self._state.ledger.effects(
            reference=asked.get("reference"),
            key=asked.get("key"),
            kind=None if kind is None else kind.decode("utf-8", "replace"),
        )
        return json_answer(
            200,
            {
                "effects": [objects.ledger_line(effect) for effect in effects],
                "calls": self._state.ledger.calls,
                "connections_without_bytes": self._state.ledger.connections_without_bytes,
            },
        )

    def _calls(self, request: Request) -> Answer:
        asked = read_query(request.query, ("reference", "key"))
        wanted = {name: objects.text(value) for name, value in asked.items()}
        listed = (record.listing() for record in self._state.calls)
        return json_answer(
            200,
            {
                "calls": [
                    line
                    for line in listed
                    if all(line[name] == value for name, value in wanted.items())
                ]
            },
        )

    def _connection_list(self, request: Request) -> Answer:
        read_query(request.query, ())
        return json_answer(200, {"connections": self._connections.listing()})

    def _forget_keys(self, request: Request) -> Answer:
        read_query(request.query, ())
        return json_answer(200, {"forgotten": self._state.ledger.forget_keys()})

    def _reset(self, request: Request) -> Answer:
        read_query(request.query, ())
        self._state.reset()
        self._connections.forget()
        return json_answer(200, {"reset": True})


@contextmanager
def _explained() -> Iterator[None]:
    """Turn a failed validation into a refusal that names the member."""
    try:
        yield
    except ValidationError as error:
        param, message = first_complaint(error)
        raise invalid("control_invalid", message, param=param or None) from error
