"""native_only: what is asked for by name runs by a kernel of the machine, or is refused."""

from __future__ import annotations

import pytest
import torch

import hal
from hal.errors import NoKernelError, PolicyError


def chosen(on: str, **words: object) -> hal.Decision:
    with hal.simulate(on), hal.scope(**words):
        return hal.explain(*(torch.empty(1, 4096, 8, 128, dtype=torch.bfloat16, device="meta") for _ in range(3)))


def test_a_backend_without_a_kernel_for_the_machine_runs_in_its_portable_form_and_says_so():
    d = chosen("x86", attention_backend="video_sparse_attn")
    assert d.kernel == "vsa.portable" and any(w.startswith("tier.portable") for w in d.warnings)


def test_native_only_refuses_that_and_names_the_change():
    d = chosen("x86", attention_backend="video_sparse_attn", native_only=True)
    assert d.chosen is None and "--native-only" in (d.error or "")
    with pytest.raises(NoKernelError, match="native_only"), hal.scope(native_only=True):
        q = torch.zeros(1, 64, 1, 8)
        with hal.grid(4, 4, 4):
            hal.attention(q, q, q, backend="video_sparse_attn")


def test_native_only_leaves_automatic_choice_and_a_declared_fallback_alone():
    assert chosen("x86", native_only=True).kernel == chosen("x86").kernel
    words = {"attention_backend": "video_sparse_attn", "attention_fallback": "declared", "native_only": True}
    assert chosen("x86", **words).backend == "torch_sdpa"


@pytest.mark.parametrize("given", ["yes", 2, ""])
def test_it_is_true_or_false(given):
    with pytest.raises(PolicyError, match="true or false"), hal.scope(native_only=given):
        pass


def test_the_stronger_word_counts_also_where_it_is_no():
    inner, outer = hal.choices.checked({"native_only": False}), hal.choices.checked({"native_only": True})
    assert inner.over(outer).native_only is False and outer.over(inner).native_only is True
    assert hal.choices.checked({}).over(outer).native_only is True
