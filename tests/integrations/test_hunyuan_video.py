"""HunyuanVideo: a choice for the video passes its token refiner over, and text that is padding is no key."""

from __future__ import annotations

import diffusers
import pytest
import torch

import hal
from hal import plugins
from hal.backends.sliding_tile_attn import strategy
from hal.integrations.attachment import find
from hal.models.hunyuan_video import CARD

CLASSES = sorted(CARD.classes)
SMALL = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1,
    "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 16, "rope_axes_dim": (2, 4, 4),
}  # fmt: skip
OLDER = {"num_single_layers": 1, "guidance_embeds": True, "pooled_projection_dim": 8}
MORE = {
    "HunyuanVideo15Transformer3DModel": {"text_embed_2_dim": 8, "image_embed_dim": 8},
    "HunyuanVideoFramepackTransformer3DModel": {**OLDER, "image_proj_dim": 8},
    "HunyuanVideoTransformer3DModel": OLDER,
}


def made(name):
    torch.manual_seed(0)
    return getattr(diffusers, name)(**SMALL, **MORE[name]).eval()


@torch.no_grad()
def sample(model, window=None, tmp_path=None):
    """What it computes of 2 x 9 x 9 tokens and 6 of text, 2 of them padding; which kernels ran, by component."""
    g = torch.Generator().manual_seed(0)
    x = {
        "hidden_states": torch.randn(1, 4, 2, 9, 9, generator=g), "timestep": torch.tensor([1]),
        "encoder_hidden_states": torch.randn(1, 6, 16, generator=g),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "pooled_projections": torch.randn(1, 8, generator=g), "guidance": torch.tensor([1000.0]),
    }  # fmt: skip
    if window is None:
        return model(**x).sample
    path = str(tmp_path / "s.json")
    strategy.write(path, strategy.Strategy((((window,) * 2,) * 2,)))  # 2 layers: the refiner's is not counted
    words = {"mask_strategy_file_path": path, "skip_time_steps": 0}
    with hal.attach(model, attention_backend="sliding_tile_attn", attention_backend_config=words) as attachment:
        with hal.step(0, 1):
            out = model(**x).sample
        return out, {(r.component, r.kernel, r.runs) for r in attachment.receipts()}


def test_a_sparse_choice_is_for_the_blocks_and_takes_their_padding(tmp_path):
    model = made("HunyuanVideoTransformer3DModel")
    dense = sample(model)
    for window, exact in (((1, 2, 2), True), ((1, 1, 1), False)):
        out, ran = sample(model, window, tmp_path)
        assert ran == {("transformer", "sta.portable", 2), ("context_embedder.token_refiner", "sdpa.cpu", 1)}
        assert torch.allclose(out, dense, atol=1e-5) is exact


@pytest.mark.parametrize("name", CLASSES)
def test_the_card_knows_the_refiner_of_each_class(name):
    assert plugins.catalog().models["hunyuan_video"] is CARD
    sites, _ = find(made(name))
    apart = [s.name for s in sites if s.name.startswith(f"{CARD.apart[0]}.")]
    assert 0 < len(apart) < len(sites)
