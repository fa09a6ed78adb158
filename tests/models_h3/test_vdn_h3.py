"""VDN-H3, saved and loaded again, through its card: every branch, and every rejection of the document."""

from __future__ import annotations

import json
import runpy
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import load_file

import hal
from hal import models, plugins
from hal.errors import CallError, NoKernelError, PolicyError
from hal.facts import Call
from hal.models import minimax_h3
from hal.policy import Policy, Request, Site, Target
from hal.sparse import PackedRows
from hal.sparse.given import take
from models_h3 import CONFIG, FastH3, inputs, vdn

NAME = "hybrid_window_attn_h3"
HERE = runpy.run_path(str(Path(__file__).parents[1] / "backends" / "test_hybrid_window_attn_h3.py"))
masked, definition = HERE["masked"], HERE["definition"]
SMALL = {"text": 6, "sound": 4, "video": (9, 2, 3)}


def built(**changes):
    """A VDN-H3 whose weights do not depend on its architecture, where they are the same."""
    architecture = deepcopy(vdn.ARCHITECTURE)
    for key, value in changes.items():
        owner = next((g for g in ("softmax_attention", "linear_attention") if key in architecture[g]), None)
        (architecture[owner] if owner else architecture)[key] = value
    torch.manual_seed(0)
    return vdn.VdnH3(**CONFIG, hybrid_attention=architecture).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vdn")
    built().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return vdn.VdnH3.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def base(folder):
    """MiniMax-H3 with the same weights, but for what VDN-H3 adds."""
    one = MiniMaxH3Transformer3DModel(**CONFIG).eval()
    missing, extra = one.load_state_dict(load_file(folder / "diffusion_pytorch_model.safetensors"), strict=False)
    assert not missing and all(
        any(n in e for n in ("linear_attention", "softmax_gate", "to_out_linear")) for e in extra
    )
    return one


@torch.no_grad()
def sample(model, x=None, **words):
    """What the attached model computes, and what ran: (component, backend, kernel, runs)."""
    with hal.attach(model, **words) as a:
        out = model(**(x or inputs(**SMALL))).sample
        return out, {(r.component, r.backend, r.kernel, r.runs) for r in a.receipts()}


def reference(model, x=None):
    """The same model with the window and the branch by their definitions."""
    x = x or inputs(**SMALL)
    rows = minimax_h3.rows(x)

    def dispatch(q, k, v, **_):
        a, gate, branch = (take(n) for n in ("hybrid", "gate", "linear"))
        branch.read = None if a.full(rows.video[0]) else definition(branch, a, rows).float()
        return masked(*(t.transpose(1, 2) for t in (q, k, v)), gate, a, rows).transpose(1, 2).float()

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(vdn, "dispatch_attention_fn", dispatch)
        return model(**x).sample


def near(a, b):
    torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


# ---- what runs

RAN = {("transformer", NAME, "hybrid.portable", 3), ("token_refiner", "torch_sdpa", "sdpa.cpu", 2)}


def test_a_checkpoint_is_saved_and_loaded_with_its_architecture(folder, model):
    assert [f.name for f in folder.glob("*.safetensors")] == ["diffusion_pytorch_model.safetensors"]
    assert json.loads((folder / "config.json").read_text())["hybrid_attention"] == vdn.ARCHITECTURE
    near(reference(model), reference(built()))


def test_nobody_asks_and_the_blocks_run_as_they_were_trained(model):
    out, ran = sample(model)
    assert ran == RAN
    near(out, reference(model))
    again, ran = sample(model, attention_backend=NAME)
    assert ran == RAN and again.equal(out)


@pytest.mark.parametrize(
    "changes",
    [
        {"anchor_frames": "none"},
        {"anchor_frames": "rows", "bridge": "none"},
        {"anchor_frames": "columns", "enable_softmax_gate": False},
        {"chunk": 0, "radius": 2, "enable_text_state": False},
        {"delta_rule": "sana_scaled", "short_conv": {"targets": []}},
        {"delta_rule": "vdn_scaled", "a_fp32": False, "short_conv": {"targets": ["q", "k", "v"]}},
        {"radius": 9},  # dense, gated, and no branch
    ],
)
def test_every_architecture(changes):
    one = built(**changes)
    near(sample(one, attention_backend_config={NAME: {"vdn_max_gather_rows": 30}})[0], reference(one))


@pytest.mark.parametrize(
    "sizes", [{"pictures": 5}, {"sound": 0}, {"text": 0}, {"video": (2, 2, 3)}, {"video": (1, 2, 3)}]
)
def test_every_layout_and_batches(model, sizes):
    x = inputs(**{**SMALL, **sizes}, batch=2)
    near(sample(model, x)[0], reference(model, x))


def test_the_branch_and_the_gates_matter(model, base):
    out = sample(model)[0]
    assert not torch.allclose(out, sample(base)[0], atol=1e-3)
    silent = built()
    for block in silent.transformer_blocks:
        torch.nn.init.zeros_(block.attn.to_out_linear.weight)
    assert not torch.allclose(out, sample(silent)[0], atol=1e-3)


def test_everything_has_gradients(model):
    with hal.attach(model):
        model(**inputs(**SMALL)).sample.square().sum().backward()
    for name, p in model.transformer_blocks.named_parameters():
        if any(n in name for n in ("linear_attention", "softmax_gate", "to_out_linear")):
            assert p.grad is not None and p.grad.abs().sum() > 0, name
    model.zero_grad()


