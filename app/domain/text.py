"""Text from outside, made safe to store and to show (CASES.md B21, CONTRACT.md 19).

One function for whatever a provider, a socket or an exception says. What a client sends is never rewritten:
it is forwarded as accepted, and refused where it could not be stored (`app.domain.fields`).
"""

from __future__ import annotations

import re

DETAIL_LIMIT = 500
"""Characters kept of an explanation from outside."""

SHORTENED = " [shortened]"
"""What a text that was cut ends with."""

_REPLACEMENT = "\ufffd"
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
"""NUL: PostgreSQL text cannot hold it. Lone surrogates: UTF-8 cannot encode them."""


def is_storable(text: str) -> bool:
    """Whether `text` can be stored as PostgreSQL text and encoded as UTF-8, just as it is."""
    return _UNSTORABLE.search(text) is None


def bounded_text(raw: bytes | str, limit: int = DETAIL_LIMIT) -> str:
    """`raw` as at most `limit` characters of storable text; never raises, and is idempotent.

    NUL, lone surrogates and bytes that are not UTF-8 each become U+FFFD. Nothing else changes: the six
    characters of an escaped NUL stay byte for byte. A text that had to be cut ends with `SHORTENED` (where
    `limit` leaves room for it), and its length is exactly `limit`.
    """
    # Megabytes are never decoded. A character has at most four bytes, so this is enough to see that there are
    # more than `limit`, and what the cut may split lies behind the last character kept.
    start = raw[: 4 * limit + 4]
    text = start.decode("utf-8", "replace") if isinstance(start, bytes) else start
    text = _UNSTORABLE.sub(_REPLACEMENT, text)
    if len(text) <= limit:
        return text
    if limit < len(SHORTENED):
        return text[:limit]
    return text[: limit - len(SHORTENED)] + SHORTENED
