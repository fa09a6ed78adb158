"""What is installed under FlashAttention's names: found, broken, another project's, or a namespace without the symbol."""

from __future__ import annotations

import sys

import pytest

import hal
from hal import policy, probe, settlement
from hal.backends.fa import BACKEND, FA2, FA2_VLLM, FA3, FA3_SGL, FA4
from hal.facts import Call
from hal.testing import fakes

PLAIN = Call.of(dtype="bfloat16", head_dim=64, heads=4, batch=2, q_len=128)
FA2_BODY = "def flash_attn_func(q, k, v, window_size=(-1, -1), deterministic=False): ...\n"
FA4_BODY = "def flash_attn_func(q, k, v, learnable_sink=None, return_lse=False): ...\n"
FA3_BODY = (
    "def flash_attn_func(q_descale, num_splits, attention_chunk, return_attn_probs): ...\n"
    "def flash_attn_varlen_func(): ...\n"
)
SGL_BODY = "def flash_attn_varlen_func(page_table, return_softmax_lse, ver): ...\n"
VLLM_BODY = "def flash_attn_varlen_func(fa_version, return_softmax_lse): ...\n"
ROOTS = {"flash_attn", "flash_attn_interface", "sgl_kernel", "vllm"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the import path, alone in having FlashAttention; what is imported from it is forgotten."""
    monkeypatch.syspath_prepend(str(tmp_path))
    probe._owners.cache_clear()
    yield tmp_path
    probe._owners.cache_clear()
    for name in [n for n in sys.modules if n.partition(".")[0] in ROOTS]:
        del sys.modules[name]


def state(kernel, prove=False):
    (needs,) = kernel.needs
    found = probe.look(needs)
    return probe.prove(needs, found) if prove else found


def test_nothing_is_there(folder):
    assert {state(k).state for k in (FA2, FA2_VLLM, FA3, FA3_SGL, FA4)} == {"absent"}


def test_flash_attention_2_alone(folder):
    fakes.distribution(folder, "flash-attn", "2.8.3+cu13torch2.9", {"flash_attn/__init__.py": FA2_BODY})
    assert (state(FA2).state, state(FA2).version) == ("found", "2.8.3+cu13torch2.9")
    assert state(FA4).state == "absent"
    assert state(FA2, prove=True).state == "usable"


def test_flash_attention_4_alone_leaves_a_namespace(folder):
    """flash-attn-4 installs flash_attn/cute only: flash_attn is there, and FlashAttention 2 is not (Megatron-LM PR#6545)."""
    fakes.distribution(folder, "flash-attn-4", "4.0.0b36", {"flash_attn/cute/__init__.py": FA4_BODY})
    assert state(FA2).state == "missing_symbol" and "flash_attn_4" in state(FA2).note
    assert (state(FA4).state, state(FA4).version) == ("found", "4.0.0b36")
    assert state(FA4, prove=True).state == "usable"
    assert state(FA2, prove=True).state == "missing_symbol"  # also once the namespace has been imported


def test_both_in_one_folder(folder):
    extend = "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"
    fakes.distribution(folder, "flash-attn", "2.8.3", {"flash_attn/__init__.py": extend + FA2_BODY})
    fakes.distribution(folder, "flash-attn-4", "4.0.0b36", {"flash_attn/cute/__init__.py": FA4_BODY})
    assert [state(k, prove=True).state for k in (FA2, FA4)] == ["usable", "usable"]


def test_the_namespace_of_flash_attention_4_without_its_symbols(folder):
    (folder / "flash_attn" / "cute").mkdir(parents=True)
    assert state(FA4).state == "missing_symbol"
    assert state(FA2).state == "missing_symbol"


@pytest.mark.parametrize(
    "line, said",
    [
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "OSError: libcudart.so.12: cannot open"),
        (
            "raise ImportError('undefined symbol: _ZNK3c106SymInt6sym_neERKS0_')",
            "undefined symbol: _ZNK3c106SymInt6sym_ne",
        ),
        ("import sys; sys.exit('no CUDA')", "SystemExit: no CUDA"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_broken_package_keeps_its_message(folder, line, said):
    fakes.distribution(folder, "flash-attn", "2.8.3", {"flash_attn/__init__.py": line + "\n"})
    assert state(FA2).state == "found"  # not imported yet
    broken = state(FA2, prove=True)
    assert broken.state == "broken" and said in broken.note and broken.version == "2.8.3"
    with fakes.workbench(BACKEND, flash_attn=probe.look(FA2.needs[0])) as machine:
        for request in ((), (policy.Request("fa", "require", "test"),)):
            d = settlement.settle(PLAIN, machine, hal.plugins.catalog(), policy.Policy(request))
            assert d.chosen is None and "package.broken" in d.error and said in d.error


def test_a_broken_package_does_not_stop_automatic_choice(folder):
    fakes.distribution(folder, "flash-attn", "2.8.3", {"flash_attn/__init__.py": "raise OSError('libcudart.so.12')\n"})
    fakes.distribution(folder, "flash_attn_3", "3.0.0", {"flash_attn_interface.py": FA3_BODY})
    packages = {"flash_attn": probe.look(FA2.needs[0]), "flash_attn_3": probe.look(FA3.needs[0])}
    with fakes.workbench(BACKEND, **packages) as machine:
        d = settlement.settle(PLAIN, machine, hal.plugins.catalog(), policy.AUTOMATIC)
    assert d.kernel == "fa3"
    assert [n.needs[0].state(d.machine.packages).state for n in (FA2, FA3)] == ["broken", "usable"]


def test_another_build_under_the_same_module_name(folder):
    """The XPU build of sgl-kernel has the module and the function of the CUDA one, and takes no page_table."""
    body = "def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, return_softmax_lse=False): ...\n"
    files = {"sgl_kernel/__init__.py": "", "sgl_kernel/flash_attn.py": body}
    fakes.distribution(folder, "sgl-kernel", "0.11.0", files)
    other = state(FA3_SGL, prove=True)
    assert other.state == "wrong_distribution" and "page_table" in other.note


def test_sgl_kernel_by_its_new_name(folder):
    files = {"sgl_kernel/__init__.py": "", "sgl_kernel/flash_attn.py": SGL_BODY}
    fakes.distribution(folder, "sglang-kernel", "0.4.10", files)
    assert (state(FA3_SGL, prove=True).state, state(FA3_SGL).version) == ("usable", "0.4.10")


def test_vllm_carries_flash_attention(folder):
    files = {"vllm/__init__.py": "", "vllm/vllm_flash_attn/__init__.py": VLLM_BODY}
    fakes.distribution(folder, "vllm", "0.28.0", files)
    assert (state(FA2_VLLM, prove=True).state, state(FA2_VLLM).version) == ("usable", "0.28.0")
