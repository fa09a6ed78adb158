"""Configuration of backends: what ``hal.source`` has read, checked by each backend's own model.

A backend declares a model, a subclass of ``Config``, beside its kernels: ``Backend(..., config="package.module:Class")``.
Spellings from elsewhere are aliases of its fields.  What is wrong is told with its place, what is allowed, and the name
that may have been meant.  Import this module only when there is a configuration: pydantic is slow to import.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from .backend import Backend
from .catalog import Catalog
from .errors import DeclarationError, PolicyError, did_you_mean, unknown
from .kernel import imported
from .source import KeyPath, Source, read

__all__ = ["Config", "Layers", "Setting", "Source", "config_model", "describe", "keys", "read", "schema", "settings"]


# ---- what a backend declares


class Config(BaseModel):
    """The base of every backend's configuration: no unknown keys, no conversions, no change afterwards.

    ``groups``: keys under which settings may also stand together, as ``moba_config: {…}`` does elsewhere.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,  # true is no 1, and "1" is no number
        allow_inf_nan=False,
        validate_default=True,
        populate_by_name=True,
        loc_by_alias=False,
        protected_namespaces=(),
    )
    groups: ClassVar[tuple[str, ...]] = ()


def _layers(value: Any) -> Any:
    """The indices in a text, a number or a list of them; what is of another type is left for the model to refuse."""
    if isinstance(value, (list, tuple)):
        parts = [_layers(x) for x in value]
        flat = [x for p in parts for x in (p if isinstance(p, tuple) else (p,))]
        return tuple(sorted(set(flat))) if all(type(x) is int for x in flat) else tuple(flat)
    if not isinstance(value, str):
        return (value,) if type(value) is int else value
    out: set[int] = set()
    for part in filter(None, re.split(r"[,+\s]+", value.strip("[]() "))):
        m = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part)
        if not m or int(m[2] or m[1]) < int(m[1]):
            raise ValueError(f"{part!r} is no layer or range of layers; write 0,1 or 0-2")
        out.update(range(int(m[1]), int(m[2] or m[1]) + 1))
    return tuple(sorted(out))


_LAYER: dict[str, Any] = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}
# Indices of layers, ascending: from 1, "0,1", "0+1", "0-2", [0, 1] or [0, "2-4"].
Layers = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    BeforeValidator(_layers),
    WithJsonSchema(
        {"anyOf": [{"type": "array", "items": _LAYER}, *_LAYER["anyOf"]], "examples": ["0,1", "0-2", [0, 1]]}
    ),
]


def config_model(backend: Backend) -> type[Config] | None:
    """The model of a backend's settings, imported now; None: it has no settings.  Raises DeclarationError."""
    if backend.config is None:
        return None
    try:
        model: Any = imported(backend.config)
    except (ImportError, AttributeError) as e:
        raise DeclarationError(f"backend {backend.name}: config {backend.config!r} cannot be imported: {e}") from e
    if not (isinstance(model, type) and issubclass(model, Config)):
        raise DeclarationError(f"backend {backend.name}: config {backend.config!r} is no subclass of hal.config.Config")
    return model


def defaults(backend: Backend) -> Config | None:
    """A backend's settings where none were given.  Raises PolicyError where one of them has no default."""
    model = config_model(backend)
    if model is None:
        return None
    needed = [describe(backend, n) for n, f in model.model_fields.items() if f.is_required()]
    if needed:
        raise PolicyError(f"{backend.name} needs {', '.join(needed)}; give it by --attention-backend-config")
    return model()


def keys(model: type[Config]) -> dict[str, str]:
    """Every key that a model takes, aliases too -> the field's name."""
    out: dict[str, str] = {}
    for name, f in model.model_fields.items():
        aliases = getattr(f.validation_alias, "choices", [f.validation_alias])
        out.update({a: name for a in (name, f.alias, *aliases) if isinstance(a, str)})
    return out


def schema(backend: Backend) -> dict[str, Any]:
    """The JSON schema of a backend's settings; ``aliases`` of a property are further names of it."""
    model = config_model(backend)
    if model is None:
        return {"title": backend.name, "type": "object", "properties": {}, "additionalProperties": False}
    out = {**model.model_json_schema(by_alias=False), "title": backend.name}
    for key, name in keys(model).items():
        if key != name:
            out["properties"][name].setdefault("aliases", []).append(key)
    return out


def describe(backend: Backend, only: str = "") -> str:
    """A backend's settings (or one of them) with type, range and default, in one line."""
    s = schema(backend)
    required = s.get("required", ())
    return ", ".join(
        f"{name} ({_kind(p, s)}{', required' if name in required else ''}"
        + (f", default {json.dumps(p['default'])})" if "default" in p else ")")
        for name, p in s["properties"].items()
        if only in ("", name)
    )


