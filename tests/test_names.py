"""hal.AttentionBackend: the document's names as constants over open ids."""

from __future__ import annotations

import pytest

import hal
from hal import plugins
from hal.backend import NAMED


@pytest.mark.parametrize("name", NAMED)
def test_every_name_of_the_document_is_a_constant_that_is_its_text(name):
    member = getattr(hal.AttentionBackend, name.upper())
    assert member == name and member.value == name and member.name == name.upper()
    assert hal.AttentionBackend(name) == member


def test_what_is_installed_is_a_constant_too_and_iterates():
    installed = list(plugins.catalog().backends)
    assert list(hal.AttentionBackend) == installed and len(hal.AttentionBackend) == len(installed)
    assert all(getattr(hal.AttentionBackend, n.upper()).installed for n in installed)
    assert hal.AttentionBackend.TORCH_CUDNN_SDPA == "torch_cudnn_sdpa"
    assert not hal.AttentionBackend.FP8_FA_SM120.installed


@pytest.mark.parametrize("alias", ["fa2", "fa3", "FA4", "flash-attn"])
def test_an_alias_is_its_backend(alias):
    assert hal.AttentionBackend(alias) is not None and hal.AttentionBackend(alias) == "fa"


def test_another_name_is_no_constant_and_no_backend():
    with pytest.raises(AttributeError, match="'SAGEATTN'; did you mean 'sage_attn'"):
        hal.AttentionBackend.SAGEATTN  # noqa: B018
    with pytest.raises(hal.HalError, match="did you mean"):
        hal.AttentionBackend("torch_sdp")


def test_it_is_a_text_wherever_a_backends_name_is_taken():
    import torch

    q = torch.randn(1, 4, 2, 8)
    assert hal.explain(q, q, q, backend=hal.AttentionBackend.TORCH_SDPA).backend == "torch_sdpa"
