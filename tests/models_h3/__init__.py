"""Tiny transformers of the H3 family: diffusers' MiniMax-H3, and FastH3, which is that with gates."""

from __future__ import annotations

from functools import wraps

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor, _apply_rotary_emb
from torch import nn

import hal

CONFIG = {
    "num_attention_heads": 2, "attention_head_dim": 16, "hidden_size": 24, "num_layers": 3, "num_refiner_layers": 2,
    "ffn_dim": 32, "in_channels": 2, "audio_in_channels": 4, "text_dim": 12, "freq_dim": 16, "time_embed_hidden_dim": 16,
    "time_embed_dim": 16, "rope_freq_dim": 2,
}  # fmt: skip


class Gated(MiniMaxH3AttnProcessor):
    """As its parent, and the gate of the branch of means: of the block's input, neither normed nor rotated."""

    def __call__(self, attn, hidden_states, rotary_emb=None, attention_mask=None):
        q, k, v, gate = (
            linear(hidden_states).unflatten(-1, (attn.heads, -1))
            for linear in (attn.to_q, attn.to_k, attn.to_v, attn.to_gate_compress)
        )
        q, k = (_apply_rotary_emb(x, *rotary_emb) for x in (attn.norm_q(q), attn.norm_k(k)))
        with hal.sparse.given(gate=gate):
            out = dispatch_attention_fn(q, k, v, backend=self._attention_backend, parallel_config=self._parallel_config)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))


class FastH3(MiniMaxH3Transformer3DModel):
    """Gates start at zero, as a checkpoint without them leaves them."""

    @wraps(MiniMaxH3Transformer3DModel.__init__)
    def __init__(self, *args, **config):
        super().__init__(*args, **config)
        for block in self.transformer_blocks:
            gate = nn.Linear(self.config.hidden_size, block.attn.inner_dim, bias=False)
            nn.init.zeros_(gate.weight)
            block.attn.to_gate_compress = gate
            block.attn.set_processor(Gated())


FastH3.__name__ = "MiniMaxH3Transformer3DModel"  # as its checkpoints name it


def inputs(text=70, pictures=0, sound=100, video=(5, 6, 10), seed=0, batch=1):
    """The arguments of forward: the layout [text | pictures | sound | video] of a request."""
    g = torch.Generator().manual_seed(seed)
    n = video[0] * video[1] * video[2]
    at = torch.zeros(text + pictures + sound + n, 3, dtype=torch.float64)
    at[:text, 0] = torch.arange(text)
    at[text : text + pictures, 1:] = torch.rand(pictures, 2, generator=g, dtype=torch.float64)
    at[text + pictures : text + pictures + sound, 0] = text + torch.arange(sound) * 0.5
    at[-n:] = torch.cartesian_prod(*(torch.arange(m, dtype=torch.float64) for m in video))
    at[-n:, 0] = text + at[-n:, 0] * 2.5
    cuts = torch.arange(at.shape[0]).split([text, pictures, sound, n])
    tags = torch.cat([torch.full((len(c),), tag) for c, tag in zip(cuts, (1, 0, 2, 0))])
    return {
        "hidden_states": torch.randn(batch, pictures + n, 8, generator=g),
        "audio_hidden_states": torch.randn(batch, sound, 4, generator=g),
        "encoder_hidden_states": torch.randn(batch, text, 12, generator=g),
        "timestep": torch.tensor([0.3]), "timestep_indices": torch.zeros(at.shape[0], dtype=torch.long), "token_tags": tags,
        "position_ids": at, "video_indices": torch.cat([cuts[1], cuts[3]]), "audio_indices": cuts[2],
        "text_indices": cuts[0],
    }  # fmt: skip