def _kind(p: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    if "examples" in p:
        return "such as " + " or ".join(x if isinstance(x, str) else json.dumps(x) for x in p["examples"])
    if "$ref" in p:
        return _kind(root["$defs"][p["$ref"].rpartition("/")[2]], root)
    if "anyOf" in p:
        return " or ".join(_kind(x, root) for x in p["anyOf"])
    if "enum" in p or "const" in p:
        return " or ".join(map(str, p.get("enum", [p.get("const")])))
    if "prefixItems" in p:
        return f"[{', '.join(_kind(x, root) for x in p['prefixItems'])}]"
    if p.get("type") == "array":
        return f"list of {_kind(p.get('items', {}), root)}"
    signs = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
    return " ".join([str(p.get("type", "value")), *(f"{sign} {_short(p[k])}" for k, sign in signs if k in p)])


def _short(bound: float) -> float:
    return int(bound) if bound == int(bound) else bound


# ---- checking


class Setting(NamedTuple):
    """The configuration of a backend: in one component or, where ``component`` is empty, wherever the backend runs."""

    backend: str
    component: str
    config: Config


def settings(
    source: Source,
    catalog: Catalog,
    default_backend: str | None = None,
    components: Collection[str] | None = None,
    component_backends: Mapping[str, str] | None = None,
) -> tuple[Setting, ...]:
    """What a configuration says, checked: keys of the chosen backend, ``{backend: {…}}``, or either in a component.

    ``default_backend`` is the one that was chosen for all, ``component_backends`` those chosen for components: keys that
    stand alone are theirs.  ``components`` are the pipeline's; None: not known, so that any other name with an object is
    taken for one.  Raises PolicyError.
    """
    overrides = {c: catalog.backend_name(b) for c, b in (component_backends or {}).items()}
    chosen = catalog.backend_name(default_backend) if default_backend else ""
    known = None if components is None else {*components, *overrides}
    return tuple(_Check(source, catalog, chosen, overrides, known).settings())


class _Check:
    def __init__(
        self, source: Source, catalog: Catalog, chosen: str, overrides: Mapping[str, str], components: set[str] | None
    ):
        self.source, self.catalog, self.chosen, self.overrides = source, catalog, chosen, overrides
        self.components = components

    def settings(self) -> Iterator[Setting]:
        seen: dict[tuple[str, str], KeyPath] = {}
        for backend, component, given in self.parts(self.source.data, (), ""):
            path = next(iter(given))
            if first := seen.get((backend, component)):
                self.refuse(path, f"{backend} is configured twice, by {'.'.join(first)} too; put its settings together")
            seen[backend, component] = path
            yield Setting(backend, component, self.checked(self.catalog.backends[backend], given))

    def parts(
        self, data: Mapping[str, Any], path: KeyPath, component: str
    ) -> Iterator[tuple[str, str, dict[KeyPath, Any]]]:
        """(backend, component, settings by path) of a level: the whole, or one component."""
        backend = self.overrides.get(component, self.chosen)
        own = self.own(backend)
        flat: dict[KeyPath, Any] = {}
        for key, value in ((str(k), x) for k, x in data.items()):
            here = (*path, key)
            named = self.backend(key)
            meant = {"backend": bool(named), "setting": _plain(key) in own}
            meant["component"] = not component and self.is_component(key, value, here, [*own], any(meant.values()))
            kinds = [k for k, x in meant.items() if x]
            if len(kinds) > 1:
                self.refuse(here, f"{key!r} is the name of a {' and of a '.join(kinds)}; nest it to say which is meant")
            if kinds in (["backend"], ["component"]):
                if not isinstance(value, Mapping):
                    self.refuse(
                        here, f"{key!r} is a {kinds[0]}, so an object of settings must follow, not {value!r:.60}"
                    )
                if named:
                    if value:
                        yield named, component, {(*here, str(k)): x for k, x in value.items()}
                else:
                    yield from self.parts(value, here, key)
            elif kinds or backend:
                flat[here] = value
            else:
                self.refuse(here, self.homeless(key, value))
        if flat:
            yield backend, component, flat

    def own(self, backend: str) -> dict[str, str]:
        """The keys of a backend, its groups too."""
        model = config_model(self.catalog.backends[backend]) if backend else None
        return {**keys(model), **dict.fromkeys(model.groups, "")} if model else {}

    def backend(self, key: str) -> str:
        plain = _plain(key).lower()
        return self.catalog.aliases.get(plain, plain if plain in self.catalog.backends else "")

    def is_component(self, key: str, value: Any, path: KeyPath, own: list[str], known: bool) -> bool:
        if key in self.overrides or self.components is not None:
            return key in self.overrides or key in (self.components or ())
        if known or not isinstance(value, Mapping) or not key.isidentifier():
            return False
        if close := get_close_matches(_plain(key), [*self.catalog.backends, *self.catalog.aliases, *own], 1, 0.7):
            self.refuse(path, f"unknown name {key!r}; did you mean {close[0]!r}?")
        return True

    def checked(self, backend: Backend, given: Mapping[KeyPath, Any]) -> Config:
        model = config_model(backend)
        own = self.own(backend.name)
        where: dict[str, KeyPath] = {}
        data: dict[str, Any] = {}
        for path, value in self.spread(backend, model, given):
            if model is None:
                more = did_you_mean(path[-1], self.names()) if len(path) == 1 else ""
                self.refuse(path, f"{backend.name} has no settings, so {path[-1]!r} cannot be given; drop it{more}")
            field = own.get(_plain(path[-1]))
            if not field:
                names = [*own, *(self.names() if len(path) == 1 else ())]
                said = did_you_mean(_plain(path[-1]), names) or "."
                self.refuse(path, f"{backend.name} has no setting {path[-1]!r}{said} Its settings: {describe(backend)}")
            if field in where:
                self.refuse(path, f"{path[-1]!r} and {where[field][-1]!r} are one setting of {backend.name}; keep one")
            where[field], data[field] = path, value
        assert model is not None  # something is given, and without a model all of it was refused
        try:
            return model.model_validate_json(json.dumps(data))  # JSON, so that a list may make a tuple
        except ValidationError as e:
            first = e.errors()[0]
        except (TypeError, ValueError) as e:
            self.refuse(next(iter(given)), f"{backend.name}: a value is none of JSON's: {e}")
        raise self.refusal(backend, first, {f: (p, data[f]) for f, p in where.items()}, next(iter(given)))

    def spread(
        self, backend: Backend, model: type[Config] | None, given: Mapping[KeyPath, Any]
    ) -> Iterator[tuple[KeyPath, Any]]:
        for path, value in given.items():
            if model is None or _plain(path[-1]) not in model.groups:
                yield path, value
            elif isinstance(value, Mapping):
                yield from (((*path, str(k)), x) for k, x in value.items())
            else:
                self.refuse(path, f"{path[-1]!r} of {backend.name} must be an object of settings, not {value!r:.60}")

    def refusal(
        self, backend: Backend, error: Mapping[str, Any], where: Mapping[str, tuple[KeyPath, Any]], level: KeyPath
    ) -> PolicyError:
        """pydantic's first objection, in our words."""
        said = error["msg"].removeprefix("Value error, ")
        said += ", so write it in quotes" if error["type"] == "string_type" else ""
        field, *inner = error["loc"] or [""]
        if error["type"] == "missing" and not inner:
            text = f"{backend.name} needs {describe(backend, str(field))}, which is not given"
            return PolicyError(f"{self.source.place(*level[:-1])}: {text}")
        if field not in where:  # of several fields together, or of a default
            return PolicyError(f"{self.source.place(*level[:-1])}: {backend.name} refuses its settings: {said}")
        path, value = where[field]
        name = path[-1]
        for x in inner:
            listed = isinstance(value, (list, tuple)) and isinstance(x, int) and x < len(value)
            if listed or (isinstance(value, Mapping) and x in value):
                path, value, name = (*path, str(x)), value[x], f"{name}.{x}"
        shown = json.dumps(value, default=str)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        text = f"{backend.name} refuses {name}={shown}: {said}; allowed: {describe(backend, field)}"
        return PolicyError(f"{self.source.place(*path)}: {text}")

    def names(self) -> list[str]:
        return [*self.catalog.backends, *self.catalog.aliases, *(self.components or ())]

    def homeless(self, key: str, value: Any) -> str:
        """A key for no backend in particular."""
        if isinstance(value, Mapping):
            return unknown("backend or component" if self.components else "backend", key, self.names())
        owners = []
        for b in self.catalog.backends:
            with suppress(DeclarationError):  # another backend's mistake
                owners += [b] if _plain(key) in self.own(b) else []
        told = (
            f" ({key} is a setting of {', '.join(owners)})" if owners else did_you_mean(key, self.names()).rstrip("?")
        )
        nested = json.dumps({owners[0] if owners else "BACKEND": {key: value}}, default=str)
        return f"{key!r} is for no backend{told}; choose one with --attention-backend, or write {nested}"

    def refuse(self, path: KeyPath, text: str) -> NoReturn:
        raise PolicyError(f"{self.source.place(*path)}: {text}")


def _plain(key: str) -> str:
    return key.strip().replace("-", "_")
