"""D: which platform is this; E: packages that are missing, broken or another's."""

from __future__ import annotations

from . import REFUSED, Case, Row
from .selection import FA2

UNDEFINED = "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZNK3c106SymInt6sym_neERKS0_"
BROKEN = {"flash-attn": {"state": "broken", "version": "2.8.3", "note": UNDEFINED}}

# fmt: off
CASES = (
    Case(
        "D1",
        "a plug-in raises, and everything runs on the CPU",
        "resolving for this machine is an error that names distribution and cause; --ignore-plugin goes on",
        tests=("test_plugins.py::test_one_that_fails_is_an_error_that_names_its_distribution_and_how_to_go_on",),
    ),
    Case(
        "D2",
        "a plug-in's OSError ends in an obscure crash",
        "the same, for whatever it raises",
        tests=("test_plugins.py::test_one_that_fails_is_an_error_that_names_its_distribution_and_how_to_go_on",),
    ),
    Case(
        "D3",
        "nothing says why no platform was found",
        "every platform says what it looked for and found",
        tests=("test_detect.py::test_every_platform_tells_of_this_machine_in_words",),
    ),
    Case(
        "D5",
        "CPU and CUDA are both active",
        "the torch build is the first fact: a CPU build on a machine with a GPU is the CPU, and says so",
        tests=("test_field_cases.py::test_a_cpu_build_of_torch_on_a_machine_with_a_gpu_is_the_cpu",),
    ),
    Case(
        "D7",
        "UUIDs and MIG names in CUDA_VISIBLE_DEVICES crash",
        "all forms are read",
        tests=("test_detect.py::test_visible_devices_are_read_in_every_form",),
    ),
    Case(
        "D10",
        "an Intel package without an Intel GPU",
        "importable is not present",
        tests=("test_field_cases.py::test_a_package_without_a_device_is_no_platform",),
    ),
    Case(
        "D11",
        "a worker sees no GPU and reports a CPU",
        "hidden by the environment is another word than absent",
        tests=("test_field_cases.py::test_hidden_is_not_absent",),
    ),
    Case(
        "D12",
        "a vendor's package needs an operator that is not there",
        "imports are isolated, for plug-ins and for packages",
        tests=(
            "test_plugins.py::test_one_that_fails_is_an_error_that_names_its_distribution_and_how_to_go_on",
            "test_probe.py::test_whatever_an_import_raises_is_broken_with_its_message",
        ),
    ),
    Case(
        "D14",
        "an unset device variable is None further on",
        "unset means that all devices are visible",
        tests=("test_detect.py::test_visible_devices_are_read_in_every_form",),
    ),
    Case(
        "D15",
        "flash_attn on MUSA is not detected",
        "each platform has rows for its own packages under the shared name",
        rows=(
            Row("the vendor's build", "s5000", "", "fa/musa_fa2", FA2),
            Row("MATE", "s5000", "", "fa/musa_flash", "flash_attn_3==0.2.0"),
            Row("neither", "s5000", "", "torch_sdpa/sdpa.fused", against={"musa_fa2": "package.absent", "musa_flash": "package.absent"}),
        ),
    ),
    Case(
        "D16",
        "a copied default is not feasible on other platforms",
        "one table; the default is feasible for every preset, dtype and head_dim",
        tests=("test_every_preset.py::test_automatic_choice_has_a_kernel_for_every_preset_dtype_and_head_dim",),
    ),
    Case(
        "E1",
        "an optional package that fails on import takes everything down",
        "broken is a state of its own, with the message; automatic choice goes on",
        rows=(
            Row("automatic", "a100", "", "torch_sdpa/sdpa.flash", BROKEN, against={"fa2": "package.broken"}, says=("undefined symbol",)),
            Row("explicit", "a100", "", REFUSED, BROKEN, ask="fa/fa2", against={"fa2": "package.broken"}, says=("undefined symbol",)),
        ),
        tests=("test_probe.py::test_whatever_an_import_raises_is_broken_with_its_message",),
    ),
    Case(
        "E2",
        "an ABI mismatch should not be fatal",
        "the same: told in automatic choice, refused on request",
        tests=("test_probe.py::test_whatever_an_import_raises_is_broken_with_its_message",),
    ),
    Case(
        "E3",
        "undefined symbol after an upgrade of torch",
        "the fix is to install the package anew for this torch",
        rows=(
            Row("the fix", "a100", "", REFUSED, BROKEN, ask="fa/fa2", against={"fa2": "package.broken"},
                says=("reinstall flash_attn for the installed torch",)),
        ),
    ),
    Case(
        "E4",
        "flash_attn.cute is there as a folder, without FlashAttention 4",
        "the very symbol is looked for, not the namespace",
        tests=("backends/test_fa_packages.py::test_the_namespace_of_flash_attention_4_without_its_symbols",),
    ),
    Case(
        "E6",
        "a probe of a private symbol says no to a good package",
        "the public function and its parameters are the proof",
        tests=("test_field_cases.py::test_no_package_is_proven_by_a_private_symbol",),
    ),
    Case(
        "E7",
        "local and pre-release versions are misread",
        "PEP 440, and pre-releases count by their place in the order",
        rows=(
            Row("a local version", "a100", "", "fa/fa2", "flash-attn==2.8.3+cu130torch2.9", ask="fa"),
            Row("a pre-release", "b200", "causal=true", "fa/fa4", "flash-attn-4==4.0.0b22", ask="fa"),
        ),
        tests=("facts/test_versions.py::test_a_version_is_in_a_set_by_its_order",),
    ),
    Case(
        "E8",
        "2.10 is older than 2.9 as text",
        "versions are compared as versions",
        rows=(
            Row("torch 2.10 is past 2.9 and before 2.11", "rx7900", "", "torch_sdpa/sdpa.math", software={"torch": "2.10.0"},
                against={"sdpa.flash": "known_bad.aotriton.gfx1100_accuracy"}),
            Row("torch 2.11", "rx7900", "", "torch_sdpa/sdpa.flash", software={"torch": "2.11.0"}),
        ),
        tests=("facts/test_versions.py::test_a_version_is_in_a_set_by_its_order",),
    ),
    Case("E9", "a vendor's package must be imported early", "a platform's module prepares it", later="Ascend's sparse backends"),
    Case(
        "E10",
        "the import fails on NPUs without Triton",
        "what a kernel needs is imported when it is bound",
        tests=("test_field_cases.py::test_hal_is_imported_and_explains_without_triton_or_torch",),
    ),
    Case(
        "E11",
        "loading plug-ins hides the real cause",
        "the cause is kept",
        tests=("test_plugins.py::test_one_that_fails_is_an_error_that_names_its_distribution_and_how_to_go_on",),
    ),
    Case(
        "E12",
        "importing makes a CUDA context",
        "importing and resolving touch nothing of torch.cuda",
        tests=("test_purity.py::test_with_every_accelerator_poisoned_importing_and_running_on_the_cpu_touches_none",),
    ),
)
