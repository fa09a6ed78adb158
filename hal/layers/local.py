"""LocalAttention: one device's attention, as a module that chooses its backend where it is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .. import detect, log, plugins
from ..context import Place, current
from ..decision import Decision
from ..errors import CallError
from ..facts import Call, dtype_name
from ..ledger import alive, receipt_of, tally, watching
from ..policy import ROLES, Site
from ..run import attention_at, decide_in

_layers: WeakSet[LocalAttention] = WeakSet()


class LocalAttention(nn.Module):
    """Softmax attention over q [B, Sq, heads, head_dim], k and v [B, Sk, kv_heads, head_dim], by the backend that policy gives.

    The policy around its construction (``hal.component``, ``hal.scope``) stays with the layer, under whatever is in force
    where it runs: ``hal.force`` and per-request overrides still count.  What was asked for explicitly is tried at
    construction, for ``dtype`` (PyTorch's default) on ``device`` (the active platform's), with what is not known yet kept
    open; ``deferred=True`` leaves it to the first use.

    - ``required_backend``: without it the layer computes something wrong, ``why``; outranks every choice.
    - ``default_backend``: taken where nobody asks otherwise and it fits.
    - ``supported_backends``: guides automatic choice only; an explicit other one is honoured.
    - ``role``: self or cross.  ``scale``: None is head_dim ** -0.5.  ``causal``: bottom-right aligned.  ``layer``: its index.

    Raises PolicyError for an unknown name and NoKernelError for a backend that this machine or layer cannot have.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        *,
        scale: float | None = None,
        causal: bool = False,
        role: str = "self",
        layer: int | None = None,
        required_backend: str | None = None,
        why: str = "",
        default_backend: str | None = None,
        supported_backends: Iterable[str] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        deferred: bool = False,
    ) -> None:
        super().__init__()
        if role not in ROLES:
            raise CallError(f"role is {role!r}; allowed: {', '.join(ROLES)}")
        for what, n, least in (
            ("heads", heads, 1),
            ("head_dim", head_dim, 1),
            ("kv_heads", kv_heads, 1),
            ("layer", layer, 0),
        ):
            if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < least):
                raise CallError(f"{what} is {n!r}; allowed: an integer of at least {least}")
        catalog = plugins.catalog(detect.ignored())
        name = catalog.backend_name
        self.heads, self.head_dim, self.kv_heads = heads, head_dim, kv_heads or heads
        self.scale, self.causal, self.role = scale, causal, role
        here = current.get()
        site = Site(
            here.site.component,
            role,
            layer,
            name(required_backend) if required_backend else "",
            name(default_backend) if default_backend else "",
            frozenset(map(name, [supported_backends] if isinstance(supported_backends, str) else supported_backends)),
            why,
        )
        self.place = Place(here.policy.lasting, site)
        self.attached: Place | None = None  # set by hal.attach
        self.decision: Decision | None = None  # what was chosen at construction; None: deferred
        self.dtype = dtype or torch.get_default_dtype()
        given = "meta" if device is None else torch.device(device).type
        self.device_type = detect.real_platform().device_type if given == "meta" else given
        if not deferred:
            self._choose()
        for ledger in watching.get() if deferred else ():
            ledger.deferred.add(site)
        _layers.add(self)

    def call(self) -> Call:
        """What is known of a call before there is one."""
        scale = "default" if self.scale is None else self.scale
        open_ended: dict[str, Any] = dict.fromkeys(("batch", "q_len", "kv_len", "mask", "mask_shape", "grad"))
        return Call(
            dtype_name(self.dtype), self.head_dim, heads=self.heads, kv_heads=self.kv_heads, causal=self.causal,
            scale=scale, role=self.role, **open_ended,
        ).checked()  # fmt: skip

    def _choose(self) -> None:
        decision = decide_in(self.place.within(current.get()), self.call(), self.device_type)
        if decision.request is not None:  # automatic choice waits for what is still open
            if decision.chosen is None:
                raise decision.refusal()
            self.decision = decision
            log.decided(decision)
        receipt = receipt_of(decision) if self.decision is None else tally(decision).receipt
        for ledger in watching.get():
            ledger.count(decision, receipt, 0)

    def __setstate__(self, state: Any) -> None:  # a copy is a layer too
        super().__setstate__(state)
        _layers.add(self)

    @property
    def backend(self) -> str | None:
        """The backend that was asked for and chosen at construction; None where each call chooses."""
        return self.decision.backend if self.decision else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        *,
        dropout_p: float = 0.0,
        return_lse: bool = False,
    ) -> Any:
        """As ``hal.attention``: returns [B, Sq, heads, head_dim], and with ``return_lse`` the LSE [B, heads, Sq]."""
        arguments: dict[str, Any] = {
            "attn_mask": attn_mask, "is_causal": self.causal, "scale": self.scale, "dropout_p": dropout_p,
            "enable_gqa": self.kv_heads != self.heads, "return_lse": return_lse, "role": self.role,
        }  # fmt: skip
        # What is no tensor is told by hal.attention.
        if not torch.compiler.is_compiling() and isinstance(q, Tensor) and isinstance(k, Tensor):
            if q.shape[2:] != (self.heads, self.head_dim) or k.shape[2] != self.kv_heads:
                raise CallError(
                    f"q is {tuple(q.shape)} and k {tuple(k.shape)}; this layer takes q [B, Sq, {self.heads}, "
                    f"{self.head_dim}] and k, v [B, Sk, {self.kv_heads}, {self.head_dim}]"
                )
            vars(self).update(dtype=q.dtype, device_type=q.device.type)  # as its calls are, whatever was thought before
        return attention_at(self.attached or self.place, q, k, v, arguments)

    def extra_repr(self) -> str:
        kv = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        return (
            f"heads={self.heads}{kv}, head_dim={self.head_dim}, role={self.role}, backend={self.backend or 'automatic'}"
        )


def layers() -> list[LocalAttention]:
    """Every such layer that lives in the process."""
    return alive(_layers)
