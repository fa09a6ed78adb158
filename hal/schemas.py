"""The published JSON schemas (draft 2020-12) of a Machine, as ``hal facts --json`` writes it, and of an explanation."""

from __future__ import annotations

from typing import Any

from .backend import QUALITIES
from .facts import DTYPES, PACKAGE_STATES
from .facts.call import KINDS
from .rows import TIERS

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        **more,
    }


def _maybe(schema: dict[str, Any], what: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {"anyOf": [schema, {"type": "null"}]}
    return {**out, "description": what} if what else out


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def device() -> dict[str, Any]:
    return _object(
        {
            "index": {**_COUNT, "description": "its index on the machine; its place in the list where not given"},
            "name": _TEXT,
            "arch": {
                **_TEXT,
                "description": "an architecture in any form that its platform reads, such as sm90 or gfx942",
            },
            "memory": _maybe(_COUNT, "bytes"),
            "dtypes": _list({"type": "string", "enum": sorted(DTYPES)}),
            "shared_memory": _maybe(_COUNT, "bytes that one block or work-group may use"),
        },
        ["arch"],
        additionalProperties=False,
    )


def machine() -> dict[str, Any]:
    """A machine's facts: what ``hal explain --on FACTS.json`` reads."""
    state = _object(
        {"state": {"enum": list(PACKAGE_STATES)}, "version": _TEXT, "note": _TEXT}, [], additionalProperties=False
    )
    package = {"anyOf": [state, {**_TEXT, "description": "the version"}, {"type": "null", "description": "absent"}]}
    return {
        "$schema": _DRAFT,
        "title": "hal machine facts",
        **_object(
            {
                "platform": _TEXT,
                "origin": {**_TEXT, "description": "where the facts come from"},
                "devices": {**_list(device()), "minItems": 1},
                "software": {
                    "type": "object",
                    "additionalProperties": _maybe(_TEXT),
                    "description": "name to version; null is unknown; an environment variable is env.NAME",
                },
                "packages": {"type": "object", "additionalProperties": package},
            },
            ["platform", "devices"],
            additionalProperties=False,
        ),
    }


def explanation() -> dict[str, Any]:
    """A decision: what ``hal explain --json`` and ``Decision.to_json()`` write."""
    anything = {"description": "as observed or declared; text where JSON has no form for it"}
    reason = _object(
        {
            "id": {**_TEXT, "description": "stable name of the rule"},
            "observed": anything,
            "allowed": anything,
            "message": _TEXT,
            "fix": _maybe(_TEXT, "the one change that would help"),
            "citation": _maybe(_TEXT),
            "waiver": _maybe(_TEXT, "the name by which --waive overrules it"),
            "depends": {"type": "boolean", "description": "true: open, as it depends on an unknown fact"},
        }
    )
    candidate = _object(
        {
            "backend": _TEXT,
            "kernel": _maybe(_TEXT, "null: the platform has no row for the backend"),
            "tier": _maybe({"enum": list(TIERS)}),
            "accepted": {"type": "boolean"},
            "verdict": {"enum": ["yes", "no", "depends"]},
            "fittings": _list(_TEXT),
            "reasons": _list(reason),
            "passed_over": _maybe(_TEXT, "why a row that fits was not chosen"),
        }
    )
    return {
        "$schema": _DRAFT,
        "title": "hal explanation",
        **_object(
            {
                "platform": _TEXT,
                "device": device(),
                "origin": _TEXT,
                "call": _object({k: _maybe(kind.schema) for k, kind in KINDS.items()}),
                "assumed": {**_list(_TEXT), "description": "call keys that were not given, and are those of a typical call"},
                "backend": _maybe(_TEXT, "null: refused"),
                "kernel": _maybe(_TEXT),
                "quality": _maybe({"enum": list(QUALITIES)}),
                "tier": _maybe({"enum": list(TIERS)}),
                "source": {**_TEXT, "description": "who chose: automatic, or the request that decided"},
                "fittings": _list(_TEXT),
                "warnings": _list(_TEXT),
                "candidates": _list(candidate),
                "advice": _list(_TEXT),
                "error": _maybe(_TEXT, "why nothing was chosen"),
            },
            [
                "platform", "device", "call", "backend", "kernel", "quality", "source", "fittings", "warnings", "candidates",
                "advice", "error",
            ],
        ),
    }  # fmt: skip


def difference() -> dict[str, Any]:
    """What ``hal diff --json`` writes."""
    side = _object(dict.fromkeys(("name", "hal", "platform", "arch", "origin"), _TEXT))
    anything = {"description": "null: unknown; a package that is not there is absent"}
    choice = _object(
        {
            "backend": _maybe(_TEXT, "null: refused"),
            "kernel": _maybe(_TEXT),
            "fittings": _list(_TEXT),
            "source": {**_TEXT, "description": "who chose: automatic, or the request that decided"},
            "error": _maybe(_TEXT, "why nothing was chosen"),
        }
    )
    reason = _object({"id": _TEXT, "message": _TEXT, "fix": _maybe(_TEXT), "citation": _maybe(_TEXT)})
    why = _object(
        {
            "kernel": {**_TEXT, "description": "backend/kernel that the other side runs"},
            "on": {"enum": ["a", "b"], "description": "the side that does not take it"},
            "reasons": {**_list(reason), "minItems": 1},
        }
    )
    call = _object(
        {
            "name": _TEXT,
            "component": _maybe(_TEXT, "of a plan's entry"),
            "role": _maybe(_TEXT),
            "layer": _maybe({"type": ["integer", "string"]}),
            "call": _object({k: _maybe(kind.schema) for k, kind in KINDS.items()}),
            "a": _maybe(choice, "null: this plan does not have the call"),
            "b": _maybe(choice),
            "why": _list(why),
        }
    )
    return {
        "$schema": _DRAFT,
        "title": "hal difference",
        **_object(
            {
                "a": side,
                "b": side,
                "compared": {**_COUNT, "description": "how many calls were compared"},
                "facts": {
                    **_list(_object({"fact": _TEXT, "a": anything, "b": anything})),
                    "description": "facts of the two machines that are not the same",
                },
                "calls": {**_list(call), "description": "calls that are decided otherwise; empty: no difference"},
            }
        ),
    }
