"""B: wrong numbers after a choice that looked valid."""

from __future__ import annotations

from . import REFUSED, Case, Row
from .selection import FA2, FA3, NEAR, SAGE, SPARSE

PARALLEL = "parallel attention"
B4 = {"torch": "2.12.1", "cudnn": "9.19.0.56"}
B5 = {"torch": "2.11.0", "cudnn": "9.19.0.56"}
CUDNN = "torch_cudnn_sdpa/sdpa.cudnn"

# fmt: off
CASES = (
    Case("B1", "Sage 2.2.0 gives artefacts on SM90", "known bad, waived by name", later=SAGE),
    Case("B2", "black images from some models with Sage", "cards say what a model forbids; a guard looks at the first step",
         later=SAGE),
    Case("B3", "black output from Sage on gfx12", "known bad", later=SAGE),
    Case(
        # The thread shows torch 2.11 and 2.13; 2.12 lies between, with the same cuDNN.
        "B4",
        "cuDNN corrupts the output on B200 with few key heads",
        "known bad under its four conditions; each of them lifted, it runs",
        rows=(
            Row("all four", "b200", "heads=4", "torch_sdpa/sdpa.flash", software=B4,
                against={"sdpa.cudnn": "known_bad.cudnn.few_kv_heads"}, says=("pytorch#193893",)),
            Row("eight heads", "b200", "heads=8", CUDNN, software=B4),
            Row("another chip", "b300", "heads=4", CUDNN, software=B4),
            Row("another torch", "b200", "heads=4", CUDNN, software={"torch": "2.14.0", "cudnn": "9.20.0.48"}),
            Row("another cuDNN", "b200", "heads=4", CUDNN, software={"torch": "2.12.1", "cudnn": "9.21.0"}),
            Row("waived", "b200", "heads=4", CUDNN, software=B4, ask="cudnn", waive="cudnn.few_kv_heads"),
        ),
    ),
    Case(
        "B5",
        "cuDNN's gradients are NaN on H100 with a mask where the length is 64 more than a multiple of 128",
        "known bad by that congruence of kv_len, with a mask and gradients; causal calls without a mask tensor stay",
        rows=(
            Row("all conditions", "h100", "q_len=192,mask=bool,grad=true", REFUSED, software=B5, ask="cudnn",
                against={"sdpa.cudnn": "known_bad.cudnn.backward_mask_64"}, says=("pytorch#196678",)),
            Row("automatic", "h100", "q_len=192,mask=bool,grad=true", "torch_sdpa/sdpa.efficient", software=B5),
            Row("the keys count", "h100", "q_len=192,kv_len=256,mask=bool,grad=true", CUDNN, software=B5, ask="cudnn"),
            Row("causal without a mask", "h100", "q_len=192,causal=true,grad=true", CUDNN, software=B5, ask="cudnn"),
            Row("no gradient", "h100", "q_len=192,mask=bool", CUDNN, software=B5, ask="cudnn"),
            Row("another chip", "b200", "q_len=192,mask=bool,grad=true", CUDNN, software=B5, ask="cudnn"),
            Row("a fixed cuDNN", "h100", "q_len=192,mask=bool,grad=true", CUDNN, software={**B5, "cudnn": "9.26.0"}, ask="cudnn"),
        ),
    ),
    Case(
        "B6",
        "cuDNN: NaN gradients of a single query, of odd lengths, and of empty sequences",
        "known bad by length and version; packed sequences never go to cuDNN",
        rows=(
            Row("one query", "h200", "q_len=1,kv_len=128,grad=true", REFUSED, software={"cudnn": "9.25.1"}, ask="cudnn",
                against={"sdpa.cudnn": "known_bad.cudnn.backward_one_query"}),
            Row("odd lengths", "h100", "q_len=1000,grad=true", REFUSED, software={"torch": "2.9.1", "cudnn": "9.12.0.46"}, ask="cudnn",
                against={"sdpa.cudnn": "known_bad.cudnn.ragged_queries known_bad.cudnn.ragged_keys"}),
            Row("even lengths warn", "h100", "q_len=1024,grad=true", CUDNN, software={"torch": "2.9.1", "cudnn": "9.12.0.46"},
                ask="cudnn", warns=True, says=("known_bad.cudnn.backward_911",)),
            Row("packed", "h200", "varlen=true", REFUSED, software={"cudnn": "9.22.0"}, ask="cudnn",
                against={"sdpa.cudnn": "varlen"}),
            Row("no keys", "h200", "kv_len=0", REFUSED, software={"cudnn": "9.22.0"}, ask="cudnn", against={"sdpa.cudnn": "empty"}),
        ),
    ),
    Case(
        # From torch 2.9 on a single query is refused with a gradient only, and a single key always.
        "B8",
        "cuDNN has no plan for a single query or key",
        "a minimum length",
        rows=(
            Row("one query with a gradient", "h100", "q_len=1,kv_len=65536,grad=true", REFUSED, ask="cudnn",
                against={"sdpa.cudnn": "known_bad.cudnn.backward_one_query"}),
            Row("one key", "h100", "kv_len=1", REFUSED, ask="cudnn", against={"sdpa.cudnn": "kv_len.one"}),
            Row("two keys", "h100", "kv_len=2", CUDNN, ask="cudnn"),
        ),
    ),
    Case(
        "B10",
        "values that are not contiguous give wrong output on MI300X",
        "contiguity is a fact of each tensor; a declared fitting copies",
        rows=(
            Row("the values", "mi300x", "v.contiguous=false", "torch_sdpa/sdpa.flash", fittings="contiguous"),
            Row("with a mask", "mi300x", "v.contiguous=false,mask=bool", "torch_sdpa/sdpa.efficient", fittings="contiguous"),
        ),
    ),
    Case(
        # Not reproduced on later builds, and blamed on a driver: a warning, not a refusal.
        "B11",
        "NaN from SDPA on XPU",
        "a warning for the torch versions that had it",
        rows=(
            Row("torch 2.8", "max1550", "", "torch_sdpa/sdpa.fused", software={"torch": "2.8.0"}, warns=True,
                says=("known_bad.xpu-sdpa-nan-pvc", "pytorch#154051")),
            Row("torch 2.13", "max1550", "", "torch_sdpa/sdpa.fused", software={"torch": "2.13.0"}, warns=False),
        ),
    ),
    Case(
        "B12",
        "a mask over very long sequences gives wrong rows",
        "the number of scores is a fact with a limit",
        rows=(
            Row("past 2^32", "a100", "q_len=65537,mask=bool", "torch_sdpa/sdpa.math", warns=True,
                against={"sdpa.efficient": "known_bad.efficient.long_mask"}, says=("pytorch#162588", "over 4 GiB")),
            Row("a window is a mask to PyTorch", "a100", "q_len=65537,window=512:512", "torch_sdpa/sdpa.math",
                against={"sdpa.efficient": "known_bad.efficient.long_mask"}),
            Row("so is causality of unequal lengths", "a100", "q_len=65536,kv_len=65537,causal=true", "torch_sdpa/sdpa.math",
                against={"sdpa.efficient": "known_bad.efficient.long_mask", "sdpa.flash": "causal.square"}),
            Row("up to 2^32", "a100", "q_len=65536,mask=bool", "torch_sdpa/sdpa.efficient"),
            Row("the gradient from 2^31", "a100", "q_len=46342,mask=bool,grad=true", "torch_sdpa/sdpa.math",
                against={"sdpa.efficient": "known_bad.efficient.long_mask_backward"}),
            Row("a fixed torch", "a100", "q_len=65537,mask=bool", "torch_sdpa/sdpa.efficient", software={"torch": "2.14.0"}),
        ),
    ),
    Case("B13", "Ulysses with SDPA is corrupted", "every strategy against one rank", later=PARALLEL),
    Case(
        "B14",
        "ring attention meets a kernel without LSE",
        "ring asks for the LSE, and a kernel without it has that reason",
        rows=(
            Row("oneDNN returns none", "b580", "ring=2", "torch_sdpa/sdpa.math", against={"sdpa.fused": "lse", "sdpa.flash_xpu": "lse"}),
            Row("Intel's flash does", "b580", "ring=2", "fa/xpu_flash", "sgl-kernel==0.11.0"),
        ),
    ),
    Case(
        "B15",
        "gradients of ring attention are wrong",
        "a gradient through the LSE is a feature of its own",
        rows=(
            Row("FlashAttention 2 has none", "a100", "ring=2,grad=true", "torch_sdpa/sdpa.math", FA2, against={"fa2": "lse_grad"}),
            Row("FlashAttention 4 has", "h100", "ring=2,grad=true", "fa/fa4", f"{FA2} flash-attn-4==4.0.0b36",
                against={"fa2": "lse_grad"}),
            Row("without gradients", "a100", "ring=2", "fa/fa2", FA2),
        ),
    ),
    Case(
        "B17",
        "SDPA crashes on NPUs with two Ulysses ranks",
        "a warning that names the thread and what to ask for",
        rows=(Row("two ranks", "910b", "ulysses=2", "torch_sdpa/sdpa.fused", warns=True, says=("vllm-omni#2259",)),),
    ),
    Case(
        "B18",
        "ring attention on NPUs calls a CUDA operator",
        "the platform's own kernel is the one with an LSE there",
        rows=(
            Row("ring", "910b", "ring=2", "fa/ascend_fa", warns=False),
            Row("ring by its other chip", "910c", "ring=4,causal=true", "fa/ascend_fa"),
            Row("no CUDA kernel is a candidate", "910b", "ring=2", REFUSED, FA2, ask="fa/fa2",
                says=("no row for this kernel; it has ascend_fa",)),
        ),
    ),
    Case(
        "B19",
        "heads and tokens are mixed up",
        "the layout is said in words; tested where both axes are equally long",
        tests=("test_field_runs.py::test_heads_and_tokens_of_equal_number_are_not_mixed_up",),
    ),
    Case(
        "B20",
        "a lossy kernel becomes the default",
        "every backend has a quality, and only exact ones are chosen automatically",
        tests=("test_resolver.py::test_near_and_lossy_backends_are_never_taken_automatically_and_are_on_request",),
    ),
    Case("B21", "Sparge claims head_dim 96", "claims are measured", later=SPARSE),
    Case("B22", "Sparge's four limits", "four reasons at once", later=SPARSE),
    Case(
        "B24",
        "FlashAttention 4 returns more values than two",
        "what comes back is normalised",
        tests=("backends/test_fa.py::test_flash_attention_4_may_return_more_values",),
    ),
    Case(
        "B26",
        "a package swallows return_lse, and unpacking splits the batch",
        "what comes back is looked at; a missing LSE is an error (Sage: with its backends)",
        tests=(
            "backends/test_fa.py::test_a_missing_lse_is_an_error_and_never_a_split_batch",
            "backends/test_fa.py::test_a_build_of_flash_attention_3_that_cannot_be_asked_for_lse_is_found_out",
        ),
        later=SAGE,
    ),
    Case(
        "B27",
        "wrong output under graph replay",
        "graph capture is a feature that a kernel says it honours (Sage: with its backends)",
        rows=(
            Row("cuDNN does not say so", "b200", "graph=true", "torch_sdpa/sdpa.flash", against={"sdpa.cudnn": "graph"}),
            Row("without a graph", "b200", "", CUDNN),
        ),
        later=SAGE,
    ),
    Case("B28", "Sage with grouped heads on H20", "grouped heads are a feature of each kernel", later=SAGE),
    Case(
        "B29",
        "one choice for transformer and VAE: the VAE fails on its dtype, or is black at another head_dim",
        "a global choice is lenient for the VAE, with dtype and head_dim as reasons; strict for the denoiser",
        rows=(
            Row("a VAE in float32", "h100", "dtype=fp32,heads=1,head_dim=512", "torch_sdpa/sdpa.efficient", f"{FA3} {NEAR}", at="vae",
                words={"attention_backend": "made_near"}, says=("dtype is float32",)),
            Row("a denoiser of head_dim 40", "h100", "head_dim=40", REFUSED, NEAR, at="unet",
                words={"attention_backend": "made_near"}, against={"made.near": "head_dim"}),
            Row("and of 160", "h100", "head_dim=160", REFUSED, NEAR, at="unet", words={"attention_backend": "made_near"},
                against={"made.near": "head_dim"}),
            Row("an override of the VAE is strict", "h100", "dtype=fp32", REFUSED, NEAR, at="vae",
                words={"component_attention_backends": "vae=made_near"}, against={"made.near": "dtype"}),
        ),
    ),
)
