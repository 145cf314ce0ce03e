"""The order of things in one provider call.

1. The request is checked; 400, 404, 405 and 415 are answered before anything else is looked at
   and never stored.
2. Above the rate limit: 429, nothing stored. Then a rule that strikes before the effect, standing
   for what lies in front of the provider.
3. The key: 409 `idempotency_key_in_use` while another call with it is under way (from its
   admission until its answer leaves); then `latency_seconds`; then 400 `idempotency_error` where
   the stored request differs.
4. The token's fault, if this is a call it strikes.
5. The stored answer, or execution: the effect and the answer stored under the key are one
   transaction, and it is committed before anything leaves.
6. What strikes after the effect: delay, other answer, cut.

A caller that hangs up changes nothing: the call goes on.
"""

from __future__ import annotations

import asyncio
import time

from . import objects, tokens
from .execution import execute
from .faults import Fault
from .ledger import StoredAnswer
from .routes import Call, LookUp, Route, read_call, read_look_up
from .state import CallRecord, State
from .wire import Answer, Refusal, Reply, Request, error_answer, invalid, json_answer

_MISMATCH = error_answer(
    400, "idempotency_error", "idempotency_key_reused",
    "This Idempotency-Key was used with another request.",
)  # fmt: skip
_IN_USE = error_answer(
    409, "idempotency_error", "idempotency_key_in_use",
    "The first call with this Idempotency-Key is still under way.",
)  # fmt: skip
_LOOK_UP_DOWN = error_answer(503, "api_error", "lookup_unavailable", "Look-ups are down.")
_REPLAYED = ("Idempotent-Replayed", "true")


