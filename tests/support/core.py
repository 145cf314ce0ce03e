"""Worker and reconciler in this process, on a real database, with a provider that plays a script.

    async with house(url, ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))) as core:
        core.provider.plays(Play(effect=True, answer=Unknown("timeout")))
        id = await core.admit("k")
        await core.work()
        assert core.provider.effects_of(...)

The provider keeps its own ledger: what reached it (`arrived`), and what came of it (`effects`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict

from app.domain.errors import CommitUnknown
from app.domain.identity import DownstreamKey, IdempotencyKey, OperationId
from app.domain.lifecycle import State
from app.domain.operation import Claimed, OperationView
from app.domain.outcome import Absent, Applied, Finding, Outcome, Succeeded
from app.domain.plan import Effect, EffectRequest, OperationType, ResultContext, StepContext
from app.domain.policy import Backoff, LeasePolicy, TypePolicy
from app.domain.profile import KeyRules, LookupRules, ProviderClass, ProviderProfile
from app.domain.provider import LastCheck
from app.domain.registry import Registry
from app.domain.restraint import RestraintRules
from app.failpoints import Failpoints
from app.service.admission import Admission, AdmissionService, Admitted, Draft
from app.service.execution import Execution
from app.service.notifying import Notifier
from app.service.reconciliation import Reconciliation
from app.service.turns import Turns
from app.storage import views
from app.storage.database import Database, Row, Statement, Transaction
from app.telemetry import Metric, Telemetry

INSTALLATION = "test"
POLICY = LeasePolicy(lease_seconds=30.0, renew_interval_seconds=10.0, margin_seconds=1.0)


class CapturedLog:
    """Keeps every log line as (level, event, fields)."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, object]]] = []

    def __getattr__(self, level: str) -> Callable[..., None]:
        if level not in ("debug", "info", "warning", "error"):
            raise AttributeError(level)

        def write(event: str, **fields: object) -> None:
            self.lines.append((level, event, fields))

        return write

    def of(self, event: str) -> list[dict[str, object]]:
        """The fields of every line of that event."""
        return [fields for _, name, fields in self.lines if name == event]


def capturing_telemetry() -> tuple[Telemetry, CapturedLog]:
    """Telemetry on a registry of its own, and what it logs."""
    log = CapturedLog()
    return Telemetry(CollectorRegistry(), log), log


def counted(telemetry: Telemetry, metric: Metric, **labels: str) -> float:
    """A counter's value, 0 where it was never counted."""
    return telemetry.registry.get_sample_value(metric.value, labels) or 0.0


def profile_of(kind: ProviderClass, **changes: Any) -> ProviderProfile:
    """A profile of that class, with short times; with keys there is a look-up only where it is asked for."""
    keys = KeyRules("Idempotency-Key", memory_seconds=600.0, stores_rejections=False)
    lookup = LookupRules("key", lag_seconds=2.0)
    profile = ProviderProfile(
        name="test",
        pinned_on="2026-01-01",
        answers=(),
        timeout_seconds=5.0,
        keys=keys if kind is ProviderClass.HONOURS_KEYS else None,
        lookup=lookup if kind is ProviderClass.LOOKED_UP else None,
        send_window_seconds=5.0,
        stall_seconds=1.0,
        delivery_seconds=4.0,
        restraint=RestraintRules(
            failure_threshold=1_000_000
        ),  # circuits are tests/service/test_restraint.py's
    )
    profile = replace(profile, **changes)
    assert profile.provider_class is kind
    return profile


Step = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Play:
    """What one call does. `before` the last check; `meanwhile`: on the wire, before the effect.

    `answer` None: the provider's own (success, or the stored one); an exception is raised as it is.
    """

    effect: bool = True
    answer: Outcome | BaseException | None = None
    before: Step | None = None
    meanwhile: Step | None = None
    after: Step | None = None


@dataclass(frozen=True)
class Arrival:
    """One call that got past its last check: its bytes were on the wire."""

    key: str
    request: EffectRequest


