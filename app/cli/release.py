"""Which version of the program this is."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path


def version_of_program() -> str:
    """The version beside the code in a checkout, else the installed distribution's."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file():
        with project.open("rb") as file:
            return str(tomllib.load(file)["project"]["version"])
    return importlib.metadata.version("fencepost")
