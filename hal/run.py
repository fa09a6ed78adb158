"""Run it: the hot path.  A decision is found by the call's raw signature; what really ran is counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, are_deterministic_algorithms_enabled, is_grad_enabled
from torch.compiler import is_compiling

from . import context, detect, plugins
from .context import current
from .decision import Decision
from .errors import CallError, GuardError, SimulationError
from .facts import Call
from .fittings import Run, Varlen
from .policy import Request
from .resolver import resolve
from .settlement import settle
from .tensors import call_of, four_axes, varlen_call_of

LIMIT = 4096  # entries; video shapes vary, so the cache is bounded


class Entry:
    """A bound decision with its count."""

    __slots__ = ("component", "decision", "role", "run", "runs")

    def __init__(self, decision: Decision, run: Run):
        self.decision, self.run, self.runs = decision, run, 0
        self.component, self.role = current.get().component, decision.call.role or ""


@dataclass(frozen=True)
class Receipt:
    """What really ran, and how often.  Under torch.compile a run is a trace."""

    component: str
    role: str
    platform: str
    device: int
    backend: str
    kernel: str
    quality: str
    source: str
    fittings: tuple[str, ...]
    warnings: tuple[str, ...]
    runs: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_entries: dict[Any, Entry] = {}
_retired: dict[tuple[Any, ...], int] = {}


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
    if is_compiling() and context.generation >= 0:  # reading it makes torch.compile trace again when the policy changes
        from .compiled import traced

        given: dict[str, Any] = {n: x for n, x in (("attn_mask", attn_mask), ("scale", scale), ("window", window), ("backend", backend)) if x is not None}
        return traced(q, k, v, is_causal=is_causal, dropout_p=dropout_p, enable_gqa=enable_gqa, layout=layout,
                      return_lse=return_lse, role=role, **given)  # fmt: skip
    key: tuple[Any, ...] = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device,
        is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad), are_deterministic_algorithms_enabled(),
        is_causal, scale, dropout_p, enable_gqa, window, layout, return_lse, role, backend, current.get(),
    )  # fmt: skip
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        key += (q.stride(), k.stride(), v.stride())
    if attn_mask is not None:
        key += (attn_mask.shape, attn_mask.dtype, attn_mask.stride(), attn_mask.requires_grad)
    try:
        entry = _entries.get(key)
    except TypeError:
        raise _unhashable(scale=scale, dropout_p=dropout_p, window=window, layout=layout, role=role, backend=backend) from None
    if entry is None:
        entry = _decided(key, q, k, v, attn_mask, is_causal, scale, dropout_p, enable_gqa, window, layout, return_lse, role, backend)
    entry.runs += 1
    return entry.run(q, k, v, attn_mask, None)


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
    Returns [Tq, H, Dv], and with ``return_lse`` the LSE [H, Tq].  All else as ``hal.attention``.
    """
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    max_q = _longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
    max_k = (max_q if cu_seqlens_k is None else _longest(cu_k)) if max_seqlen_k is None else max_seqlen_k
    key = (
        "varlen", q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, q.stride(), k.stride(), v.stride(),
        is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad), are_deterministic_algorithms_enabled(),
        cu_seqlens_q.shape, cu_k.shape, cu_seqlens_q.dtype, cu_k.dtype, max_q, max_k,
        is_causal, scale, dropout_p, enable_gqa, window, return_lse, role, backend, current.get(),
    )  # fmt: skip
    try:
        entry = _entries.get(key)
    except TypeError:
        raise _unhashable(scale=scale, dropout_p=dropout_p, window=window, role=role, backend=backend) from None
    if entry is None:
        call = varlen_call_of(q, k, v, cu_seqlens_q, cu_k, max_q, max_k, is_causal, scale, dropout_p, enable_gqa, window, return_lse, role)
        decision = decide(call, q.device.type, backend, (q, k, v, None))
        entry = _remember(key, decision, decision.bind())
    entry.runs += 1
    return entry.run(q, k, v, None, Varlen(cu_seqlens_q, cu_k, max_q, max_k))


def _longest(cu: Tensor) -> int:
    return int(cu.diff().max()) if cu.numel() > 1 else 0


def _unhashable(**arguments: Any) -> CallError:
    name, x = next(((n, x) for n, x in arguments.items() if x.__hash__ is None), ("an argument", "unhashable"))
    return CallError(f"{name} is {x!r}; write plain values: a number, a text or a tuple")