class ScriptedProvider:
    """A `ProviderAdapter` that plays what it is told, then what a healthy provider would do."""

    def __init__(self, profile: ProviderProfile) -> None:
        self._profile = profile
        self._script: deque[Play] = deque()
        self._lookups: deque[Finding | BaseException] = deque()
        self.always: Play | None = None
        self.called = 0
        self.arrived: list[Arrival] = []
        self.effects: list[tuple[str, str]] = []
        self.asked: list[str] = []

    @property
    def profile(self) -> ProviderProfile:
        return self._profile

    def plays(self, *plays: Play) -> None:
        """The next calls do this, in this order."""
        self._script.extend(plays)

    def finds(self, *findings: Finding | BaseException) -> None:
        """The next look-ups tell this, in this order; later ones tell the truth."""
        self._lookups.extend(findings)

    async def perform(
        self, request: EffectRequest, key: DownstreamKey, last_check: LastCheck
    ) -> Outcome:
        self.called += 1
        play = self._script.popleft() if self._script else self.always or Play()
        await _do(play.before)
        last_check()
        self.arrived.append(Arrival(key.value, request))
        await _do(play.meanwhile)
        own = self._execute(key.value) if play.effect else None
        await _do(play.after)
        if isinstance(play.answer, BaseException):
            raise play.answer
        if play.answer is not None:
            return play.answer
        assert own is not None, "a call without effect needs an answer"
        return Succeeded(own, {"reference": own})

    def _execute(self, key: str) -> str:
        if self._profile.keys is not None:
            for known, reference in self.effects:
                if known == key:
                    return reference
        reference = f"effect-{len(self.effects) + 1}"
        self.effects.append((key, reference))
        return reference

    async def look_up(self, request: EffectRequest, key: DownstreamKey) -> Finding:
        self.asked.append(key.value)
        if self._lookups:
            told = self._lookups.popleft()
            if isinstance(told, BaseException):
                raise told
            return told
        for known, reference in self.effects:
            if known == key.value:
                return Applied(reference, {"reference": reference})
        return Absent()

    async def probe(self) -> str | None:
        return None

    async def close(self) -> None:
        return None


async def _do(step: Step | None) -> None:
    if step is not None:
        await step()


