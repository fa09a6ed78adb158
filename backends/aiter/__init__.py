"""AITER: AMD's own attention.  Its Composable Kernel and assembly part, and its Triton part, which runs on more chips.

Conditions: ROCm/aiter aiter/ops/mha.py and aiter/ops/triton/attention/mha.py.  PyPI's ``aiter`` is another project.
"""

from __future__ import annotations

from pathlib import Path

from hal.backend import Backend, Kernel, Needs
from hal.facts import HALF
from hal.rules import Not, OneOf, Pairs, Rule, Same

INSTALL = "git clone --recursive https://github.com/ROCm/aiter && cd aiter && python setup.py develop"
PLAIN = frozenset({"causal", "lse", "varlen", "grad", "deterministic", "graph", "gqa", "rectangular", "scale"})
LIMITS = {
    "dtype": HALF,
    "head_dim": range(8, 257, 8),
    "v_head_dim": OneOf(Same("head_dim"), Pairs("head_dim", {(192, 128)})),
}

AITER = Kernel(
    "aiter",
    "hal.backends.aiter.kernels:ck",
    honours=PLAIN | {"window"},
    limits=LIMITS,
    rules=(
        Rule("window.zero", {"window": frozenset({(0, 0), (0, -1), (-1, 0)})},
             note="AITER takes a window without a positive side for none when it chooses its assembly kernels",
             fix="write a window of (-1, 0) as is_causal=True", citation="ROCm/aiter aiter/ops/mha.py"),
        Rule("window.rectangular", {"window": Not((-1, -1)), "causal": False, "rectangular": True},
             note="AITER takes a side of kv_len or more as unlimited, which is another window where q_len exceeds kv_len",
             citation="ROCm/aiter aiter/ops/mha.py"),
    ),
    needs=(Needs("amd-aiter", "aiter", "flash_attn_func", ">=0.1.5,<0.13", INSTALL,
                 parameters=("return_lse", "softmax_scale")),),
    title="AITER",
)  # fmt: skip
AITER_TRITON = Kernel(
    "aiter.triton",
    "hal.backends.aiter.kernels:triton",
    honours=PLAIN,
    limits=LIMITS,
    rules=tuple(
        Rule(f"causal.varlen.{stats}", {"causal": True, "varlen": True, stats: True},
             note="for packed causal sequences it writes the LSE of one sequence's empty rows over that of the next",
             citation="ROCm/aiter aiter/ops/triton/_triton_kernels/attention/mha.py")
        for stats in ("lse", "grad")
    ),
    needs=(Needs("amd-aiter", "aiter.ops.triton.attention.mha", "flash_attn_func", ">=0.1.10,<0.13", INSTALL,
                 parameters=("return_lse", "softmax_scale")),),
    title="AITER's Triton part",
)  # fmt: skip

BACKEND = Backend(
    "aiter",
    kernels=(AITER, AITER_TRITON),
    fallback="torch_sdpa",
    tolerance={"float16": 4e-3, "bfloat16": 3e-2},
    known_bad=str(Path(__file__).parent / "known_bad.toml"),
    title="AITER",
)