def explain(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Decision:
    """The Decision that ``hal.attention(q, k, v, **arguments)`` would take; ``print`` it.  Nothing runs."""
    return _decide(q, k, v, **arguments)


def decide(call: Call, device_type: str, backend: str | None, tensors: tuple[Any, ...] = ()) -> Decision:
    """Resolve for the active machine: a simulated one, or the one that is really here, settled."""
    here = current.get()
    catalog = plugins.catalog(detect.ignored())
    if here.machine is None and catalog.problems:
        raise catalog.problems[0].as_error()
    policy = here.policy
    if backend is not None:
        policy = policy.with_request(Request(catalog.backend_name(backend), "require", f"backend={backend!r} of the call"))
    if here.machine is not None:
        return resolve(call.but(device=here.machine.devices[0].index), here.machine, catalog, policy)
    platform = detect.platform_for(device_type)
    if platform.capturing():
        call = call.but(graph=True)
    return settle(call, detect.real_machine(platform.name), catalog, policy, tensors)


def _decide(
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
    compiling: bool = False,
) -> Decision:
    call = call_of(q, k, v, attn_mask, is_causal, scale, dropout_p, enable_gqa, window, layout, return_lse, role, compiling)
    return decide(call, q.device.type, backend, () if compiling else (q, k, v, attn_mask))


def _decided(key: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *arguments: Any) -> Entry:
    decision = _decide(q, k, v, mask, *arguments)
    return _remember(key, decision, guarded_run(decision, q, k, mask))


def guarded_run(decision: Decision, q: Tensor, k: Tensor, mask: Tensor | None) -> Run:
    """The bound run, with a mask of fewer axes viewed as four, and graph capture watched where the kernel forbids it."""
    if current.get().machine is not None:
        try:
            run = decision.bind()
        except ImportError as e:
            raise SimulationError(
                f"{decision.kernel} was chosen for the simulated machine ({decision.machine.origin}) and is not here: {e}; "
                "explain inside hal.simulate, run outside"
            ) from e
    else:
        run = decision.bind()
    if mask is not None and mask.ndim != 4:
        s = 1 if decision.call.layout == "bshd" else 2
        shape = four_axes(mask, q.shape[0], q.shape[s], k.shape[s])
        inner = run
        run = lambda q, k, v, mask, varlen: inner(q, k, v, mask.view(shape), varlen)
    return run


def _remember(key: Any, decision: Decision, run: Run) -> Entry:
    if len(_entries) >= LIMIT:
        _retire()
    entry = _entries[key] = Entry(decision, run)
    return entry


# ---- bound decisions


def bind(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, **arguments: Any) -> Any:
    """Decide once for these tensors and arguments (those of ``hal.attention``): a function ``bound(q, k, v, attn_mask=None)``.

    It costs a fraction of ``hal.attention``, works inside ``torch.compile(fullgraph=True)``, and raises GuardError for
    tensors of other shapes, dtype, device or need of gradients.  ``bound.decision`` is its Decision.
    """
    decision = _decide(q, k, v, attn_mask, **arguments)
    run = guarded_run(decision, q, k, attn_mask)
    entry = _remember(("bound", object()), decision, run)
    q_shape, k_shape, v_shape, dtype, device, grad = key = _signature(q, k, v)
    mask_key = _mask_signature(attn_mask)

    def bound(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Any:
        if (
            q.shape != q_shape or k.shape != k_shape or v.shape != v_shape
            or q.dtype is not dtype or q.device != device
            or (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)) is not grad
            or ((attn_mask is not None or mask_key is not None) and _mask_signature(attn_mask) != mask_key)
        ):  # fmt: skip
            _refuse((*key, mask_key), (*_signature(q, k, v), _mask_signature(attn_mask)))
        entry.runs += 1
        return run(q, k, v, attn_mask, None)

    bound.decision = decision  # type: ignore[attr-defined]
    return bound


_SIGNATURE = ("shape of q", "shape of k", "shape of v", "dtype", "device", "need of gradients", "mask")


def _signature(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    return q.shape, k.shape, v.shape, q.dtype, q.device, is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _mask_signature(mask: Tensor | None) -> Any:
    return None if mask is None else (mask.shape, mask.dtype, mask.requires_grad)


def _refuse(asked: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    wrong = [f"the {n} is {b}, bound for {a}" for n, a, b in zip(_SIGNATURE, asked, found) if a != b]
    raise GuardError("; ".join(wrong) + "; bind again for these tensors, or call hal.attention")


# ---- receipts


def receipts() -> list[Receipt]:
    """What really ran since the last ``clear_receipts()``, most often first."""
    total = dict(_retired)
    for entry in list(_entries.values()):
        if entry.runs:
            key = _summary(entry)
            total[key] = total.get(key, 0) + entry.runs
    return sorted((Receipt(*(*key, n)) for key, n in total.items()), key=lambda r: -r.runs)


def clear_receipts() -> None:
    """Count from zero again; decisions stay."""
    _retired.clear()
    for entry in _entries.values():
        entry.runs = 0


def forget() -> None:
    """Drop every cached decision (a package was installed, a test has changed the machine).  Receipts are kept."""
    _retire()


def _retire() -> None:
    for entry in list(_entries.values()):
        if entry.runs:
            key = _summary(entry)
            _retired[key] = _retired.get(key, 0) + entry.runs
    _entries.clear()


def _summary(e: Entry) -> tuple[Any, ...]:
    d = e.decision
    quality = d.chosen.backend.quality if d.chosen else ""
    return e.component, e.role, d.machine.platform, d.call.device, d.backend, d.kernel, quality, d.source, d.fittings, d.warnings
