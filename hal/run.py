"""Run it: the hot path.  A decision is found by the call's raw signature; what really ran is counted."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from . import choices, detect, log, plugins
from .context import Context, Place, current, local, where
from .decision import Decision
from .errors import CallError, GuardError, NoKernelError, PolicyError, SimulationError
from .facts import Call
from .fittings import Run, Varlen
from .ledger import Tally, scopes, tally, watching
from .policy import Policy, Request
from .resolver import resolve
from .settlement import settle
from .tensors import call_of, check_arguments, check_lengths, four_axes, varlen_call_of

LIMIT = 4096  # entries; video shapes vary, so the cache is bounded

# What a decision depends on besides its tensors, asked on every call: PyTorch's own functions cost a Python frame each.
_any_autocast, _deterministic = torch._C._is_any_autocast_enabled, torch._C._get_deterministic_algorithms
_flash_allowed = torch._C._get_flash_sdp_enabled


class Entry:
    """A bound decision, and where its runs are counted."""

    __slots__ = ("decision", "run", "tally")

    def __init__(self, decision: Decision, run: Run):
        self.decision, self.run, self.tally = decision, log.observed(decision, run), tally(decision)


_entries: dict[Any, Entry] = {}
_BY_GRID: Any = object()  # stands for the entries of a key whose backend needs the grid: each grid has one of its own


class _OfGrid(NamedTuple):
    key: Any
    grid: Any


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    window: tuple[int, int] | int | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    role: str = "self",
    backend: str | None = None,
) -> Any:
    """Softmax attention by the kernel that hal resolves for this call on this machine.

    q: [B, Sq, H, D], k: [B, Sk, Hk, D], v: [B, Sk, Hk, Dv] (or heads first with ``layout="bhsd"``), of one float dtype.

    - ``attn_mask``: bool (True: attend) or additive, broadcast to [B, H, Sq, Sk]; a bool [B, Sk] is key padding.
      A mask and ``is_causal`` together both apply.
    - ``is_causal``: bottom-right aligned, query i sees keys j <= i + Sk - Sq, also when Sq differs from Sk
      (PyTorch's own ``is_causal`` is top-left aligned then).
    - ``scale``: softmax scale, positive; None is D ** -0.5.  ``window``: (left, right) tokens around the aligned diagonal, -1 unlimited.
    - ``enable_gqa``: Hk may divide H; query head h uses key head h // (H / Hk).
    - ``role``: self or cross, a matter of policy.  ``backend``: a backend's name, required for this call.

    Returns [B, Sq, H, Dv] in the caller's layout and dtype; with ``return_lse`` also the natural-log LSE,
    [B, H, Sq] in float32 (float64 for float64 inputs).  A row without keys gives 0 and -inf.  Inputs are not changed.
    Raises CallError, PolicyError or NoKernelError before anything has run.
    """
    # Reading the generation makes torch.compile trace again when the policy changes.
    if is_dynamo_compiling() and local.generation is not None:
        from .compiled import traced

        given: dict[str, Any] = {"attn_mask": attn_mask, "scale": scale, "window": window, "backend": backend}
        return traced(
            q, k, v, is_causal=is_causal, dropout_p=dropout_p, enable_gqa=enable_gqa, layout=layout,
            return_lse=return_lse, role=role, **{n: x for n, x in given.items() if x is not None},
        )  # fmt: skip
    try:
        if _any_autocast() and torch.is_autocast_enabled(q.device.type):
            q, k, v, attn_mask = autocast(q, k, v, attn_mask)
            with torch.autocast(q.device.type, enabled=False):
                return attention(
                    q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p,
                    enable_gqa=enable_gqa, window=window, layout=layout, return_lse=return_lse, role=role, backend=backend,
                )  # fmt: skip
        grad = is_grad_enabled()
        key: tuple[Any, ...] = (
            q.shape, k.shape, v.shape, q.dtype, q.get_device(), q.is_cpu,
            grad and (q.requires_grad or k.requires_grad or v.requires_grad), _deterministic(), _flash_allowed(),
            is_causal, scale, dropout_p, enable_gqa, window, layout, return_lse, role, backend, current.get(),
        )  # fmt: skip
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
            key += (q.stride(), k.stride(), v.stride())
        if attn_mask is not None:
            key += (
                attn_mask.shape,
                attn_mask.dtype,
                attn_mask.stride(),
                attn_mask.device,
                grad and attn_mask.requires_grad,
            )
        entry = _entries.get(key)
        if entry is _BY_GRID:
            key = _OfGrid(key, where().grid)
            entry = _entries.get(key)
    except (AttributeError, TypeError, RuntimeError):
        check_arguments(q, k, v, attn_mask, scale, dropout_p, window, layout, role, backend)
        raise
    if entry is None:
        decision = decided(
            q, k, v, attn_mask, is_causal, scale, dropout_p, enable_gqa, window, layout, return_lse, role, backend
        )
        entry = remember(key, decision, runnable(decision, q, k, attn_mask))
    entry.tally.runs += 1
    for scope in watching.get():
        scope.count(entry.decision, entry.tally.receipt)
    try:
        return entry.run(q, k, v, attn_mask, None)
    except Exception as e:
        counted(entry.decision, entry.tally, -1)
        if not isinstance(e, (RuntimeError, TypeError)):
            raise
        # dtypes and devices of k and v are not in the key: every look costs
        call_of(q, k, v, attn_mask, is_causal, scale, dropout_p, enable_gqa, window, layout, return_lse, role)
        raise


def attention_at(place: Place, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Any:
    """``attention`` of the layer that stands at a place."""
    if is_compiling() and local.generation is not None:  # read, so that a new policy traces again
        from .compiled import placed

        given = {name: value for name, value in arguments.items() if value is not None}
        return placed(q, k, v, place.layer_key if local.by_layer is True else place.key, given)
    with place.entered():
        return attention(q, k, v, **arguments)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    window: tuple[int, int] | int | None = None,
    return_lse: bool = False,
    role: str = "self",
    backend: str | None = None,
) -> Any:
    """Attention over packed sequences, each with itself: q [Tq, H, D], k [Tk, Hk, D], v [Tk, Hk, Dv].

    ``cu_seqlens_*``: int32 [sequences + 1], rising from 0 to Tq and Tk; those of k are those of q where not given.
    ``max_seqlen_*``: the longest sequence; read from ``cu_seqlens`` where not given, which waits for the device.
    ``cu_seqlens`` are checked at the first call of a signature, on a CPU at every call.  Not for torch.compile.
    Returns [Tq, H, Dv], and with ``return_lse`` the LSE [H, Tq].  All else as ``hal.attention``.
    """
    check_arguments(q, k, v, None, scale, dropout_p, window, "bshd", role, backend)
    check_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if is_compiling():
        raise CallError("hal.attention_varlen reads its lengths and cannot be traced; call it outside torch.compile")
    if _any_autocast() and torch.is_autocast_enabled(q.device.type):
        q, k, v, _ = autocast(q, k, v, None)
        with torch.autocast(q.device.type, enabled=False):
            return attention_varlen(
                q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
                max_seqlen_k=max_seqlen_k, is_causal=is_causal, scale=scale, dropout_p=dropout_p, enable_gqa=enable_gqa,
                window=window, return_lse=return_lse, role=role, backend=backend,
            )  # fmt: skip
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    max_q = _longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
    max_k = (max_q if cu_seqlens_k is None else _longest(cu_k)) if max_seqlen_k is None else max_seqlen_k
    key: tuple[Any, ...] = (
        "varlen", q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, q.stride(), k.stride(), v.stride(),
        is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad), _deterministic(), _flash_allowed(),
        cu_seqlens_q.shape, cu_k.shape, cu_seqlens_q.dtype, cu_k.dtype, max_q, max_k,
        is_causal, scale, dropout_p, enable_gqa, window, return_lse, role, backend, current.get(),
    )  # fmt: skip
    entry = _entries.get(key)
    if entry is _BY_GRID:
        key = _OfGrid(key, where().grid)
        entry = _entries.get(key)
    if entry is None or q.is_cpu:
        call = varlen_call_of(
            q, k, v, cu_seqlens_q, cu_k, max_q, max_k, is_causal, scale, dropout_p, enable_gqa, window, return_lse, role
        )
    if entry is None:
        decision = decide(call, q.device.type, backend, (q, k, v, None))
        entry = remember(key, decision, runnable(decision, q, k, None))
    counted(entry.decision, entry.tally)
    try:
        return entry.run(q, k, v, None, Varlen(cu_seqlens_q, cu_k, max_q, max_k))
    except Exception:
        counted(entry.decision, entry.tally, -1)
        raise


def autocast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Under torch.autocast attention runs in the autocast dtype, as PyTorch's own does: cast first, then decide."""
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t for t in (q, k, v))
    return q, k, v, mask.to(dtype) if mask is not None and mask.is_floating_point() else mask


