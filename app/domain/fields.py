"""Field types that inputs of operation types share; what they accept is what is stored and forwarded.

They implement CONTRACT.md 7 (numbers) and CASES.md B21 (text). Each is a pydantic annotation: a refusal is an
ordinary validation error, which the API answers with 422 and a JSON Pointer.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from app.domain.text import is_storable

MAX_EXACT_INTEGER = 2**53 - 1
"""The largest integer that every JSON implementation reads as the same number (RFC 8785, RFC 7493)."""

STRICT_INPUT = ConfigDict(strict=True, frozen=True, extra="forbid")
"""How an operation type's input is modelled: no coercion, no change afterwards, no unknown member."""


def _integral(value: object) -> object:
    """`1.0` and `1` are one number in JSON; every other float is left for the strict check to refuse."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _storable(text: str) -> str:
    if not is_storable(text):
        raise PydanticCustomError(
            "text_not_storable", "Text may hold neither NUL nor a lone surrogate"
        )
    return text


AcceptIntegral = BeforeValidator(_integral)
"""Makes `1.0` the integer `1`, for fields with bounds of their own. It comes last in the annotation, behind
`Field(strict=True, ge=..., le=...)`: only then does the JSON Schema show the bounds."""

WholeNumber = Annotated[
    int, Field(strict=True, ge=-MAX_EXACT_INTEGER, le=MAX_EXACT_INTEGER), AcceptIntegral
]
"""An integer within ±(2^53 - 1). `1` and `1.0` are the same; booleans and strings are refused."""

MinorUnits = Annotated[int, Field(strict=True, ge=1, le=MAX_EXACT_INTEGER), AcceptIntegral]
"""Money: 1 to 2^53 - 1 of the currency's smallest unit. There are no fractions and no decimal strings."""

SafeText = Annotated[str, Field(strict=True), AfterValidator(_storable)]
"""Text without NUL and lone surrogates; nothing is stripped, folded or normalised (NFC and NFD differ)."""