class Provider:
    """Answers provider routes of one simulator."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._ledger = state.ledger

    async def answer(self, request: Request, route: Route, record: CallRecord) -> Reply:
        """How this request ends. Raises `Refusal` and `LedgerError`."""
        if route.look_up:
            look_up = read_look_up(request, route)
            record.reference = look_up.traits.reference
            if not self._state.within_rate():
                raise Refusal(tokens.RATE_LIMITED)
            return await self._look_up(look_up)
        call = read_call(request, route)
        record.reference = call.body.reference
        if not self._state.within_rate():
            self._count_ask(call, self._stored(call))
            raise Refusal(tokens.RATE_LIMITED)
        rule = self._state.rules.strike(call.traits)
        if rule is not None and rule.effect != "after":
            ended = await self._strike_first(call, rule)
            if ended is not None:
                return ended
            rule = None
        return await self._admit(call, rule)

    async def _admit(self, call: Call, rule: Fault | None) -> Reply:
        """Take the key for the time of the call."""
        if call.key is None:
            return await self._perform(call, rule)
        under_way = self._state.under_way
        if call.key in under_way:
            self._count_ask(call, self._stored(call))
            raise Refusal(_IN_USE)
        under_way[call.key] = call
        try:
            return await self._perform(call, rule)
        finally:
            # After a reset the key may already belong to another call.
            if under_way.get(call.key) is call:
                del under_way[call.key]

    async def _perform(self, call: Call, rule: Fault | None) -> Reply:
        await _pause(self._state.settings.latency_seconds)
        stored = self._stored(call)
        if stored is not None and stored.fingerprint != call.fingerprint:
            raise Refusal(_MISMATCH)
        fault = self._token_fault(call)
        fault = rule or fault
        if fault is not None and fault.effect != "after":
            ended = await self._strike_first(call, fault)
            if ended is not None:
                return ended
        truth = self._replay(call, stored) if stored else self._execute(call, fault)
        await self._ledger.commit()
        if fault is None:
            return truth
        await _pause(fault.delay_seconds)
        return fault.reply(truth) or truth

    def _stored(self, call: Call) -> StoredAnswer | None:
        if call.key is None:
            return None
        oldest = time.time() - self._state.settings.key_memory_seconds
        return self._ledger.stored_answer(call.key, oldest=oldest)

    def _replay(self, call: Call, stored: StoredAnswer) -> Answer:
        self._count_ask(call, stored)
        return Answer(
            stored.status, stored.body, (("Content-Type", stored.content_type), _REPLAYED)
        )

    def _execute(self, call: Call, fault: Fault | None) -> Answer:
        at = time.time()
        with self._ledger.atomic():
            done = execute(self._ledger, call, at=at)
            answer = done.answer
            if fault is not None and fault.store and fault.answer is not None:
                answer = fault.answer
            self._keep(call, answer, at=at, effect=done.effect)
        return done.answer

    def _keep(
        self, call: Call, answer: Answer, *, at: float, effect: int | None, forever: bool = False
    ) -> None:
        """Store an answer under the call's key, if it has one."""
        if call.key is None:
            return
        content_type = dict(answer.headers).get("Content-Type", "application/octet-stream")
        self._ledger.store_answer(
            call.key,
            StoredAnswer(
                call.fingerprint, at, forever, answer.status, content_type, answer.body, effect
            ),
        )

    def _count_ask(self, call: Call, stored: StoredAnswer | None) -> None:
        if call.key is not None:
            self._ledger.count_ask(call.key, stored.effect if stored else None)

    async def _strike_first(self, call: Call, fault: Fault) -> Reply | None:
        """A fault before the effect; None: the call goes on."""
        reply = fault.reply(None)
        if reply is not None:
            with self._ledger.atomic():
                stored = self._stored(call)
                self._count_ask(call, stored)
                if fault.store and fault.answer is not None and stored is None:
                    self._keep(
                        call, fault.answer, at=time.time(), effect=None, forever=fault.forever
                    )
        await self._ledger.commit()
        await _pause(fault.delay_seconds)
        return reply

    def _token_fault(self, call: Call) -> Fault | None:
        """The token's fault for this call, counted durably with the call's own transaction."""
        token = call.body.chosen_token()
        if token is None or not tokens.can_fail(token):
            return None
        settings = self._state.settings
        amount = getattr(call.body, "amount", None)
        with self._ledger.atomic():
            # A fingerprint cannot be mistaken for a key: keys are printable text.
            per_request = call.key is None or tokens.strikes_per_request(token)
            who = b"\0" + call.fingerprint if per_request else call.key
            assert who is not None
            number = self._ledger.strike(who)
        return tokens.fault(
            token,
            number,
            keyed=call.key is not None,
            flaky=tokens.flaky_sequence(settings.seed, call.kind, amount),
            slow_seconds=settings.slow_seconds,
        )

    async def _look_up(self, asked: LookUp) -> Reply:
        rule = self._state.rules.strike(asked.traits)
        if rule is not None and rule.effect != "after":
            await _pause(rule.delay_seconds)
            ended = rule.reply(None)
            if ended is not None:
                return ended
            rule = None
        await _pause(self._state.settings.latency_seconds)
        truth = self._found(asked)
        if rule is None:
            return truth
        await _pause(rule.delay_seconds)
        return rule.reply(truth) or truth

    def _found(self, asked: LookUp) -> Answer:
        settings = self._state.settings
        if settings.lookup == "down":
            return _LOOK_UP_DOWN
        until = time.time() - settings.lookup_lag_seconds
        if asked.target is not None:
            effect = self._ledger.effect(asked.kind, asked.target)
            if effect is None or effect.at > until or settings.lookup == "lying_absent":
                raise invalid("resource_missing", f"No such {asked.kind}.", param="id", status=404)
            return json_answer(200, objects.current(self._ledger, effect, until=until))
        effects = self._ledger.effects(
            kind=asked.kind, reference=asked.reference, key=asked.key, until=until
        )
        if settings.lookup == "lying_absent":
            effects = []
        data = [objects.current(self._ledger, effect, until=until) for effect in effects]
        return json_answer(200, {"object": "list", "data": data, "has_more": False})


async def _pause(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)
