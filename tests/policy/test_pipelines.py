"""The words of policy on real pipelines: who follows them, who does not, and what is told of one that nobody could follow."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from attached import Plain, sample
from torch import nn

import hal
from hal.errors import AttachError, NoKernelError, PolicyError
from hal.testing import tiny

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

# The components of each that hold attention, with the roles in which they have it.
ROLES = {
    "wan": {"text_encoder": {"self"}, "transformer": {"self", "cross"}, "vae": {"self"}},
    "flux": {"text_encoder": {"self"}, "text_encoder_2": {"self"}, "transformer": {"self"}, "vae": {"self"}},
    "sd3": {c: {"self"} for c in ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae")},
}
TARGETS = [
    *((name, c, c) for name, components in ROLES.items() for c in components),
    ("wan", "transformer.cross", "transformer"),
    ("wan", "transformer.self", "transformer"),
    ("wan", "transformer@0", "transformer"),
]
_built = {}


def built(name):
    """A tiny pipeline, and what each of its components was given in a plain run and gave."""
    if name not in _built:
        pipeline = tiny.PIPELINES[name]()
        calls = {}
        undo = []
        for component in ROLES[name]:
            part = getattr(pipeline, component)
            method = "decode" if component == "vae" else "forward"

            own = getattr(part, method)

            def watched(*args, _of=component, _run=own, **kwargs):
                out = _run(*args, **kwargs)
                calls.setdefault(_of, (args, kwargs, first(out)))
                return out

            setattr(part, method, watched)
            undo.append((part, method))
        sample(name, pipeline, num_inference_steps=1)
        for part, method in undo:
            delattr(part, method)
        assert set(calls) == set(ROLES[name])
        _built[name] = pipeline, calls
    return _built[name]


def first(out):
    return (out[0] if isinstance(out, tuple) else next(iter(out.values()))).clone()


@torch.no_grad()
def changed(pipeline, calls):
    """The components that, given the same again, give something else."""
    out = set()
    for component, (args, kwargs, before) in calls.items():
        part = getattr(pipeline, component)
        run = part.decode if component == "vae" else part
        if not torch.equal(first(run(*args, **kwargs)), before):
            out.add(component)
    return out


def used():
    return {(r.component, r.role, r.backend) for r in hal.receipts()}


@pytest.mark.parametrize("name, target, component", TARGETS, ids=[f"{n} {t}" for n, t, _ in TARGETS])
def test_an_override_is_followed_by_exactly_its_target(zeros, name, target, component):
    pipeline, calls = built(name)
    with hal.attach(pipeline, component_attention_backends={target: zeros}) as handle:
        assert changed(pipeline, calls) == {component}
        followed = {(r.component, r.role) for r in handle.receipts() if r.backend == zeros}
        others = {(r.component, r.role) for r in handle.receipts() if r.backend != zeros}
    role = target.partition(".")[2]
    assert followed == {(component, r) for r in ROLES[name][component] if role in ("", r)}
    every = {(c, r) for c, roles in ROLES[name].items() for r in roles}
    assert followed | others == every
    if "@" in target:  # the other layers of it keep theirs
        assert {(component, "self"), (component, "cross")} <= others
    else:
        assert not followed & others
    assert changed(pipeline, calls) == set()


@pytest.mark.parametrize("name", ROLES)
def test_a_whole_run_with_a_choice_for_each_component(zeros, name):
    pipeline, _ = built(name)
    want = sample(name, pipeline, num_inference_steps=1)
    words = {"attention_backend": zeros, "component_attention_backends": dict.fromkeys(ROLES[name], "torch_sdpa")}
    with hal.attach(pipeline, **words):  # each override comes before the global choice, which is not told as unused
        same = sample(name, pipeline, num_inference_steps=1)
        hal_receipts = used()
    assert torch.equal(same, want)
    assert hal_receipts == {(c, r, "torch_sdpa") for c, roles in ROLES[name].items() for r in roles}


def test_a_global_choice_that_only_the_transformer_can_have_is_told_of_the_others(monkeypatch):
    """Sparse, for self-attention, one head size: strict in the transformer, passed over elsewhere, replaced in cross."""
    from attached import ZEROS

    from hal import plugins, run
    from hal.backend import Backend, Kernel
    from hal.catalog import Catalog
    from hal.facts.flat import FEATURES

    pipeline, calls = built("wan")
    dim = pipeline.transformer.config.attention_head_dim
    kernel = Kernel(
        "tiles",
        ZEROS.portable.bind,
        layout="any",
        honours=FEATURES,
        limits={
            "role": {"self"},
            "batch": {1, 2},
            "causal": {False},
            "mask": {"none"},
            "head_dim": {dim},
            "scale": {"default"},
        },
    )
    tiles = Backend("tiles", portable=kernel, quality="lossy", traits=frozenset({"sparse"}), roles=frozenset({"self"}))
    catalog = plugins.catalog(frozenset())
    wider = Catalog(catalog.platforms, {**catalog.backends, "tiles": tiles}, catalog.problems)
    monkeypatch.setattr(plugins, "catalog", lambda ignore=frozenset(): wider)
    try:
        with hal.attach(pipeline, attention_backend="tiles") as handle:
            changed(pipeline, calls)
            receipts = {(r.component, r.role): r for r in handle.receipts()}
    finally:
        run.forget()
    assert receipts["transformer", "self"].backend == "tiles"
    assert receipts["transformer", "cross"].backend == receipts["text_encoder", "self"].backend == "torch_sdpa"
    assert "is replaced: tiles is sparse" in receipts["transformer", "cross"].notes[0]
    assert "is passed" in receipts["text_encoder", "self"].notes[0]


# ---- consumed, or an error


@pytest.mark.parametrize("name, target, said", [
    ("wan", "text_encodr", "unknown component 'text_encodr'; did you mean 'text_encoder'"),
    ("wan", "text_encoder_2", "unknown component 'text_encoder_2'"),
    ("flux", "scheduler", "hal reaches no attention in 'scheduler', as it is no model with attention; it reaches "),
    ("flux", "tokenizer", "hal reaches no attention in 'tokenizer'"),
    ("wan", "transformer.crosss", "unknown role .*did you mean 'cross'"),
    ("wan", "transformer@x", "'x' is no layer or range of layers"),
    ("wan", "", "allowed is COMPONENT=NAME"),
])  # fmt: skip
def test_an_override_for_what_is_not_there_is_refused_before_anything_is_attached(name, target, said):
    pipeline, _ = built(name)
    with pytest.raises(PolicyError, match=said):
        hal.attach(pipeline, component_attention_backends={target: "torch_sdpa"})
    with hal.attach(pipeline):  # nothing was left of it
        pass


def pipeline_of(**components):
    return type("TinyPipeline", (), {"components": components, **components})()


class Fixed(nn.Module):
    """Attention by a softmax of its own, in one matrix product after the other: hal cannot reach it."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.attn(x, x, x)[0]


