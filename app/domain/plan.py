"""An operation type as data: a frozen plan of steps.

A step's request is built once, by a pure function of the validated input and earlier results, stored with
the first attempt, and never rebuilt (DESIGN.md, 3). What comes next for one operation is `course.next_move`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from app.domain.errors import ConfigurationError
from app.domain.identity import DownstreamKey
from app.domain.outcome import JsonObject
from app.domain.policy import TypePolicy


@dataclass(frozen=True, slots=True)
class EffectRequest:
    """The fixed request of one effect: what is stored and sent, byte for byte, at every attempt.

    `path` is relative to the provider's base URL. `headers` are semantic ones only; credentials are added
    at the send and never stored. `lookup_reference` is what to look up by, where the profile looks up by
    reference.
    """

    method: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    lookup_reference: str | None = None


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a builder sees: the validated input, earlier steps' results by name, its own derived key."""

    input: Any
    results: Mapping[str, JsonObject]
    key: DownstreamKey


@dataclass(frozen=True, slots=True)
class Effect:
    """One call to a provider. `build` is pure: same context, same request."""

    name: str
    provider: str
    build: Callable[[StepContext], EffectRequest]


Step = Effect
"""The kinds of step there are; `local` and `wait` join here."""


@dataclass(frozen=True, slots=True)
class ResultContext:
    """What the result builder sees: the validated input, and each done step's reference and result."""

    input: Any
    references: Mapping[str, str | None]
    results: Mapping[str, JsonObject]


@dataclass(frozen=True, slots=True)
class OperationType:
    """A type of operation: models of input and result (pydantic), steps, policy, versions.

    `semantic_headers`: request headers (lower case) that are part of the request's meaning.
    """

    name: str
    version: int
    title: str
    input: type[BaseModel]
    result: type[BaseModel]
    steps: tuple[Step, ...]
    build_result: Callable[[ResultContext], JsonObject]
    result_version: int = 1
    policy: TypePolicy = field(default_factory=TypePolicy)
    semantic_headers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        if not names:
            raise ConfigurationError(f"type {self.name}: a plan has at least one step.")
        if len(set(names)) != len(names):
            raise ConfigurationError(f"type {self.name}: step names must be unique.")
        if self.version < 1:
            raise ConfigurationError(f"type {self.name}: versions count from 1.")

    def step(self, name: str) -> Step:
        """The step of that name.

        Raises:
            KeyError: this version of the type has no such step.
        """
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(name)
