"""FlashAttention: exact attention computed tile by tile, as several packages have it.  One backend, many packages.

Conditions: the checks of Dao-AILab/flash-attention (csrc/flash_attn/flash_api.cpp, hopper/flash_api.cpp,
flash_attn/cute/interface.py), and of the packages that carry its kernels on: sglang-kernel, vllm, the kernels hub.
"""

from __future__ import annotations

from pathlib import Path

from hal.backend import Backend, Kernel, Needs
from hal.facts import HALF
from hal.rules import Between, Not, OneOf, Pairs, Rule, Same, Versions

SIZES = frozenset({32, 64, 96, 128, 160, 192, 224, 256})  # others run as the next of these, which pads
FORWARD = frozenset({"causal", "lse", "varlen", "deterministic", "graph", "gqa", "rectangular", "window", "scale"})
WINDOW_TALL = Rule(
    "window.rectangular",
    {"window": Not((-1, -1)), "causal": False, "rectangular": True},
    note="FlashAttention 2 takes a right side of -1 as kv_len tokens, and one of kv_len or more as unlimited, "
         "which is another window where q_len exceeds kv_len",
    citation="flash-attention csrc/flash_attn/flash_api.cpp",
)  # fmt: skip

FA2 = Kernel(
    "fa2",
    "hal.backends.fa.kernels:fa2",
    honours=FORWARD | {"grad", "dropout", "compile"},
    limits={"dtype": HALF, "head_dim": SIZES, "v_head_dim": Same("head_dim")},
    rules=(
        WINDOW_TALL,
        Rule("compile.registered", {"compile": True, "pkg.flash_attn": Versions("<2.7")},
             note="flash_attn registers its kernels with PyTorch from 2.7 on",
             fix="pip install 'flash-attn>=2.7' --no-build-isolation"),
    ),
    needs=(Needs("flash-attn", "flash_attn", "flash_attn_func", ">=2.6,<3",
                 "pip install flash-attn --no-build-isolation", parameters=("window_size", "deterministic")),),
    title="FlashAttention 2",
)  # fmt: skip
FA2_VLLM = Kernel(
    "fa2.vllm",
    "hal.backends.fa.kernels:fa2_vllm",
    honours=FORWARD,
    # vLLM builds it without uneven sizes, and without 224 (vllm PR#16206): head_dim sets differ from package to package.
    limits={"dtype": HALF, "head_dim": SIZES - {224}, "v_head_dim": Same("head_dim")},
    rules=(WINDOW_TALL,),
    needs=(Needs("vllm-flash-attn", "vllm.vllm_flash_attn", "flash_attn_varlen_func", install="pip install vllm",
                 names=("vllm",), parameters=("fa_version", "return_softmax_lse")),),
    title="FlashAttention 2 of vLLM",
)  # fmt: skip

FA3_LIMITS = {
    "dtype": HALF,
    "head_dim": SIZES,
    "v_head_dim": OneOf(Same("head_dim"), Pairs("head_dim", {(192, 128)})),
}
FA3_DETERMINISTIC = Rule(
    "deterministic.head_dim",
    {"deterministic": True, "grad": True, "head_dim": {224, 256}},
    note="FlashAttention 3 has no deterministic backward above head_dim 192",
    fix="allow non-deterministic algorithms",
    citation="flash-attention hopper/flash_api.cpp",
)
FA3 = Kernel(
    "fa3",
    "hal.backends.fa.kernels:fa3",
    honours=FORWARD | {"grad", "compile"},
    limits=FA3_LIMITS,
    rules=(
        FA3_DETERMINISTIC,
        Rule("compile.registered", {"compile": True, "pkg.flash_attn_3": Versions("<=3.0.0b1")},
             note="flash_attn_3 registers its kernels with PyTorch from 3.0.0 on, not in 3.0.0b1",
             fix="build hopper/ of github.com/Dao-AILab/flash-attention anew"),
        *(Rule("lse.build", {**asked, "pkg.flash_attn_3": Versions("==3.0.0b1")}, effect="warn",
               note="builds of 3.0.0b1 cannot all be asked for the LSE; hal looks at the one installed before it takes it")
          for asked in ({"lse": True}, {"lse": False, "ring": Between(2)})),
    ),
    needs=(Needs("flash_attn_3", "flash_attn_interface", "flash_attn_func", ">=3.0.0b1,<4",
                 "git clone https://github.com/Dao-AILab/flash-attention && cd flash-attention/hopper && python setup.py install",
                 parameters=("q_descale", "num_splits", "attention_chunk")),),
    confirm="hal.backends.fa.kernels:confirm_fa3",
    title="FlashAttention 3",
)  # fmt: skip
FA3_HUB = Kernel(
    "fa3.hub",
    "hal.backends.fa.kernels:fa3_hub",
    honours=FORWARD | {"grad", "compile"},
    limits=FA3_LIMITS,
    rules=(FA3_DETERMINISTIC,),
    # Below 0.16 it cannot select the stable-ABI builds that newer PyTorch needs (vllm-omni#6971).
    needs=(Needs("kernels", "kernels", "install_kernel", ">=0.16", "pip install 'kernels>=0.16'",
                 parameters=("local_files_only",)),),
    confirm="hal.backends.fa.kernels:confirm_hub",
    title="FlashAttention 3 of the kernels hub",
)  # fmt: skip
FA3_SGL = Kernel(
    "fa3.sgl",
    "hal.backends.fa.kernels:fa3_sgl",
    honours=FORWARD,
    limits=FA3_LIMITS,
    needs=(Needs("sgl-kernel", "sgl_kernel.flash_attn", "flash_attn_varlen_func", install="pip install sglang-kernel",
                 names=("sglang-kernel",), parameters=("page_table", "return_softmax_lse", "ver")),),
    title="FlashAttention 3 of SGLang",
)  # fmt: skip

FA4 = Kernel(
    "fa4",
    "hal.backends.fa.kernels:fa4",
    honours=FORWARD | {"grad", "lse_grad"},
    limits={
        "dtype": HALF,
        "head_dim": range(8, 257, 8),
        "v_head_dim": OneOf(Same("head_dim"), Pairs("head_dim", {(192, 128)})),
    },
    needs=(Needs("flash-attn-4", "flash_attn.cute", "flash_attn_func", ">=4.0.0b5", "pip install flash-attn-4",
                 parameters=("learnable_sink", "return_lse")),),
    title="FlashAttention 4",
)  # fmt: skip

BACKEND = Backend(
    "fa",
    kernels=(FA2, FA2_VLLM, FA3, FA3_HUB, FA3_SGL, FA4),
    aliases=("fa2", "fa3", "fa4", "flash", "flash_attn"),
    fallback="torch_sdpa",
    per_request=True,
    tolerance={"float16": 4e-3, "bfloat16": 3e-2},
    known_bad=str(Path(__file__).parent / "known_bad.toml"),
    title="FlashAttention",
)
