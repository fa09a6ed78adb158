"""Random attention calls for hypothesis: tensors, arguments, and what the oracle says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from hal import context, oracle
from hal.policy import Policy, Request

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MASKS = ("b11k", "bk", "b1qk", "bhqk", "11qk", "1hqk", "bh1k", "111k", "1h1k", "qk", "k", "b111", "1111", "1hq1")
STRIDES = ("plain", "heads first", "rows apart", "columns apart", "batch repeated")


@dataclass
class Drawn:
    """One call: its tensors, arguments of ``hal.attention``, and how it was drawn."""

    q: Tensor
    k: Tensor
    v: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Drawn({self.how})"

    @property
    def mask(self) -> Tensor | None:
        return self.arguments.get("attn_mask")

    def copied(self, grad: bool = False) -> Drawn:
        """The same values in tensors of their own."""
        q, k, v = (t.detach().double().requires_grad_(grad) for t in (self.q, self.k, self.v))
        return Drawn(q, k, v, dict(self.arguments), self.how)

    def by_oracle(self) -> tuple[Tensor, Tensor]:
        known = ("attn_mask", "is_causal", "scale", "window", "layout")
        return oracle.attention(self.q, self.k, self.v, **{k: x for k, x in self.arguments.items() if k in known})


def strided(shape: tuple[int, ...], dtype: torch.dtype, how: str, g: torch.Generator) -> Tensor:
    """A tensor of this shape with memory laid out in one of the ways that models do."""
    if how == "heads first":
        b, s, h, d = shape
        return torch.randn(b, h, s, d, generator=g).to(dtype).transpose(1, 2)
    if how == "rows apart":  # one third of a fused projection
        return torch.randn(*shape[:3], 3 * shape[3], generator=g).to(dtype)[..., shape[3] : 2 * shape[3]]
    if how == "columns apart":
        return torch.randn(*shape[:3], 2 * shape[3], generator=g).to(dtype)[..., ::2]
    if how == "batch repeated":
        return torch.randn(1, *shape[1:], generator=g).to(dtype).expand(shape)
    return torch.randn(shape, generator=g).to(dtype)


def mask_of(letters: str, b: int, h: int, q: int, k: int, kind: str, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    size = {"b": b, "h": h, "q": q, "k": k, "1": 1}
    shape = [size[c] for c in letters]
    keep = torch.rand(shape, generator=g) < 0.6
    if kind == "bool":
        return keep
    return (
        torch.randn(shape, generator=g)
        .masked_fill(~keep & (torch.rand(shape, generator=g) < 0.7), -torch.inf)
        .to(dtype)
    )


@st.composite
def calls(
    draw: Any, dtypes: Any = tuple(TOLERANCE), masks: Any = MASKS, lse: bool | None = None, equal_dims: bool = False
) -> Drawn:
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype, layout = draw(st.sampled_from(dtypes)), draw(st.sampled_from(("bshd", "bhsd")))
    b, kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 1, 2, 3)))
    q_len = draw(st.integers(1, 40))
    kv_len = draw(st.one_of(st.just(q_len), st.integers(1, 40)))
    d = draw(st.sampled_from((1, 4, 7, 8, 16, 24, 40)))
    v_d = d if equal_dims else draw(st.sampled_from((d, d, d, 8, 12)))
    hows = [draw(st.sampled_from(STRIDES)) for _ in range(3)]
    heads = kv_heads * groups
    shapes = [(b, q_len, heads, d), (b, kv_len, kv_heads, d), (b, kv_len, kv_heads, v_d)]
    q, k, v = (strided(s, dtype, how, g) for s, how in zip(shapes, hows))
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    arguments: dict[str, Any] = {"layout": layout, "enable_gqa": groups > 1 or draw(st.booleans())}
    arguments["is_causal"] = draw(st.booleans())
    arguments["scale"] = draw(st.sampled_from((None, None, 0.3, 1e-6, 1.0, d**-0.5)))
    arguments["window"] = draw(st.sampled_from((None, None, None, 3, (2, -1), (-1, 5), (0, 0), (4, 1))))
    arguments["return_lse"] = draw(st.booleans()) if lse is None else lse
    kind = draw(st.sampled_from(("none", "none", "bool", "additive"))) if masks else "none"
    letters = ""
    if kind != "none":
        letters = draw(st.sampled_from(masks))
        unclear = letters in ("bk", "qk") and kind == "bool" and q_len == b
        if unclear or (letters == "bk" and kind == "additive"):
            letters = "11qk"
        of = draw(st.sampled_from((dtype, torch.float32)))
        arguments["attn_mask"] = mask_of(letters, b, heads, q_len, kv_len, kind, of, g)
    how = {
        "dtype": dtype,
        "q": tuple(q.shape),
        "k": tuple(k.shape),
        "v": tuple(v.shape),
        "strides": hows,
        "mask": (kind, letters),
    }
    return Drawn(q, k, v, arguments, {**how, **{n: x for n, x in arguments.items() if n != "attn_mask"}})


def kernel(name: str) -> Any:
    """Inside, the kernel is required."""
    return context.changed(policy=Policy((Request("torch_sdpa", kernel=name, source="the test"),)))


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)