def _longest(cu: Tensor) -> int:
    return int(cu.diff().max()) if cu.numel() > 1 else 0


def explain(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Decision:
    """The Decision that ``hal.attention(q, k, v, **arguments)`` would take; ``print`` it.  Nothing runs."""
    mask = arguments.pop("attn_mask", None)
    if _any_autocast() and torch.is_autocast_enabled(q.device.type):
        q, k, v, mask = autocast(q, k, v, mask)
    return decided(q, k, v, mask, **arguments)


def decide(call: Call, device_type: str, backend: str | None, tensors: tuple[Any, ...] = ()) -> Decision:
    """The decision in the running context; its plan is kept to, and whoever wants to know of it is told."""
    here = current.get()
    decision = decide_in(here, call, device_type, backend, tensors)
    if here.plan is not None:
        here.plan.check(decision)
    log.decided(decision)
    return decision


def decide_in(
    here: Context, call: Call, device_type: str, backend: str | None = None, tensors: tuple[Any, ...] = ()
) -> Decision:
    """Resolve in a context: for its simulated machine, or for the one that is really here, settled."""
    global _environment
    catalog = plugins.catalog(detect.ignored())
    if here.machine is None and catalog.problems:
        raise catalog.problems[0].as_error()
    if _environment is None:
        _environment = choices.environment(catalog)
    policy = here.policy.over(_environment).at(here.site)
    if backend is not None:
        named = catalog.backend_name(backend)
        policy = policy.with_request(Request(named, "require", f"backend={backend!r} of the call", "", backend, "call"))
    if call.compile and any(r.kind == "request" for r in policy.requests):
        raise PolicyError(
            f"{next(r.source for r in policy.requests if r.kind == 'request')}: torch.compile keeps the kernel that it has "
            "traced, so one request cannot switch it; run it uncompiled"
        )
    if here.machine is not None:
        return resolve(call.but(device=here.machine.devices[0].index), here.machine, catalog, policy)
    platform = detect.platform_for(device_type)
    if platform.capturing():
        call = call.but(graph=True)
    return settle(call, detect.real_machine(platform.name), catalog, policy, tensors)


_environment: Policy | None = None  # what the environment asks for, read at the first decision


def decided(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    window: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    role: str = "self",
    backend: str | None = None,
) -> Decision:
    """The Decision for these tensors and arguments.  While torch.compile traces, nothing is asked of the tensors."""
    tracing = is_compiling()
    call = call_of(
        q, k, v, attn_mask, is_causal, scale, dropout_p, enable_gqa, window, layout, return_lse, role, tracing
    )
    return decide(call, q.device.type, backend, () if tracing else (q, k, v, attn_mask))


def runnable(decision: Decision, q: Tensor, k: Tensor, mask: Tensor | None) -> Run:
    """The bound run, with what only a real call needs: no open conditions, a mask viewed as four axes, graph capture watched."""
    if decision.chosen and any(r.verdict is None and not r.soft for r in decision.chosen.reasons):
        open_ones = "; ".join(r.message for r in decision.chosen.reasons)
        raise NoKernelError(
            f"whether {decision.kernel} may run this call {open_ones}; give the sizes (static shapes)", decision
        )
    run = decision.bind() if current.get().machine is None else _simulated(decision)
    chosen = decision.chosen
    assert chosen is not None and chosen.line is not None
    platform = decision.catalog.platforms[decision.machine.platform]
    if platform.accelerator and ("graph" not in chosen.line.honours or "key_padding_to_varlen" in decision.fittings):
        run = _uncaptured(run, platform.capturing, decision)
    if mask is not None and mask.ndim != 4:
        s = 1 if decision.call.layout == "bshd" else 2
        shape = four_axes(mask, q.shape[0], q.shape[s], k.shape[s])
        inner = run
        run = lambda q, k, v, mask, varlen: inner(q, k, v, mask.view(shape), varlen)
    return run


def _uncaptured(run: Run, capturing: Any, decision: Decision) -> Run:
    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, varlen: Varlen | None) -> Any:
        if capturing() and not decision.call.graph:
            raise GuardError(
                f"{decision.kernel} ({', '.join(decision.fittings) or 'no fittings'}) cannot be captured into a graph; "
                "call hal.explain inside the capture to see what can, and hal.forget() before it"
            )
        return run(q, k, v, mask, varlen)

    return watched


