"""Request bodies: read here, with a hard bound, before anything is parsed (CONTRACT.md 2).

The bound holds for what comes over the wire and for what gzip unpacks to, so that a small bomb costs no more
than an honest body (CASES.md B18).
"""

from __future__ import annotations

import zlib

from starlette.requests import Request

from app.api.headers import lines_of
from app.api.problems import Refusal, Slug
from app.domain.request import parse_json

_GZIP = 16 + zlib.MAX_WBITS


async def read_json(request: Request, limit: int) -> object:
    """The body as JSON. `limit` is in bytes.

    Raises:
        Refusal: 415, then 413, then 400 for a gzip stream that is broken.
        MalformedBody: not JSON as `parse_json` wants it.
        ClientDisconnect: the client hung up while sending.
    """
    gzipped = check_media_type(request)
    body = await read_bytes(request, limit)
    return parse_json(_unpacked(body, limit) if gzipped else body)


def check_media_type(request: Request) -> bool:
    """Whether the body is gzipped.

    Raises:
        Refusal: 415 for anything but `application/json`, in UTF-8, plain or gzipped.
    """
    lines = lines_of(request.scope, b"content-type")
    if len(lines) != 1 or not _is_json(lines[0].decode("latin-1")):
        raise Refusal(
            Slug.MEDIA_TYPE,
            "The body must be application/json in UTF-8, and say so in one Content-Type header.",
            headers={"Accept": "application/json"},
        )
    encodings = b",".join(lines_of(request.scope, b"content-encoding")).strip().lower()
    if encodings not in (b"", b"identity", b"gzip", b"x-gzip"):
        raise Refusal(
            Slug.MEDIA_TYPE,
            "The body may be encoded with gzip, once, or not at all.",
            headers={"Accept-Encoding": "gzip"},
        )
    return encodings in (b"gzip", b"x-gzip")


def _is_json(content_type: str) -> bool:
    media_type, *parameters = (part.strip() for part in content_type.split(";"))
    if media_type.lower() != "application/json":
        return False
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        # RFC 8259 defines no parameter; of those in use, only a charset changes what the bytes mean.
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() != "utf-8":
            return False
    return True


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body as it came, at most `limit` bytes.

    Raises:
        Refusal: 413, as soon as it is known.
        ClientDisconnect: the client hung up while sending.
    """
    for length in lines_of(request.scope, b"content-length"):
        if length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> Refusal:
    return Refusal(Slug.TOO_LARGE, f"The body, unpacked, may have {limit} bytes at most.")


def _unpacked(body: bytes, limit: int) -> bytes:
    """All members of the gzip stream, never more than `limit` bytes of it in memory."""
    unpacked = bytearray()
    while body:
        member = zlib.decompressobj(_GZIP)
        try:
            unpacked += member.decompress(body, limit + 1 - len(unpacked))
        except zlib.error:
            raise _broken() from None
        if len(unpacked) > limit:
            raise _too_large(limit)
        if not member.eof:
            raise _broken()
        body = member.unused_data
    return bytes(unpacked)


def _broken() -> Refusal:
    return Refusal(Slug.MALFORMED_JSON, "The gzip stream of the body is broken or incomplete.")
