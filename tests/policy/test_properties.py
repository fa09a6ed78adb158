"""Any policy over any call on any preset: the strongest source that applies decides, or the call is refused.

The oracle below is the order once more, written from the document; whether one backend serves one call, alone, is asked of
hal, and judged elsewhere (tests/test_every_preset.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import judge
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from test_every_preset import calls, facts, machines

import hal
from hal import plugins
from hal.backend import Backend, Kernel, Needs
from hal.errors import PolicyError
from hal.facts import Call, Machine
from hal.facts.flat import FEATURES
from hal.policy import Only, Policy, Request, Site, Target
from hal.rules import VERSION_FACTS


def nothing(call: Any) -> Any:
    raise AssertionError("nothing is bound here")


def portable(name: str, honours: frozenset[str] = FEATURES) -> Kernel:
    return Kernel(name, nothing, layout="any", honours=honours)


# Beside what is in the tree: one that no machine has, a lossy one, a sparse one, one that does nothing but the plain call.
ABSENT = Kernel("gone", nothing, needs=(Needs("no-such-package", "no_such_package"),))
MORE = (
    Backend("gone", kernels=(ABSENT,), fallback="tiles"),
    Backend("rough", quality="lossy", portable=portable("rough")),
    Backend("tiles", quality="lossy", traits=frozenset({"sparse"}), roles=frozenset({"self"}), portable=portable("tiles"), fallback="fa"),
    Backend("plain", quality="near", portable=portable("plain", frozenset()), fallback="gone"),
)  # fmt: skip
REAL = plugins.catalog()
CATALOG = hal.Catalog(REAL.platforms, {**REAL.backends, **{b.name: b for b in MORE}}, REAL.problems)
NAMES = sorted(CATALOG.backends)
SPARSE = {
    "tiles",
    "sliding_tile_attn",
    "video_sparse_attn",
    "video_sparse_attn_h3",
    "hybrid_window_attn_h3",
    "vmoba_attn",
}
COMPONENTS = ("transformer", "transformer_2", "text_encoder", "vae", "connectors", "")
MACHINE = {"arch", "memory", "shared_memory", "device_dtype", "platform", *VERSION_FACTS}
KINDS = ("required", "call", "force", "request", "override", "global", "default")  # the order in the document


@st.composite
def targets(draw: Any) -> Target:
    component = draw(st.sampled_from((*COMPONENTS, "", "transformer")))
    return Target(
        component, draw(st.sampled_from(("", "", "self", "cross"))), draw(st.sampled_from(((), (), (0,), (0, 1))))
    )


@st.composite
def requests(draw: Any) -> Request:
    mode = draw(st.sampled_from(("require", "require", "prefer", "prefer", "forbid")))
    kind = "override" if mode == "forbid" else draw(st.sampled_from(KINDS[1:]))
    target = Target() if kind in ("global", "call") else draw(targets())
    return Request(draw(st.sampled_from(NAMES)), mode, f"source {draw(st.integers(0, 99))}", kind=kind, target=target)


@st.composite
def sites(draw: Any) -> Site:
    def rarely(values: Any) -> Any:
        return draw(st.one_of(st.just(values[0]), st.just(values[0]), st.sampled_from(values)))

    supported = rarely((frozenset(), frozenset({"torch_sdpa"}), frozenset({"fa", "torch_sdpa"}), frozenset({"plain"})))
    layer = draw(st.sampled_from((None, 0, 1, 2)))
    return Site(draw(st.sampled_from(COMPONENTS)), "self", layer, rarely(("", *NAMES)), rarely(("", *NAMES)), supported)


def policy_of(site: Site, asked: list[Request], limits: tuple[Only, ...] = ()) -> Policy:
    """The policy; where it contradicts itself, both sources must be told, and the example ends."""
    try:
        return Policy(tuple(asked), limits=limits, site=site)
    except PolicyError as e:
        pairs = [
            (r, f) for r in asked for f in asked if (r.mode, f.mode) == ("require", "forbid") and r.backend == f.backend
        ]
        assert any(r.source in str(e) and f.source in str(e) for r, f in pairs)
        assume(False)
        raise


class Oracle:
    """The documented order, for one call at one site."""

    def __init__(self, call: Call, machine: Machine, site: Site, asked: list[Request], limits: tuple[Only, ...]):
        self.call, self.machine, self.site, self.role = call, machine, site, call.role
        self.asked = [r for r in asked if self.at(r.target) and r.mode != "forbid"]
        self.forbidden = {r.backend for r in asked if self.at(r.target) and r.mode == "forbid"}
        for limit in limits:
            if self.at(limit.target):
                self.forbidden |= {b for b in NAMES if b not in limit.backends and b != site.required}
        # What the call asks for beyond the plain computation, taken away.
        self.plain = replace(
            call, mask="none", mask_shape="none", mask_grad=False, dropout=0.0, window=(-1, -1), scale="default", causal=False,
            lse=False, varlen=False, grad=False, deterministic=False, compile=False, graph=False, kv_heads=call.heads,
            kv_len=call.q_len, ring=1,
        )  # fmt: skip

    def at(self, t: Target) -> bool:
        return (
            t.component in ("", self.site.component)
            and t.role in ("", self.role)
            and (not t.layers or self.site.layer in t.layers)
        )

    def alone(self, backend: str, call: Call) -> bool:
        # "required", as that alone is never replaced in cross-attention.
        bare = Policy((Request(backend, kind="required"),), site=Site(self.site.component, layer=self.site.layer))
        return hal.resolve(call, self.machine, CATALOG, bare).chosen is not None

    def serves(self, backend: str) -> bool:
        return backend not in self.forbidden and self.alone(backend, self.call)

    def lacks_what_the_call_asks(self, backend: str) -> bool:
        """Some row fails by what the call asks for or what policy forbids, and by nothing that lies in the machine."""
        bare = Policy((Request(backend, kind="required"),), site=Site(self.site.component, layer=self.site.layer))
        d = hal.resolve(self.call, self.machine, CATALOG, bare)
        mine = [
            {(r.id, r.fact) for r in c.reasons if r.verdict is False}
            for c in d.candidates
            if c.backend.name == backend and c.line
        ]
        asked = [{i for i, _ in reasons} & FEATURES or backend in self.forbidden for reasons in mine]
        return any(
            wants and not any(f in MACHINE or f.startswith(("pkg.", "env.")) for _, f in reasons)
            for wants, reasons in zip(asked, mine)
        )

    def strict(self, kind: str) -> bool:
        denoiser = self.role == "self" and self.site.component in ("", "transformer", "transformer_2")
        return denoiser if kind in ("global", "request") else kind != "default"

    def answer(self) -> tuple[str, str]:
        """(what happens, backend): chosen, refused or automatic."""
        own = [
            (k, Request(b, kind=k)) for k, b in (("required", self.site.required), ("default", self.site.default)) if b
        ]
        first = [r for k, r in own if k == "required"]
        last = [r for k, r in own if k == "default"]
        for r in (*first, *sorted(self.asked, key=rank), *last):
            sparse = r.backend in SPARSE
            if sparse and self.role == "cross" and r.kind != "required":
                continue
            if sparse and r.kind == "global" and self.site.component not in ("", "transformer", "transformer_2"):
                continue
            if self.serves(r.backend):
                return "chosen", r.backend
            if r.mode == "prefer" and (found := self.declared(r.backend)):
                return "chosen", found
            if self.strict(r.kind):
                return "refused", r.backend
        return "automatic", ""

    def declared(self, backend: str) -> str:
        for _ in NAMES:
            across = backend in SPARSE and self.role == "cross"  # passed over there, whatever else speaks against it
            if not across and self.lacks_what_the_call_asks(backend):
                return ""
            following = CATALOG.backends[backend].fallback
            if not following:
                return ""
            backend = following
            if self.serves(backend):
                return backend
        return ""


def rank(r: Request) -> tuple[Any, ...]:
    narrow = () if r.kind in ("call", "force") else (not r.target.layers, not r.target.role, not r.target.component)
    return KINDS.index(r.kind), narrow


@st.composite
def cases(draw: Any, unique_by: Any = None) -> Any:
    machine = draw(machines())
    call = draw(calls(machine.device().dtypes))
    if draw(st.booleans()):
        call = call.but(role="cross")
    limits = draw(st.sampled_from(((), (), (), (Only(Target("vae"), frozenset({"torch_sdpa"}), "says its card"),))))
    return machine, call, draw(sites()), draw(st.lists(requests(), max_size=5, unique_by=unique_by)), limits


@settings(max_examples=400)
@given(cases())
def test_the_strongest_source_that_applies_decides_or_refuses(case: Any) -> None:
    machine, call, site, asked, limits = case
    d = hal.resolve(call, machine, CATALOG, policy_of(site, asked, limits))
    oracle = Oracle(call, machine, site, asked, limits)
    what, backend = oracle.answer()
    event(f"{what}, {call.role}")
    if what == "chosen":
        assert d.backend == backend and d.request is not None, d
        assert d.request.backend == backend or d.request.mode == "prefer"
        assert (d.request.backend == backend) is not any(w.startswith("policy.fallback") for w in d.warnings)
    elif what == "refused":
        assert d.chosen is None and d.request is not None and d.request.backend == backend
        assert d.request.source in (d.error or "")
    else:
        assert d.request is None and d.source == "automatic"
        if d.chosen:
            assert d.chosen.backend.quality == "exact"
            assert not site.supported or d.backend in site.supported
        else:
            assert d.error
    if d.chosen:
        assert d.backend not in oracle.forbidden
        assert d.kernel in {k.name for b in MORE for k in (*b.kernels, b.portable) if k} or not judge.violations(
            d.kernel or "", facts(machine, call, d.fittings)
        )
        if d.backend == "plain":  # which honours nothing: whatever the call asks for has been refused
            assert oracle.plain.but(kv_heads=call.kv_heads) == call or not _asks(call)
    outcomes = [s.outcome for s in d.steps]
    assert outcomes.count("taken") <= 1 and (outcomes.count("taken") == 1) is (
        d.request is not None and d.chosen is not None
    )


def _asks(call: Call) -> bool:
    wanted = (call.dropout, call.lse, call.varlen, call.grad, call.deterministic, call.compile, call.graph, call.causal)
    return any(wanted) or call.mask not in ("none", None) or call.heads != call.kv_heads or call.q_len != call.kv_len


@settings(max_examples=100)
@given(cases(unique_by=rank))
def test_which_source_was_written_down_first_is_no_matter_between_ranks(case: Any) -> None:
    machine, call, site, asked, limits = case
    mixed = asked[::-1]
    one = hal.resolve(call, machine, CATALOG, policy_of(site, asked, limits))
    two = hal.resolve(call, machine, CATALOG, policy_of(site, mixed, limits))
    assert (one.kernel, one.request, one.error) == (two.kernel, two.request, two.error)


@settings(max_examples=100)
@given(cases())
def test_a_request_for_elsewhere_changes_nothing_here(case: Any) -> None:
    machine, call, site, asked, limits = case
    elsewhere = [replace(r, target=Target("image_encoder", r.target.role, r.target.layers)) for r in asked]
    one = hal.resolve(call, machine, CATALOG, policy_of(site, elsewhere, limits))
    two = hal.resolve(call, machine, CATALOG, Policy(limits=limits, site=site))
    assert (one.kernel, one.request, one.steps) == (two.kernel, two.request, two.steps)


@pytest.mark.parametrize("preset", ["h100", "b200", "910b", "x86", "m3"])
def test_the_text_of_a_decision_tells_every_request_that_applies(preset: str) -> None:
    machine = CATALOG.machine(preset)
    asked = (
        Request("rough", source="the flag", kind="global"),
        Request("torch_sdpa", source="the option", kind="override"),
    )
    d = hal.resolve(Call.of(dtype="bf16", head_dim=64, heads=2), machine, CATALOG, Policy(asked, site=Site("vae")))
    assert [s.outcome for s in d.steps] == ["taken", "outranked"] and d.backend == "torch_sdpa"
    assert "the flag" in str(d) and "the option" in str(d)
    assert [s["outcome"] for s in d.to_json()["policy"]] == ["taken", "outranked"]
