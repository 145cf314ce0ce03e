"""What every command has in common: help, usage errors, exit statuses, secrets that stay secret."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.cli.durations import parse_duration
from app.cli.failing import REFUSED, Refused, verdict, without_secrets
from app.cli.output import printable, span
from app.domain.errors import CommitUnknown, StampMismatch, StoreBusy, StoreUnavailable
from app.embedded import EmbeddedPostgresError
from tests.cli.conftest import Run
from tests.support.processes import CHECKOUT

COMMANDS = (
    ["up"],
    ["api"],
    ["worker"],
    ["reconciler"],
    ["simulator"],
    ["migrate"],
    ["keys", "create"],
    ["keys", "list"],
    ["keys", "revoke"],
    ["ops", "list"],
    ["ops", "show"],
    ["ops", "cancel"],
    ["types"],
    ["providers"],
    ["doctor"],
    ["installation", "show"],
)
DOWN = "postgresql://somebody:s3cret-word@127.0.0.1:1/nowhere"


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(bare: Run, command: list[str], option: str) -> None:
    ran = bare(*command, option)
    assert ran.status == 0
    assert f"fencepost {' '.join(command)}" in ran.out


def test_version(bare: Run) -> None:
    ran = bare("--version")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == "fencepost 0.1.0\n"


@pytest.mark.parametrize("arguments", [[], ["keys"], ["ops"], ["installation"]])
def test_without_a_command_help_is_shown(bare: Run, arguments: list[str]) -> None:
    ran = bare(*arguments)
    assert ran.status == 2
    assert "Usage: fencepost" in ran.out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "nonsense"),
        (["keys", "create", "--tenant", "t"], "--scopes"),
        (["ops", "list", "--limit", "0"], "--limit"),
        (["ops", "list", "--state", "lost"], "lost"),
        (["ops", "show", "op_1"], "op_ and a UUID"),
        (["api", "--port", "70000"], "--port"),
        (["worker", "--concurrency", "none"], "--concurrency"),
        (["keys", "create", "--tenant", "t", "--scopes", "operator", "--expires-in", "5y"], "90d"),
        (["up", "--port"], "--port"),
    ],
)
def test_wrong_usage_is_one_sentence_and_status_2(
    bare: Run, arguments: list[str], named: str
) -> None:
    ran = bare(*arguments)
    assert (ran.status, ran.out) == (2, "")
    assert named in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["migrate"],
        ["keys", "list"],
        ["keys", "create", "--tenant", "t", "--scopes", "operator"],
        ["keys", "revoke", "x"],
        ["ops", "list"],
        ["ops", "show", "op_0198f3a0-0000-7000-8000-000000000001"],
        ["ops", "cancel", "op_0198f3a0-0000-7000-8000-000000000001"],
        ["installation", "show"],
        ["worker", "--once"],
        ["reconciler", "--once"],
    ],
    ids=" ".join,
)
def test_database_down_is_one_sentence_and_status_3(bare: Run, arguments: list[str]) -> None:
    ran = bare(*arguments, DATABASE_URL=DOWN)
    assert (ran.status, ran.out) == (3, "")
    assert ran.err.startswith("The database ")
    assert "Connection refused" in ran.err
    assert ran.err.count("\n") == 1
    assert "s3cret" not in ran.err


@pytest.mark.parametrize(
    "url", ["postgresql://u:pass%zzword@127.0.0.1:1/x", "postgresql://u:pass%zzword@h:port/x"]
)
@pytest.mark.parametrize("command", [["keys", "list"], ["migrate"], ["doctor"]], ids=" ".join)
def test_an_address_that_cannot_be_read_shows_no_password(
    bare: Run, url: str, command: list[str]
) -> None:
    ran = bare(*command, DATABASE_URL=url, FENCEPOST_PAYMENTS_URL="http://127.0.0.1:1")
    assert ran.status in (1, 3)
    assert "zzword" not in ran.out + ran.err
    assert "Traceback" not in ran.err


def test_a_traceback_is_shown_in_debug_only_and_without_secrets(bare: Run) -> None:
    ran = bare("keys", "list", DATABASE_URL=DOWN, FENCEPOST_LOG_LEVEL="debug")
    assert ran.status == 3
    assert "Traceback" in ran.err
    assert "s3cret" not in ran.err


@pytest.mark.parametrize("command", [["types"], ["keys", "list"], ["worker"]], ids=" ".join)
def test_settings_that_do_not_hold_are_refused(bare: Run, command: list[str]) -> None:
    ran = bare(*command, FENCEPOST_LEASE_SECONDS="never")
    assert (ran.status, ran.out) == (1, "")
    assert "FENCEPOST_LEASE_SECONDS" in ran.err
    assert ran.err.count("\n") == 1


def test_a_database_never_migrated_is_refused(bare: Run, empty_database_url: str) -> None:
    ran = bare("ops", "list", DATABASE_URL=empty_database_url)
    assert (ran.status, ran.out) == (1, "")
    assert "fencepost migrate" in ran.err


def test_the_program_itself() -> None:
    """`python -m app.cli`, with the exit status the shell sees."""
    command = [sys.executable, "-m", "app.cli"]
    told = subprocess.run(
        [*command, "--version"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stdout) == (0, "fencepost 0.1.0\n")
    assert subprocess.run([*command, "no"], cwd=CHECKOUT, capture_output=True).returncode == 2


def test_a_reader_that_leaves_is_no_error() -> None:
    """`fencepost types --json | head -1`: no traceback, no complaint."""
    command = f"'{sys.executable}' -m app.cli types --json | head -c 1"
    told = subprocess.run(
        ["sh", "-c", command], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert (told.stdout, told.stderr) == ("[", "")


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (Refused("No."), 1, "No."),
        (Refused("No.", 3), 3, "No."),
        (StampMismatch("Another's."), 1, "Another's."),
        (
            StoreUnavailable("OperationalError: gone\nmore"),
            3,
            "The database is out of reach: gone.",
        ),
        (StoreBusy("QueryCanceled: slow"), 3, "The database is too slow: slow."),
        (CommitUnknown("OperationalError: cut"), 3, "The database is out of reach: cut."),
        (EmbeddedPostgresError("No binaries."), 3, "No binaries."),
    ],
)
def test_errors_have_their_status(error: Exception, status: int, sentence: str) -> None:
    assert verdict(error) == (status, sentence)


def test_an_unexpected_error_is_one_sentence() -> None:
    status, sentence = verdict(KeyError("two\nlines"))
    assert status == REFUSED
    assert sentence.startswith("Unexpected KeyError: ")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "variables",
    [
        {"DATABASE_URL": "postgresql://u:hunter2@h/d"},
        {"FENCEPOST_DATABASE_URL": "postgresql://u:hunter%32@h/d"},
        {"DATABASE_URL": "postgresql://u@h/d?password=hunter2"},
        {"FENCEPOST_PAYMENTS_API_KEY": "hunter2"},
    ],
)
def test_secrets_are_blotted_out(variables: dict[str, str]) -> None:
    assert without_secrets("is hunter2 wrong", variables) == "is *** wrong"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("30m", 1800), ("12h", 43200), ("90d", 7776000), ("1.5H", 5400), (" 1d ", 86400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "d", "0s", "-1d", "1w", "1d2h", "1e3s", "٣d", "nan s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="such as 90d"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.5, "0.5 s"), (60, "1 min"), (90, "90 s"), (86400, "1 d"), (34560000, "400 d")],
)
def test_spans(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


def test_text_from_outside_cannot_drive_a_terminal() -> None:
    assert printable("a\x1b[2Jb\nc") == "a?[2Jb?c"
