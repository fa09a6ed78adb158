"""One request's own choice in the denoising loop: ``hal.request``.

Nothing is changed in any layer: the choice lies in the context, so it ends with the block, and a failure while it is
prepared leaves everything as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import detect, plugins
from .context import Place, changed, current, interned
from .errors import PolicyError, unknown
from .facts import Call
from .integrations.attachment import Attachment, attachments, compiled
from .layers.local import LocalAttention, layers
from .policy import DENOISER, Request, Target
from .run import decide_in

SKIP_SOFTMAX = "skip_softmax"  # the feature that a kernel honours which can skip small tiles


@dataclass(frozen=True)
class RequestScope:
    """What one request asks.  ``signature`` is equal where requests may share a batch; ``switched`` tells the sites."""

    signature: str
    attention_backend_override: str | None
    skip_softmax_params: Mapping[str, Any] | None
    switched: tuple[str, ...] = ()


@contextmanager
def request(
    model: Any = None,
    *,
    attention_backend_override: str | None = None,
    skip_softmax_params: Mapping[str, Any] | None = None,
    source: str = "",
) -> Iterator[RequestScope]:
    """One request's own choice, for the denoiser's attention inside the block.

    ``model`` is the attached pipeline or model, or one built of hal layers, that the request is for; without it,
    everything that is attached and every hal layer.  ``attention_backend_override`` is a backend that may be switched
    per request; self-attention takes it or the request is rejected, cross-attention takes it where it fits, and a layer
    that requires a backend keeps its own.  ``skip_softmax_params``: ``threshold_scale_factor`` (finite, > 0, required)
    and ``start_step`` (>= 0).  ``source`` says who asks, as people know it.

    Raises PolicyError before anything is switched: for a bad value; under torch.compile or graph capture, which keep the
    kernel that they have seen; over a sparse default; where a layer would run something else than was asked, with the
    reasons; and where no layer can switch.
    """
    asked = signature(attention_backend_override, skip_softmax_params)
    catalog = plugins.catalog(detect.ignored())
    if skip_softmax_params is not None and not any(SKIP_SOFTMAX in k.honours for k in catalog.kernels.values()):
        raise PolicyError(
            "skip_softmax_params: no kernel that is installed skips softmax tiles; leave it out to run exactly"
        )
    if attention_backend_override is None:
        yield RequestScope(asked, None, skip_softmax_params)
        return
    name = catalog.per_request(attention_backend_override)
    source = source or f"hal.request(attention_backend_override={attention_backend_override!r})"
    requests, switched = _prepared(name, attention_backend_override, model, source)
    with changed(policy=current.get().policy.with_request(*requests)):
        yield RequestScope(asked, name, skip_softmax_params, switched)


def signature(
    attention_backend_override: str | None = None, skip_softmax_params: Mapping[str, Any] | None = None
) -> str:
    """A stable key: requests with different ones must not share a batch.  Empty: the server's default.  Raises PolicyError."""
    parts = []
    if attention_backend_override is not None:
        name = plugins.catalog(detect.ignored()).per_request(attention_backend_override)
        parts.append(f"attention_backend_override={name}")
    if skip_softmax_params is not None:
        factor, start = _skip_softmax(skip_softmax_params)
        parts.append(f"skip_softmax_params=threshold_scale_factor:{factor!r}+start_step:{start}")
    return ";".join(parts)


def _skip_softmax(given: Mapping[str, Any]) -> tuple[float, int]:
    keys = ("threshold_scale_factor", "start_step")
    if not isinstance(given, Mapping):
        raise PolicyError(
            f"skip_softmax_params is {given!r}; write {{'threshold_scale_factor': 500.0, 'start_step': 14}}"
        )
    for key in given:
        if key not in keys:
            raise PolicyError(f"skip_softmax_params: {unknown('key', key, keys)}")
    factor, start = given.get("threshold_scale_factor"), given.get("start_step", 0)
    if factor is None:
        raise PolicyError(
            "skip_softmax_params: threshold_scale_factor is required; it has no default that fits every model"
        )
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not (math.isfinite(factor) and factor > 0):
        raise PolicyError(f"skip_softmax_params: threshold_scale_factor is {factor!r}; allowed: a finite number > 0")
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise PolicyError(f"skip_softmax_params: start_step is {start!r}; allowed: an integer >= 0")
    return float(factor), start


# ---- preparing


