"""VSA: by its definition, its settings, its gate, and the run of a backend that needs the grid."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

import hal
from hal import oracle, policy, probe, sparse
from hal.backends.video_sparse_attn import BACKEND, PORTABLE, TRITON, VSA, VSA_FASTVIDEO, native, portable
from hal.backends.video_sparse_attn.settings import Settings
from hal.config import Setting
from hal.context import position
from hal.errors import CallError, NoKernelError
from hal.facts import Call
from hal.sparse import Order
from hal.testing import fakes

settings = hypothesis_settings(max_examples=15, deadline=None)
sides = st.integers(1, 6)
grids = st.tuples(sides, sides, st.integers(1, 11))


def tensors(seed, b, h, kv_heads, s, d=8):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(b, n, s, d, generator=g, dtype=torch.float64) for n in (h, kv_heads, kv_heads))


def cubes(grid, text=0, first=False):
    """The block of each token, text in chunks of 64: int64 [tokens]."""
    at = torch.cartesian_prod(*(torch.arange(n) // 4 for n in grid)).view(-1, 3)
    sizes = torch.tensor([-(-n // 4) for n in grid])
    video, words = (at[:, 0] * sizes[1] + at[:, 1]) * sizes[2] + at[:, 2], torch.arange(text) // 64
    n = int(sizes.prod())
    return (torch.cat([words, video + -(-text // 64)]) if first else torch.cat([video, words + n])), n


def definition(q, k, v, grid, share, *, text=0, first=False, scale=None, gate=None, compress=False):
    """VSA in float64, token by token: means of cubes, the best of each, masked softmax, gated means of values."""
    of, n = cubes(grid, text, first)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    one_hot = torch.nn.functional.one_hot(of).double()
    means = lambda x: torch.einsum("tn,bhtd->bhnd", one_hot, x) / one_hot.sum(0)[:, None]
    scores = means(q) @ means(k).transpose(-1, -2) * scale
    video = torch.zeros(scores.shape[-1], dtype=torch.bool)
    video[of[text if first else 0] : of[text if first else 0] + n] = True
    keep = torch.ones_like(scores, dtype=torch.bool)
    ranked = scores.masked_fill(~video, -torch.inf).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    kept = max(1, min(n, math.ceil((1 - share) * n - 1e-9)))
    keep[..., video, :] = (ranked < kept)[..., video, :] | ~video
    out = oracle.attention(q, k, v, attn_mask=keep[..., of, :][..., of], layout="bhsd", scale=scale)[0]
    if gate is not None or compress:
        coarse = (scores.softmax(-1) @ means(v))[..., of, :]
        out = out + coarse * (1 if gate is None else gate.transpose(1, 2))
    return out


def running(call=None, **words):
    return portable.bind(call or Call(head_dim=8), Settings(**words))


# ---- the run


@given(
    grid=grids, text=st.integers(0, 70), first=st.booleans(), b=st.integers(1, 2), kv_heads=st.sampled_from([1, 2]),
    share=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.99]), scale=st.sampled_from(["default", 0.3]),
    branch=st.sampled_from(["none", "gate", "always"]), seed=st.integers(0, 99),
)  # fmt: skip
@settings
def test_equals_its_definition(grid, text, first, b, kv_heads, share, scale, branch, seed):
    q, k, v = tensors(seed, b, 2, kv_heads, math.prod(grid) + text)
    run = running(Call(head_dim=8, scale=scale), sparsity=share, compress_without_gate=branch == "always")
    gate = torch.randn(b, q.shape[2], 2, 8, dtype=torch.float64) if branch == "gate" else None
    with hal.grid(*grid, text=text, text_first=first):
        if gate is None:
            out = run(q, k, v, None, None)
        else:
            with sparse.given(gate=gate):
                out = run(q, k, v, None, None)
    wanted = definition(
        q, k, v, grid, share, text=text, first=first, scale=None if scale == "default" else scale, gate=gate,
        compress=branch == "always",
    )  # fmt: skip
    # Means are float32, so the coarse branch is; the fine one is float64 wherever the same cubes are chosen.
    torch.testing.assert_close(out, wanted, atol=1e-10 if branch == "none" else 2e-5, rtol=0)


@given(grid=grids, text=st.integers(0, 9), seed=st.integers(0, 99))
@settings
def test_without_sparsity_and_gate_it_is_dense(grid, text, seed):
    q, k, v = tensors(seed, 1, 2, 1, math.prod(grid) + text)
    with hal.grid(*grid, text=text):
        out = running()(q, k, v, None, None)
    torch.testing.assert_close(out, oracle.attention(q, k, v, layout="bhsd")[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_gate_of_zero_changes_no_bit(dtype):
    q, k, v = (x.to(dtype) for x in tensors(0, 2, 2, 2, 5 * 6 * 7))
    run = running(sparsity=0.5)
    with hal.grid(5, 6, 7):
        plain = run(q, k, v, None, None)
        with sparse.given(gate=torch.zeros(2, 210, 2, 8, dtype=dtype)):
            gated = run(q, k, v, None, None)
    assert gated.dtype is dtype and gated.equal(plain)


@given(grid=grids, share=st.floats(0, 1, exclude_max=True), seed=st.integers(0, 99))
@settings
def test_equal_values_stay_what_they_are_and_the_coarse_branch_adds_them_once(grid, share, seed):
    q, k, v = tensors(seed, 1, 2, 2, math.prod(grid))
    v = v[:, :, :1].expand_as(v)
    with hal.grid(*grid):
        fine = running(sparsity=share)(q, k, v, None, None)
        both = running(sparsity=share, compress_without_gate=True)(q, k, v, None, None)
    torch.testing.assert_close(fine, v, atol=1e-10, rtol=0)
    torch.testing.assert_close(both, 2 * v, atol=1e-5, rtol=0)


@given(seed=st.integers(0, 99), share=st.sampled_from([0.4, 0.8]))
@settings
def test_batches_and_heads_do_not_touch_each_other(seed, share):
    q, k, v = tensors(seed, 2, 2, 2, 6 * 5 * 9)
    run = running(sparsity=share)
    with hal.grid(6, 5, 9):
        whole = run(q, k, v, None, None)
        for i in range(2):
            for j in range(2):
                one = run(*(x[i : i + 1, j : j + 1] for x in (q, k, v)), None, None)
                torch.testing.assert_close(one, whole[i : i + 1, j : j + 1], atol=1e-10, rtol=0)


def test_gradients_are_the_definitions():
    q, k, v = (x.requires_grad_() for x in tensors(3, 1, 2, 1, 5 * 6 * 7))
    gate = torch.randn(1, 210, 2, 8, dtype=torch.float64, requires_grad=True)
    with hal.grid(5, 6, 7), sparse.given(gate=gate):
        mine = torch.autograd.grad(running(sparsity=0.5)(q, k, v, None, None).sin().sum(), (q, k, v, gate))
    wanted = definition(q, k, v, (5, 6, 7), 0.5, gate=gate).sin().sum()
    for a, b in zip(mine, torch.autograd.grad(wanted, (q, k, v, gate))):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def test_on_structured_data_the_best_cubes_are_nearly_all_of_it():
    """Each cube is one of 16 clusters: keys of other clusters hardly count.  Random cubes of that number are the yardstick."""
    grid, g = (8, 16, 16), torch.Generator().manual_seed(0)
    of, n = cubes(grid)
    cluster = torch.arange(n) // 2
    noise = lambda a: torch.randn(2048, 64, generator=g) * a
    centre, value = torch.randn(16, 64, generator=g) * 1.2, torch.randn(16, 64, generator=g)
    q, k, v = ((x[cluster[of]] + noise(a))[None, None] for x, a in ((centre, 0.4), (centre, 0.4), (value, 0.3)))
    dense = oracle.attention(q, k, v, layout="bhsd")[0]
    with hal.grid(*grid):
        out = running(Call(head_dim=64), sparsity=0.875)(q, k, v, None, None).double()
    order = Order.of(grid, (4, 4, 4))
    chance = torch.rand(1, 1, n, n, generator=g).argsort(-1).argsort(-1) < n // 8
    random = order.from_blocks(hal.sparse.block_sparse_attention(*map(order.to_blocks, (q, k, v)), order.mask(chance)))
    assert torch.cosine_similarity(out.flatten(), dense.flatten(), 0) > 0.999
    assert (out - dense).norm() * 10 <= (random - dense).norm()


# ---- how much is kept, and where


@example(n=10, percent=70)  # (1 - 0.7) * 10 is a little more than 3
@given(n=st.integers(1, 500), percent=st.integers(0, 99))
@settings
def test_the_number_of_tiles_is_that_of_whole_percents_and_falls_with_sparsity(n, percent):
    kept = portable.count(n, percent / 100)
    assert kept == max(1, -(-(100 - percent) * n // 100))  # in whole numbers, so without a rounding error
    assert kept >= portable.count(n, min(percent + 1, 99) / 100)


@pytest.mark.parametrize(
    "step, layer, share", [(0, 5, 0.0), (1, 5, 0.2), (4, 5, 0.2), (5, 5, 0.9), (40, 5, 0.9), (40, 2, 0.0), (0, 0, 0.0)]
)
def test_the_schedule(step, layer, share):
    s = Settings(sparsity=0.0, schedule=((1, 0.2), (5, 0.9)), dense_layers="0-2")
    with position(step=step, steps=50, layer=layer):
        assert portable.sparsity(s, hal.context.where()) == share


@pytest.mark.parametrize(
    "words, text",
    [
        ({"sparsity": 1.0}, "less than 1"),
        ({"sparsity": -0.1}, "greater than or equal to 0"),
        ({"sparsity": True}, "number"),
        ({"VSA_sparsity": 0.5, "sparsity_": 1}, "sparsity_"),
        ({"schedule": ((5, 0.5), (1, 0.2))}, "must rise"),
        ({"schedule": ((1, 0.5), (1, 0.2))}, "must rise"),
        ({"schedule": ((1, 1.0),)}, "less than 1"),
    ],
)
def test_settings_that_are_wrong(words, text):
    with pytest.raises(ValidationError, match=text):
        Settings(**words)


@pytest.mark.parametrize(
    "grid, words, text",
    [
        (None, {}, r"video_sparse_attn .* 24 tokens .* no grid is set; write with hal\.grid\(.*hal\.attach"),
        ((2, 3, 5), {}, r"24 tokens, and the grid is 2 x 3 x 5 = 30; set the grid"),
        ((2, 3, 4), {"schedule": ((1, 0.5),)}, r"the denoising step for schedule"),
        ((2, 3, 4), {"dense_layers": 1}, r"the index of the layer for dense_layers"),
    ],
)
def test_calls_that_do_not_fit(grid, words, text):
    q, k, v = tensors(0, 1, 1, 1, 24)
    with position() if grid is None else hal.grid(*grid):
        with pytest.raises(CallError, match=text):
            running(sparsity=0.5, **words)(q, k, v, None, None)


def test_a_gate_must_fit_and_must_be_used():
    q, k, v = tensors(0, 1, 2, 2, 24)
    with hal.grid(2, 3, 4):
        with pytest.raises(CallError, match=r"\(1, 2, 24, 8\); it must be \[B, S, H, Dv\], here \(1, 24, 2, 8\)"):
            with sparse.given(gate=v):
                running(sparsity=0.5)(q, k, v, None, None)
        with pytest.raises(CallError, match="gate was given, and no attention inside computes with it"):
            with sparse.given(gate=v.transpose(1, 2)):
                hal.attention(q, k, v, layout="bhsd")
        with pytest.raises(ZeroDivisionError):  # an error inside stays what it is
            with sparse.given(gate=v):
                raise ZeroDivisionError


# ---- through hal.attention


def test_hal_attention_runs_the_portable_form_with_its_settings_and_the_running_grid():
    q, k, v = (x.float().transpose(1, 2) for x in tensors(0, 1, 2, 1, 5 * 6 * 7))
    given = (Setting("video_sparse_attn", "", Settings(sparsity=0.8)),)
    with fakes.workbench(BACKEND), hal.context.changed(policy=policy.Policy(settings=given)):
        for grid in ((5, 6, 7), (7, 6, 5)):  # one decision, two grids
            with hal.grid(*grid):
                out = hal.attention(q, k, v, enable_gqa=True, backend="video_sparse_attn")
            wanted = definition(*(x.double().transpose(1, 2) for x in (q, k, v)), grid, 0.8).transpose(1, 2)
            torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=0)
        with pytest.raises(CallError, match="no grid is set"):
            hal.attention(q, k, v, enable_gqa=True, backend="video_sparse_attn")


@pytest.mark.parametrize(
    "arguments", [{"is_causal": True}, {"window": 3}, {"return_lse": True}, {"attn_mask": torch.ones(210, 210) > 0}]
)
def test_what_it_cannot_do_is_refused_before_the_grid_is_looked_at(arguments):
    q, k, v = (x.float().transpose(1, 2) for x in tensors(0, 1, 2, 2, 210))
    with fakes.workbench(BACKEND), pytest.raises(NoKernelError, match="video_sparse_attn"):
        hal.attention(q, k, v, backend="video_sparse_attn", **arguments)


# ---- the packages


RECORDED = ["vsa-0.0.4", "vsa-0.0.5", "fastvideo_kernel-0.2.6", "fastvideo_kernel-0.3.5"]


def compute(a):
    """What the packages compute: no scale, means in q's dtype, weight 1 where none is given."""
    q, k, v, sizes = a["q"], a["k"], a["v"], a["variable_block_sizes"]
    n = sizes.numel()
    assert a["block_size"] == (4, 4, 4) and q.shape[2] == 64 * n
    assert a.get("q_variable_block_sizes", sizes).equal(sizes)
    means = [(x.unflatten(2, (n, 64)).float().sum(3) / sizes[:, None]).to(x.dtype) for x in (q, k, v)]
    scores = means[0] @ means[1].transpose(-1, -2) * q.shape[-1] ** -0.5
    keep = scores.argsort(dim=-1, descending=True, stable=True).argsort(-1) < a["topk"]
    real = (torch.arange(64) < sizes[:, None]).flatten()
    seen = keep.repeat_interleave(64, 2).repeat_interleave(64, 3) & real
    fine = oracle.attention(q, k, v, attn_mask=seen, layout="bhsd")[0]
    coarse = (scores.softmax(-1) @ means[2]).repeat_interleave(64, 2)
    weight = 1 if a["compress_attn_weight"] is None else a["compress_attn_weight"]
    return (fine + coarse * weight).to(q.dtype)


