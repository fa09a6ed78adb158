"""MiniMax-H3 and FastH3, saved and loaded again, through their card: what runs where, and what is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import hal
import models_h3
from hal import models, oracle, plugins
from hal.backend import Backend
from hal.backends.video_sparse_attn_h3 import portable
from hal.catalog import Catalog
from hal.errors import CallError, NoKernelError, PolicyError
from hal.facts import Call
from hal.integrations import denoising
from hal.models import minimax_h3
from hal.policy import Policy, Request, Site, Target
from hal.sparse import PackedRows
from hal.sparse.given import take
from models_h3 import CONFIG, FastH3, inputs

NAME = "video_sparse_attn_h3"
ROWS = PackedRows((70, 100), (5, 6, 10))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from diffusers import MiniMaxH3Transformer3DModel

    base, fast = (tmp_path_factory.mktemp(n) for n in ("base", "fast"))
    torch.manual_seed(0)
    MiniMaxH3Transformer3DModel(**CONFIG).save_pretrained(base)
    model = FastH3(**CONFIG)
    for block in model.transformer_blocks:
        torch.nn.init.normal_(block.attn.to_gate_compress.weight, std=0.3)
    model.save_pretrained(fast)
    return base, fast


@pytest.fixture(scope="module")
def base(folders):
    from diffusers import MiniMaxH3Transformer3DModel

    assert [f.name for f in folders[0].glob("*.safetensors")] == ["diffusion_pytorch_model.safetensors"]
    return MiniMaxH3Transformer3DModel.from_pretrained(folders[0]).eval()


@pytest.fixture(scope="module")
def fast(folders):
    return FastH3.from_pretrained(folders[1]).eval()


@torch.no_grad()
def sample(model, x=None, rows=None, step=None, backend=NAME, **config):
    """What the attached model computes, and what ran: (component, backend, kernel, runs)."""
    x = x or inputs()
    with hal.attach(model, attention_backend=backend, attention_backend_config=config or None) as a:
        with hal.context.position(**({} if step is None else {"step": step, "steps": 10})):
            with hal.sparse.given(rows=rows):
                out = model(**x).sample
        return out, {(r.component, r.backend, r.kernel, r.runs) for r in a.receipts()}


def near(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# ---- what runs


def test_only_the_blocks_run_sparse(base):
    with torch.no_grad():
        dense = base(**inputs()).sample
    for share in (0.0, 0.5, 0.9):
        out, ran = sample(base, sparsity=share)
        assert ran == {
            ("transformer", NAME, "vsa_h3.portable", 3),
            ("token_refiner", "torch_sdpa", "sdpa.cpu", 2),
        }
        assert torch.allclose(out, dense, atol=1e-5) is (share == 0.0)


@pytest.mark.parametrize("mode", ["exempt", "compete"])
@pytest.mark.parametrize("pictures", [0, 60])
def test_a_batch_of_any_layout_in_both_modes(base, mode, pictures):
    x = inputs(pictures=pictures, video=(3, 5, 7), batch=2)
    rows = PackedRows((70, pictures, 100), (3, 5, 7))
    out, _ = sample(base, x, sparsity=0.6, vsa_mode=mode)
    given, _ = sample(base, x, rows, sparsity=0.6, vsa_mode=mode)
    assert out.shape == (2, pictures + 105, 8) and out.equal(given)


def test_reference_videos_have_their_own_rate_where_the_rows_say_so(base):
    x = inputs(pictures=60, video=(3, 5, 7))
    rows = PackedRows((70, (3, 4, 5), 100), (3, 5, 7))  # the picture rows are a small video
    low, high = (sample(base, x, rows, sparsity=0.6, vsa_ref_keep_rate=rate)[0] for rate in (0.3, 1.0))
    assert not low.equal(high)
    with pytest.raises(CallError, match="compete is for one video"):
        sample(base, x, rows, vsa_mode="compete")


def test_weights_without_gates_are_purely_sparse(folders, base):
    zero = FastH3(**CONFIG).eval()
    missing, extra = zero.load_state_dict(load_file(folders[0] / "diffusion_pytorch_model.safetensors"), strict=False)
    assert not extra and len(missing) == 3 and all("to_gate_compress" in name for name in missing)
    assert sample(zero, sparsity=0.7)[0].equal(sample(base, sparsity=0.7)[0])


def reference(model, share):
    """FastH3 without hal's attention: dense or sparse by a mask of tokens, and the gated means of tiles."""
    order = ROWS.order((4, 4, 4))
    of = order.slot // 64
    one_hot = torch.nn.functional.one_hot(of).double()
    means = lambda x: torch.einsum("tn,bhtd->bhnd", one_hot, x) / one_hot.sum(0)[:, None]

    def dispatch(q, k, v, **_):
        q, k, v, gate = (x.transpose(1, 2).double() for x in (q, k, v, take("gate")))
        scores = means(q) @ means(k).transpose(-1, -2) * q.shape[-1] ** -0.5
        keep = scores.masked_fill(order.dense, torch.inf).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        keep = (keep < 4 + portable.count(12, share)) | order.dense[:, None]
        out = oracle.attention(q, k, v, attn_mask=keep[:, :, of][..., of], layout="bhsd")[0]
        return (out + (scores.softmax(-1) @ means(v))[:, :, of] * gate).transpose(1, 2).float()

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(models_h3, "dispatch_attention_fn", dispatch)
        return model(**inputs()).sample


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_gates_add_the_means_of_tiles(fast, share):
    near(sample(fast, sparsity=share)[0], reference(fast, share))


