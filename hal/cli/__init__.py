"""The ``hal`` command.  Each subcommand is a module of its own, imported when it is used, so that start-up stays cheap.

A new subcommand is one line in COMMANDS and a module of its name (dashes as underscores) with a ``command``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from ..errors import HalError, did_you_mean
from .options import ignore_plugin, undotted

COMMANDS = {
    "doctor": "Examine this machine: devices, packages, and every backend against the oracle.",
    "explain": "Tell which kernel runs a call, on this machine or any other, and why.",
    "generate": "Make a picture or a video, of hal's own model or of a diffusers folder, and tell which attention ran.",
    "mask": "Draw which blocks a sparse backend attends to.",
    "compare": "Run one prompt under several backends, draw them side by side, and measure each.",
    "diff": "Tell what two machines, releases or plans decide otherwise, and why.",
    "lock": "Save every layer's decision of a pipeline as a plan that generate keeps to.",
    "matrix": "Show what is supported where, from the declarations.",
    "facts": "Show this machine's facts, to explain and replay elsewhere.",
    "presets": "List the machines that can be simulated by name.",
    "config": "Show and check the settings of backends.",
    "known-bad": "List the known defects, with their sources and waivers.",
}

# What some commands need beside hal itself, by its module: what installs it.
NEEDED = {
    "torch": "torch (the build for your accelerator)",
    "numpy": "numpy",
    "PIL": "pillow",
    "diffusers": "diffusers",
}


class Group(click.Group):
    """Loads commands when they are used, and tells every error in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"{__name__}.{cmd_name.replace('-', '_')}").command
        if ignore_plugin not in command.params:
            command.params.append(ignore_plugin)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0].replace("_", "-")
        if name in COMMANDS:
            return name, self.get_command(ctx, name), undotted(args[1:])
        ctx.fail(f"unknown command {args[0]!r}{did_you_mean(name, COMMANDS)} (known: {', '.join(COMMANDS)})")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        standalone = extra.pop("standalone_mode", True)
        try:
            code = super().main(args, prog_name or "hal", standalone_mode=False, **extra)
        except click.UsageError as e:
            _fail(_usage(e))
        except (HalError, click.ClickException) as e:
            _fail(e.format_message() if isinstance(e, click.ClickException) else str(e))
        except ModuleNotFoundError as e:
            if (package := NEEDED.get(e.name or "")) is None:
                raise
            _fail(f"this command needs {e.name}, which is not installed; pip install {package}")
        except click.Abort:
            _fail("interrupted", 130)
        if standalone:
            sys.exit(code or 0)
        return code


def _fail(text: str, code: int = 2) -> NoReturn:
    click.echo(f"hal: {text}", err=True)
    sys.exit(code)


def _usage(e: click.UsageError) -> str:
    path = e.ctx.command_path if e.ctx else "hal"
    text = e.format_message().rstrip(".")
    if isinstance(e, click.NoSuchOption) and e.ctx:
        names = [o for p in e.ctx.command.params for o in (*p.opts, *p.secondary_opts)]
        text = f"unknown option {e.option_name!r}{did_you_mean(e.option_name, names)}"
    return f"{text} ({path} --help tells more)"


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from .. import __version__

        click.echo(f"hal {__version__}")
        ctx.exit()


@click.group(
    cls=Group,
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": lambda text: text.replace("_", "-"),
    },
)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version.")
@click.pass_context
def main(ctx: click.Context) -> None:
    """hal: which attention kernel runs for this call on this machine, and why."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


main.params.append(ignore_plugin)
