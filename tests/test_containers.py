"""The container files: linted, valid, and saying what the program understands. No engine is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import Settings

CHECKOUT = Path(__file__).resolve().parents[1]
DOCKERFILE = CHECKOUT / "Dockerfile"
COMPOSE = CHECKOUT / "docker-compose.yml"

# Fields of other settings classes: the provider's, the simulator's.
OTHER_SETTINGS = ("FENCEPOST_PAYMENTS_", "FENCEPOST_SIMULATOR_")
ROLES = {"api", "worker", "reconciler", "simulator", "migrate"}


def hadolint(dockerfile: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("hadolint has no build for this machine")
    return subprocess.run(
        [program, "--no-color", "--failure-threshold", "style", dockerfile],
        capture_output=True,
        text=True,
        check=False,
    )


def compose_schema(file: Path) -> subprocess.CompletedProcess[str]:
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load(COMPOSE.read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = compose["services"]
    assert isinstance(found, dict)
    return found


def ours(services: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: each for name, each in services.items() if name != "postgres"}


def test_the_dockerfile_is_clean(tmp_path: Path) -> None:
    answer = hadolint(DOCKERFILE)
    assert answer.returncode == 0, answer.stdout
    careless = tmp_path / "Dockerfile"
    careless.write_text("FROM python\nRUN cd /tmp && sudo pip install fastapi\n")
    assert "DL3004" in hadolint(careless).stdout


def test_the_compose_file_is_valid(tmp_path: Path) -> None:
    answer = compose_schema(COMPOSE)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(COMPOSE.read_text().replace("restart: unless-stopped", "restarts: often"))
    assert compose_schema(wrong).returncode != 0


def test_the_image_is_made_of_what_is_here_and_not_ignored() -> None:
    wanted = re.findall(r"^COPY (?!--from)(\S+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    kept = [
        line.removeprefix("!").rstrip("/")
        for line in (CHECKOUT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert sorted(path.rstrip("/") for path in wanted) == sorted(kept)
    for path in kept:
        assert (CHECKOUT / path).exists(), f"{path} is missing"


def test_the_image_runs_as_nobody_special_and_from_hashed_requirements() -> None:
    text = DOCKERFILE.read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    assert "--require-hashes" in text
    assert re.search(r"^HEALTHCHECK .*", text, re.MULTILINE)
    requirements = (CHECKOUT / "requirements.txt").read_text()
    pins = re.findall(r"^[a-z0-9][^\s\\]*==", requirements, re.MULTILINE)
    hashed = re.findall(
        r"^[a-z0-9][^\n]*\\\n    --hash=sha256:[0-9a-f]{64}", requirements, re.MULTILINE
    )
    assert len(pins) == len(hashed) > 20


def test_there_is_a_service_for_every_role(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == ROLES | {"postgres"}
    for name, service in ours(services).items():
        assert service["command"][0] == name


def test_services_are_confined(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["user"] in ("10001:10001", "postgres"), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
    assert all(service["read_only"] for service in ours(services).values())


def test_services_come_back_and_tell_how_they_are(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        if name == "migrate":
            assert service["restart"] == "no"  # it runs once; the others wait for its success
            continue
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"], name
    for name in ROLES - {"migrate", "simulator"}:
        after = services[name]["depends_on"]
        assert after["migrate"] == {"condition": "service_completed_successfully"}, name
        assert after["postgres"] == {"condition": "service_healthy"}, name


def test_settings_exist(services: dict[str, dict[str, Any]]) -> None:
    for service in ours(services).values():
        for name in service["environment"]:
            if name == "PGPASSWORD" or name.startswith(OTHER_SETTINGS):
                continue
            assert name.removeprefix("FENCEPOST_").lower() in Settings.model_fields, name


def test_no_secret_has_a_default() -> None:
    passwords = re.findall(r"^ *\w*PASSWORD: (.*)$", COMPOSE.read_text(), re.MULTILINE)
    assert len(passwords) == 2
    assert all(value.startswith("${POSTGRES_PASSWORD:?") for value in passwords)
    for file in (DOCKERFILE, COMPOSE):
        assert not re.search(r"://[^/\s@]*:[^/\s@]*@", file.read_text()), file.name
