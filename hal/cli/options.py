"""What several commands share: their options, and the machine that these describe."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from ..choices import KEYS
from ..errors import FactError, HalError, PlatformError, PolicyError, unknown

if TYPE_CHECKING:
    from ..catalog import Catalog
    from ..facts import Machine
    from ..policy import Policy


COMPONENTS = "--component-attention-backends"


def _ignore(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> None:
    """Set for this process, before the catalog is made; detection at import has already run, so it runs again."""
    if not given:
        return
    from .. import detect, plugins

    points = plugins.entry_points()
    known = {x for e in points for x in (e.name, e.distribution, f"{e.distribution}:{e.name}")}
    wanted = {n.strip() for text in given for n in text.split(",") if n.strip()}
    for name in sorted(wanted - known):
        raise PolicyError(unknown("plug-in", name, {e.name for e in points} | {e.distribution for e in points}))
    before = detect.ignored()
    if not wanted <= before:
        os.environ[detect.IGNORE] = ",".join(sorted(before | wanted))
        detect.detected(again=True)


# Accepted by ``hal`` itself and, given to each by the group, by every subcommand.
ignore_plugin = click.Option(
    ["--ignore-plugin"],
    multiple=True,
    metavar="NAME",
    expose_value=False,
    is_eager=True,
    callback=_ignore,
    help="Go on without this plug-in (its name or its distribution).",
)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def on_machine(f: Callable[..., Any]) -> Callable[..., Any]:
    """--on, --with and --without: the machine that is talked about."""
    for option in (
        click.option("--without", multiple=True, metavar="NAME", help="Take a package away."),
        click.option(
            "--with",
            "with_",
            multiple=True,
            metavar="NAME==VERSION",
            help="Add a package, or set torch, cudnn or triton.",
        ),
        click.option("--on", metavar="MACHINE", help="A preset, platform:arch, or a facts file; else this machine."),
    ):
        f = option(f)
    return f


def sized(when: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Sizes of what is generated, and guidance; ``when`` says of each with what it goes."""

    def option(name: str, kind: Any, metavar: str, text: str) -> Callable[..., Any]:
        text = f"{when}{text[0].lower()}{text[1:]}" if when else text
        return click.option(name, type=kind, metavar=metavar, help=text)

    def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
        for one in (
            option("--guidance-scale", float, "X", "How closely to follow the prompt."),
            option("--width", click.IntRange(1), "N", "Pixels."),
            option("--height", click.IntRange(1), "N", "Pixels."),
            option("--num-frames", click.IntRange(1), "N", "Frames of a video."),
        ):
            f = one(f)
        return f

    return decorate


def choosing(f: Callable[..., Any]) -> Callable[..., Any]:
    """What people say of the choice, as ``words`` for hal.choices; and ``config``, a settings file that comes after."""

    @functools.wraps(f)
    def with_words(**given: Any) -> Any:
        words = {k: given.pop(k) for k in KEYS}
        return f(words={k: x for k, x in words.items() if x not in (None, ())}, **given)

    out: Callable[..., Any] = with_words
    for option in (
        click.option(
            "--config", metavar="FILE", help="A settings file; what is said here and in the environment comes first."
        ),
        click.option("--fit", multiple=True, metavar="NAME", help="Allow a fitting that hal does not make by itself."),
        click.option(
            "--waive", multiple=True, metavar="NAME", help="Overrule a known-bad rule or a budget by its waiver."
        ),
        click.option("--forbid", multiple=True, metavar="[COMPONENT=]NAME", help="Never use this backend or kernel."),
        click.option(
            "--native-only/--no-native-only",
            default=None,
            help="Refuse a backend that has only its portable form here.",
        ),
        click.option("--kernel", metavar="NAME", help="Require one kernel by its name."),
        click.option(
            "--attention-fallback",
            metavar="refuse|declared",
            help="What becomes of a backend that the machine cannot have: refused, or its declared fallback.",
        ),
        click.option("--attention-backend-config", metavar="TEXT", help="Settings: a file, JSON, or key=value,..."),
        click.option(
            COMPONENTS,
            multiple=True,
            metavar="COMPONENT=NAME,...",
            help="Backends of components: text_encoder=torch_sdpa,transformer.cross=fa.",
        ),
        click.option("--attention-backend", metavar="NAME", help="The backend for all, strict for the transformer."),
    ):
        out = option(out)
    return out


def said(key: str, value: Any) -> str:
    """An option as it was typed; True is a switch."""
    return f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}")


def undotted(args: list[str]) -> list[str]:
    """``--component-attention-backends.vae fa`` and ``….vae=fa`` as ``--component-attention-backends vae=fa``."""
    out: list[str] = []
    rest = iter(args)
    for arg in rest:
        option, dot, target = arg.partition(".")
        if option.replace("_", "-") != COMPONENTS or not dot:
            out.append(arg)
            if arg == "--":
                return [*out, *rest]
            continue
        target, eq, backend = target.partition("=")
        backend = backend if eq else next(rest, "")
        if not target or not backend or backend.startswith("--"):
            raise click.UsageError(f"{arg} needs a component and a backend; write, say, {COMPONENTS}.vae torch_sdpa")
        out += [COMPONENTS, f"{target}={backend}"]
    return out


def policy_from(catalog: Catalog, words: Mapping[str, Any], config: str | None, **more: Any) -> Policy:
    """The policy of a command line: its words, then the environment, then the settings file.  Raises PolicyError."""
    from .. import choices

    return choices.asked(catalog, words, config, said=said, **more).over(choices.environment(catalog))


def installed() -> Catalog:
    """The catalog of what is installed; plug-ins that failed are told on stderr."""
    from .. import detect, plugins

    catalog = plugins.catalog(detect.ignored())
    for stranger in detect.strangers(os.environ):
        raise PolicyError(stranger)
    for p in catalog.problems:
        click.echo(f"hal: warning: {p}; --ignore-plugin {p.name} silences this", err=True)
    return catalog


def this_machine() -> Machine:
    """The machine that is really here.  Raises PlatformError where its facts cannot be read."""
    from .. import detect

    name = detect.real_platform().name
    try:
        return detect.real_machine(name)
    except HalError:
        raise
    except Exception as e:
        said = str(e).strip().splitlines()
        raise PlatformError(
            f"the facts of this {name} machine cannot be read: {type(e).__name__}: {said[0] if said else ''}; "
            "hal doctor tells more, and --on explains another machine"
        ) from e


def machine_of(catalog: Catalog, on: str | None, with_: tuple[str, ...], without: tuple[str, ...]) -> Machine:
    """The machine asked for, with packages and software set and taken away.  Raises HalError for what is unknown."""
    machine = this_machine() if on is None else catalog.machine(on)
    if not with_ and not without:
        return machine
    from ..policy import names, release
    from ..rules import VERSION_FACTS

    software: dict[str, str | None] = {}
    packages: dict[str, str | None] = {}
    for text in sorted(names(with_)):
        name, version = release(text)
        _check_version(text, version)
        if name in VERSION_FACTS:
            software[name] = version
        if name not in VERSION_FACTS or name in catalog.packages:
            packages[catalog.known_package(name, machine)] = version
    for name in sorted(names(without)):
        key = catalog.known_package(name, machine)
        if key in packages:
            raise PolicyError(f"--with and --without both name {key}")
        packages[key] = None
    return catalog.changed(machine, packages, software)


def _check_version(text: str, version: str) -> None:
    from packaging.version import InvalidVersion, Version

    try:
        Version(version)
    except InvalidVersion:
        raise FactError(f"{text!r}: {version!r} is no PEP 440 version; write, say, 2.8.3") from None
