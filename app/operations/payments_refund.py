"""`payments.refund`: give back all that is left of a charge, or a part of it, once."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from app.domain.fields import STRICT_INPUT, MinorUnits, SafeText
from app.domain.outcome import JsonObject
from app.domain.plan import Effect, EffectRequest, OperationType, ResultContext, StepContext
from app.operations.payments_api import PAYMENT_POLICY, PROVIDER, payment_request

_STEP = "refund"


class RefundInput(BaseModel):
    """Which charge to refund, and how much of it."""

    model_config = ConfigDict(
        **STRICT_INPUT,
        json_schema_extra={
            "examples": [
                {"charge": "ch_1", "amount": 250, "reference": "return-77", "reason": "damaged"},
                {"charge": "ch_1"},
            ]
        },
    )

    charge: Annotated[SafeText, Field(min_length=1, max_length=255)] = Field(
        description="The provider's id of the charge: `result.charge` of `payments.charge`",
        examples=["ch_1"],
    )
    amount: MinorUnits | None = Field(
        None, description="Minor units; left out: all that is left of the charge", examples=[250]
    )
    reference: Annotated[SafeText, Field(min_length=1, max_length=200)] | None = Field(
        None,
        description="Your own reference, shown at the provider; need not be unique",
        examples=["return-77"],
    )
    reason: Annotated[SafeText, Field(max_length=1000)] | None = Field(
        None, description="Free text for the provider's records", examples=["damaged"]
    )


class RefundResult(BaseModel):
    """The refund as the provider made it."""

    model_config = ConfigDict(frozen=True)

    refund: str | None = Field(
        description="The provider's id of the refund; null where it never said one"
    )
    charge: str = Field(description="The provider's id of the charge")
    amount: int | None = Field(
        description="Minor units; null where neither the request nor an answer names it"
    )
    currency: str | None = Field(description="ISO 4217 code in lower case, where the provider said")
    status: str = Field(description="The provider's word for the refund's state")


def _build(context: StepContext) -> EffectRequest:
    asked: RefundInput = context.input
    members = {"charge": asked.charge, "amount": asked.amount, "reason": asked.reason}
    return payment_request(context, "/v1/refunds", members, asked.reference)


def _result(context: ResultContext) -> JsonObject:
    """From the provider's answer; from the input where a human settled the step without one."""
    asked: RefundInput = context.input
    made = context.results.get(_STEP) or {}
    return {
        "refund": context.references.get(_STEP),
        "charge": asked.charge,
        "amount": made.get("amount", asked.amount),
        "currency": made.get("currency"),
        "status": made.get("status", "succeeded"),
    }


operation_type = OperationType(
    name="payments.refund",
    version=1,
    title="Refund a charge",
    input=RefundInput,
    result=RefundResult,
    steps=(Effect(_STEP, PROVIDER, _build),),
    build_result=_result,
    policy=PAYMENT_POLICY,
)
