"""What `up` prints when everything is ready."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

LEGEND = (
    ("tok_ok", "works"),
    ("tok_declined", "refused: the operation ends failed"),
    ("tok_drop_after", "charged, but the connection breaks before the answer: still one charge"),
    ("tok_500_before", "an error 500 with no charge made: tried again, one charge"),
    ("tok_slow", "answers after our timeout: uncertain for a moment, then succeeded"),
    ("tok_flaky", "fails in several ways, then works"),
    ("tok_500_burn", "an error that makes its key useless: uncertain for minutes"),
)


@dataclass(frozen=True)
class Banner:
    """Everything a person needs to begin. Addresses without a slash at the end."""

    api: str
    provider: str
    database: str
    data: Path
    secret: str
    idempotency_key: str
    simulated: bool

    def text(self) -> str:
        """The whole message; the two curls can be pasted as they are."""
        legend = "\n".join(f"  {token:<15} {what}" for token, what in LEGEND)
        provider = self.provider
        if self.simulated:
            provider += f" (simulated; its effects: {provider}/_control/ledger)"
        return f"""
Fencepost is up. Ctrl-C stops it; what it accepted survives.

  API        {self.api}
  provider   {provider}
  database   {self.database}
  data       {self.data} (logs in logs/)
  API key    {self.secret}

Charge once (the same Idempotency-Key again gives the same operation):

{self.post()}

See what became of it (or poll {self.api}/v1/operations/ID):

{self.get()}

Other endings, as "source":

{legend}

In another terminal: . {shlex.quote(str(self.data / "env"))} && fencepost ops list
"""

    def post(self) -> str:
        """The curl that admits an operation."""
        body = {
            "type": "payments.charge",
            "input": {"amount": 1250, "currency": "eur", "source": "tok_ok"},
        }
        return (
            f"  curl -sS {self.api}/v1/operations \\\n"
            f"    -H 'Authorization: Bearer {self.secret}' \\\n"
            f"    -H 'Idempotency-Key: {self.idempotency_key}' \\\n"
            f"    -H 'Content-Type: application/json' \\\n"
            f"    -d '{json.dumps(body)}'"
        )

    def get(self) -> str:
        """The curl that looks the operation up by its key."""
        return (
            f"  curl -sS '{self.api}/v1/operations?type=payments.charge' \\\n"
            f"    -H 'Authorization: Bearer {self.secret}' \\\n"
            f"    -H 'Idempotency-Key: {self.idempotency_key}'"
        )
