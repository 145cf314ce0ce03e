"""Cases: one claimed operation as its rows are now, and the send that a move asks for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from app.domain.course import Basis, BeginStep, Case, results_so_far
from app.domain.identity import Direction, DownstreamKey, new_id
from app.domain.lifecycle import Actor, State, StopCause
from app.domain.operation import Claimed, History
from app.domain.outcome import Finding, NotApplied, Outcome, Unavailable, Unknown
from app.domain.plan import EffectRequest, OperationType, StepContext
from app.domain.policy import LeasePolicy
from app.domain.profile import ProviderProfile
from app.domain.registry import Registry
from app.storage.steps import Begin


class Cases:
    """Makes cases and begins; knows the registry, the profiles and the installation's stamp."""

    def __init__(
        self,
        registry: Registry,
        profiles: Mapping[str, ProviderProfile],
        installation: str,
        policy: LeasePolicy,
    ) -> None:
        self._registry = registry
        self._profiles = profiles
        self._installation = installation
        self._policy = policy

    def case_of(
        self,
        claimed: Claimed,
        actor: Actor,
        *,
        state: State,
        stop_cause: StopCause | None,
        history: History,
        now: datetime,
        answered: Outcome | None = None,
        told: Finding | None = None,
    ) -> Case:
        """The case of one claimed operation, as its rows are now, after what was just answered or told."""
        type = self.type_of(claimed)
        heard = told if answered is None else answered
        floor = 0.0
        if isinstance(heard, (NotApplied, Unknown, Unavailable)):
            floor = heard.retry_after_seconds or 0.0
        return Case(
            type=type,
            profiles=self._profiles,
            input=self._input_of(claimed, type),
            actor=actor,
            state=state,
            ending=claimed.ending,
            stop_cause=stop_cause,
            attention=claimed.attention,
            deadline=claimed.deadline,
            started_at=max(
                claimed.created_at,
                claimed.not_before or claimed.created_at,
                claimed.retried_at or claimed.created_at,
            ),
            claims=claimed.claims,
            claims_limit=self._policy.claims_limit,
            suspect=claimed.suspect,
            history=history,
            now=now,
            turn_began_at=claimed.claimed_at,
            draw=random.random(),  # noqa: S311 - jitter, not a secret
            answered=answered is not None,
            floor_seconds=floor,
        )

    def type_of(self, claimed: Claimed) -> OperationType:
        """The type and version a claimed operation was admitted under."""
        type = self._registry.get(claimed.type, claimed.type_version)
        assert type is not None  # claims name the types this process knows
        return type

    def _input_of(self, claimed: Claimed, type: OperationType) -> Any:
        return type.input.model_validate_json(claimed.input)

    def begin_of(self, claimed: Claimed, move: BeginStep, case: Case) -> Begin:
        """The send a move asks for: built at the first one, read back ever after (I10)."""
        profile = self._profiles[move.step.provider]
        stored = case.history.step(move.step.name, move.item)
        ordinal = 0 if stored is None else stored.key_ordinal + (1 if move.fresh_key else 0)
        if stored is None or move.fresh_key:
            key = DownstreamKey.derive(
                installation=self._installation,
                tenant=claimed.tenant,
                type=claimed.type,
                key_digest=claimed.key_digest,
                step=move.step.name,
                item=move.item,
                direction=Direction.FORWARD,
                ordinal=ordinal,
            )
        else:
            key = stored.key
        # What was begun is read back, never rebuilt (DESIGN.md, 3); a fresh key goes with the same request.
        request = self._build(move, case, key) if stored is None else stored.request
        return Begin(
            lease=claimed.lease,
            attempt_id=new_id(),
            step=move.step.name,
            item=move.item,
            direction=Direction.FORWARD,
            provider=move.step.provider,
            key=key,
            key_ordinal=ordinal,
            request=request,
            send_window_seconds=min(profile.send_window_seconds, self._policy.lease_seconds),
            in_transit_seconds=profile.in_transit_seconds,
            lag_seconds=profile.lag_seconds,
            resend_seconds=profile.resend_seconds if profile.keys is not None else None,
            basis=move.basis,
            restarts_window=stored is not None and move.basis is not Basis.KEY,
            fresh_key=move.fresh_key,
        )

    def _build(self, move: BeginStep, case: Case, key: DownstreamKey) -> EffectRequest:
        results = results_so_far(case)
        return move.step.build(StepContext(input=case.input, results=results, key=key))
