"""A tiny VDN-H3: diffusers' MiniMax-H3 with the gates and the linear branch of the checkpoint, by its parameter names."""

from __future__ import annotations

import inspect

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor, _apply_rotary_emb
from torch import nn

import hal
from hal.backends.hybrid_window_attn_h3.delta import LinearBranch, decay
from hal.backends.hybrid_window_attn_h3.window import Architecture
from hal.models import minimax_h3

ARCHITECTURE = {
    "anchor_frames": "both", "enable_softmax_gate": True, "softmax_attention": {"chunk": 2, "radius": 1},
    "linear_attention": {"a_fp32": True, "bridge": "alpha", "delta_rule": "vdn_solve", "enable_text_state": True,
                         "linear_head_dim": 16, "short_conv": {"targets": ["k", "v"]}},
}  # fmt: skip


class Hybrid(MiniMaxH3AttnProcessor):
    def __call__(self, attn, hidden_states, rotary_emb=None, attention_mask=None):
        x, a, linear, rows = hidden_states, attn.architecture, attn.linear_attention, attn.rows
        heads = lambda t: t.unflatten(-1, (attn.heads, -1))
        q, k, v = (heads(to(x)) for to in (attn.to_q, attn.to_k, attn.to_v))
        frames, height, width = rows.video
        video = x[:, rows.first : rows.first + frames * height * width]
        mean = video.unflatten(1, (frames, height * width)).float().mean(2)
        branch = LinearBranch(
            q, k, v,
            beta=linear["beta_proj"](x).sigmoid(),
            alpha=decay(heads(linear["alpha"](mean)), linear["alpha"].A_log),
            gate=heads(linear["output_gate"](x)).sigmoid(),
            norm=linear["norm"].weight,
            text=attn.text,
            convs={n: tuple(linear["short_conv"][f"{n}_{part}"].weight for part in ("sp", "tm")) for n in a.short_conv},
        )  # fmt: skip
        q, k = (_apply_rotary_emb(t, *rotary_emb) for t in (attn.norm_q(q), attn.norm_k(k)))
        gate = attn.softmax_gate["up"](x).sigmoid() if a.enable_softmax_gate else None
        with hal.sparse.given(hybrid=a, gate=gate, linear=branch):
            out = dispatch_attention_fn(q, k, v, backend=self._attention_backend, parallel_config=self._parallel_config)
        out = attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))
        return out if branch.read is None else out + attn.to_out_linear(branch.read.flatten(2, 3))


class LowRank(nn.Module):
    def __init__(self, hidden, inner, channels, bias):
        super().__init__()
        self.down, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, channels, bias=bias)

    def forward(self, x):
        return self.up(self.down(x))


class Alpha(LowRank):
    def __init__(self, hidden, inner, heads):
        super().__init__(hidden, inner, heads * inner, False)
        self.A_log, self.dt_bias = nn.Parameter(torch.randn(heads)), nn.Parameter(torch.randn(heads * inner))

    def forward(self, x):
        return super().forward(x) + self.dt_bias


class VdnH3(MiniMaxH3Transformer3DModel):
    def __init__(self, *args, hybrid_attention, **config):
        super().__init__(*args, **config)
        self.register_to_config(hybrid_attention=hybrid_attention)
        a, hidden = Architecture.of(self.config), self.config.hidden_size
        for block in self.transformer_blocks:
            attn, d = block.attn, a.linear_head_dim
            channels = attn.heads * d
            conv = lambda cls, n=channels: cls(n, n, 5, groups=n, bias=False)
            attn.architecture = a
            attn.linear_attention = nn.ModuleDict({
                "alpha": Alpha(hidden, d, attn.heads),
                "beta_proj": nn.Linear(hidden, attn.heads, bias=False),
                "output_gate": LowRank(hidden, d, channels, True),
                "norm": nn.RMSNorm(d),
                "short_conv": nn.ModuleDict({
                    f"{n}_{part}": conv(cls) for n in a.short_conv for part, cls in (("sp", nn.Conv2d), ("tm", nn.Conv1d))
                }),
            })  # fmt: skip
            attn.softmax_gate = nn.ModuleDict({"up": nn.Linear(hidden, attn.heads)} if a.enable_softmax_gate else {})
            attn.to_out_linear = nn.Linear(channels, hidden, bias=False)
            attn.set_processor(Hybrid())

    def forward(self, *args, **given):
        rows = minimax_h3.rows(given)
        for block in self.transformer_blocks:
            block.attn.rows, block.attn.text = rows, given["text_indices"].numel()
        return super().forward(*args, **given)


_parameters = dict(inspect.signature(MiniMaxH3Transformer3DModel.__init__).parameters)
_parameters["hybrid_attention"] = inspect.Parameter("hybrid_attention", inspect.Parameter.KEYWORD_ONLY)
VdnH3.__init__.__signature__ = inspect.Signature(list(_parameters.values()))  # the keys of its config
VdnH3.__name__ = "MiniMaxH3Transformer3DModel"  # as its checkpoints name it
