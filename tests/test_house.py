"""The house keeps its rules: sizes, failpoints, names, contracts, and what must never be committed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.failpoints import Failpoint

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
BANNED = re.compile(r"(^|_)(jobs?|tasks?|caches?|managers?|utils?|commons?|helpers?)(_|$)", re.I)


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


PROGRAM = sources("app", "workers")


def definitions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node


def test_no_file_is_a_hall() -> None:
    """DESIGN.md, 6: a file over 400 lines asks for a new room."""
    long = {
        str(path.relative_to(ROOT)): count
        for path in [*PROGRAM, *sources("bench")]
        if (count := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert long == {}


def test_no_function_is_long() -> None:
    """DESIGN.md, 6: nor is a function over 60."""
    long = {
        f"{path.relative_to(ROOT)}:{node.name}": lines
        for path in PROGRAM
        for node in definitions(ast.parse(path.read_text()))
        if not isinstance(node, ast.ClassDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in PROGRAM
        if ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_banned_names() -> None:
    """DESIGN.md, 2: words that say nothing."""
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in PROGRAM
        for name in [path.stem, *(node.name for node in definitions(ast.parse(path.read_text())))]
        if BANNED.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name))
    ]
    assert found == []


def test_alembic_stays_a_folder_and_not_a_package() -> None:
    """MODELS.md, finding 3: with an __init__ it would shadow the library."""
    assert not list((ROOT / "alembic").rglob("__init__.py"))


@pytest.mark.parametrize("point", list(Failpoint), ids=str)
def test_a_failpoint_is_passed_at_one_place_and_has_a_crash_test(point: Failpoint) -> None:
    """DESIGN.md, 6: called only from service and workers, each at one place, each named by a test."""
    passed = [
        path
        for path in PROGRAM
        for _ in re.finditer(rf"\.hit\(Failpoint\.{point.name}\)", path.read_text())
    ]
    assert len(passed) == 1, passed
    assert passed[0].relative_to(ROOT).parts[:2] in (("app", "service"),) or passed[
        0
    ].is_relative_to(ROOT / "workers")
    named = [
        path
        for path in sources("tests/crash", "tests/api")
        if re.search(rf"Failpoint\.{point.name}\b|\b{point.value}\b", path.read_text())
    ]
    assert named


def test_the_import_contracts_hold() -> None:
    """One way down; pyproject.toml has the contracts."""
    lint = Path(sys.executable).with_name("lint-imports")
    ended = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "0 broken" in ended.stdout


def test_nothing_that_must_not_be_committed() -> None:
    """No registry's host, no path of a machine: in no tracked file."""
    hosts = "|".join(("py" + "pi", "python" + "hosted", "npm" + "js"))
    places = "|".join(("wo" + "rk", "ro" + "ot"))
    bad = re.compile(rf"({hosts})\.org|(?<![\w./])/({places})/")
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("this is no git checkout")
    found = [
        name
        for name in tracked
        if (ROOT / name).is_file() and bad.search((ROOT / name).read_text(errors="replace"))
    ]
    assert found == []