def package(name):
    return fakes.of(name, {"video_sparse_attn": compute})


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("branch", ["none", "gate", "always"])
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_package_gives_what_the_portable_form_gives(name, branch, share):
    fake = package(name)
    q, k, v = tensors(1, 2, 2, 2, 210)
    s = Settings(sparsity=share, compress_without_gate=branch == "always")
    gate = torch.sin(torch.arange(210 * 32.0)).view(2, 210, 2, 8) if branch == "gate" else None
    outs = []
    with hal.grid(5, 6, 7):
        for run in (
            native._bound(fake.functions["video_sparse_attn"], s),
            portable.bind(Call(head_dim=8), s),
        ):
            with sparse.given(gate=gate):
                outs.append(run(q, k, v, None, None))
    torch.testing.assert_close(*outs, atol=2e-5, rtol=0)
    (call,) = fake.calls
    assert call["topk"] == portable.count(8, share)
    assert branch != "none" or not call["compress_attn_weight"].any()  # None would be a weight of 1


@pytest.mark.parametrize("name", RECORDED)
def test_a_package_is_found_proven_and_called_by_its_keywords(name):
    q, k, v = (x.bfloat16().transpose(1, 2) for x in tensors(2, 1, 2, 2, 210, 64))
    r = fakes.record(name)
    given = (Setting("video_sparse_attn", "", Settings(sparsity=0.6)),)
    with fakes.installed(name, {"video_sparse_attn": compute}) as fake:
        with fakes.workbench(BACKEND, **{r.distribution.replace("-", "_"): r.version}), hal.grid(5, 6, 7):
            with hal.context.changed(policy=policy.Policy(settings=given)):
                assert hal.explain(q, k, v, backend="video_sparse_attn").kernel == (
                    "vsa" if r.module == "vsa" else "vsa.fastvideo"
                )
                out = hal.attention(q, k, v, backend="video_sparse_attn")
                with pytest.raises(NoKernelError, match="scale"):
                    hal.attention(q, k, v, scale=0.5, backend="video_sparse_attn", return_lse=True)
    wanted = definition(*(x.double().transpose(1, 2) for x in (q, k, v)), (5, 6, 7), 0.6).transpose(1, 2)
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-2)
    assert set(fake.calls[-1]) == {"symbol", *r.symbols["video_sparse_attn"].parameters}