# ---- the card, and what it refuses

CATALOG = plugins.catalog()
CALL = Call.of(dtype="bfloat16", head_dim=128, heads=4, batch=1, q_len=4096)


def decide(model, component, backend=None, kind="global", call=CALL, machine="h100"):
    with hal.simulate(machine, packages={"triton": "3.7.0", "flash_attn_3": "3.0.0"}) as m:
        card = models.policy(models.of(model, {"transformer": model}, CATALOG), CATALOG)
        target = Target(component) if kind == "override" else Target()
        requests = (Request(backend, source="somebody", kind=kind, target=target),) if backend else ()
        return hal.resolve(call, m, CATALOG, Policy(requests).over(card).at(Site(component)))


def test_the_card_finds_its_own(model, base):
    (one,) = models.of(model, {"transformer": model}, CATALOG)
    assert (one.card.name, one.gates) == ("vdn_h3", ("*.softmax_gate.up.weight",))
    assert one.geometry["hybrid_attention"] == vdn.ARCHITECTURE
    assert [f.card.name for f in models.of(base, {"transformer": base}, CATALOG)] == ["minimax_h3"]


REFUSED = [
    # component, backend, kind, what the refusal says
    *(
        ("transformer", dense, kind, "would skip VDN-H3's linear branch and its gates")
        for dense in ("fa", "torch_sdpa", "torch_cudnn_sdpa", "video_sparse_attn_h3")
        for kind in ("global", "override", "force")
    ),
    ("text_encoder", "fa", "override", "the H3 text encoder has layers for PyTorch's SDPA only"),
    *((part, NAME, "override", "only") for part in ("text_encoder", "vae", "audio_vae", "token_refiner")),
    *((part, NAME, "force", "only") for part in ("text_encoder", "vae", "audio_vae", "token_refiner")),
]


@pytest.mark.parametrize("component, backend, kind, text", REFUSED)
def test_what_the_card_refuses(model, component, backend, kind, text):
    try:
        d = decide(model, component, backend, kind)
    except PolicyError as e:  # an override that the card forbids word for word is refused before there is a call
        assert kind == "override" and text in str(e)
    else:
        assert d.chosen is None and text in d.error, d.error


def test_what_it_does_not_refuse(model):
    assert decide(model, "transformer").kernel == "hybrid.fa3"
    assert decide(model, "transformer", NAME, call=CALL.but(ulysses=4)).kernel == "hybrid.fa3"
    assert decide(model, "transformer", machine="m1").kernel == "hybrid.portable"
    for component in ("text_encoder", "vae", "token_refiner"):  # a global choice passes them over
        assert decide(model, component, NAME).backend not in (None, NAME)
    assert decide(model, "token_refiner", "fa", "override").backend == "fa"


@pytest.mark.parametrize("backend", [None, NAME])
@pytest.mark.parametrize("fact", [{"ring": 2}, {"compile": True}, {"graph": True}])
def test_ring_compile_and_graphs_are_refused(model, fact, backend):
    d = decide(model, "transformer", backend, call=CALL.but(**fact))
    assert d.chosen is None and next(iter(fact)) in d.error


def test_torch_compile_is_refused(model):
    compiled = torch.compile(model, backend="eager")
    with hal.attach(compiled), torch.no_grad():
        with pytest.raises(NoKernelError, match="compile is asked for; hybrid.portable does not honour it"):
            compiled(**inputs(**SMALL))
    torch._dynamo.reset()


def test_a_dense_backend_is_refused_without_a_smoke_run(model):
    with pytest.raises(NoKernelError, match="skip VDN-H3's linear branch and its gates.* set vdn_h3_dense_smoke"):
        sample(model, attention_backend="torch_sdpa")
    with pytest.raises(NoKernelError, match="skip VDN-H3's linear branch"):
        sample(model, component_attention_backends={"transformer": "torch_sdpa"})


def test_a_smoke_run_is_minimax_h3_with_these_weights(model, base):
    with torch.no_grad():
        wanted = base(**inputs(**SMALL)).sample
    for words in ({}, {"attention_backend": NAME}):
        out, ran = sample(model, **words, attention_backend_config={NAME: {"vdn_h3_dense_smoke": True}})
        assert ran == RAN
        near(out, wanted)


def test_base_and_fast_checkpoints_are_refused(base):
    torch.manual_seed(0)
    for one in (base, FastH3(**CONFIG).eval()):
        with pytest.raises(NoKernelError, match="it has no linear branch; VDN-H3 has"):
            sample(one, attention_backend=NAME)


def test_a_model_that_hands_nothing_over_is_refused_without_a_card_too():
    q = torch.randn(1, 64, 2, 16)
    with pytest.raises(CallError, match="given none: MiniMax-H3 and FastH3 have no linear branch"):
        with hal.sparse.given(rows=PackedRows((10,), (9, 2, 3))):
            hal.attention(q, q, q, backend=NAME)


def test_wrong_geometry_in_the_config_is_an_error_where_the_model_is_loaded():
    with pytest.raises(CallError, match="anchor_frames is 'ends'; it must be one of none, columns, rows, both"):
        built(anchor_frames="ends")
