"""The README's blocks that are made from code: `python -m tests.support.readme` writes them anew.

Each block stands between `<!-- made: NAME -->` and `<!-- end -->`; tests/test_readme.py compares.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from app.bootstrap import load_plugins, provider_options
from app.domain.lifecycle import TERMINAL, TRANSITIONS, State
from app.failpoints import Failpoint
from app.settings import Settings
from app.telemetry import METRICS

README = Path(__file__).resolve().parents[2] / "README.md"
_BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def picture() -> str:
    """The life of an operation as Mermaid, from the transition table: one arrow per pair of states."""
    arrows: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for row in TRANSITIONS:
        for to in row.to:
            for source in row.sources or ("[*]",):
                if source != to:
                    arrows[str(source), str(to)].append(row.event.value.replace("_", " "))
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {source} --> {to}: {', '.join(why)}" for (source, to), why in arrows.items()]
    lines += [f"    {state} --> [*]" for state in State if state in TERMINAL]
    return "\n".join([*lines, "```"])


def settings() -> str:
    """Every setting with its default and meaning, then every provider's options."""
    lines = ["| variable (after `FENCEPOST_`) | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        lines.append(f"| `{name.upper()}` | {_shown(field.default)} | {field.description} |")
    for prefix, options in provider_options().items():
        for name, field in options.model_fields.items():
            variable = f"{prefix.removeprefix('FENCEPOST_')}{name.upper()}"
            lines.append(f"| `{variable}` | {_shown(field.default)} | {field.description or ''} |")
    return "\n".join(lines)


def _shown(default: object) -> str:
    if default is None or default is PydanticUndefined or default == "":
        return "none"
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    if isinstance(default, bool):
        return "`on`" if default else "`off`"
    if isinstance(default, float):
        return f"`{default:g}`" if default < 1e6 else f"`{default:.0f}`"
    return f"`{default}`"


def metrics() -> str:
    """Every metric with its labels and meaning."""
    lines = ["| metric | labels | meaning |", "|---|---|---|"]
    for metric, spec in METRICS.items():
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "none"
        lines.append(f"| `{metric.value}` | {labels} | {spec.help} |")
    return "\n".join(lines)


def failpoints() -> str:
    """Every crash window with what has happened when it is passed."""
    lines = ["| failpoint | what stands when it is passed |", "|---|---|"]
    text = Path(README.parent / "app" / "failpoints.py").read_text()
    for point in Failpoint:
        said = re.search(rf'= "{point.value}"\n    """(.+?)"""', text, re.DOTALL)
        assert said is not None, point
        lines.append(f"| `{point.value}` | {' '.join(said.group(1).split())} |")
    return "\n".join(lines)


def types() -> str:
    """What ships: each operation type with its steps, and each provider with its class."""
    plugins = load_plugins({})
    lines = ["| type | version | steps |", "|---|---|---|"]
    for (name, version), found in sorted(plugins.registry.types.items()):
        steps = ", ".join(f"`{step.name}` ({step.provider})" for step in found.steps)
        lines.append(f"| `{name}` | {version} | {steps} |")
    return "\n".join(lines)


BLOCKS = {
    "picture": picture,
    "settings": settings,
    "metrics": metrics,
    "failpoints": failpoints,
    "types": types,
}


def made(text: str) -> str:
    """The README's text with every made block as the code says now."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", text)


if __name__ == "__main__":
    README.write_text(made(README.read_text()))