def test_an_override_for_fixed_attention_or_for_none_says_which():
    pipeline = pipeline_of(transformer=Plain(), vae=nn.Linear(2, 2), text_encoder=Fixed())
    with pytest.raises(
        PolicyError, match=r"hal reaches no attention in 'vae', as Linear has no attention; it reaches transformer"
    ):
        hal.attach(pipeline, component_attention_backends={"vae": "torch_sdpa"})
    with pytest.raises(PolicyError, match=r"'text_encoder', as its attention is fixed \(MultiheadAttention: "):
        hal.attach(pipeline, component_attention_backends={"text_encoder": "torch_sdpa"})
    same = Plain()
    twice = pipeline_of(transformer=same, transformer_2=same)
    with pytest.raises(PolicyError, match="'transformer_2', as it is the same object as 'transformer'; name that"):
        hal.attach(twice, component_attention_backends={"transformer_2": "torch_sdpa"})


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_role_that_a_component_does_not_have_is_told_when_it_is_over(zeros, name):
    """Joint attention is self-attention: nothing of these transformers is cross."""
    pipeline, calls = built(name)
    with pytest.raises(
        PolicyError,
        match=r"no attention layer of 'transformer.cross' used zeros; its layers: transformer.self chose torch_sdpa",
    ):
        with hal.attach(pipeline, component_attention_backends={"transformer.cross": zeros}):
            assert changed(pipeline, calls) == set()
    assert changed(pipeline, calls) == set() and not [r for r in used() if r[2] == zeros]