@pytest.mark.parametrize("kernel", [VSA, VSA_FASTVIDEO])
def test_another_package_of_that_name_is_no_proof(kernel):
    """vsa is a word that anybody may use; fastvideo-kernel 0.1.0 took no sizes of the queries' blocks."""
    (needs,) = kernel.needs
    wrong = lambda q, k, v, variable_block_sizes, topk, compress_attn_weight=None: q
    with fakes.modules({needs.module: {"video_sparse_attn": wrong}}):
        assert probe.prove(needs).state == "wrong_distribution"
    with fakes.modules({needs.module: {"analyse": wrong}}):
        assert probe.prove(needs).state == "missing_symbol"


def test_packages_refuse_text():
    q = torch.empty(1, 27, 1, 64, device="meta")
    run = native._bound(package(RECORDED[0]).functions["video_sparse_attn"], Settings())
    with hal.grid(2, 3, 4, text=3):
        assert "3 text tokens" in native.confirm(q, q, q, None, Call(layout="bshd"))
        assert native.confirm(q[:, :24], q, q, None, Call(layout="bshd")) is None
        with pytest.raises(CallError, match="3 text tokens"):
            run(*tensors(0, 1, 1, 1, 27), None, None)


def test_the_declaration():
    assert BACKEND.quality == "lossy" and BACKEND.roles == {"self"}
    for kernel in (VSA, VSA_FASTVIDEO, TRITON, PORTABLE):
        assert not kernel.honours & {"causal", "rectangular", "varlen", "compile", "graph", "window", "dropout", "lse"}
        assert callable(kernel.binder())
    assert not VSA.honours  # its scale is fixed
