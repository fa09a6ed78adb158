"""Golden cases: facts with their answers, as the field gathered them."""

from __future__ import annotations

from . import REFUSED, Case, Row
from .selection import FA3, SAGE

TWO_CARDS = {
    "platform": "cuda",
    "devices": [{"arch": "7.0", "name": "V100"}, {"arch": "8.6", "name": "RTX 3090"}],
    "software": {"torch": "2.13.0+cu126", "cudnn": "9.20.0.48"},
    "packages": {"flash-attn": "2.8.3"},
}

# fmt: off
CASES = (
    Case("golden 1", "Sage 2.2.0 on SM90, automatic", "known bad", later=SAGE),
    Case("golden 2", "the same, required", "refused, or waived by name", later=SAGE),
    Case("golden 3", "FlashAttention 2.7.2 on SM120", "chip and version are reasons", rows_of="C1"),
    Case("golden 5", "flash_attn on a T4", "the chip is the only reason", rows_of="C9"),
    Case("golden 6", "Sage on SM89", "accepted", later=SAGE),
    Case("golden 7", "cuDNN 9.19 on B200 with 4 heads", "rejected", rows_of="B4"),
    Case("golden 8", "the same with 8 heads", "accepted", rows_of="B4"),
    Case("golden 9", "cuDNN on SM90, 192 tokens, mask, gradient", "rejected by the congruence", rows_of="B5"),
    Case("golden 11", "AITER on gfx1201 with head_dim 256", "rejected by shared memory", rows_of="C13"),
    Case("golden 13", "ring attention on NPUs", "Ascend's own kernel alone", rows_of="B18"),
    Case("golden 14", "ring attention with Sage 1.0.6", "rejected by the LSE", later=SAGE),
    Case(
        "golden 16",
        "a sparse choice for the transformer, and a text encoder",
        "dense there, and no error",
        rows=(
            Row("the text encoder", "h100", "", "fa/fa3", FA3, at="text_encoder", warns=False,
                words={"component_attention_backends": "transformer=made_sparse"}),
            Row("the transformer", "h100", "", "made_sparse/made.sparse", FA3, at="transformer",
                words={"component_attention_backends": "transformer=made_sparse"}),
        ),
        rows_of="A18",
    ),
    Case("golden 17", "a sparse choice and cross-attention", "dense there", rows_of="A19"),
    Case("golden 18", "two components, one override", "the other is unchanged", rows_of="A2",
         tests=("test_field_runs.py::test_an_override_ends_with_its_component",)),
    Case("golden 19", "an override without attention", "an error that says so, before anything runs",
         tests=("integrations/test_attachment.py::test_an_override_for_what_has_no_attention_is_refused_before_anything_is_changed",
                "test_field_runs.py::test_an_override_that_every_layer_outranks_is_an_error")),
    Case("golden 20", "a misspelt name", "error with a suggestion", tests=("test_resolver.py::test_a_name_that_does_not_exist_is_told_with_a_suggestion",)),
    Case("golden 21", "a mask, and flash required", "key padding is packed and listed, others refused", rows_of="A1"),
    Case(
        "golden 22",
        "causality on NPUs",
        "honoured by both kernels",
        rows=(
            Row("by SDPA", "910b", "causal=true,kv_len=8192", "torch_sdpa/sdpa.fused"),
            Row("by Ascend's kernel", "910b", "causal=true,kv_len=8192", "fa/ascend_fa", ask="fa"),
        ),
        tests=("platforms/test_npu.py::test_what_the_operator_is_called_with_and_what_comes_back",),
    ),
    Case("golden 23", "flash_attn raises OSError on import", "broken, message kept, automatic goes on", rows_of="E1",
         tests=("test_probe.py::test_whatever_an_import_raises_is_broken_with_its_message",)),
    Case("golden 24", "only the namespace flash_attn.cute", "the symbol is missing", tests=("backends/test_fa_packages.py::test_the_namespace_of_flash_attention_4_without_its_symbols",)),
    Case("golden 25", "the order of versions", "PEP 440", tests=("facts/test_versions.py::test_a_version_is_in_a_set_by_its_order",)),
    Case("golden 26", "a plug-in that raises", "an error names it; nothing becomes the CPU",
         tests=("test_plugins.py::test_one_that_fails_is_an_error_that_names_its_distribution_and_how_to_go_on",)),
    Case(
        "golden 27",
        "an SM70 and an SM86 in one machine",
        "each device decides by its own facts; ranks that must agree and do not are an error on each of them",
        rows=(
            Row("the SM70", TWO_CARDS, "dtype=fp16,device=0", "torch_sdpa/sdpa.efficient", against={"fa2": "arch"}),
            Row("the SM86", TWO_CARDS, "dtype=fp16,device=1", "fa/fa2"),
            Row("the SM70 refuses what the SM86 takes", TWO_CARDS, "dtype=fp16,device=0", REFUSED, ask="fa/fa2", says=("cuda sm70 (V100)",)),
        ),
        tests=("parallel/test_agree.py::test_mixed_machines_are_named_by_rank_and_architecture",),
    ),
    Case("golden 28", "CUDA_VISIBLE_DEVICES in all its forms", "read", tests=("test_detect.py::test_visible_devices_are_read_in_every_form",)),
    Case("golden 31", "a worker's facts on a CPU host", "the worker's choice", rows_of="A34"),
    Case(
        "golden 32",
        "a T4, grouped heads and a mask",
        "the efficient path after repeating the key heads; the math path's memory has a budget",
        rows=(
            Row("predicted", "t4", "dtype=fp16,head_dim=64,heads=32,kv_heads=8,mask=bool", "torch_sdpa/sdpa.efficient",
                fittings="expand_kv", warns=False),
            Row("math only if nothing else fits", "t4", "dtype=bf16,head_dim=64,heads=32,kv_heads=8,mask=bool",
                "torch_sdpa/sdpa.math", warns=True, against={"sdpa.efficient": "dtype gqa"}),
        ),
        rows_of="A28",
    ),
    Case("golden 34", "head_dim unknown", "candidates depend on it; no crash", rows_of="C2"),
    Case("golden 36", "every preset, dtype and head_dim", "always a kernel, with a warning where it is the last resort",
         tests=("test_every_preset.py::test_automatic_choice_has_a_kernel_for_every_preset_dtype_and_head_dim",)),
    Case("golden 37", "import with torch.cuda poisoned", "nothing is touched",
         tests=("test_purity.py::test_with_every_accelerator_poisoned_importing_and_running_on_the_cpu_touches_none",)),
    Case("golden 38", "a thousand identical calls", "one decision", tests=("test_run_cache.py::test_a_thousand_equal_calls_decide_once",)),
    Case("golden 40", "a removed variable is set", "an error", tests=("test_detect.py::test_a_variable_that_nothing_reads_is_an_error",)),
)
