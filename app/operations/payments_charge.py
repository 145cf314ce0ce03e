"""`payments.charge`: take money from a source, once.

The currency is accepted in lower case only. The provider takes either, but what is accepted is what is
forwarded and fingerprinted (CONTRACT.md 7), and one currency in two spellings would make a retry a mismatch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from app.domain.fields import STRICT_INPUT, MinorUnits, SafeText
from app.domain.outcome import JsonObject
from app.domain.plan import Effect, EffectRequest, OperationType, ResultContext, StepContext
from app.operations.payments_api import PAYMENT_POLICY, PROVIDER, payment_request

_STEP = "charge"


class ChargeInput(BaseModel):
    """What to charge, and whom."""

    model_config = ConfigDict(
        **STRICT_INPUT,
        json_schema_extra={
            "examples": [
                {
                    "amount": 1250,
                    "currency": "eur",
                    "source": "tok_ok",
                    "reference": "invoice-2031",
                    "description": "March",
                },
                {"amount": 1, "currency": "usd", "source": "tok_ok"},
            ]
        },
    )

    amount: MinorUnits = Field(
        description="Minor units of the currency: 1250 is 12.50 EUR", examples=[1250]
    )
    currency: Annotated[SafeText, Field(pattern="^[a-z]{3}$")] = Field(
        description="ISO 4217 code in lower case", examples=["eur"]
    )
    source: Annotated[SafeText, Field(min_length=1, max_length=255)] = Field(
        description="The provider's token for what is charged", examples=["tok_ok"]
    )
    reference: Annotated[SafeText, Field(min_length=1, max_length=200)] | None = Field(
        None,
        description="Your own reference, shown at the provider; need not be unique",
        examples=["invoice-2031"],
    )
    description: Annotated[SafeText, Field(max_length=1000)] | None = Field(
        None, description="Free text for the provider's records", examples=["March"]
    )


class ChargeResult(BaseModel):
    """The charge as the provider made it."""

    model_config = ConfigDict(frozen=True)

    charge: str | None = Field(
        description="The provider's id of the charge; null where it never said one"
    )
    amount: int = Field(description="Minor units")
    currency: str = Field(description="ISO 4217 code in lower case")
    status: str = Field(description="The provider's word for the charge's state")


def _build(context: StepContext) -> EffectRequest:
    asked: ChargeInput = context.input
    members = {
        "amount": asked.amount,
        "currency": asked.currency,
        "source": asked.source,
        "description": asked.description,
    }
    return payment_request(context, "/v1/charges", members, asked.reference)


def _result(context: ResultContext) -> JsonObject:
    """From the provider's answer; from the input where a human settled the step without one."""
    asked: ChargeInput = context.input
    made = context.results.get(_STEP) or {}
    return {
        "charge": context.references.get(_STEP),
        "amount": made.get("amount", asked.amount),
        "currency": made.get("currency", asked.currency),
        "status": made.get("status", "succeeded"),
    }


operation_type = OperationType(
    name="payments.charge",
    version=1,
    title="Charge a source",
    input=ChargeInput,
    result=ChargeResult,
    steps=(Effect(_STEP, PROVIDER, _build),),
    build_result=_result,
    policy=PAYMENT_POLICY,
)
