"""Configuration as people write it: a file, a JSON text or ``key=value,…``, with the place of each key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .errors import PolicyError

OPTION = "--attention-backend-config"
SUFFIXES = (".json", ".yaml", ".yml")
KeyPath = tuple[str, ...]


class Source(NamedTuple):
    """A configuration as it was written, and where: the option or the file, with the line of each key of a file."""

    data: Mapping[str, Any]
    origin: str
    lines: Mapping[KeyPath, int] = {}

    def place(self, *path: str) -> str:
        """The line of the key, or of the nearest one around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.origin}, line {self.lines[path]}" if path else self.origin

    def under(self, key: str) -> Source:
        """What stands under a key, with its own lines; as text it is read.  Raises PolicyError."""
        value = self.data[key]
        if not isinstance(value, Mapping):
            return read(value, self.place(key))
        inner = {path[1:]: line for path, line in self.lines.items() if path[0] == key and path[1:]}
        return Source(value, self.origin if inner else self.place(key), inner)


def read(given: str | Mapping[str, Any], origin: str = OPTION) -> Source:
    """A file's name in .json, .yaml or .yml; a JSON object; ``key=value,…``; or a mapping.  Raises PolicyError."""
    if isinstance(given, Mapping):
        return Source(given, origin)
    text = given.strip()
    try:
        if text.startswith(("{", "[")):
            return Source(_object(_json(text, origin), origin), origin)
        if text.lower().endswith(SUFFIXES) and not re.match(r"[A-Za-z_][\w-]*\s*=", text):
            return _file(Path(text))
        return Source(_pairs(text, origin), origin)
    except RecursionError:
        raise PolicyError(f"{origin}: {text!r:.80} is nested too deeply, or within itself") from None


