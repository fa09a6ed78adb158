"""A: silent fallback, ignored request, leaking override."""

from __future__ import annotations

from . import REFUSED, Case, Row

EXPERIMENTAL = "env.TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
FA2, FA3 = "flash-attn==2.8.3", "flash_attn_3==3.0.0"
LONG = "heads=24,q_len=75600"  # a video's tokens
MODELS, SAGE, SPARSE = "model cards", "the Sage backends", "the sparse backends"
NEAR = "made-near==1.0"  # made_near and made_sparse: see stand_ins
SPARSELY = {"attention_backend": "made_sparse"}
LISTED = frozenset({"fa", "torch_sdpa"})

# fmt: off
CASES = (
    Case(
        "A1",
        "flash kernels drop a padding mask without a word",
        "key padding becomes packed sequences, and is listed; any other mask is a reason",
        rows=(
            Row("key padding is packed", "h100", "mask=key_padding", "fa/fa3", FA3, ask="fa", fittings="key_padding_to_varlen"),
            Row("a bool mask is a reason", "h100", "mask=bool", REFUSED, FA3, ask="fa", against={"fa3": "mask.bool"},
                says=("drop attn_mask",)),
            Row("so is an additive one", "h100", "mask=additive", REFUSED, FA3, ask="fa", against={"fa3": "mask.additive"}),
            Row("causal key padding is not packed", "h100", "mask=key_padding,causal=true", REFUSED, FA3, ask="fa",
                against={"fa3": "mask.key_padding"}, says=("hal.attention_varlen",)),
            Row("automatic choice keeps the mask", "h100", "mask=bool", "torch_sdpa/sdpa.efficient", FA3,
                against={"fa3": "mask.bool", "sdpa.flash": "mask.bool"}),
        ),
        tests=("test_field_runs.py::test_a_padded_batch_equals_the_oracle_through_packing",),
    ),
    Case(
        "A2",
        "a backend set on one model changes another",
        "choices are scoped by component",
        rows=(
            Row("the one that asks", "h100", "", "fa/fa3", FA3, at="transformer",
                words={"component_attention_backends": "transformer=fa3"}),
            Row("another, with a mask", "h100", "mask=bool", "torch_sdpa/sdpa.efficient", FA3, at="text_encoder",
                words={"component_attention_backends": "transformer=fa3"}, warns=False),
        ),
        tests=(
            "integrations/test_attachment.py::test_another_pipeline_in_the_process_is_not_touched",
            "test_field_runs.py::test_an_override_ends_with_its_component",
        ),
    ),
    Case(
        "A3",
        "a hub kernel is chosen and was never loaded; the call is of None",
        "the kernel is loaded while settling, from the local cache; what is missing is an error before anything runs",
        rows=(Row("without the loader", "h100", "", REFUSED, ask="fa/fa3.hub", against={"fa3.hub": "package.absent"}),),
        tests=("backends/test_fa.py::test_the_hub_kernel_is_taken_from_the_local_cache_only",),
    ),
    Case(
        "A4",
        "'NoneType is not callable' where a package is missing",
        "an explicit request for it is refused with the command that installs it",
        rows=(
            Row("the install command is said", "h100", "", REFUSED, ask="fa", against={"fa2": "package.absent"},
                says=("pip install flash-attn --no-build-isolation", "fa declares torch_sdpa as its fallback")),
        ),
    ),
    Case(
        "A6",
        "a hub build for a newer torch is not matched, and something else runs",
        "a loader that is too old is a version reason; the builds that do not match are told one by one",
        rows=(
            Row("the old loader", "h100", "", REFUSED, "kernels==0.14.1", ask="fa/fa3.hub",
                against={"fa3.hub": "package.version"}, says=("pip install 'kernels>=0.16'",)),
            Row("the new loader", "h100", "", "fa/fa3.hub", "kernels==0.16.0", ask="fa"),
        ),
        tests=("backends/test_fa.py::test_the_hub_kernel_is_taken_from_the_local_cache_only",),
    ),
    Case(
        "A7",
        "FlashAttention 3 is asked for and something weaker runs",
        "a request is strict: no package, no run; --kernel asks for one generation alone",
        rows=(
            Row("nothing installed", "h100", "", REFUSED, ask="fa3", against={"fa3": "package.absent"}),
            Row("another generation installed", "h100", "", REFUSED, FA2, ask="fa/fa3", against={"fa3": "package.absent"}),
        ),
    ),
    Case(
        "A9",
        "the log names a kernel that did not run",
        "receipts tell what was bound and ran",
        tests=("test_run_cache.py::test_receipts_tell_component_role_fittings_and_source_and_are_cleared",),
    ),
    Case("A10", "an alias of a model loses its mark, and with it the kernel", "cards are found through aliases", later=MODELS),
    Case(
        "A11",
        "a layer pins its backend, so the override never applies",
        "the layer keeps what it requires, and an override that nothing consumed is an error",
        rows=(
            Row("the layer keeps it", "h100", "", "torch_sdpa/sdpa.flash", FA3, at="transformer",
                words={"component_attention_backends": "transformer=fa3"}, layer={"required": "torch_sdpa"}),
        ),
        tests=("test_field_runs.py::test_an_override_that_every_layer_outranks_is_an_error",),
    ),
    Case(
        "A12",
        "a package under another name is not seen, though it has the kernel",
        "a backend is served by any package that has a kernel for it; all are listed",
        rows=(
            Row("vLLM's build alone", "a100", "", "fa/fa2.vllm", "vllm-flash-attn==0.28.0", ask="fa",
                against={"fa2": "package.absent", "fa3": "package.absent", "fa3.hub": "package.absent"}),
        ),
    ),
    Case(
        "A13",
        "a layer's list silently drops an explicit choice",
        "the explicit choice is honoured; the set filters automatic choice",
        rows=(
            Row("an override outside the set", "h100", "", "made_near/made.near", f"{FA3} {NEAR}", at="transformer",
                words={"component_attention_backends": "transformer=made_near"}, layer={"supported": LISTED}),
            Row("a global choice outside the set", "h100", "", "made_near/made.near", f"{FA3} {NEAR}", at="transformer",
                words={"attention_backend": "made_near"}, layer={"supported": LISTED}),
            Row("which the layer cannot run", "h100", "head_dim=160", REFUSED, f"{FA3} {NEAR}", at="transformer",
                words={"attention_backend": "made_near"}, layer={"supported": LISTED}, against={"made.near": "head_dim"}),
            Row("automatic choice", "h100", "", "torch_sdpa/sdpa.flash", FA3, at="transformer",
                layer={"supported": frozenset({"torch_sdpa"})}, against={"fa3": "layer.supported"},
                says=("name fa explicitly to use it all the same",)),
        ),
    ),
    Case(
        "A14",
        "a misspelt backend, or a missing one, becomes automatic choice",
        "what is missing is refused, or its declared fallback on request; what a layer requires is kept; "
        "an unknown name is an error with a suggestion",
        rows=(
            Row("missing", "h100", "", REFUSED, FA3, at="transformer", words={"attention_backend": "made_near"},
                against={"made.near": "package.absent"},
                says=("pip install made-near", "made_near declares fa as its fallback")),
            Row("with declared fallbacks", "h100", "", "fa/fa3", FA3, at="transformer", warns=True,
                words={"attention_backend": "made_near", "attention_fallback": "declared"},
                says=("policy.fallback: made_near cannot serve; its declared fallback fa does", "made_near is absent")),
            Row("and with the next of them", "h100", "", "torch_sdpa/sdpa.flash", at="transformer", warns=True,
                words={"attention_backend": "made_near", "attention_fallback": "declared"},
                says=("its declared fallback torch_sdpa does",)),
            Row("a layer needs a sparse one", "h100", "", "made_sparse/made.sparse", FA3, at="transformer",
                words={"attention_backend": "fa"}, layer={"required": "made_sparse", "why": "it was trained with it"}),
            Row("and it is not to be had", "a100", "", REFUSED, FA2, at="transformer", words={"attention_backend": "fa"},
                layer={"required": "made_sparse", "why": "it was trained with it"}, says=("it was trained with it",)),
        ),
        tests=(
            "test_resolver.py::test_a_name_that_does_not_exist_is_told_with_a_suggestion",
            "test_field_runs.py::test_a_misspelt_backend_in_the_environment_is_an_error",
        ),
    ),
    Case(
        "A15",
        "two readers of one setting disagree",
        "a layer, its receipts and its explanation read one decision, with what was outranked",
        tests=("test_field_runs.py::test_a_layer_and_what_runs_in_it_read_one_decision",),
    ),
    Case(
        "A16",
        "a backend that the environment asks for is not in use",
        "it runs, or it is an error that names the variable",
        tests=("test_field_runs.py::test_what_the_environment_asks_for_runs_or_is_an_error",),
    ),
    Case(
        "A17",
        "AITER becomes SDPA where the dtype does not fit",
        "the dtype is a reason, and the request is refused",
        rows=(
            Row("float32", "mi300x", "dtype=fp32", REFUSED, "amd-aiter==0.1.10", ask="aiter",
                against={"aiter": "dtype", "aiter.triton": "dtype"}, says=("cast q, k and v to float16, bfloat16",)),
            Row("bfloat16", "mi300x", "", "aiter/aiter", "amd-aiter==0.1.10", ask="aiter"),
        ),
    ),
    Case(
        "A18",
        "a sparse choice for the transformer breaks text encoders",
        "a global choice is strict in the transformer alone; elsewhere it is passed over where it does not fit, and told",
        rows=(
            Row("the transformer", "h100", "", "made_sparse/made.sparse", FA3, at="transformer", words=SPARSELY),
            Row("a text encoder", "h100", "mask=bool", "torch_sdpa/sdpa.efficient", FA3, at="text_encoder", words=SPARSELY,
                says=("made_sparse (attention_backend='made_sparse') is passed",)),
            Row("with a default of its own", "h100", "causal=true", "torch_sdpa/sdpa.flash", FA3, at="text_encoder",
                words=SPARSELY, layer={"default": "torch_sdpa"}),
            Row("the transformer of another chip", "a100", "", REFUSED, FA2, at="transformer", words=SPARSELY,
                against={"made.sparse": "arch"}),
            Row("a text encoder of another chip", "a100", "", "fa/fa2", FA2, at="text_encoder", words=SPARSELY),
            Row("an override of it is strict", "h100", "mask=bool", REFUSED, FA3, at="text_encoder",
                words={"component_attention_backends": "text_encoder=made_sparse"}, against={"made.sparse": "mask.bool"}),
        ),
    ),
    Case(
        "A19",
        "a sparse backend meets cross-attention",
        "a compatible dense one runs there, by a declared rule that is shown; whoever asked",
        rows=(
            Row("a global choice", "h100", "kv_len=512", "fa/fa3", FA3, at="transformer.cross", words=SPARSELY,
                says=("made_sparse (attention_backend='made_sparse') is replaced: made_sparse is sparse",)),
            Row("an override", "h100", "kv_len=512", "fa/fa3", FA3, at="transformer.cross",
                words={"component_attention_backends": "transformer=made_sparse"}, says=("is replaced",)),
            Row("with a dense one for the role", "h100", "kv_len=512", "torch_sdpa/sdpa.flash", FA3, at="transformer.cross",
                words={"component_attention_backends": "transformer=made_sparse,transformer.cross=torch_sdpa"}),
            Row("with a dense global choice", "h100", "kv_len=512", "torch_sdpa/sdpa.flash", FA3, at="transformer.cross",
                words={"component_attention_backends": "transformer=made_sparse", "attention_backend": "torch_sdpa"}),
            Row("by force", "h100", "kv_len=512", "fa/fa3", FA3, at="transformer.cross", ask="made_sparse",
                says=("is replaced",)),
            Row("self-attention", "h100", "", "made_sparse/made.sparse", FA3, at="transformer.self", ask="made_sparse"),
            Row("a dense backend is not replaced", "h100", "kv_len=512,head_dim=160", REFUSED, f"{FA3} {NEAR}",
                at="transformer.cross", words={"component_attention_backends": "transformer=made_near"},
                against={"made.near": "head_dim"}),
        ),
    ),
    Case(
        "A20",
        "a set of allowed SDPA paths is no order: cuDNN is allowed and does not run",
        "each path is a kernel, called by its own operator; no process-wide switch is used",
        rows=(
            Row("head_dim 64", "rtx5090", "head_dim=64", "torch_cudnn_sdpa/sdpa.cudnn", ask="torch_cudnn_sdpa"),
            Row("head_dim 128", "rtx5090", "", "torch_cudnn_sdpa/sdpa.cudnn", ask="torch_cudnn_sdpa"),
        ),
        tests=("test_field_runs.py::test_each_path_of_pytorch_is_called_by_its_own_operator",),
    ),
    Case(
        "A21",
        "a setting that is no longer read is ignored",
        "a HAL_ variable that nothing reads is an error, which doctor shows",
        tests=(
            "test_detect.py::test_a_variable_that_nothing_reads_is_an_error",
            "cli/test_checkup.py::test_an_unknown_variable_is_an_error_and_the_doctor_still_works",
        ),
    ),
    Case(
        "A22",
        "what a call needs is not part of the selection, and fails later",
        "every property of the call is a fact: a dtype that no kernel here takes is an error at once",
        rows=(
            Row("float8 keys and values", "h100", "dtype=fp8", REFUSED, FA3,
                against={"sdpa.math": "dtype.device", "fa3": "dtype dtype.device"}, says=("float8_e4m3fn",)),
        ),
    ),
    Case(
        "A23",
        "a flag moves AITER to the front on chips that it is not for",
        "each candidate has its own conditions; AITER is taken on request only, where it has a kernel",
        rows=(
            Row("installed is not preferred", "rx7900", "", "torch_sdpa/sdpa.flash", "amd-aiter==0.1.10", against={"aiter": "arch"}),
        ),
    ),
    Case(
        "A24",
        "an unsupported request falls to the eager path",
        "a refusal, with every reason; the eager path is a kernel like any other",
        rows=(
            Row("a mask", "h100", "mask=bool", REFUSED, ask="torch_sdpa/sdpa.flash", against={"sdpa.flash": "mask.bool"}),
        ),
    ),
    Case(
        "A25",
        "an explicit hub kernel that is missing falls back",
        "a refusal that says what to install",
        rows=(
            Row("not installed", "h100", "", REFUSED, FA2, ask="fa/fa3.hub", against={"fa3.hub": "package.absent"},
                says=("pip install 'kernels>=0.16'",)),
        ),
    ),
    Case(
        "A26",
        "the first failed check hides a candidate that would do",
        "every candidate is examined, and has all of its reasons",
        rows=(
            Row("the hub serves", "h100", "", "fa/fa3.hub", "kernels==0.16.0", ask="fa", against={"fa2": "package.absent"}),
            Row("five reasons at once", "t4", "dtype=fp32,head_dim=72,mask=bool,dropout=0.1,varlen=true", REFUSED, ask="fa/fa3.hub",
                against={"fa3.hub": "package.absent arch dtype head_dim mask.bool dropout"}),
        ),
    ),
    Case(
        "A27",
        "causality is taken from the module, or from the mask, and not from the call",
        "is_causal is a fact of the call, and reaches the kernel as it was given",
        tests=("test_field_runs.py::test_causality_is_what_the_call_says",),
    ),
    Case(
        "A28",
        "grouped heads with a mask, large head_dim or Turing: SDPA takes its math path, and memory ends",
        "the path is predicted; key heads are repeated first, and the math path has a budget",
        rows=(
            Row("grouped heads and a mask on Turing", "t4", "dtype=fp16,heads=32,kv_heads=8,mask=bool", "torch_sdpa/sdpa.efficient",
                fittings="expand_kv", warns=False, against={"sdpa.flash": "arch mask.bool"}),
            Row("and on Ampere", "a100", "heads=32,kv_heads=8,mask=bool", "torch_sdpa/sdpa.efficient", fittings="expand_kv"),
            Row("head_dim 512", "a100", "head_dim=512", "torch_sdpa/sdpa.efficient", against={"sdpa.flash": "head_dim"}),
            Row("the math path over its budget warns", "t4", f"{LONG},dtype=bf16", "torch_sdpa/sdpa.math", warns=True,
                against={"sdpa.math": "memory.math", "sdpa.efficient": "dtype"}, says=("over 4 GiB",)),
            Row("and is refused on request", "t4", f"{LONG},dtype=bf16", REFUSED, ask="torch_sdpa",
                against={"sdpa.math": "memory.math"}, says=("--waive memory.math",)),
            Row("unless it is waived", "t4", f"{LONG},dtype=bf16", "torch_sdpa/sdpa.math", ask="torch_sdpa", waive="memory.math"),
        ),
    ),
    Case(
        "A29",
        "SDPA takes 71 GB on gfx1200, while PyTorch says that flash is enabled",
        "a switch is no capability: the path is predicted from the chip, and doctor runs it",
        rows=(
            Row("the math path is told", "rocm:gfx1200", LONG, "torch_sdpa/sdpa.math", warns=True,
                against={"sdpa.flash": "aotriton.experimental", "sdpa.efficient": "aotriton.experimental"},
                says=("set TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 before Python starts", "over 4 GiB")),
            Row("with the variable", "rocm:gfx1200", LONG, "torch_sdpa/sdpa.flash", software={EXPERIMENTAL: "1"}),
        ),
    ),
    Case(
        # The thread's measured machine is a gfx1200.  gfx1151 left AOTriton's experiments with 0.12.
        "A30",
        "gfx1151 needs a variable of an experiment",
        "the variable is a fact, and the fix names it; an AOTriton that needs none is believed",
        rows=(
            Row("unset", "strix-halo", "", "torch_sdpa/sdpa.math", software={"aotriton": "0.11.2"},
                says=("set TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 before Python starts",), warns=True),
            Row("set", "strix-halo", "", "torch_sdpa/sdpa.flash", software={"aotriton": "0.11.2", EXPERIMENTAL: "1"}),
            Row("a newer AOTriton", "strix-halo", "", "torch_sdpa/sdpa.flash", software={"aotriton": "0.12.1"}),
        ),
    ),
    Case(
        # The thread's own gate of 9.22 was too high, and was lowered to the 9.20 that torch 2.13 pins.
        "A31",
        "a cuDNN that is too old silently becomes another backend",
        "the version is a reason, and the fix names what pins it",
        rows=(
            Row("9.20 will do", "h100", "", "torch_cudnn_sdpa/sdpa.cudnn", software={"cudnn": "9.20.0.48"}, ask="cudnn"),
            Row("9.10 will not", "h100", "q_len=1000", REFUSED, software={"torch": "2.10.0", "cudnn": "9.10.2.21"}, ask="cudnn",
                against={"sdpa.cudnn": "known_bad.cudnn.ragged_queries known_bad.cudnn.ragged_keys"},
                says=("a PyTorch whose wheel pins cuDNN 9.15.1",)),
        ),
    ),
    Case(
        "A32",
        "one warning per call",
        "a thousand equal calls decide once",
        tests=("test_run_cache.py::test_a_thousand_equal_calls_decide_once",),
    ),
    Case(
        "A33",
        "preferred and forced are one word",
        "prefer goes on with the declared fallback, with a warning, and never for something that the call asks for; require refuses",
        rows=(
            Row("prefer", "h100", "head_dim=160", "torch_sdpa/sdpa.flash", ask="prefer torch_cudnn_sdpa", warns=True,
                against={"sdpa.cudnn": "head_dim v_head_dim"}, says=("policy.fallback: torch_cudnn_sdpa cannot serve",)),
            Row("prefer, in a graph", "h100", "graph=true", REFUSED, ask="prefer torch_cudnn_sdpa", against={"sdpa.cudnn": "graph"}),
            Row("require", "h100", "head_dim=160", REFUSED, ask="torch_cudnn_sdpa", against={"sdpa.cudnn": "head_dim v_head_dim"}),
        ),
    ),
    Case(
        "A34",
        "a capability is evaluated on a host that is not the one that runs",
        "a decision is made for the named facts, wherever it is made",
        rows=(
            Row("the worker's facts", {"platform": "cuda", "devices": [{"arch": "9.0"}], "software": {"torch": "2.13.0"},
                                       "packages": {"flash_attn_3": "3.0.0"}}, "", "fa/fa3"),
        ),
        tests=("cli/test_command_explain.py::test_facts_of_another_machine_are_explained_here",),
    ),
    Case(
        "A35",
        "a patched SDPA hits an encoder with another head_dim",
        "nothing is patched; choices are scoped, and a global one is lenient for encoders",
        rows=(
            Row("the encoder", "h100", "head_dim=80", "torch_sdpa/sdpa.flash", f"{FA3} {NEAR}", at="text_encoder",
                words={"attention_backend": "made_near"}, says=("head_dim is 80",)),
            Row("the transformer", "h100", "", "made_near/made.near", f"{FA3} {NEAR}", at="transformer",
                words={"attention_backend": "made_near"}),
        ),
        tests=("integrations/test_attachment.py::test_an_attached_pipeline_makes_the_same_picture_and_counts_every_call",),
    ),
    Case(
        "A37",
        "a padding mask is lost under Ulysses",
        "the mask stays a fact of the call whatever the parallel strategy",
        rows=(
            Row("key padding", "h100", "ulysses=4,mask=key_padding", "fa/fa3", FA3, ask="fa", fittings="key_padding_to_varlen"),
            Row("additive", "h100", "ulysses=4,mask=additive", REFUSED, FA3, ask="fa", against={"fa3": "mask.additive"}),
        ),
    ),
    Case(
        "A39",
        "SDPA on NPUs takes some shapes of masks only",
        "the shape class of a mask is a fact, and a declared fitting expands it",
        rows=(
            Row("[B, Sk] is expanded", "910b", "mask=key_padding", "torch_sdpa/sdpa.fused", fittings="mask_shape"),
            Row("[B, 1, Sq, Sk] is taken as it is", "910b", "mask=bool", "torch_sdpa/sdpa.fused"),
        ),
    ),
    Case(
        "A40",
        "the operator's opt-in stands behind the default order",
        "a preference comes before the platform's order, and the explanation names who asked",
        rows=(
            Row("preferred", "mi300x", "", "aiter/aiter", f"{FA2} amd-aiter==0.1.10", ask="prefer aiter"),
            Row("not preferred", "mi300x", "", "fa/fa2", f"{FA2} amd-aiter==0.1.10"),
        ),
    ),
    Case(
        "A41",
        "'invalid attention backend' does not say what is valid",
        "names are read in any spelling; an unknown one is an error with all known names",
        rows=(Row("upper case", "h100", "", "torch_sdpa/sdpa.flash", ask="TORCH_SDPA"),),
        tests=("test_resolver.py::test_a_name_that_does_not_exist_is_told_with_a_suggestion",),
    ),
    Case(
        "A42",
        "sdpa_kernel(MATH) has no effect on XPU",
        "the math path is written out, so that asking for it is running it",
        rows=(Row("asked for", "b580", "", "torch_sdpa/sdpa.math", ask="torch_sdpa/sdpa.math", waive="memory.math"),),
        tests=("test_field_runs.py::test_the_math_path_calls_no_sdpa",),
    ),
)
