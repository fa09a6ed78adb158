"""The Video Delta linear branch of VDN-H3: what the window leaves out, summed into states, frame by frame, from both ends.

Pure functions of tensors.  B: batch, F: frames, P: tokens of a frame, H: heads, d: head_dim.  A state is [.., H, d, d]:
values by keys.  What is summed over frames is float32 (float64 for float64).
Conditions: OpenVDN vdn-minimax-h3 src/models/linear_attention, and SGLang's port of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.errors import CallError
from hal.sparse.portable import wide
from hal.sparse.selected import indices

from .window import Architecture, Range

TAPS = 5  # of the short convolution, in rows, columns and frames
EPS = 1e-6
TEXT = 0.5  # both directions start from half of the prompt's state


@dataclass(eq=False)
class LinearBranch:
    """What a model hands over for the linear branch, and what it takes back: ``hal.sparse.given(linear=branch, ...)``.

    Over the same rows as the attention, [B, rows, ..] or packed [rows, ..]:
    ``q``, ``k``, ``v`` [.., H, d]: the projections, neither normed nor rotated.  ``beta`` [.., H]: a sigmoid of one.
    ``gate`` [.., H, d]: a sigmoid of one, by which the output is multiplied.
    ``alpha`` [B, F, H, d], or [F, H, d] packed: how much of each key channel a frame keeps (``decay``), in float32.
    ``norm`` [d]: the weight of the output's RMSNorm.  ``text``: so many of the first rows are the prompt.
    ``convs``: for each of q, k, v that the architecture names, weights [H * d, 1, 5, 5] and [H * d, 1, 5].

    ``read`` is set by the attention: [.., H, d] in the dtype of q, for the model's own output projection; 0 in rows of no
    video.  None: there is nothing to add, as the window has all frames (or in a dense smoke test).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    alpha: Tensor
    gate: Tensor
    norm: Tensor
    text: int = 0
    convs: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    read: Tensor | None = field(default=None, init=False)


def decay(x: Tensor, a_log: Tensor) -> Tensor:
    """alpha, 0 < alpha <= 1, of projections [.., H, d] of a frame's mean, with their bias, and a_log [H]; float32."""
    return torch.exp(-torch.exp(wide(a_log))[:, None] * F.softplus(wide(x)))


def branch(x: LinearBranch, a: Architecture, size: tuple[int, int, int], first: int) -> Tensor:
    """The read of a branch whose tensors have a batch axis: [B, F * P, H, d], of all frames of the video.

    ``size``: frames, rows and columns of the video.  ``first``: its first row.
    """
    frames, height, width = size
    inner, bounds = a.linear(frames)
    per, (b, _, h, d) = height * width, x.q.shape
    if not inner:
        return x.q.new_zeros(b, frames * per, h, d)
    start, stop = first + inner.start * per, first + inner.stop * per
    video = lambda t: t[:, start:stop].unflatten(1, (len(inner), per))
    q, k, v = (
        features(video(t), x.convs.get(n) if n in a.short_conv else None, (height, width), norm=n != "v")
        for n, t in zip("qkv", (x.q, x.k, x.v))
    )
    alpha = wide(x.alpha)[:, inner.start : inner.stop]
    text = None
    if a.enable_text_state and x.text:
        prompt = lambda t: t[:, None, : x.text]  # one frame
        k0, v0 = features(prompt(x.k), norm=True), features(prompt(x.v), norm=False)
        text = text_state(k0, v0, prompt(x.beta), a)
    keep, add = factors(a.delta_rule, alpha, *statistics(k, v, video(x.beta), a.a_fp32), per)
    state = outside(keep, add, alpha, bounds, a.bridge, text)
    out = torch.einsum("bfphk,bfhvk->bfphv", q, state.to(q.dtype))
    out = rms_norm(out, x.norm) * video(x.gate).to(out.dtype)
    return F.pad(out.flatten(1, 2), (0, 0, 0, 0, inner.start * per, (frames - inner.stop) * per))


# ---- features


def features(
    x: Tensor, conv: tuple[Tensor, Tensor] | None = None, size: tuple[int, int] = (1, 1), *, norm: bool
) -> Tensor:
    """Of projections [B, F, P, H, d], the same shape: [short convolution,] SiLU [, L2 norm]."""
    if conv is not None:
        x = short_conv(x, *conv, size)
    x = F.silu(x)
    return F.normalize(x, dim=-1, eps=EPS) if norm else x


