"""The tree of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli import acts, doctor, installation, keys, ops, plugins, processes
from app.cli.output import line
from app.cli.up import command as up

_HELP = {"help_option_names": ["-h", "--help"]}
_ABOUT = (
    "Fencepost runs long external effects (charges, payouts, mails), so that each one happens once or is "
    "openly in doubt.\n\n"
    "To try it: `fencepost up` starts everything and prints a curl to paste. "
    "In production: `fencepost migrate`, then as many `fencepost api`, `worker` and `reconciler` processes "
    "as wanted, all configured by FENCEPOST_ variables; `fencepost doctor` tells what is wrong.\n\n"
    "Exit status: 0, 1 (refused or not found), 2 (usage), 3 (database or provider out of reach)."
)


def build() -> typer.Typer:
    """The application with all its commands."""
    root = _group(_ABOUT)
    root.callback(invoke_without_command=True)(_root)
    panel = "Try it"
    root.command("up", rich_help_panel=panel)(up.up)
    root.command("doctor", rich_help_panel=panel)(doctor.doctor)
    panel = "Processes"
    root.command("api", rich_help_panel=panel)(processes.api)
    root.command("worker", rich_help_panel=panel)(processes.worker)
    root.command("reconciler", rich_help_panel=panel)(processes.reconciler)
    root.command("simulator", rich_help_panel=panel)(processes.simulator)
    panel = "Administration"
    root.command("migrate", rich_help_panel=panel)(installation.migrate)
    key_commands = _group("API keys: make, list, revoke.")
    key_commands.command("create")(keys.create)
    key_commands.command("list")(keys.list_keys)
    key_commands.command("revoke")(keys.revoke)
    root.add_typer(key_commands, name="keys", rich_help_panel=panel)
    operation_commands = _group("Operations of every tenant: list, show, cancel, resolve, retry.")
    operation_commands.command("list")(ops.list_operations)
    operation_commands.command("show")(ops.show)
    operation_commands.command("cancel")(ops.cancel)
    operation_commands.command("resolve")(acts.resolve)
    operation_commands.command("retry")(acts.retry)
    root.add_typer(operation_commands, name="ops", rich_help_panel=panel)
    installation_commands = _group(
        "The stamp that keeps a copied database from acting on the world."
    )
    installation_commands.command("show")(installation.show)
    root.add_typer(installation_commands, name="installation", rich_help_panel=panel)
    panel = "What is loaded"
    root.command("types", rich_help_panel=panel)(plugins.types)
    root.command("providers", rich_help_panel=panel)(plugins.providers)
    return root


def _group(about: str) -> typer.Typer:
    group = typer.Typer(
        help=about,
        context_settings=_HELP,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    # A group with a callback stays a group, also while it has a single command.
    group.callback(invoke_without_command=True, help=about)(_help_without_command)
    return group


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from app.cli.release import version_of_program

        line(f"fencepost {version_of_program()}")
        raise typer.Exit
    _help_without_command(context)


def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        line(context.get_help())
        raise typer.Exit(2)