def test_a_layer_that_a_component_does_not_have_is_told_when_it_is_over(zeros):
    pipeline, calls = built("wan")
    with pytest.raises(PolicyError, match="no attention layer of 'transformer@77' used zeros"):
        with hal.attach(pipeline, component_attention_backends={"transformer@77": zeros}):
            changed(pipeline, calls)


def test_a_failure_inside_stays_what_it_is_and_leaves_no_scope(zeros):
    pipeline, calls = built("wan")
    with (
        pytest.raises(ZeroDivisionError),
        hal.attach(pipeline, component_attention_backends={"transformer.cross": zeros}),
    ):
        raise ZeroDivisionError
    with hal.attach(pipeline):
        assert changed(pipeline, calls) == set()
    with pytest.raises(FileNotFoundError), hal.component("text_encoder", zeros):
        raise FileNotFoundError("no weights")
    with pytest.raises(FileNotFoundError), hal.scope(component_attention_backends={"vae": zeros}):
        hal.attention(*[torch.ones(1, 2, 1, 8)] * 3)
        raise FileNotFoundError("no weights")
    assert hal.attention(*[torch.ones(1, 2, 1, 8)] * 3).any()


def test_an_override_that_the_machine_cannot_serve_refuses_the_run_and_names_the_reasons():
    pipeline, calls = built("wan")
    with hal.attach(pipeline, component_attention_backends={"text_encoder": "fa"}):
        with pytest.raises(
            NoKernelError,
            match=r"'fa', asked for by component_attention_backends='text_encoder=fa', cannot serve text_encoder.self",
        ) as e:
            changed(pipeline, calls)
    assert "torch_sdpa" in str(e.value)  # the declared fallback, as advice
    with hal.attach(
        pipeline, component_attention_backends={"text_encoder": "fa"}, attention_fallback="declared"
    ) as handle:
        assert changed(pipeline, calls) == set()
        mine = [r for r in handle.receipts() if r.component == "text_encoder"]
    assert {r.backend for r in mine} == {"torch_sdpa"} and all(
        "policy.fallback: fa cannot serve" in " ".join(r.warnings) for r in mine
    )


def test_two_pipelines_in_one_process_keep_their_own(zeros):
    one, calls = built("wan")
    two, others = built("flux")
    with (
        hal.attach(one, component_attention_backends={"transformer": zeros}) as first_,
        hal.attach(two, component_attention_backends={"vae": zeros}) as second,
    ):
        for _ in range(2):
            assert changed(one, calls) == {"transformer"}
            assert changed(two, others) == {"vae"}
        assert {r.component for r in first_.receipts() if r.backend == zeros} == {"transformer"}
        assert {r.component for r in second.receipts() if r.backend == zeros} == {"vae"}
        first_.detach()
        assert changed(one, calls) == set() and changed(two, others) == {"vae"}


def test_a_compiled_model_may_be_attached_again_with_the_same_override(zeros):
    model = torch.compile(nn.Sequential(Plain()), backend="aot_eager", fullgraph=True)
    q = torch.randn(1, 2, 5, 8)
    for _ in range(2):
        with hal.attach(model, component="vae", component_attention_backends={"vae": zeros}):
            assert not model(q).any()
    assert model(q).any()


def test_a_second_attachment_is_refused_and_the_first_goes_on(zeros):
    pipeline, calls = built("wan")
    with hal.attach(pipeline, component_attention_backends={"vae": zeros}):
        with pytest.raises(AttachError, match="attached to hal already"):
            hal.attach(pipeline)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert changed(pipeline, calls) == {"vae"}
        assert F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 8)] * 3).any()
