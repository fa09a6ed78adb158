"""Ranks agree: what every rank decided is compared before anything runs.

Each rank decides by itself, from its own facts.  Where machines are mixed (another architecture, another package version)
the ranks would run different kernels, and a collective would hang or add up numbers of different make.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ..decision import Decision
from ..errors import AgreementError
from ..facts import Package

_MOST = 20  # differing facts that an error tells


def agree(decisions: Decision | Iterable[Decision], group: Any = None) -> str:
    """The digest of the decisions, where every rank of ``group`` took the same ones; else AgreementError on every rank.

    Compared, in the order given: platform, architecture, torch, the call without its device index, backend, kernel,
    fittings, source, the backend's settings, and the versions of the packages that the chosen kernel needs.  Two ranks
    that refuse a call alike agree.  Without an initialised process group this is the only rank, and the digest is
    returned.  The digest is that of the facts alone: the same in every process.

    Every rank of the group must call this, as with any collective: it is one ``all_gather_object`` of text (over NCCL set
    the current device first).  The error names ranks as the whole job numbers them.

    ``decisions`` may be a generator, and its failure is this rank's news to the others: they raise too, and none waits.

        hal.parallel.agree(hal.explain(q, k, v, backend=name) for name in chosen)
    """
    failure: Exception | None = None
    try:
        mine = _canonical(_told(decisions))
    except Exception as e:  # told to all, and raised below
        failure = e
        mine = _canonical({"failed": f"{type(e).__name__}: {e}"})
    told = {rank: json.loads(text) for rank, text in _gathered(mine, group).items()}
    digests = {digest(t["decisions"]) if "decisions" in t else "" for t in told.values()}
    if digests == {""} or len(digests) > 1:
        raise AgreementError(_disagreement(told)) from failure
    return digests.pop()


def digest(told: Any) -> str:
    """sha256 of JSON in its one spelling."""
    return hashlib.sha256(_canonical(told).encode()).hexdigest()


def _canonical(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


# ---- what a rank tells


def _told(decisions: Decision | Iterable[Decision]) -> dict[str, Any]:
    """What is compared, and what only explains a difference: all packages, and why a call was refused."""
    given = [decisions] if isinstance(decisions, Decision) else list(decisions)
    for d in given:
        if not isinstance(d, Decision):
            raise TypeError(f"agree takes decisions, such as hal.explain returns; this is {type(d).__name__}")
    told = [_facts(d) for d in given]
    packages = {p: _version(d.machine.packages.get(p)) for d in given for p in d.catalog.packages}
    for facts in told:
        packages.update(facts["packages"])
    refusals = {str(i): d.error.partition("\n")[0] for i, d in enumerate(given) if d.error}
    return {"decisions": told, "packages": packages, "refusals": refusals}


def _facts(d: Decision) -> dict[str, Any]:
    """What makes two decisions the same."""
    call = d.call.to_json()
    del call["device"]
    kernel = d.chosen.kernel if d.chosen else None
    packages = d.machine.packages
    return {
        "platform": d.machine.platform,
        "arch": d.machine.device(d.call.device).arch,
        "torch": d.machine.software.get("torch"),
        "call": call,
        "backend": d.backend,
        "kernel": d.kernel,
        "fittings": list(d.fittings),
        "source": d.source,
        "settings": d.config.model_dump(mode="json") if d.config is not None else {},
        "packages": {
            n.package: _version(n.state(packages), packages.get(n.package)) for n in (kernel.needs if kernel else ())
        },
    }


def _version(*states: Package | None) -> str:
    """The version, the state where it cannot be used, or that it is there."""
    known = [s for s in states if s]
    if not known:
        return "absent"
    if not known[0].available:
        return known[0].state.replace("_", " ")
    return next((s.version for s in known if s.version), "of unknown version")


def _gathered(mine: str, group: Any) -> dict[int, str]:
    """Global rank -> what it told."""
    dist: Any = sys.modules.get("torch.distributed")  # not imported: no process group was made either
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return {0: mine}
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise AgreementError(
            f"rank {dist.get_rank()} is not in the group over which it should agree; call it on members"
        )
    texts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, mine, group=group)
    return {dist.get_global_rank(group, i): text for i, text in enumerate(texts)}


# ---- what differs


def _disagreement(told: Mapping[int, Any]) -> str:
    lines = [f"rank {r} failed before it could decide: {t['failed']}" for r, t in told.items() if "failed" in t]
    able = {r: t for r, t in told.items() if "failed" not in t}
    lines += _by_value({r: _count(len(t["decisions"])) for r, t in able.items()})
    shared = min((len(t["decisions"]) for t in able.values()), default=0)
    where: dict[str, list[int]] = {}  # what differs -> the decisions in which it does
    for i in range(shared):
        flat = {r: _flat(t["decisions"][i]) for r, t in able.items()}
        for fact in dict.fromkeys(f for facts in flat.values() for f in facts):
            for text in _by_value({r: _show(fact, facts.get(fact)) for r, facts in flat.items()}, f"{fact} "):
                where.setdefault(text, []).append(i)
    lines += [text + (f" (decisions {_ranges(at)})" if shared > 1 else "") for text, at in where.items()]
    needed = {p for t in able.values() for d in t["decisions"] for p in d["packages"]}
    for p in sorted(needed):
        lines += _by_value({r: t["packages"].get(p, "absent") for r, t in able.items()}, f"{p} ")
    for r, t in able.items():
        lines += [f"rank {r} refuses decision {i}: {why}" for i, why in t["refusals"].items()]
    more = [f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    who = f"the {len(told)} ranks do not agree on" if len(told) > 1 else "this rank could not tell"
    advice = (
        "give every rank the same devices, packages and settings (hal facts --json on each, then hal diff A.json B.json), "
        "or require a backend that all of them can run"
    )
    return "\n  ".join(
        [f"{who} which attention runs:", *lines[:_MOST], *more, *([f"fix: {advice}"] if len(able) > 1 else [])]
    )


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    flat = {k: x for k, x in facts.items() if k not in ("call", "settings", "packages")}
    for part, name in (("call", "call"), ("settings", "setting")):
        flat |= {f"{name} {k}": x for k, x in facts[part].items()}
    return flat


def _by_value(values: Mapping[int, str], before: str = "") -> list[str]:
    """``arch sm100 on ranks 0-1, sm90 on rank 2``; nothing where all are equal."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    if len(ranks) < 2:
        return []
    return [before + ", ".join(f"{v} on rank{'s' * (len(r) > 1)} {_ranges(r)}" for v, r in ranks.items())]


def _count(n: int) -> str:
    return f"{n} decision{'s' * (n != 1)}"


def _show(fact: str, x: Any) -> str:
    if x is None:
        return (
            "none (refused)" if fact in ("backend", "kernel") else "none" if fact.startswith("setting ") else "unknown"
        )
    if isinstance(x, list):
        return " ".join(map(str, x)) or "none"
    return str(x).lower() if isinstance(x, bool) else str(x)


def _ranges(numbers: Iterable[int]) -> str:
    """0-2, 5"""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
