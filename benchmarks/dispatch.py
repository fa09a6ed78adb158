"""What hal adds to a call, against what diffusers' dispatcher adds; and what a decision costs.

Tiny tensors, one thread, so that only the dispatch is seen.  "Adds" is the time over PyTorch's SDPA with the four
transposes that (B, S, H, D) tensors need in either.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import hal
from benchmarks.common import check, interleaved, median, report
from hal import plugins
from hal.policy import Policy
from hal.resolver import resolve

SHAPE = (1, 1, 8, 8)  # B S H D


def calls() -> dict[str, float]:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = (torch.randn(SHAPE) for _ in range(3))
    bound = hal.bind(q, k, v)
    sdpa = F.scaled_dot_product_attention

    def bare() -> None:
        sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    cases = {
        "sdpa": bare,
        "diffusers": lambda: dispatch_attention_fn(q, k, v),
        "hal": lambda: hal.attention(q, k, v),
        "bound": lambda: bound(q, k, v),
    }
    with torch.inference_mode():
        seconds = interleaved(cases, rounds=40, calls=300)
    return {n: median(xs) * 1e6 for n, xs in seconds.items()}


def decisions() -> dict[str, float]:
    """Milliseconds: the chosen candidate alone, with every reason, and with every fitting tried.

    On a bare H100, where the packages' kernels are out at once, and on one with FlashAttention 2, 3 and 4.
    """
    catalog = plugins.catalog()
    bare = catalog.machine("h100")
    full = bare.with_packages({"flash_attn": "2.8.3", "flash_attn_3": "3.0.0", "flash_attn_4": "4.0.0b36"})
    plain = hal.Call.of(dtype="bf16", head_dim=128, heads=24, batch=2, q_len=4096)
    awkward = plain.but(
        head_dim=72, v_head_dim=72, kv_heads=8, mask="key_padding", mask_shape="b11k", v_contiguous=False
    )
    policy = Policy(fit=frozenset({"pad_head_dim"}))
    cases = {
        "chosen": lambda: resolve(plain, bare, catalog),
        "reasons": lambda: resolve(plain, bare, catalog).candidates,
        "fittings": lambda: resolve(awkward, bare, catalog, policy).candidates,
        "chosen, with packages": lambda: resolve(plain, full, catalog),
        "reasons, with packages": lambda: resolve(plain, full, catalog).candidates,
        "fittings, with packages": lambda: resolve(awkward, full, catalog, policy).candidates,
    }
    return {n: median(xs) * 1e3 for n, xs in interleaved(cases, rounds=30, calls=20).items()}


def main() -> None:
    torch.set_num_threads(1)
    us, ms = calls(), decisions()
    added = {n: us[n] - us["sdpa"] for n in us}
    report(
        [
            check("cached hal.attention adds, against diffusers' dispatch", added["hal"] / added["diffusers"], 0.6),
            check(
                "guarded bound decision adds, against diffusers' dispatch", added["bound"] / added["diffusers"], 0.25
            ),
            *(
                check(f"resolve, {what}{where}", ms[name + where], limit, "ms")
                for where in ("", ", with packages")
                for name, what, limit in (
                    ("chosen", "chosen only", 0.25),
                    ("reasons", "all reasons", 1.0),
                    ("fittings", "every fitting tried", 2.5),
                )
            ),
        ],
        microseconds={n: round(x, 2) for n, x in us.items()},
        milliseconds={n: round(x, 4) for n, x in ms.items()},
    )


if __name__ == "__main__":
    main()