class Amount(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    amount: int


def build(context: StepContext) -> EffectRequest:
    """The request of one step: the amount and what earlier steps gave."""
    body = {"amount": context.input.amount, "earlier": dict(context.results)}
    return EffectRequest("POST", "/effects", orjson.dumps(body))


def result_of(context: ResultContext) -> Mapping[str, object]:
    """What the operation results in: each step's reference."""
    return {"references": dict(context.references)}


def type_of(*steps: str, name: str = "test.one", **policy: Any) -> OperationType:
    """A type with one effect per name, all at the provider `test`; no back-off worth waiting for."""
    policy.setdefault("backoff", Backoff(0.001, 0.001))
    return OperationType(
        name=name,
        version=1,
        title="A test",
        input=Amount,
        result=BaseModel,
        steps=tuple(Effect(step, "test", build) for step in steps or ("send",)),
        build_result=result_of,
        policy=TypePolicy(**policy),
    )


@dataclass
class House:
    """One process' worth of service, opened."""

    url: str
    database: Database
    provider: ScriptedProvider
    registry: Registry
    turns: Turns
    telemetry: Telemetry
    log: CapturedLog
    admission: AdmissionService
    execution: Execution = field(init=False)
    reconciliation: Reconciliation = field(init=False)

    def __post_init__(self) -> None:
        self.execution = Execution(self.turns)
        self.reconciliation = Reconciliation(self.turns)

    async def submit(self, key: str, type: str = "test.one", **members: Any) -> Admission:
        """One POST."""
        body = {"type": type, "input": {"amount": 100}, **members}
        return await self.admission.submit(Draft("tenant", IdempotencyKey(key), body, {}))

    async def admit(self, key: str = "key", type: str = "test.one", **members: Any) -> OperationId:
        """A first POST; the operation's id."""
        answer = await self.submit(key, type, **members)
        assert isinstance(answer, Admitted), answer
        return answer.view.id

    async def work(self, limit: int = 100) -> list[Claimed]:
        """Claim as a worker what is due and run the turns side by side."""
        return await self._pass(self.execution, limit)

    async def reconcile(self, limit: int = 100) -> list[Claimed]:
        """The same as a reconciler."""
        return await self._pass(self.reconciliation, limit)

    async def _pass(self, role: Execution | Reconciliation, limit: int) -> list[Claimed]:
        claimed = await role.claim(limit)
        await asyncio.gather(*(role.run(one) for one in claimed))
        return claimed

    async def view(self, id: OperationId) -> OperationView:
        """The operation as a reader sees it."""
        async with self.database.transaction() as tx:
            return (await views.read(tx, [id]))[id]

    async def state(self, id: OperationId) -> State:
        """Its state now."""
        return (await self.view(id)).state

    def count(self, metric: Metric, **labels: str) -> float:
        """A counter's value in this process."""
        return counted(self.telemetry, metric, **labels)


@asynccontextmanager
async def house(
    url: str,
    provider: ScriptedProvider,
    *,
    types: Sequence[OperationType] = (),
    policy: LeasePolicy = POLICY,
    pool_size: int = 4,
    failpoints: Failpoints | None = None,
    database: Database | None = None,
    registry: Registry | None = None,
) -> AsyncIterator[House]:
    """A process' worth of service on `url`; `database` may be a wrapped one, which is opened here."""
    telemetry, log = capturing_telemetry()
    database = database or Database(
        url, application="house", pool_size=pool_size, timeout_seconds=10.0
    )
    registry = registry or Registry.of(list(types) or [type_of()], [provider.profile])
    failpoints = failpoints or Failpoints()
    await database.open()
    notifier = Notifier(database, telemetry)
    adapters = {provider.profile.name: provider}
    turns = Turns(
        database, registry, adapters, INSTALLATION, policy, notifier, telemetry, failpoints
    )
    admission = AdmissionService(
        database, registry, notifier, telemetry, failpoints, patience_seconds=5.0
    )
    try:
        yield House(url, database, provider, registry, turns, telemetry, log, admission)
        await turns.drain()
        await admission.drain()
        await notifier.drain()
    finally:
        await database.close()


class _Rolled(Exception):
    """The block's work is thrown away, as a server does that died before its COMMIT."""


class _Watched:
    """A transaction that remembers which statements ran in it."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self.names: set[str] = set()

    async def fetch(self, statement: Statement, **parameters: object) -> list[Row]:
        self.names.add(statement.name)
        return await self._tx.fetch(statement, **parameters)

    async def execute(self, statement: Statement, **parameters: object) -> int:
        self.names.add(statement.name)
        return await self._tx.execute(statement, **parameters)


class UnknownCommits(Database):
    """A database whose COMMIT ends in an error where it was told so: done all the same, or not done."""

    def __init__(self, url: str) -> None:
        super().__init__(url, application="house", pool_size=4, timeout_seconds=10.0)
        self._strikes: list[tuple[str, bool, Step | None]] = []
        self.struck = 0

    def strike(self, statement: str, *, stands: bool, then: Step | None = None) -> None:
        """At the next COMMIT of a transaction that ran `statement`; `then` runs before the error is told."""
        self._strikes.append((statement, stands, then))

    def _strike_of(self, names: set[str]) -> tuple[str, bool, Step | None] | None:
        found = next((strike for strike in self._strikes if strike[0] in names), None)
        if found is not None:
            self._strikes.remove(found)
            self.struck += 1
        return found

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        strike = None
        try:
            async with super().transaction() as tx:
                watched = _Watched(tx)
                yield watched  # type: ignore[misc]
                strike = self._strike_of(watched.names)
                if strike is not None and not strike[1]:
                    raise _Rolled
        except _Rolled:
            pass
        if strike is not None:
            await _do(strike[2])
            raise CommitUnknown("the connection was lost at COMMIT")
