"""How commands fail: an exit status, and one sentence on stderr that shows no secret."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast
from urllib.parse import parse_qs, unquote, urlsplit

import typer

REFUSED = 1
USAGE = 2
OUT_OF_REACH = 3
INTERRUPTED = 130  # 128 and the number of SIGINT, as shells say it

_SHORTEST_SECRET = 3  # replacing anything shorter would only garble the sentence
_SECRET_NAMES = ("API_KEY", "SECRET", "PASSWORD", "TOKEN")


class Refused(Exception):
    """A command cannot do what it was asked; the message is one sentence. `status`: the exit status."""

    def __init__(self, sentence: str, status: int = REFUSED) -> None:
        super().__init__(sentence)
        self.status = status


class _Usage(Protocol):
    """What typer raises for wrong usage; where the class lives differs between its versions."""

    ctx: Any
    exit_code: int

    def format_message(self) -> str: ...


def run(application: typer.Typer, arguments: Sequence[str] | None) -> int:
    """Run a command of `application`; the exit status. Errors are told on stderr."""
    # The pool tells every failed try through logging; what matters of it ends up in the sentence.
    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)
    command = typer.main.get_command(application)
    try:
        status = command.main(
            args=None if arguments is None else list(arguments),
            prog_name="fencepost",
            standalone_mode=False,
        )
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return _tell("Interrupted.", INTERRUPTED)
    except SystemExit as asked:
        return asked.code if isinstance(asked.code, int) else 0
    except BrokenPipeError:  # the reader has left: `fencepost ops list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _failed(error)
    return status if isinstance(status, int) else 0


def _failed(error: Exception) -> int:
    status, sentence = verdict(error)
    if status != USAGE and os.environ.get("FENCEPOST_LOG_LEVEL", "").lower() == "debug":
        sys.stderr.write(without_secrets("".join(traceback.format_exception(error)), os.environ))
    return _tell(without_secrets(sentence, os.environ), status)


def _tell(sentence: str, status: int) -> int:
    sys.stderr.write(f"{sentence}\n")
    return status


def verdict(error: Exception) -> tuple[int, str]:
    """The exit status and the sentence for an error that ended a command."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return _usage(cast(_Usage, error))
    if isinstance(error, Refused):
        return error.status, one_line(error)
    from app.domain.errors import FencepostError, StoreBusy, StoreUnavailable
    from app.embedded_host import EmbeddedPostgresError

    if isinstance(error, StoreBusy):
        return OUT_OF_REACH, _sentence("The database is too slow", error)
    if isinstance(error, StoreUnavailable):
        return OUT_OF_REACH, _sentence("The database is out of reach", error)
    if isinstance(error, EmbeddedPostgresError):
        return OUT_OF_REACH, str(error)
    if isinstance(error, FencepostError):
        return REFUSED, one_line(error)
    said = one_line(error)[:300]
    return REFUSED, (
        f"Unexpected {type(error).__name__}: {said} (FENCEPOST_LOG_LEVEL=debug shows where)."
    )


def _usage(error: _Usage) -> tuple[int, str]:
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "fencepost"
    return error.exit_code, f"{message}: see `{where} --help`."


def _sentence(beginning: str, error: Exception) -> str:
    """`OperationalError: connection failed: ...` said to a person."""
    text = (str(error).splitlines() or [type(error).__name__])[0].strip()
    name, colon, rest = text.partition(": ")
    if colon and name.isidentifier():
        text = rest
    text = text.rstrip(".")
    return f"{text}." if text.startswith("The database") else f"{beginning}: {text}."


def one_line(error: BaseException) -> str:
    """An error's message without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """`text` with every secret that `environ` holds blotted out."""
    for secret in sorted(_secrets(environ), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _secrets(environ: Mapping[str, str]) -> set[str]:
    found: set[str] = set()
    for name, value in environ.items():
        upper = name.upper()
        if upper in ("DATABASE_URL", "FENCEPOST_DATABASE_URL"):
            found.update(_passwords(value))
        elif upper.startswith("FENCEPOST_") and upper.endswith(_SECRET_NAMES):
            found.add(value)
    return {secret for secret in found if len(secret) >= _SHORTEST_SECRET}


def _passwords(url: str) -> Iterator[str]:
    """The password of a database address, as written and decoded, also of one that cannot be parsed."""
    credentials = url.partition("://")[2].rpartition("@")[0]
    password = credentials.partition(":")[2]
    yield password
    yield unquote(password)
    try:
        yield from parse_qs(urlsplit(url).query).get("password", [])
    except ValueError:
        return