def test_dense_layers_are_counted_without_the_refiner_and_keep_the_gate(fast):
    dense, sparse = (sample(fast, sparsity=share)[0] for share in (0.0, 0.9))
    near(sample(fast, vsa_dense_layers="0-2")[0], dense)
    assert sample(fast, vsa_dense_layers="3-9")[0].equal(sparse)
    some = sample(fast, vsa_dense_layers=[0])[0]
    assert not some.equal(sparse) and not torch.allclose(some, dense, atol=1e-5)


def test_dense_first_steps(fast):
    dense, sparse = (sample(fast, sparsity=share)[0] for share in (0.0, 0.9))
    near(sample(fast, step=1, vsa_dense_first_n_steps=2)[0], dense)
    assert sample(fast, step=2, vsa_dense_first_n_steps=2)[0].equal(sparse)
    with pytest.raises(CallError, match="the denoising step for vsa_dense_first_n_steps"):
        sample(fast, vsa_dense_first_n_steps=2)


def test_gates_have_gradients(fast):
    x = inputs(text=5, sound=3, video=(2, 3, 3))
    with hal.attach(fast, attention_backend=NAME):
        fast(**x).sample.square().sum().backward()
    gradients = [block.attn.to_gate_compress.weight.grad for block in fast.transformer_blocks]
    fast.zero_grad()
    assert all(g is not None and g.abs().sum() > 0 for g in gradients)


# ---- how the rows lie


@pytest.mark.parametrize(
    "sizes, rows",
    [
        ({}, ROWS),
        ({"pictures": 60}, PackedRows((70, 60, 100), (5, 6, 10))),
        ({"sound": 0, "video": (1, 7, 5)}, PackedRows((70,), (1, 7, 5))),
    ],
)
def test_rows_are_read_from_the_arguments(sizes, rows):
    assert minimax_h3.rows(inputs(**sizes)) == rows


def test_arguments_that_make_no_grid_are_not_guessed():
    x = inputs()
    x["position_ids"][-1, 1] = 99
    assert minimax_h3.rows(x) is None and minimax_h3.rows({}) is None


def test_a_request_reads_its_rows_once(base, monkeypatch):
    read = []
    real = minimax_h3.rows
    monkeypatch.setattr(denoising.minimax_h3, "rows", lambda given: read.append(1) or real(given))
    x = inputs(video=(2, 3, 3))
    with hal.attach(base, attention_backend=NAME), torch.no_grad():
        for _ in range(3):
            base(**x)
        assert len(read) == 1
        x["position_ids"][-18:, 0] += 1.0  # the same tensor, written into
        base(**x)
    assert len(read) == 2


# ---- the card, and what it refuses

INSTALLED = plugins.catalog()
HYBRID = Backend("hybrid_window_attn_h3", portable=INSTALLED.backends["torch_sdpa"].portable)
CATALOG = Catalog(
    INSTALLED.platforms, {HYBRID.name: HYBRID, **INSTALLED.backends}, models={"minimax_h3": minimax_h3.CARD}
)
CALL = Call.of(dtype="bfloat16", head_dim=128, heads=4, batch=1, q_len=4096)


def decide(model, component, backend, kind="global", call=CALL, machine="h100"):
    with hal.simulate(machine, packages={"triton": "3.7.0", "flash_attn_3": "3.0.0"}) as m:
        card = models.policy(models.of(model, {"transformer": model}, CATALOG), CATALOG)
        target = Target(component) if kind == "override" else Target()
        request = Request(backend, source="somebody", kind=kind, target=target)
        return hal.resolve(call, m, CATALOG, Policy((request,)).over(card).at(Site(component)))


def test_the_card_finds_both_and_tells_which_has_gates(base, fast):
    found = lambda m: [(f.card.name, f.gates) for f in models.of(m, {"transformer": m}, CATALOG)]
    assert found(base) == [("minimax_h3", ())]
    assert found(fast) == [("minimax_h3", ("*.to_gate_compress.weight",))]


