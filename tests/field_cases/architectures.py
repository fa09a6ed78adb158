"""C: what runs on which chip."""

from __future__ import annotations

from . import REFUSED, Case, Row
from .selection import EXPERIMENTAL, FA2, SPARSE

FA4 = "flash-attn-4==4.0.0b36"
AITER = "amd-aiter==0.1.10"
XPU = "sgl-kernel==0.11.0"
CUDNN = "torch_cudnn_sdpa/sdpa.cudnn"

# fmt: off
CASES = (
    Case(
        "C1",
        "SM120 passes 'at least 8.0' and dies without a kernel image",
        "architectures are sets; the chip and the version are two reasons",
        rows=(
            Row("an old wheel", "rtx5090", "", "torch_sdpa/sdpa.flash", "flash-attn==2.7.2",
                against={"fa2": "arch known_bad.fa2.blackwell", "fa3": "package.absent arch"}),
        ),
        tests=("test_field_cases.py::test_no_row_says_at_least",),
    ),
    Case(
        "C2",
        "an unknown head_dim crashes the selection",
        "unknown is a third answer: candidates depend on it",
        rows=(
            Row("automatic", "b200", "head_dim=?", "torch_sdpa/sdpa.math", FA4, warns=True,
                against={"fa4": "head_dim? head_dim.192? v_head_dim?", "sdpa.flash": "head_dim? v_head_dim?"}),
            Row("asked for", "b200", "head_dim=?", "fa/fa4", FA4, ask="fa", warns=True, says=("depends on head_dim",)),
        ),
    ),
    Case(
        "C4",
        "no kernel image on SM120 and SM121",
        "no row for it, so the chip is the reason",
        rows=(
            Row("GB10", "gb10", "", REFUSED, FA2, ask="fa/fa2", against={"fa2": "arch"}),
            Row("and automatic", "gb10", "", "torch_sdpa/sdpa.flash", FA2),
            Row("FlashAttention 4 on request", "gb10", "", "fa/fa4", FA4, ask="fa"),
        ),
    ),
    Case(
        "C5",
        "FlashAttention 2 is picked on Blackwell",
        "the order depends on the chip, and is shown",
        rows=(
            Row("asked for fa", "b200", "", "fa/fa4", f"{FA2} {FA4}", ask="fa", against={"fa2": "arch"}),
            Row("automatic with causality", "b200", "causal=true", "fa/fa4", f"{FA2} {FA4}"),
        ),
    ),
    Case(
        # FlashInfer is no dense kernel of hal's; the kind is: a size that one chip cannot hold.
        "C7",
        "head_dim 512 on SM120",
        "sizes depend on the chip",
        rows=(
            Row("256 is too much for 99 KiB", "rtx5090", "head_dim=256", REFUSED, FA4, ask="fa", against={"fa4": "shared_memory"}),
            Row("and not for 227 KiB", "h100", "head_dim=256", "fa/fa4", FA4, ask="fa"),
            Row("512", "rtx5090", "head_dim=512", "torch_sdpa/sdpa.efficient", FA4,
                against={"fa4": "head_dim shared_memory", "sdpa.flash": "head_dim"}),
        ),
    ),
    Case("C8", "no candidate for sparse MLA on SM121", "all reasons of all candidates", later=SPARSE),
    Case(
        "C9",
        "the package is there and the chip is not",
        "two separate reasons",
        rows=(
            Row("the package alone", "t4", "dtype=fp16", REFUSED, FA2, ask="fa/fa2", against={"fa2": "arch"}),
            Row("neither", "t4", "dtype=fp16", REFUSED, ask="fa/fa2", against={"fa2": "package.absent arch"}),
        ),
    ),
    Case(
        "C10",
        "FlashAttention 2 on Turing and older",
        "the chip is the reason",
        rows=(
            Row("Turing", "t4", "dtype=fp16", "torch_sdpa/sdpa.efficient", FA2, against={"fa2": "arch"}),
            Row("Volta", "v100", "dtype=fp16", "torch_sdpa/sdpa.efficient", FA2, against={"fa2": "arch"}),
        ),
    ),
    Case(
        "C12",
        "AITER is gated as a whole, though its Triton part runs on more chips",
        "its two parts are two kernels with rows of their own",
        rows=(
            Row("gfx1201 by the Triton part", "rx9070", "", "aiter/aiter.triton", AITER, ask="aiter", against={"aiter": "arch"}),
            Row("gfx942 by the other", "mi300x", "", "aiter/aiter", AITER, ask="aiter"),
        ),
    ),
    Case(
        # The measured 65792 bytes are of another AITER kernel at head_dim 128; 256 is the case's example.
        "C13",
        "a kernel needs 65792 bytes of the 65536 that gfx1201 has",
        "shared memory is a fact of the device",
        rows=(
            Row("head_dim 256", "rx9070", "head_dim=256", REFUSED, AITER, ask="aiter",
                against={"aiter": "arch", "aiter.triton": "known_bad.aiter.shared_memory"}, says=("65792",)),
            Row("a chip with more", "mi355x", "head_dim=256", "aiter/aiter.triton", AITER, ask="aiter/aiter.triton"),
        ),
    ),
    Case(
        "C14",
        "SDPA is missing or slow on gfx1103 and gfx1151",
        "rows have a tier, and an experiment says how it is switched on",
        rows=(
            Row("no experiment", "rocm:gfx1103", "", "torch_sdpa/sdpa.math", warns=True,
                against={"sdpa.flash": "aotriton.experimental"}),
            Row("switched on", "rocm:gfx1103", "", "torch_sdpa/sdpa.flash", software={EXPERIMENTAL: "1"}),
            Row("before it had code", "rocm:gfx1103", "", "torch_sdpa/sdpa.math", software={EXPERIMENTAL: "1", "torch": "2.10.0"},
                against={"sdpa.flash": "aotriton.images"}),
        ),
    ),
    Case(
        # FlashAttention itself still takes 224, by rounding up; vLLM's build of it does not.
        "C15",
        "head_dim 224 is dropped between versions",
        "each package has its own set",
        rows=(
            Row("flash_attn", "a100", "head_dim=224", "fa/fa2", FA2, ask="fa"),
            Row("192 with 128 on Hopper", "h100", "head_dim=192,v_head_dim=128", "fa/fa3.hub", "kernels==0.16.0", ask="fa"),
            Row("and there alone", "rtx4090", "head_dim=192,v_head_dim=128", REFUSED, "kernels==0.16.0", ask="fa/fa3.hub",
                against={"fa3.hub": "v_head_dim"}),
            Row("vLLM's build", "a100", "head_dim=224", REFUSED, "vllm-flash-attn==0.28.0", ask="fa/fa2.vllm",
                against={"fa2.vllm": "head_dim"}),
        ),
    ),
    Case(
        "C16",
        "a head_dim that a kernel does not take",
        "the value, the set, and the padding that would do as advice; padding only on request",
        rows=(
            Row("384", "a100", "head_dim=384", REFUSED, FA2, ask="fa/fa2", against={"fa2": "head_dim"},
                says=("head_dim is 384; allowed: 32, 64, 96, 128, 160, 192, 224, 256",)),
            Row("72 has advice", "a100", "head_dim=72", REFUSED, FA2, ask="fa/fa2", against={"fa2": "head_dim"},
                says=("to pad head_dim 72 to 96 (--fit pad_head_dim) would allow fa/fa2",)),
            Row("and fits on request", "a100", "head_dim=72", "fa/fa2", FA2, ask="fa/fa2", fit="pad_head_dim",
                fittings="pad_head_dim"),
            Row("automatic choice does not pad", "a100", "head_dim=72", "torch_sdpa/sdpa.flash", FA2, fittings=""),
            Row("nor on XPU", "b580", "head_dim=72", "torch_sdpa/sdpa.fused", XPU, against={"xpu_flash": "head_dim"},
                says=("to pad head_dim 72 to 96 (--fit pad_head_dim) would allow fa/xpu_flash",)),
            Row("512 has nothing to pad to", "a100", "head_dim=512", "torch_sdpa/sdpa.efficient", FA2, fit="pad_head_dim"),
        ),
    ),
    Case(
        # xformers#1263 was not found; the same fact is in xformers#813 and diffusers#9637.
        "C18",
        "a bias must have rows of a multiple of 8 elements",
        "the bias is padded and sliced before PyTorch's operator is called",
        tests=("test_field_runs.py::test_a_bias_reaches_the_efficient_operator_aligned",),
    ),
    Case(
        "C20",
        "XPU: which head_dim, grouped heads and gradients work depends on the torch version",
        "limits under a version; grouped heads are always said to PyTorch; gradients go to the path that has them",
        rows=(
            Row("256 before the fix", "max1550", "head_dim=256,grad=true", "torch_sdpa/sdpa.math", software={"torch": "2.13.0"},
                against={"sdpa.flash_xpu": "known_bad.xpu-flash-head-dim", "sdpa.fused": "grad"}),
            Row("and after", "max1550", "head_dim=256,grad=true", "torch_sdpa/sdpa.flash_xpu", software={"torch": "2.14.0"}),
            Row("192", "max1550", "head_dim=192,grad=true", "torch_sdpa/sdpa.flash_xpu"),
            Row("32 without a gradient", "max1550", "head_dim=32", "torch_sdpa/sdpa.fused"),
            Row("a gradient and a mask", "max1550", "grad=true,mask=bool", "torch_sdpa/sdpa.math",
                against={"sdpa.flash_xpu": "mask.bool", "sdpa.fused": "grad"}),
            Row("one key head", "max1550", "kv_heads=1", "torch_sdpa/sdpa.fused", fittings="", warns=False),
            Row("Intel's flash", "b580", "head_dim=96", "fa/xpu_flash", XPU),
            Row("does not take 32", "b580", "head_dim=32", REFUSED, XPU, ask="fa", against={"xpu_flash": "head_dim"}),
        ),
    ),
    Case(
        "C21",
        "cuDNN is faster than FlashAttention 4 on SM100",
        "measured shapes go to cuDNN first, the rest to FlashAttention 4",
        rows=(
            Row("self-attention", "b200", "", CUDNN, FA4),
            Row("cross-attention", "b200", "kv_len=512,role=cross", CUDNN, FA4),
            Row("short", "b200", "q_len=64", CUDNN, FA4),
            Row("short against long", "b200", "q_len=64,kv_len=4096", "fa/fa4", FA4),
            Row("causal", "b200", "causal=true", "fa/fa4", FA4),
            Row("with LSE", "b200", "lse=true", "fa/fa4", FA4),
            Row("float32", "b200", "dtype=fp32", "torch_sdpa/sdpa.efficient", FA4),
            Row("SM103, long and head_dim 128", "b300", "q_len=16384", "fa/fa4", FA4),
            Row("SM103, a little shorter", "b300", "q_len=16383", CUDNN, FA4),
            Row("SM103, long without FlashAttention 4", "b300", "q_len=16384", CUDNN),
            Row("Hopper", "h100", "", "torch_sdpa/sdpa.flash"),
        ),
    ),
)
