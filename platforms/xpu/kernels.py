"""Intel's own kernels: the flash attention of sgl-kernel-xpu, and the SYCL-TLA flash path inside PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from hal.backend import Kernel, Needs
from hal.facts import HALF, Call
from hal.rules import Rule, Same

if TYPE_CHECKING:
    from torch import Tensor

    from hal.fittings import Run

XPU_FLASH = Kernel(
    "xpu_flash",
    "hal.platforms.xpu.kernels:bind_flash",
    honours={"causal", "window", "scale", "gqa", "rectangular", "varlen", "lse"},
    limits={"dtype": HALF, "head_dim": {64, 96, 128, 192, 256}, "v_head_dim": Same("head_dim"), "contiguous": True},
    rules=(
        Rule("decode.gqa", {"q_len": 1}, {"gqa": False},
             note="its single-query kernel takes 16 query heads per key head at most"),
    ),
    needs=(
        Needs(
            "sgl-kernel",
            "sgl_kernel.flash_attn",
            "flash_attn_varlen_func",
            install="pip install -v git+https://github.com/sgl-project/sgl-kernel-xpu.git (from source, with oneAPI)",
            names=("sglang-kernel-xpu", "sgl-kernel-xpu", "sglang-kernel"),
            parameters=("cu_seqlens_q", "window_size", "return_softmax_lse"),
        ),
    ),
    confirm="hal.platforms.xpu.kernels:confirm_flash",
    title="sgl-kernel-xpu's flash attention",
)  # fmt: skip
TORCH_FLASH = Kernel(
    "sdpa.flash_xpu",
    "hal.backends.torch_sdpa.kernels:flash",
    layout="bhsd",
    honours={"causal", "scale", "gqa", "rectangular", "varlen", "grad"},
    limits={"dtype": HALF, "head_dim": {64, 128, 192, 256}, "v_head_dim": Same("head_dim"), "contiguous": True},
    rules=(
        Rule("empty", require={"empty": False}, note="PyTorch sends calls without tokens to its math path"),
        Rule("causal.square", {"causal": True}, {"q_len": Same("kv_len"), "varlen": False},
             note="PyTorch's flash path takes causal calls of equal lengths only"),
    ),
    title="PyTorch's SYCL-TLA flash path, which has a backward",
)  # fmt: skip


def function() -> Callable[..., Any]:
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    packed: Callable[..., Any] = flash_attn_varlen_func
    return packed


def bind_flash(call: Call) -> Run:
    """It knows packed sequences only; its LSE is (H, T), of a dense call (H, B * Sq)."""
    from hal.flash import flash

    return flash(call, None, function(), return_softmax_lse=bool(call.lse))


def confirm_flash(q: Tensor, k: Tensor, v: Tensor, mask: Any, call: Call) -> str | None:
    """What no version number tells: rows of 16 bytes, and whether this build writes the LSE that it returns."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.data_ptr() % 16 or any(step % 8 for step, n in zip(t.stride()[:-1], t.shape) if n > 1):
            return (
                f"{name} has strides {tuple(t.stride())}; sgl-kernel-xpu takes 16-byte rows: pass {name}.contiguous()"
            )
    if not call.lse:
        return None
    probe = Call(
        dtype=call.dtype, head_dim=call.head_dim, heads=1, batch=1, q_len=2, kv_len=3, causal=call.causal,
        window=call.window, scale=call.scale, lse=True,
    )  # fmt: skip
    return _lse_refusal(probe, function(), q.dtype, q.device)


@cache
def _lse_refusal(probe: Call, of: Callable[..., Any], dtype: Any, device: Any) -> str | None:
    """One tiny run for each kind of call and function ``of`` a build; the next calls of that kind are not asked again.

    Builds before sgl-kernel-xpu PR#330 return memory that nothing was written to, and those before PR#487 refuse it for
    causal and windowed calls.  With all-zero inputs the LSE of a query is ln(number of keys that it sees).
    """
    import torch

    zeros = torch.zeros(1, 3, 1, probe.head_dim or 64, dtype=dtype, device=device)
    try:
        stats = bind_flash(probe)(zeros[:, :2], zeros, zeros, None, None)[1]
    except RuntimeError as e:
        return f"this build of sgl-kernel-xpu gives no LSE here: {e}"
    left, right = probe.window or (-1, -1)
    right = 0 if probe.causal else right
    seen = [[j for j in range(3) if (left < 0 or j >= i - left) and (right < 0 or j <= i + right)] for i in (1, 2)]
    wanted = [math.log(len(keys)) for keys in seen]
    got = stats.flatten().tolist()
    if all(abs(a - b) < 1e-3 for a, b in zip(got, wanted)):
        return None
    return f"this build of sgl-kernel-xpu returns a wrong LSE ({got}, not {wanted}); take one with PR#330 and PR#487"
