"""What can go wrong, with stable codes and no HTTP.

Expected results are values (closed unions beside the use case that returns them); these exceptions are
for broken promises and for input that cannot be understood::

    FencepostError
     +- InvalidInput              the words of a request do not fit (IdempotencyKeyMissing, ...)
     +- ConfigurationError        settings, types or providers that cannot work together
     +- LeaseLost                 a fenced write matched no row: somebody else owns the operation
     +- SendWindowClosed          the last-moment check before the first byte said no (PROTOCOL.md R1)
     +- StoreUnavailable          the database is down or too slow; nothing was committed
     |   +- StoreBusy             a row or a statement took too long
     |   +- CommitUnknown         the error came at COMMIT: committed or not, nobody knows yet (R13)
     +- StampMismatch             this database belongs to another installation (R16)
     +- SchemaMismatch            the schema is not the one this code was written for
"""

from __future__ import annotations


class FencepostError(Exception):
    """Root of every error Fencepost raises on purpose; `code` is stable and safe to show."""

    code = "internal-error"


class InvalidInput(FencepostError):
    """The words of a request do not fit; `detail` says which, in a sentence safe to show."""

    code = "invalid-input"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class IdempotencyKeyMissing(InvalidInput):
    """CONTRACT.md 1: the request has no Idempotency-Key."""

    code = "idempotency-key-missing"


class IdempotencyKeyMalformed(InvalidInput):
    """CONTRACT.md 1: the request's Idempotency-Key cannot be understood as one key."""

    code = "idempotency-key-malformed"


class MalformedBody(InvalidInput):
    """The body is not one JSON text with unique member names and finite numbers."""

    code = "malformed-json"


class ConfigurationError(FencepostError):
    """Settings, operation types or providers that cannot work together; says which and why."""

    code = "configuration-error"


class LeaseLost(FencepostError):
    """A fenced write matched no row: stop, publish nothing, call nobody (DESIGN.md I3)."""

    code = "lease-lost"


class SendWindowClosed(FencepostError):
    """The clock check before the first byte came too late; nothing was sent (PROTOCOL.md R1)."""

    code = "send-window-closed"


class StoreUnavailable(FencepostError):
    """The database is down or too slow. Nothing of this transaction was committed."""

    code = "store-unavailable"


class StoreBusy(StoreUnavailable):
    """A row or a statement took too long; the database itself answers. Nothing was committed."""


class CommitUnknown(StoreUnavailable):
    """The error came at COMMIT: whether the transaction stands is not known (PROTOCOL.md R13)."""


class StampMismatch(FencepostError):
    """The database carries another installation's stamp, or is a copy or a promoted standby (R16)."""

    code = "stamp-mismatch"


class SchemaMismatch(FencepostError):
    """The schema's revision is not the one this code was written for."""

    code = "schema-mismatch"