def short_conv(x: Tensor, spatial: Tensor, temporal: Tensor, size: tuple[int, int]) -> Tensor:
    """Each channel by itself: over rows and columns of each frame, then over frames; zeros around them."""
    b, frames, per, h, d = x.shape
    flat = x.reshape(b * frames, *size, h * d).permute(0, 3, 1, 2)
    flat = F.conv2d(flat, spatial.to(x.dtype), padding=TAPS // 2, groups=h * d)
    y = flat.permute(0, 2, 3, 1).reshape(b, frames, per, h * d)
    taps = temporal.to(x.dtype)[:, 0]  # [H * d, 5]
    padded = F.pad(y, (0, 0, 0, 0, TAPS // 2, TAPS // 2))
    out = padded[:, :frames] * taps[:, 0]
    for i in range(1, TAPS):
        out = out + padded[:, i : i + frames] * taps[:, i]
    return out.view(b, frames, per, h, d)


# ---- what a frame does to a state


def statistics(k: Tensor, v: Tensor, beta: Tensor, a_fp32: bool = True) -> tuple[Tensor, Tensor]:
    """(A, B) [B, F, H, d, d] of frames: sums over their tokens of beta k k', and of beta v k'.

    A is inverted, so it is summed in float32; B may be summed as it comes.
    """
    keys = wide(k) if a_fp32 else k
    weight = beta[..., None]
    a = wide(torch.einsum("bfphi,bfphj->bfhij", keys * weight.to(keys.dtype), keys))
    b = torch.einsum("bfphv,bfphk->bfhvk", v * weight.to(v.dtype), k)
    return (a + a.transpose(-1, -2)) / 2, wide(b)


def factors(rule: str, alpha: Tensor, a: Tensor, b: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """(T, J) [B, F, H, d, d]: a frame of so many tokens takes a state S to S T + J.  ``alpha`` [B, F, H, d]."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    if rule != "vdn_solve":
        a, b = a / tokens, b * tokens**-0.5
    if rule == "sana_scaled":
        return alpha[..., None] * (eye - a), b
    # Positive definite, so it needs no check, for which the host would wait.  A triangular solve and a product are faster
    # than a solve for both sides.
    lower = torch.linalg.cholesky_ex(a + eye).L
    half = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    inverse = half.transpose(-1, -2) @ half
    return alpha[..., None] * inverse, b @ inverse


def text_state(k: Tensor, v: Tensor, beta: Tensor, a: Architecture) -> Tensor:
    """The state [B, H, d, d] of a prompt's features [B, 1, rows, H, d]: it is written as one frame into an empty state."""
    parts = statistics(k, v, beta, a.a_fp32)
    ones = parts[0].new_ones(()).expand(parts[0].shape[:-1])
    return TEXT * factors(a.delta_rule, ones, *parts, k.shape[2])[1][:, 0]


# ---- states


def states(keep: Tensor, add: Tensor, start: Tensor, ends: Sequence[int]) -> Tensor:
    """The states [B, len(ends), H, d, d] after those frames, rising.  ``keep``, ``add`` [B, F, H, d, d], ``start`` [B, H, d, d].

    The frames between two ends are one map, composed for all of them at once; only these maps follow one another.
    """
    if not ends:
        return add[:, :0]
    firsts = [0, *(e + 1 for e in ends[:-1])]
    longest = max(e + 1 - f for f, e in zip(firsts, ends))
    none = keep.shape[1]  # short runs begin with frames that do nothing
    at = [[t if t >= f else none for t in range(e + 1 - longest, e + 1)] for f, e in zip(firsts, ends)]
    eye = torch.eye(keep.shape[-1], dtype=keep.dtype, device=keep.device).expand_as(keep[:, :1])
    keep, add = torch.cat([keep, eye], 1), torch.cat([add, torch.zeros_like(eye)], 1)
    some = lambda x, i: _pick(x, tuple(run[i] for run in at))
    whole, sums = some(keep, 0), some(add, 0)
    for i in range(1, longest):
        following = some(keep, i)
        whole, sums = whole @ following, sums @ following + some(add, i)
    out, state = [], start
    for i in range(len(ends)):
        state = state @ whole[:, i] + sums[:, i]
        out.append(state)
    return torch.stack(out, 1)


def outside(
    keep: Tensor, add: Tensor, alpha: Tensor, bounds: Sequence[Range], bridge: str, text: Tensor | None
) -> Tensor:
    """The state [B, F, H, d, d] that each frame reads: all frames before its window, and all after it.

    Over the frames between, a state decays by their alpha (bridge alpha), or not (none).  Where there are none before or
    after, it is the prompt's.
    """
    frames = len(bounds)
    start = add.new_zeros(add[:, 0].shape) if text is None else text
    before = sorted({lo - 1 for lo, _ in bounds if lo > 0})
    after = sorted({frames - 2 - hi for _, hi in bounds if hi < frames - 1})  # counted from the end
    left = torch.cat([start[:, None], states(keep, add, start, before)], 1)
    right = torch.cat([start[:, None], states(keep.flip(1), add.flip(1), start, after)], 1)
    ahead = {e: i + 1 for i, e in enumerate(before)}
    behind = {e: i + 1 for i, e in enumerate(after)}
    x = _pick(left, tuple(ahead.get(lo - 1, 0) for lo, _ in bounds))
    y = _pick(right, tuple(behind.get(frames - 2 - hi, 0) for _, hi in bounds))
    if bridge == "none":
        return x + y
    log = alpha.clamp(min=1e-12).log().cumsum(1)
    log = torch.cat([torch.zeros_like(log[:, :1]), log], 1)  # of the frames before each
    since = log[:, 1:] - _pick(log, tuple(max(lo, 0) for lo, _ in bounds))
    until = _pick(log, tuple(min(hi + 1, frames) for _, hi in bounds)) - log[:, :-1]
    return x * since.exp()[..., None, :] + y * until.exp()[..., None, :]


def _pick(x: Tensor, frames: tuple[int, ...]) -> Tensor:
    return x.index_select(1, indices(frames, x.device))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Over the last axis; the mean of squares is float32."""
    mean = wide(x).square().mean(-1, keepdim=True)
    return x * torch.rsqrt(mean + EPS).to(x.dtype) * weight.to(x.dtype)


# ---- what a model may hand over


def checked(x: Any, a: Architecture, q: Tensor, video: tuple[int, int, int], first: int, packed: bool) -> LinearBranch:
    """The branch with a batch axis, for an attention over ``q`` [B, H, rows, d].  Raises CallError for what does not fit."""
    if not isinstance(x, LinearBranch):
        raise CallError(
            f"linear is a {type(x).__name__}; give a LinearBranch of hal.backends.hybrid_window_attn_h3.delta"
        )
    b, h, s, d = q.shape
    rows, heads = "rows" if packed else "B, rows", {"q": d, "k": d, "v": d, "beta": None, "gate": d}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        n: (f"[{rows}, H{', d' if last else ''}]", (b, s, h, *((last,) if last else ()))) for n, last in heads.items()
    }
    shapes["alpha"] = f"[{'' if packed else 'B, '}frames, H, d]", (b, video[0], h, d)
    for n, (axes, wanted) in shapes.items():
        _fits(f"{n} of the linear branch", getattr(x, n), axes, wanted[1:] if packed else wanted)
    _fits("norm of the linear branch", x.norm, "[d]", (d,))
    if sorted(x.convs) != sorted(a.short_conv):
        told = ", ".join(sorted(x.convs)) or "none"
        raise CallError(
            f"convs of the linear branch are {told}; the architecture has {', '.join(a.short_conv) or 'none'}"
        )
    for n, pair in x.convs.items():
        for weight, shape in zip(pair, ((h * d, 1, TAPS, TAPS), (h * d, 1, TAPS)), strict=True):
            _fits(f"a short convolution of {n}", weight, "[H * d, 1, taps..]", shape)
    if isinstance(x.text, bool) or not isinstance(x.text, int) or not 0 <= x.text <= first:
        raise CallError(
            f"text of the linear branch is {x.text!r}; so many rows of the prompt, of {first} before the video"
        )
    if not packed:
        return x
    tensors = {n: getattr(x, n)[None] for n in shapes}
    return LinearBranch(**tensors, norm=x.norm, text=x.text, convs=x.convs)


def _fits(what: str, x: Tensor, axes: str, wanted: tuple[int, ...]) -> None:
    if tuple(x.shape) != wanted:
        raise CallError(f"{what} has shape {tuple(x.shape)}; it must be {axes}, here {wanted}")