@dataclass(frozen=True)
class _Known:
    """A denoiser's attention that the request would switch: where it stands, and a call of it."""

    place: Place
    call: Call
    device_type: str
    compiled: bool


def _prepared(name: str, spelt: str, model: Any, source: str) -> tuple[list[Request], tuple[str, ...]]:
    """The requests to put in force, after every layer has shown that it can follow them."""
    here = current.get()
    if torch.compiler.is_compiling() or detect.real_platform().capturing():
        raise PolicyError(f"{source}: a traced or captured graph keeps its kernel; make requests outside of it")
    known = _known(model)
    if not known:
        whose = f"this {type(model).__name__}" if model is not None else "this process"
        raise PolicyError(
            f"{source}: {whose} has no denoiser attention that hal can switch; call hal.attach(pipeline) first"
        )
    if any(k.compiled for k in known):
        raise PolicyError(
            f"{source}: the denoiser is under torch.compile, whose graph keeps its kernel; run it uncompiled"
        )
    components = dict.fromkeys(k.place.site.component for k in known)
    plain = [Request(name, "require", source, "", spelt, "request", Target(c)) for c in components]
    owners = frozenset(k.place.owner for k in known)
    requests = [replace(r, owners=owners) for r in plain]
    within = interned(here, policy=here.policy.with_request(*requests))
    switched: list[str] = []
    kept: list[str] = []
    for k in {(k.place.policy, k.place.site, k.place.owner, k.call): k for k in known}.values():
        before = decide_in(k.place.within(here), k.call, k.device_type)
        if before.chosen and "sparse" in before.chosen.backend.traits:
            raise PolicyError(
                f"{source}: {k.place.site} runs {before.backend} by default, which is sparse; a request cannot mix with that"
            )
        after = decide_in(k.place.within(within), k.call, k.device_type)
        if after.request in plain and after.chosen:
            switched.append(str(after.policy.site))
        elif after.request is not None and after.request.kind == "required":
            kept.append(f"{after.policy.site} keeps {after.request}, which it requires")
        elif after.error:
            raise PolicyError(f"{source} is rejected, nothing was switched: {after.error}")
        elif after.policy.site.role == "self":
            raise PolicyError(
                f"{source} is rejected, nothing was switched: {after.policy.site} would run {after.backend} ({after.source})"
            )
        else:
            kept.append(f"{after.policy.site} keeps {after.backend}")
    if not switched:
        raise PolicyError(f"{source}: no layer can switch: {'; '.join(dict.fromkeys(kept))}")
    return requests, tuple(dict.fromkeys(switched))


def _known(model: Any) -> list[_Known]:
    """The denoiser attention of what is attached and of hal's layers, with the calls that have been seen of it."""
    out: list[_Known] = []
    for a in attachments():
        if model is None or model is a or model is a.model or any(model is part for part in a.parts.values()):
            out += _attached(a)
    mine = None if model is None else set(model.modules()) if isinstance(model, torch.nn.Module) else set()
    for layer in layers():
        if (
            (mine is None or layer in mine)
            and layer.attached is None
            and DENOISER.fullmatch(layer.place.site.component)
        ):
            out.append(_own(layer, compiled(layer)))
    return out


def _own(layer: LocalAttention, traced: bool) -> _Known:
    return _Known(layer.attached or layer.place, layer.call(), layer.device_type, traced)


def _attached(a: Attachment) -> Iterator[_Known]:
    for name, part in a.parts.items():
        if not (DENOISER.fullmatch(name) and a.components[name].reached):
            continue
        now = getattr(a.model, name, part) if a.model is not part else part  # torch.compile may have wrapped it since
        first, traced = next(part.parameters(), None), compiled(now if isinstance(now, torch.nn.Module) else part)
        device = first.device if first is not None else torch.device("cpu")
        own = [m for m in part.modules() if isinstance(m, LocalAttention)]
        for layer in own:  # each knows its call, and may require a backend of its own
            yield _own(layer, traced)
        told = {m.attached for m in own}
        routed = {p.key if p.policy.layered else name: p for p in a.places[name] if p not in told}
        seen = [t.decision.call for t in list(a.ledger.tallies.values()) if t.receipt.component == name and t.decision]
        calls = seen or [Call(str(first.dtype).removeprefix("torch.") if first is not None else None)]
        for place in routed.values():
            for call in calls:
                yield _Known(place, call, device.type, traced)
