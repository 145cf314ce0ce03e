"""Text from outside becomes storable, bounded and marked, and is otherwise left alone (CASES.md B21)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.text import DETAIL_LIMIT, SHORTENED, bounded_text, is_storable


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("a\x00b", "a\ufffdb"),
        ("a\ud800b", "a\ufffdb"),
        ("\udfff", "\ufffd"),
        (b"a\x00b", "a\ufffdb"),
        (b"a\xffb", "a\ufffdb"),
        (b"caf\xc3\xa9", "café"),
        (b"caf\xc3", "caf\ufffd"),
        ("a\\u0000b", "a\\u0000b"),
        (b"a\\u0000b", "a\\u0000b"),
        ("e\u0301\r\n\t\x1b", "e\u0301\r\n\t\x1b"),
        ("\U0001f600", "\U0001f600"),
        ("", ""),
        (b"", ""),
    ],
)
def test_only_what_cannot_be_stored_is_replaced(raw: bytes | str, text: str) -> None:
    assert bounded_text(raw) == text


def test_a_long_text_is_cut_by_characters_and_marked() -> None:
    text = bounded_text("é" * 600)
    assert len(text) == DETAIL_LIMIT
    assert text == "é" * (DETAIL_LIMIT - len(SHORTENED)) + SHORTENED
    assert bounded_text(("é" * 600).encode()) == text


def test_a_text_of_exactly_the_limit_is_not_cut() -> None:
    assert bounded_text("x" * DETAIL_LIMIT) == "x" * DETAIL_LIMIT
    assert bounded_text("\U0001f600".encode() * DETAIL_LIMIT) == "\U0001f600" * DETAIL_LIMIT


def test_megabytes_are_not_decoded() -> None:
    class Counted(bytes):
        largest = 0

        def __getitem__(self, part: object) -> bytes:  # type: ignore[override]
            assert isinstance(part, slice)
            taken = super().__getitem__(part)
            Counted.largest = max(Counted.largest, len(taken))
            return taken

        def decode(self, *_: object) -> str:
            raise AssertionError("the whole was decoded")

    assert len(bounded_text(Counted(b"\xff" * 5_000_000))) == DETAIL_LIMIT
    assert 0 < Counted.largest < 10 * DETAIL_LIMIT


@given(st.text(alphabet=st.characters()) | st.binary(), st.integers(0, 40))
def test_the_result_is_storable_bounded_and_stable(raw: bytes | str, limit: int) -> None:
    text = bounded_text(raw, limit)
    assert len(text) <= limit
    assert is_storable(text)
    assert text.encode().decode() == text
    assert bounded_text(text, limit) == text


@given(st.text())
def test_a_storable_short_text_is_unchanged(text: str) -> None:
    if is_storable(text) and len(text) <= DETAIL_LIMIT:
        assert bounded_text(text) == text
        assert bounded_text(text.encode()) == text


def test_what_is_storable() -> None:
    assert is_storable("plain \\u0000 \u00e9")
    assert not is_storable("a\x00")
    assert not is_storable("a\udc00")
