"""What provider requests may hold.

Unknown members are ignored, as the simulator need not know all of an adapter's request; what is
known is checked strictly and refused with 400, `param` naming the member.
"""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .tokens import TOKENS, leading_token
from .wire import Request, invalid

_Text = Annotated[str, Field(min_length=1, max_length=5000)]
_Amount = Annotated[int, Field(gt=0, le=10**12)]
_Currency = Annotated[str, Field(pattern=r"^[A-Za-z]{3}$")]


class Body(BaseModel):
    """Members any provider request may have. `reference` is the caller's; it need not be unique."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    reference: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=50)] | None = None
    description: str | None = None
    token: str | None = None

    def chosen_token(self) -> str | None:
        """The test token this request carries, if any."""
        return leading_token(self.token or "")

    def source_text(self) -> str | None:
        """What a fault rule's `source` is compared with."""
        return self.chosen_token()


class ChargeBody(Body):
    """`POST /v1/charges`: `amount` in minor units, `currency` three letters, `source` a token."""

    amount: _Amount
    currency: _Currency
    source: _Text

    @field_validator("source")
    @classmethod
    def _known(cls, source: str) -> str:
        if source not in TOKENS:
            raise ValueError("No such source; the simulator knows the tok_ test tokens.")
        return source

    def chosen_token(self) -> str | None:
        """The source itself."""
        return self.source


class RefundBody(Body):
    """`POST /v1/refunds`: without `amount`, all that is left of the charge."""

    charge: _Text
    amount: _Amount | None = None
    reason: str | None = None


class CancelBody(Body):
    """`POST .../cancel`: the body may be empty."""

    reason: str | None = None


class ShipmentBody(Body):
    """`POST /v1/shipments`: `address` is one text; its first word may be a token."""

    address: _Text

    def chosen_token(self) -> str | None:
        """The address's first word."""
        return leading_token(self.address)


class MessageBody(Body):
    """`POST /v1/messages`: mail-like; the local part of `to` may be a token."""

    to: _Text
    subject: str = ""
    body: str = ""

    def chosen_token(self) -> str | None:
        """The local part of the address, up to a plus sign."""
        local = self.to.partition("@")[0].partition("+")[0]
        return local if local in TOKENS else None


_SHAPES: dict[str, type[Body]] = {
    "charge": ChargeBody,
    "charge_cancel": CancelBody,
    "refund": RefundBody,
    "shipment": ShipmentBody,
    "shipment_cancel": CancelBody,
    "message": MessageBody,
}


def read_json(request: Request, *, empty: Any = None) -> Any:
    """The JSON value of a request body; `empty` stands in for no body at all (None: refused).

    Raises `Refusal`: 415 for a declared type other than JSON, 400 for what is not JSON.
    """
    types = request.header_lines(b"content-type")
    if types and types[0].partition(b";")[0].strip().lower() != b"application/json":
        raise invalid("content_type_unsupported", "Send application/json.", status=415)
    if not request.body and empty is not None:
        return empty
    try:
        return orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise invalid("json_invalid", f"The body is not JSON: {error}.") from error


def first_complaint(error: ValidationError) -> tuple[str, str]:
    """The member (dotted) and the sentence of the first thing wrong."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return param, f"Unknown member: {param}."
    message = first["msg"].removeprefix("Value error, ")
    return param, f"{param}: {message}" if param else message


def read_body(kind: str, request: Request) -> Body:
    """The checked body of a call of this effect kind. Raises `Refusal` (400, 415)."""
    shape = _SHAPES[kind]
    value = read_json(request, empty={} if shape is CancelBody else None)
    if not isinstance(value, dict):
        raise invalid("parameter_invalid", "The body must be a JSON object.")
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        param, message = first_complaint(error)
        missing = error.errors()[0]["type"] == "missing"
        code = "parameter_missing" if missing else "parameter_invalid"
        raise invalid(code, message, param=param) from error