def test_weights_with_a_linear_branch_are_another_models():
    one = lambda name: models.found([minimax_h3.CARD], "transformer", minimax_h3.CLASSES, {}, [name])
    assert one("transformer_blocks.0.attn.to_q.weight")
    assert not one("transformer_blocks.0.attn.to_out_linear.weight")
    assert not one("transformer_blocks.0.attn.linear_attention.beta_proj.weight")


REFUSED = [
    # component, backend, kind, what the refusal says
    ("text_encoder", "fa", "override", "the H3 text encoder has layers for PyTorch's SDPA only"),
    ("text_encoder", NAME, "override", "the H3 text encoder has layers for PyTorch's SDPA only"),
    ("vae", NAME, "override", "only the transformer's blocks attend to a packed video"),
    ("token_refiner", NAME, "force", "only the transformer's blocks attend to a packed video"),
    ("transformer", HYBRID.name, "global", "it has no linear branch; VDN-H3 has"),
    ("transformer", HYBRID.name, "override", "it has no linear branch; VDN-H3 has"),
    ("transformer", HYBRID.name, "force", "it has no linear branch; VDN-H3 has"),
]


@pytest.mark.parametrize("which", ["base", "fast"])
@pytest.mark.parametrize("component, backend, kind, text", REFUSED)
def test_what_the_card_refuses(request, which, component, backend, kind, text):
    try:
        said = decide(request.getfixturevalue(which), component, backend, kind).error
    except PolicyError as e:  # what can never be is refused before there is a call
        said = str(e)
    assert text in said


@pytest.mark.parametrize("fact", [{"ring": 2}, {"compile": True}, {"graph": True}])
def test_ring_compile_and_graphs_are_refused(base, fact):
    d = decide(base, "transformer", NAME, call=CALL.but(**fact))
    assert d.chosen is None and next(iter(fact)) in d.error


def test_what_is_not_refused(base):
    assert decide(base, "transformer", NAME, call=CALL.but(ulysses=4)).kernel == "vsa_h3.triton"
    assert decide(base, "transformer", NAME, machine="a100").kernel == "vsa_h3.triton"
    assert decide(base, "transformer", NAME, machine="m1").kernel == "vsa_h3.portable"
    for component in ("text_encoder", "vae", "token_refiner"):  # a global choice passes them over
        assert decide(base, component, NAME).backend not in (None, NAME)
    assert decide(base, "text_encoder", "torch_sdpa", "override").backend == "torch_sdpa"
    assert decide(base, "transformer", "fa").backend == "fa"


class Pipe:
    def __init__(self, **components):
        self.components = components
        vars(self).update(components)


@pytest.fixture(scope="module")
def encoder():
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(vocab_size=99, bos_token_id=0, eos_token_id=1, **sizes)).eval()


@torch.no_grad()
def test_a_pipeline_end_to_end(fast, encoder):
    words = torch.ones(1, 3, dtype=torch.long)
    with hal.attach(Pipe(transformer=fast, text_encoder=encoder), attention_backend=NAME) as a:
        encoder(words)
        fast(**inputs())
        assert {(r.component, r.backend) for r in a.receipts()} == {
            ("transformer", NAME),
            ("token_refiner", "torch_sdpa"),
            ("text_encoder", "torch_sdpa"),
        }
    with pytest.raises(NoKernelError, match="text_encoder=video_sparse_attn_h3"):
        with hal.attach(
            Pipe(transformer=fast, text_encoder=encoder), component_attention_backends={"text_encoder": NAME}
        ):
            encoder(words)


def test_torch_compile_is_refused(base):
    small = type(base)(**{**CONFIG, "num_layers": 1, "num_refiner_layers": 1})
    compiled = torch.compile(small, backend="eager")
    with hal.attach(compiled, attention_backend=NAME), torch.no_grad():
        with pytest.raises(PolicyError, match="compile is asked for; vsa_h3.portable does not honour it"):
            compiled(**inputs(5, 0, 3, (2, 3, 3)))
    torch._dynamo.reset()


def test_gates_are_not_dropped_in_silence(fast):
    with pytest.raises(CallError, match="gate was given, and no attention inside computes with it"):
        sample(fast, backend="torch_sdpa")


def test_rows_of_another_request_are_refused(base):
    with pytest.raises(CallError, match=r"was given 470 rows, and the packed rows are 7 \+ 5x6x10: 307 in all"):
        sample(base, rows=PackedRows((7,), (5, 6, 10)))


def test_without_an_attachment_or_rows_it_says_what_to_write(base):
    x = torch.randn(1, 470, 2, 16)
    with pytest.raises(CallError, match=r"hal\.attach a MiniMaxH3Transformer3DModel"):
        hal.attention(x, x, x, backend=NAME)