def counted(decision: Decision, t: Tally, runs: int = 1) -> None:
    """Count runs for the process and for every scope around."""
    t.runs += runs
    for scope in watching.get():
        scope.count(decision, t.receipt, runs)


def _simulated(decision: Decision) -> Run:
    """A simulated machine's kernel, for where a stand-in of its package is importable here."""
    what = f"{decision.kernel} was chosen for the simulated machine ({decision.machine.origin}) and cannot run here"
    try:
        run = decision.bind()
    except ImportError as e:
        raise SimulationError(f"{what}: {e}; explain inside hal.simulate, run outside") from e

    def tried(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, varlen: Varlen | None) -> Any:
        try:
            return run(q, k, v, mask, varlen)
        except NotImplementedError as e:
            first = str(e).splitlines()[0]
            raise SimulationError(f"{what}: {first}; explain inside hal.simulate, run outside") from e

    return tried


def _of_grid(decision: Decision) -> bool:
    """Whether another grid may have another decision: its backend needs the grid, or one that does was refused."""
    c = decision.catalog
    names = {decision.backend} | {b for b in c.backends for k, _ in decision.call.refused if k in c.kernels_of(b)}
    return any(c.backends[b].needs_grid for b in names if b and b in c.backends)


def remember(key: Any, decision: Decision, run: Run) -> Entry:
    if len(_entries) >= LIMIT:
        for old in list(_entries)[: LIMIT // 2]:  # the oldest; what is still hot is decided again
            _entries.pop(old, None)
    if _of_grid(decision) and not isinstance(key, _OfGrid):
        _entries[key] = _BY_GRID
        key = _OfGrid(key, where().grid)
    entry = _entries[key] = Entry(decision, run)
    return entry


def forget() -> None:
    """Drop every cached decision (a package was installed, the environment has changed).  Receipts are kept."""
    global _environment
    _entries.clear()
    _environment = None


# ---- bound decisions


def bind(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, **arguments: Any) -> Any:
    """Decide once for these tensors and arguments (those of ``hal.attention``): a function ``bound(q, k, v, attn_mask=None)``.

    It costs a fraction of ``hal.attention``, works inside ``torch.compile(fullgraph=True)``, and raises GuardError for
    tensors of other shapes, dtype, device, need of gradients, or under torch.autocast.  That rows
    are contiguous is taken as it was.  ``bound.decision`` is its Decision.
    """
    decision = decided(q, k, v, attn_mask, **arguments)
    run = runnable(decision, q, k, attn_mask)
    run, count = log.observed(decision, run), tally(decision)
    counted(decision, count, 0)
    q_shape, k_shape, v_shape, dtype, *_, grad = key = _signature(q, k, v)
    mask_key, index = _mask_signature(attn_mask), q.get_device()

    def bound(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Any:
        if (
            q.shape != q_shape or k.shape != k_shape or v.shape != v_shape or q.dtype is not dtype or q.get_device() != index
            or (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)) is not grad
            or ((attn_mask is not None or mask_key is not None) and _mask_signature(attn_mask) != mask_key)
            or _any_autocast()
        ):  # fmt: skip
            _refuse((*key, mask_key), (*_signature(q, k, v), _mask_signature(attn_mask)))
        count.runs += 1
        if scopes.open and not is_dynamo_compiling():  # Dynamo can read no ContextVar
            for scope in watching.get():
                scope.count(decision, count.receipt)
        try:
            return run(q, k, v, attn_mask, None)
        except Exception as e:
            counted(decision, count, -1)
            # What a kernel refuses of k and v is looked at only then: every look costs.
            if isinstance(e, (RuntimeError, TypeError)) and (now := _signature(q, k, v)) != key:
                _refuse((*key, mask_key), (*now, _mask_signature(attn_mask)))
            raise

    bound.decision = decision  # type: ignore[attr-defined]
    return bound


_SIGNATURE = (
    "shape of q", "shape of k", "shape of v", "dtype of q", "dtype of k", "dtype of v", "device", "need of gradients",
    "mask",
)  # fmt: skip


def _signature(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    grad = is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    devices = q.device if q.device == k.device == v.device else f"{q.device}, {k.device} and {v.device}"
    return q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, devices, grad


def _mask_signature(mask: Tensor | None) -> Any:
    return None if mask is None else (mask.shape, mask.dtype, is_grad_enabled() and mask.requires_grad)


def _refuse(asked: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    if _any_autocast():
        raise GuardError(
            "a bound decision takes tensors as they are; call it outside torch.autocast, or call hal.attention"
        )
    wrong = [f"the {n} is {b}, bound for {a}" for n, a, b in zip(_SIGNATURE, asked, found) if a != b]
    raise GuardError("; ".join(wrong) + "; bind again for these tensors, or call hal.attention")
