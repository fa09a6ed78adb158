"""hal config: the settings that backends take, and whether a configuration is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..errors import did_you_mean
from .options import as_json as json_option
from .options import ignore_plugin, installed
from .output import Row, emit, screen

if TYPE_CHECKING:
    from ..config import Setting


class Group(click.Group):
    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in self.commands:
            ctx.fail(
                f"unknown command {args[0]!r}{did_you_mean(args[0], self.commands)} (known: {', '.join(self.commands)})"
            )
        return super().resolve_command(ctx, args)


@click.group(cls=Group, invoke_without_command=True, short_help="Show and check the settings of backends.")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Show and check the settings of backends, as --attention-backend-config takes them."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@command.command(short_help="Print the JSON schema of a backend's settings.")
@click.argument("backend", required=False)
def schema(backend: str | None) -> None:
    """Print the JSON schema of a backend's settings, or an object of all backends that have any."""
    from ..config import schema

    catalog = installed()
    if backend is not None:
        return emit(schema(catalog.backends[catalog.backend_name(backend)]))
    emit({b.name: schema(b) for b in catalog.backends.values() if b.config is not None})


@command.command(short_help="Check a configuration and print what it says.")
@click.argument("file")
@click.option("--attention-backend", metavar="NAME", help="The backend that was chosen: keys that stand alone are its.")
@json_option
def check(file: str, attention_backend: str | None, as_json: bool) -> None:
    """Check a configuration and print what it says.  Exit code 2: it is wrong.

    FILE may also be a JSON text or key=value,...

    \b
    hal config check settings.yaml
    hal config check sparsity=0.5 --attention-backend NAME
    """
    from ..choices import KEYS, settings_file
    from ..config import read, settings

    source = read(file, "FILE")
    if set(source.data) & set(KEYS):  # a settings file, as --config and HAL_SETTINGS take it
        policy = settings_file(installed(), file)
        for r in policy.requests:
            click.echo(f"{r.mode} {r} ({r.kind}, {r.target})", err=as_json)
        found = policy.settings
    else:
        found = settings(source, installed(), attention_backend)
    if as_json:
        return emit({"settings": [_json(s) for s in found]})
    if not found:
        click.echo("no settings of backends")
        return
    rows: list[Row] = []
    for s in found:
        rows.append([[(s.backend, "bold cyan"), f" in {s.component}" if s.component else ""]])
        values = s.config.model_dump(mode="json")
        rows += [(f"  {k}", _text(x), "" if k in s.config.model_fields_set else "default") for k, x in values.items()]
    screen().table(("setting", "value", ""), rows)


def _text(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)


def _json(s: Setting) -> dict[str, Any]:
    return {"backend": s.backend, "component": s.component or None, "config": s.config.model_dump(mode="json")}


for _command in command.commands.values():
    _command.params.append(ignore_plugin)
