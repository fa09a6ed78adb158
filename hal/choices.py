"""What people say (options, environment, settings file, keyword arguments) as a Policy.  One reader for all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import detect, plugins
from .errors import PolicyError, unknown
from .policy import AUTOMATIC, Policy, Request, Target, names, pieces, target_of

if TYPE_CHECKING:
    from .catalog import Catalog

FALLBACKS = ("refuse", "declared")
BACKEND, FALLBACK, SETTINGS = "HAL_ATTENTION_BACKEND", "HAL_ATTENTION_FALLBACK", "HAL_SETTINGS"
_SEVERAL = "one, several with commas, a list"
# The keys of a settings file, the keyword arguments of hal.attach and hal.scope, and (with dashes) the options:
# what each may be, in a word for ``_fits`` and in words for people, and an example.
WORDS = {
    "attention_backend": ("text", "one name", "torch_sdpa"),
    "component_attention_backends": ("pairs", f"COMPONENT=NAME: {_SEVERAL}, a mapping", "text_encoder=torch_sdpa"),
    "attention_backend_config": ("settings", "a mapping, key=value,..., JSON, or the name of a file", "sparsity=0.5"),
    "attention_fallback": ("text", " or ".join(FALLBACKS), "declared"),
    "kernel": ("text", "one name", "sdpa.math"),
    "forbid": ("pairs", f"[COMPONENT=]NAME: {_SEVERAL}, a mapping of components", "vae=torch_sdpa"),
    "waive": ("texts", f"the waiver of a rule: {_SEVERAL}", "memory.math"),
    "fit": ("texts", f"the name of a fitting: {_SEVERAL}", "pad_head_dim"),
    "native_only": ("flag", "true or false", "true"),
}
KEYS = tuple(WORDS)

Names = str | Collection[str] | None


def policy_of(
    catalog: Catalog,
    *,
    attention_backend: str | None = None,
    component_attention_backends: Mapping[str, str] | Names = None,
    attention_backend_config: Any = None,
    attention_fallback: str | None = None,
    kernel: str | None = None,
    forbid: Mapping[str, str] | Names = None,
    waive: Names = None,
    fit: Names = None,
    native_only: bool | str | None = None,
    components: Iterable[str] | None = None,
    said: Any = lambda key, value: f"{key}={value!r}",
) -> Policy:
    """The policy that these words mean.  ``said(key, value)`` names a source as the user knows it.

    ``components`` are the names that exist, where they are known.  A fallback that is not said is the environment's,
    else ``refuse``.  Raises PolicyError for every malformed, unknown or contradictory word.
    """
    values = (attention_backend, component_attention_backends, attention_backend_config, attention_fallback)
    given = dict(zip(KEYS, (*values, kernel, forbid, waive, fit, native_only), strict=True))
    _check({key: value for key, value in given.items() if value is not None}, said)
    mode = _mode(attention_fallback, said)
    requests: list[Request] = []
    if attention_backend is not None or kernel is not None:
        source = " ".join(said(k, given[k]) for k in ("attention_backend", "kernel") if given[k] is not None)
        own = "" if attention_backend is None else _named(catalog.backend_name, attention_backend, source)
        one = "" if kernel is None else _named(catalog.kernel_name, kernel, source)
        if own and one and one not in (known := catalog.kernels_of(own)):
            raise PolicyError(f"{source}: {one} is no kernel of {own}; its kernels: {', '.join(sorted(known))}")
        owners = [b for b in catalog.backends if one in catalog.kernels_of(b)] if one and not own else []
        own = owners[0] if len(owners) == 1 else own  # so that what its backend is (sparse, say) counts
        # One kernel by its name is meant as it is said: no fallback has it.
        requests.append(Request(own, "require" if one else mode, source, one, attention_backend or "", "global"))
    for text, backend in pairs(component_attention_backends, "component_attention_backends", said):
        source = said("component_attention_backends", f"{text}={backend}")
        target = target_of(text, source, components)
        requests.append(
            Request(_named(catalog.backend_name, backend, source), mode, source, "", backend, "override", target)
        )
    for text, name in pairs(forbid, "forbid", said, lone=True):
        source = said("forbid", f"{text}={name}" if text else name)
        target = target_of(text, source, components) if text else Target()
        backend, one = ("", name) if name in catalog.kernels else (_named(catalog.backend_name, name, source), "")
        requests.append(Request(backend, "forbid", source, one, name, "override", target))
    settings = _settings(attention_backend_config, catalog, requests, components, said)
    for name in sorted(names(waive)):
        _named(lambda n: catalog.check_names(frozenset({n}), frozenset()), name, said("waive", name))
    for name in sorted(names(fit)):
        _named(lambda n: catalog.check_names(frozenset(), frozenset({n})), name, said("fit", name))
    return Policy(
        tuple(requests),
        names(waive),
        names(fit),
        settings,
        native_only=None if native_only is None else native_only in (True, "true"),
    )


def _check(words: Mapping[str, Any], said: Any) -> None:
    """Raises PolicyError for a value of a type that its key does not take, and for an empty one."""
    for key, given in words.items():
        kind, allowed, example = WORDS[key]
        if _fits(kind, given):
            continue
        if kind == "pairs" and isinstance(given, Mapping):
            t, b = next(pair for pair in given.items() if not _fits(kind, dict([pair])))
            given = f"{t}={'' if b is None else b}"
        raise PolicyError(f"{said(key, given)}: allowed is {allowed}; write, say, {example}")


def _fits(kind: str, given: Any) -> bool:
    if kind == "flag":
        return isinstance(given, bool) or given in ("true", "false")
    if isinstance(given, str):
        return bool(pieces(given))
    if kind == "settings":
        from .source import Source

        return isinstance(given, (Mapping, Source))
    if isinstance(given, Mapping):
        return kind == "pairs" and all(isinstance(x, str) and pieces(x) for pair in given.items() for x in pair)
    many = kind != "text" and isinstance(given, Collection)
    return many and all(isinstance(x, str) and pieces(x) for x in given)


def pairs(given: Any, key: str, said: Any, lone: bool = False) -> list[tuple[str, str]]:
    """``a=x,b=y`` (one text or several) or a mapping; with ``lone`` a name alone is for everywhere."""
    if given is None:
        return []
    out: list[tuple[str, str]] = []
    if isinstance(given, Mapping):
        out = [(t, b.strip()) for t, b in given.items()]
    else:
        for piece in pieces(given):
            target, eq, backend = piece.partition("=")
            if lone and not eq:
                target, backend = "", target
            if not backend.strip() or (not lone and not target.strip()):
                form = "[COMPONENT=]NAME" if lone else "COMPONENT=BACKEND"
                raise PolicyError(f"{said(key, piece)}: {piece!r} is no {form}; write, say, text_encoder=torch_sdpa")
            out.append((target.strip(), backend.strip()))
    if not lone:
        for i, (target, backend) in enumerate(out):
            earlier = [b for t, b in out[:i] if t == target]
            if earlier and earlier[0] != backend:
                raise PolicyError(
                    f"{said(key, f'{target}={backend}')}: {target} was given {earlier[0]} as well; keep one"
                )
    return list(dict.fromkeys(out))


def _named(read: Any, name: str, source: str) -> str:
    try:
        out: str = read(name)
    except PolicyError as e:
        raise PolicyError(f"{source}: {e}") from None
    return out


def _mode(given: str | None, said: Any) -> str:
    source = said("attention_fallback", given)
    if given is None:
        given, source = os.environ.get(FALLBACK), f"{FALLBACK}={os.environ.get(FALLBACK)}"
    if not given and (file := os.environ.get(SETTINGS)):
        read = _read(file)
        given = read.data.get("attention_fallback")
        source = f"{read.place('attention_fallback')}, attention_fallback: {given}"
    if not given:
        return "require"
    if given not in FALLBACKS:
        raise PolicyError(f"{source}: {unknown('fallback', given, FALLBACKS)}")
    return "prefer" if given == "declared" else "require"


def _settings(
    given: Any, catalog: Catalog, requests: list[Request], components: Iterable[str] | None, said: Any
) -> tuple[Any, ...]:
    """The settings of backends, checked by their models.  Imported only where something is set: pydantic is slow."""
    if given is None:
        return ()
    from . import config, source

    if not isinstance(given, source.Source):
        given = source.read(given, said("attention_backend_config", given) if isinstance(given, str) else "settings")
    chosen = next((r.backend for r in requests if r.kind == "global" and r.backend), None)
    own = {
        r.target.component: r.backend
        for r in requests
        if r.kind == "override" and r.mode != "forbid" and not r.target.role and not r.target.layers
    }
    return config.settings(given, catalog, chosen, None if components is None else list(components), own)


# ---- what surrounds the process


def environment(catalog: Catalog) -> Policy:
    """What HAL_ATTENTION_BACKEND asks for, and the settings file of HAL_SETTINGS after it."""
    file = os.environ.get(SETTINGS)
    return _variable(catalog).over(settings_file(catalog, file)) if file else _variable(catalog)


def _variable(catalog: Catalog) -> Policy:
    name = os.environ.get(BACKEND)
    if not name:
        return AUTOMATIC
    return policy_of(catalog, attention_backend=name, said=lambda k, x: f"{BACKEND}={x}")


def settings_file(catalog: Catalog, path: str, attention_fallback: str | None = None) -> Policy:
    """The policy in a JSON or YAML file with the keys of ``KEYS``; a fallback that was said elsewhere comes before its own.

    Raises PolicyError naming file and line.
    """
    source = _read(path)

    def said(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
        return f"{source.place(key, text.partition('=')[0])}, {key}: {text}"

    words = dict(source.data)
    for key in words:
        if key not in KEYS:
            raise PolicyError(f"{source.place(key)}: {unknown('setting', key, KEYS)}")
    _check(words, said)
    if "attention_fallback" in words:
        _mode(words["attention_fallback"], said)  # also where it gives way
    if "attention_backend_config" in words:
        words["attention_backend_config"] = source.under("attention_backend_config")
    if attention_fallback or os.environ.get(FALLBACK):
        words["attention_fallback"] = attention_fallback or os.environ[FALLBACK]
    return policy_of(catalog, **words, said=said)


def _read(path: str) -> Any:
    from .source import read

    return read(path, "the settings file")


def asked(
    catalog: Catalog,
    words: Mapping[str, Any],
    config: str | None = None,
    *,
    said: Any = lambda key, value: f"{key}={value!r}",
    components: Iterable[str] | None = None,
) -> Policy:
    """The policy of a command: its words, and the settings file that it names, whose fallback is that of the words too.

    HAL_ATTENTION_BACKEND comes before the file; HAL_SETTINGS comes after all of it, with the rest of the environment.
    """
    if config is None:
        return policy_of(catalog, **words, said=said, components=components)
    file, fallback = settings_file(catalog, config, words.get("attention_fallback")), os.environ.get(FALLBACK)
    own = None if fallback else _read(config).data.get("attention_fallback")
    words = {"attention_fallback": own, **words}
    first = policy_of(catalog, **words, said=said, components=components)
    return first.over(_variable(catalog)).over(file)


# ---- by hand


@contextmanager
def scope(**choices: Any) -> Iterator[None]:
    """Attention inside is chosen by these words, those of ``hal.attach``: ``attention_backend`` (the global choice),
    ``component_attention_backends``, ``attention_backend_config``, ``attention_fallback``, ``kernel``, ``forbid``,
    ``waive`` (rules by their waiver), ``fit`` (fittings) and ``native_only`` (what is asked for runs by a native kernel of
    this machine, or is refused).  Raises PolicyError for an unknown word or name.
    """
    from .context import changed, current, watched
    from .ledger import Ledger

    policy = checked(choices)
    with changed(policy=policy.over(current.get().policy)), watched(Ledger()) as ledger:
        yield
    if ledger.tallies:
        ledger.check_used(policy.requests)


def checked(choices: Mapping[str, Any], **more: Any) -> Policy:
    """The policy of keyword arguments.  Raises PolicyError for a word that does not exist."""
    for key in choices:
        if key not in KEYS:
            raise PolicyError(unknown("choice", key, KEYS))
    return policy_of(plugins.catalog(detect.ignored()), **choices, **more)
