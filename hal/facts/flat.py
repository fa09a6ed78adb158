"""The one flat namespace that rules see, and the features that a call asks of a kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .call import CONTIGUOUS, KINDS, Call
from .machine import Machine
from .values import ABSENT

CALL_FACTS = frozenset(KINDS) | {
    "contiguous",
    "empty",
    "gqa",
    "rectangular",
    "math_bytes",
    "masked",
    "biased",
    "scores",
}
MACHINE_FACTS = frozenset({"platform", "arch", "memory", "shared_memory", "device_dtype"})

# A feature is asked for when its fact differs from the plain value.  A kernel lists what it honours; the rest is refused.
_FLAGS = ("causal", "lse", "varlen", "grad", "mask_grad", "deterministic", "compile", "graph", "gqa", "rectangular")
FEATURES = frozenset(_FLAGS) | {
    "dropout",
    "window",
    "scale",
    "lse_grad",
    "mask.key_padding",
    "mask.bool",
    "mask.additive",
}


def facts_of(call: Call, machine: Machine, packages: Iterable[str] = ()) -> dict[str, Any]:
    """Facts of the call, its device and the software.  A package in ``packages`` that the machine lacks is ABSENT."""
    d = machine.device(call.device)
    facts: dict[str, Any] = {"platform": machine.platform, "arch": d.arch, "memory": d.memory}
    facts["shared_memory"] = d.shared_memory
    facts.update(machine.software)
    facts.update((f"pkg.{p}", ABSENT) for p in packages)
    for name, p in machine.packages.items():
        facts[f"pkg.{name}"] = p.version if p.available else ABSENT
    facts.update(call.__dict__)
    facts["contiguous"] = _all([facts[c] for c in CONTIGUOUS])
    facts["device_dtype"] = None if None in (d.dtypes, call.dtype) else call.dtype in d.dtypes  # type: ignore[operator]
    return derive(facts)


def derive(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts that follow from others; done again after a fitting has changed some."""
    b, h, hk, q, k = facts["batch"], facts["heads"], facts["kv_heads"], facts["q_len"], facts["kv_len"]
    facts["gqa"] = None if h is None or hk is None else h != hk
    facts["rectangular"] = None if q is None or k is None else q != k
    facts["scores"] = None if q is None or k is None else q * k  # of one head
    facts["masked"] = None if facts["mask"] is None else facts["mask"] != "none"
    # PyTorch's paths know neither windows nor causality from the bottom right: they are given a mask for these too.
    window = None if facts["window"] is None else facts["window"] != (-1, -1)
    uneven = _all([facts["causal"], _any([facts["varlen"], facts["rectangular"]])])
    facts["biased"] = _any([facts["masked"], window, uneven])
    sizes = (b, h, q, k)
    facts["empty"] = 0 in sizes  # a size that is not known is taken to be there; a real call knows all of its own
    # PyTorch's math path holds scores and weights at once, in float32 for the half types too.  Packed sequences run one
    # at a time, and only a backward needs the weights of all.
    item = 8 if facts["dtype"] == "float64" else 4
    alone = _all([facts["varlen"], None if facts["grad"] is None else not facts["grad"]])
    known = None not in sizes and alone is not None
    facts["math_bytes"] = 2 * item * (min(b, 1) if alone else b) * h * q * k if known else None
    return facts


def features_of(facts: dict[str, Any]) -> list[tuple[str, bool | None]]:
    """(feature, True: asked for, None: perhaps)."""
    out: list[tuple[str, bool | None]] = [(f, facts[f]) for f in _FLAGS if facts[f] is not False]
    if facts["mask"] != "none":
        out.append((f"mask.{facts['mask'] or 'bool'}", facts["mask"] and True))
    if facts["dropout"] != 0.0:
        out.append(("dropout", facts["dropout"] and True))
    if facts["window"] != (-1, -1):
        out.append(("window", facts["window"] and True))
    if facts["scale"] != "default":
        out.append(("scale", None if facts["scale"] is None else True))
    if facts["ring"] != 1 and facts["lse"] is False:  # partial results are merged by their LSE
        out.append(("lse", facts["ring"] and True))
    if facts["grad"] is not False and (facts["lse"] is not False or facts["ring"] != 1):
        sure = facts["grad"] and (facts["lse"] or (facts["ring"] or 0) > 1)
        out.append(("lse_grad", True if sure else None))
    return out


def _all(xs: list[bool | None]) -> bool | None:
    return False if False in xs else None if None in xs else True


def _any(xs: list[bool | None]) -> bool | None:
    return True if True in xs else None if None in xs else False
