"""Fittings: declared, lossless changes that make a call fit a kernel.

Each says what it does to the facts (``fit``) and to the bound function (``wrap``).  A decision lists those that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .facts.call import CONTIGUOUS
from .rules import Mod, OneOf, Reason, Same, show

Run = Callable[..., Any]


class Varlen(NamedTuple):
    """Packed sequences: int32 tensors [B + 1] of cumulative lengths, and the longest length of each side."""

    cu_q: Any
    cu_k: Any
    max_q: int
    max_k: int


class Fitting(NamedTuple):
    name: str
    automatic: bool  # False: only on request
    mends: frozenset[str]  # reason ids
    fit: Callable[[Mapping[str, Any], Reason], dict[str, Any] | None]  # the facts that change, or None
    wrap: Callable[[Run, Any, Any], Run]  # (run, call before, call after) -> run
    title: str


# ---- contiguous


def _contiguous(facts: Mapping[str, Any], r: Reason) -> dict[str, Any]:
    return {**dict.fromkeys(CONTIGUOUS, True), "contiguous": True}


def _wrap_contiguous(run: Run, before: Any, after: Any) -> Run:
    return lambda q, k, v, mask, varlen: run(q.contiguous(), k.contiguous(), v.contiguous(), mask, varlen)


# ---- expand_kv


def _expand(facts: Mapping[str, Any], r: Reason) -> dict[str, Any] | None:
    return {"kv_heads": facts["heads"]} if facts["heads"] and facts["kv_heads"] else None


def _wrap_expand(run: Run, before: Any, after: Any) -> Run:
    n, axis = before.heads // before.kv_heads, 1 if before.varlen or before.layout == "bhsd" else 2

    def expanded(q: Any, k: Any, v: Any, mask: Any, varlen: Any) -> Any:
        return run(q, k.repeat_interleave(n, axis), v.repeat_interleave(n, axis), mask, varlen)

    return expanded


# ---- key_padding_to_varlen


def _pack(facts: Mapping[str, Any], r: Reason) -> dict[str, Any] | None:
    # Packing moves keys, so a call that depends on their positions keeps its mask.  A gradient needs no more than this.
    if facts["causal"] is not False or facts["window"] != (-1, -1) or facts["varlen"] is not False:
        return None
    # How many keys are kept is read from the device: neither a captured nor a traced graph may depend on it.
    if facts["graph"] is not False or facts["compile"] is not False:
        return None
    return {"mask": "none", "mask_shape": "none", "varlen": True}


def _wrap_pack(run: Run, before: Any, after: Any) -> Run:
    bshd, lse = before.layout == "bshd", before.lse

    def packed(q: Any, k: Any, v: Any, mask: Any, varlen: Any) -> Any:
        import torch

        if not bshd:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        b, s = q.shape[:2]
        keep = mask[:, 0, 0].expand(b, k.shape[1])
        lengths = keep.sum(-1, dtype=torch.int32)
        cu_k = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        cu_q = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=q.device)
        out = run(q.flatten(0, 1), k[keep], v[keep], None, Varlen(cu_q, cu_k, s, k.shape[1]))
        out, stats = out if lse else (out, None)
        out = out.unflatten(0, (b, s))
        out = out if bshd else out.transpose(1, 2)
        return out if stats is None else (out, stats.unflatten(1, (b, s)).transpose(0, 1))

    return packed


# ---- mask_shape


def _widen(facts: Mapping[str, Any], r: Reason) -> dict[str, Any] | None:
    have = facts["mask_shape"]
    allowed = {r.allowed} if isinstance(r.allowed, str) else r.allowed
    for shape in sorted(allowed) if isinstance(allowed, (set, frozenset)) else ():
        if shape != "none" and all(w in (h, "1") or h == "1" for h, w in zip(have, shape)) and "1" in have:
            wider = all(h in (w, "1") for h, w in zip(have, shape))
            if wider:
                return {"mask_shape": shape, "mask": "bool" if facts["mask"] == "key_padding" else facts["mask"]}
    return None


def _wrap_widen(run: Run, before: Any, after: Any) -> Run:
    shape, heads_axis = after.mask_shape, 1 if before.layout == "bhsd" else 2

    def widened(q: Any, k: Any, v: Any, mask: Any, varlen: Any) -> Any:
        full = {"b": q.shape[0], "h": q.shape[heads_axis], "q": q.shape[3 - heads_axis], "k": k.shape[3 - heads_axis]}
        return run(q, k, v, mask.expand([full.get(c, 1) for c in shape]), varlen)

    return widened


# ---- pad_head_dim


def next_allowed(limit: Any, n: int) -> int | None:
    """The smallest head_dim above ``n`` that the limit allows."""
    if isinstance(limit, range):
        return next((m for m in limit if m > n), None)
    if isinstance(limit, (set, frozenset)):
        return min((m for m in limit if m > n), default=None)
    if isinstance(limit, Mod) and not limit.rest:
        return n + -n % limit.n
    if isinstance(limit, OneOf):
        return min((m for m in (next_allowed(x, n) for x in limit.limits) if m), default=None)
    return None


def _pad(facts: Mapping[str, Any], r: Reason) -> dict[str, Any] | None:
    d, dv = facts["head_dim"], facts["v_head_dim"]
    if not d or not dv:
        return None
    if isinstance(r.allowed, Same) and r.fact == "v_head_dim":  # (192, 128) for a kernel of equal sizes
        n: int | None = max(d, dv)
    else:
        n = next_allowed(r.allowed, max(d, dv))
    if not n:
        return None
    scale = d**-0.5 if facts["scale"] == "default" else facts["scale"]
    return {"head_dim": n, "v_head_dim": n, "scale": scale}


def _wrap_pad(run: Run, before: Any, after: Any) -> Run:
    more, more_v = after.head_dim - before.head_dim, after.v_head_dim - before.v_head_dim
    dv, lse = before.v_head_dim, before.lse

    def padded(q: Any, k: Any, v: Any, mask: Any, varlen: Any) -> Any:
        from torch.nn.functional import pad

        out = run(pad(q, (0, more)), pad(k, (0, more)), pad(v, (0, more_v)), mask, varlen)
        return (out[0][..., :dv], out[1]) if lse else out[..., :dv]

    return padded


_ALL = (
    Fitting("contiguous", True, frozenset({"contiguous", *CONTIGUOUS}), _contiguous, _wrap_contiguous,
            "copies q, k and v so that their rows are contiguous"),
    Fitting("expand_kv", True, frozenset({"gqa"}), _expand, _wrap_expand, "repeats each key and value head for its query heads"),
    Fitting("key_padding_to_varlen", True, frozenset({"mask.key_padding"}), _pack, _wrap_pack,
            "packs the kept keys, and calls the variable-length kernel"),
    Fitting("mask_shape", True, frozenset({"mask_shape"}), _widen, _wrap_widen, "expands the mask to a shape that the kernel takes"),
    Fitting("pad_head_dim", False, frozenset({"head_dim", "v_head_dim"}), _pad, _wrap_pad,
            "pads head_dim with zeros, keeps the scale, and slices the output"),
)  # fmt: skip
FITTINGS: Mapping[str, Fitting] = {f.name: f for f in _ALL}
BY_REASON: Mapping[str, Fitting] = {i: f for f in _ALL for i in f.mends}


def transposed(run: Run, lse: bool) -> Run:
    """Between [B, S, H, D] and [B, H, S, D]: a view, so never a reason and never listed."""

    if lse:

        def both(q: Any, k: Any, v: Any, mask: Any, varlen: Any) -> Any:
            out, stats = run(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, varlen)
            return out.transpose(1, 2), stats

        return both
    return lambda q, k, v, mask, varlen: run(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, varlen
    ).transpose(1, 2)


def fix(r: Reason) -> str:
    """What would mend the reason: its declared fix, or what the fact itself allows; empty where nobody can change it."""
    if r.fix or r.verdict is None:
        return r.fix
    if r.id == "dtype":
        return f"cast q, k and v to {show(r.allowed)}"
    if (
        r.id in FITTINGS["pad_head_dim"].mends
        and isinstance(r.observed, int)
        and (n := next_allowed(r.allowed, r.observed))
    ):
        return f"pad {r.fact} {r.observed} to {n} (--fit pad_head_dim)"
    if r.id == "package.version":
        return f"install {r.fact.removeprefix('pkg.')} {show(r.allowed)}"
    if r.waiver:
        return f"waive {r.waiver} (--waive {r.waiver})"
    if r.fact in ("torch", "cudnn", "driver", "triton", "runtime"):
        return f"upgrade {r.fact} to {show(r.allowed)}"
    return f"set {r.fact.removeprefix('env.')}={show(r.allowed)}" if r.fact.startswith("env.") else ""