def _object(data: Any, origin: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise PolicyError(f"{origin}: it must hold an object of keys and values, not {data!r:.60}")
    return data


def _json(text: str, origin: str, lined: bool = False) -> Any:
    """``lined``: the text of a file, whose lines are told, and whose duplicate keys are looked for elsewhere."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [k for k, _ in pairs]
        for twice in (k for k in names if names.count(k) > 1):
            raise PolicyError(f"{origin}: the key {twice!r} is given twice; keep one")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=None if lined else once)
    except json.JSONDecodeError as e:
        where = f"{origin}, line {e.lineno}" if lined else origin
        near = text[max(0, e.pos - 20) : e.pos + 20]
        raise PolicyError(f"{where}: this is no JSON: {e.msg} at column {e.colno}, near {near!r}") from None
    except PolicyError:
        raise
    except ValueError as e:  # a number of thousands of digits
        raise PolicyError(f"{origin}: this is no JSON: {e}") from None


def _file(path: Path) -> Source:
    try:
        text = path.expanduser().read_text("utf-8-sig")
    except (OSError, ValueError, RuntimeError) as e:
        said = getattr(e, "strerror", None) or e
        raise PolicyError(f"the configuration file {str(path)!r} cannot be read: {said}") from None
    import yaml

    lines: dict[KeyPath, int] = {}
    is_json = path.suffix.lower() == ".json"
    data = _json(text, str(path), lined=True) if is_json else None
    try:
        # JSON is nearly YAML, whose reader tells the lines of keys.  No JSON string holds a tab as such.
        tree = yaml.compose(text.replace("\t", " ") if is_json else text, yaml.SafeLoader)
        told = _tree(tree, str(path), (), lines)
    except yaml.YAMLError as e:
        if is_json:
            return Source(_object(_json(text, str(path)), str(path)), str(path))
        mark = getattr(e, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise PolicyError(f"{where}: this is no YAML: {getattr(e, 'problem', None) or e}") from None
    return Source(_object(data if is_json else told, str(path)), str(path), lines)


def _tree(node: Any, origin: str, path: KeyPath, lines: dict[KeyPath, int]) -> Any:
    """A YAML node as a value, by the rules of ``scalar``: PyYAML alone takes 1e-3 for a text and 1:30 for a number."""
    import yaml

    if node is not None and not re.fullmatch(r"tag:yaml\.org,2002:[a-z]+", node.tag):
        raise PolicyError(f"{origin}, line {node.start_mark.line + 1}: the tag {node.tag!r} is not read; drop it")
    if isinstance(node, yaml.SequenceNode):
        return [_tree(x, origin, path, lines) for x in node.value]
    if not isinstance(node, yaml.MappingNode):
        return None if node is None else scalar(node.value) if node.style is None else node.value
    out: dict[str, Any] = {}
    for k, x in node.value:
        line = k.start_mark.line + 1
        if not isinstance(k, yaml.ScalarNode):
            raise PolicyError(f"{origin}, line {line}: a key must be a name")
        if k.value in out:
            raise PolicyError(f"{origin}, line {line}: the key {k.value!r} is given twice; keep one")
        here = (*path, k.value)
        lines[here] = line
        out[k.value] = _tree(x, origin, here, lines)
    return out


def _pairs(text: str, origin: str) -> dict[str, Any]:
    """``a=1,layers=0,1,b=-0.5,c="x,y"``: a piece that has no ``=`` of its own makes a list of the value before it."""
    found: dict[str, list[Any]] = {}
    name = ""
    for piece in _split(text, origin):
        m = re.match(r"([A-Za-z_][\w-]*)\s*=", piece, re.ASCII)
        if m:
            name = m[1]
            if name in found:
                raise PolicyError(f"{origin}: the key {name!r} is given twice in {text!r}; keep one")
            found[name] = []
        elif not name or ("=" in piece and piece[0] not in "'\"[{"):
            raise PolicyError(
                f"{origin}: {piece!r} is no key=value; write, say, sparsity=0.5,dense_layers=0,1, a JSON object, "
                f"or the name of a file in {', '.join(SUFFIXES)}"
            )
        found[name].append(_value(piece[m.end() :].strip() if m else piece, name, origin))
    return {k: x[0] if len(x) == 1 else x for k, x in found.items()}


def _split(text: str, origin: str) -> Iterator[str]:
    """At commas outside quotes and brackets."""
    depth, quote, start, escaped = 0, "", 0, False
    for i, c in enumerate(f"{text},"):
        if escaped:
            escaped = False
        elif quote:
            escaped = c == "\\" and quote == '"'
            quote = "" if c == quote else quote
        elif c in "'\"":
            # an apostrophe inside a word is none: /it's.json
            quote = c if depth or not text[start:i].rpartition("=")[2].strip() else ""
        elif c in "[{":
            depth += 1
        elif c in "]}":
            depth -= 1
        elif c == "," and depth <= 0:
            piece = text[start:i].strip()
            if not piece:
                raise PolicyError(f"{origin}: {text!r} has an empty piece; write key=value,key=value")
            yield piece
            start, depth = i + 1, 0
    if quote or depth > 0:
        raise PolicyError(f"{origin}: {text[start:]!r} is not closed: a {quote or 'bracket'} is missing")


def _value(text: str, key: str, origin: str) -> Any:
    if not text:
        raise PolicyError(f'{origin}: {key!r} has no value; write {key}=null or {key}="" where that is meant')
    if m := re.fullmatch(r"'([^']*)'", text):
        return m[1]
    if text[0] == "'":
        raise PolicyError(f"{origin}: {text!r} goes on after its quote; write {key}='...'")
    if text[0] in '[{"':
        return _json(text, f"{origin}, {key}")
    return scalar(text)


def scalar(text: str) -> Any:
    """A plain word's value: -1, 1e-3, inf, true, null, or the word."""
    word = text.lower()
    if word in ("true", "false"):
        return word == "true"
    if word in ("null", "~", ""):
        return None
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", word):
        try:
            return int(word)
        except ValueError:
            return float(word)
    m = re.fullmatch(r"([+-]?)\.?(inf|nan)", word)
    return float(m[1] + m[2]) if m else text
