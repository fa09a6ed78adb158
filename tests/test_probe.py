"""Packages are looked at without importing; importing is proof, isolated, and only of what was chosen."""

from __future__ import annotations

import os
import sys

import pytest

from hal import detect, plugins, probe
from hal.backend import Backend, Kernel, Needs
from hal.catalog import Catalog
from hal.facts import Call, Device, Machine, Package
from hal.facts.flat import FEATURES
from hal.platform import Platform
from hal.policy import Policy, Request
from hal.rows import Prefer, Row
from hal.settlement import settle


@pytest.fixture
def site(tmp_path, monkeypatch, distribution):
    """A folder on the import path: ``site(dist, module=text, ...)`` installs, ``site(**files)`` lays files there."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def install(dist=None, version="1.0", **files):
        named = {name.replace("__", "/") + ".py": text for name, text in files.items()}
        if dist:
            distribution(dist, version, named)
        else:
            for file, text in named.items():
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / file).write_text(text)
        probe._owners.cache_clear()
        return tmp_path

    yield install
    for name in set(sys.modules) - before:
        del sys.modules[name]
    probe._owners.cache_clear()


def needs(module="madepkg", symbol="f", dist="made-pkg", **more):
    return Needs(dist, module, symbol, **more)


def both(n):
    """The state by looking and, where it is found, by proof."""
    looked = probe.look(n)
    assert n.module not in sys.modules, "looking imports nothing"
    return looked, probe.prove(n, looked) if looked.state == "found" else None


# ---- looking


def test_nothing_is_absent():
    assert both(needs()) == (Package("absent"), None)


def test_an_installed_package_is_found_with_its_version_and_then_usable(site):
    site("made-pkg", "2.1+cu13", madepkg="def f(): pass")
    looked, proven = both(needs())
    assert (looked, proven) == (Package("found", "2.1+cu13"), Package("usable", "2.1+cu13"))


def test_a_package_without_metadata_has_the_version_that_it_says(site):
    site(madepkg="__version__ = '3.0'\ndef f(): pass")
    looked, proven = both(needs())
    assert (looked, proven) == (Package("found", None), Package("usable", "3.0"))


def test_another_projects_package_of_the_same_name_is_the_wrong_distribution(site):
    site("other-pkg", madepkg="raise SystemExit('imported')")
    looked, _ = both(needs())
    assert looked.state == "wrong_distribution" and "of the distribution 'other_pkg'" in looked.note


def test_a_distribution_by_another_of_its_names_is_the_right_one(site):
    site("made-pkg-nightly", "4.0", madepkg="def f(): pass")
    looked, proven = both(needs(names=("made-pkg-nightly",)))
    assert (looked.state, looked.version, proven.state) == ("found", "4.0", "usable")


def test_a_bare_namespace_is_a_missing_symbol(site):
    """Field case E4, golden case 24: flash_attn that is only the namespace of FA4."""
    site("made-pkg-4", madepkg__cute__interface="x = 1")
    looked, _ = both(needs(names=("made",)))
    assert looked.state == "missing_symbol" and "only a namespace here (of made_pkg_4), without f" in looked.note
    looked, _ = both(needs("madepkg.cute"))
    assert looked.state == "missing_symbol"


def test_metadata_without_its_module_is_a_missing_symbol(site):
    site("made-pkg", "1.5")
    looked, _ = both(needs())
    assert (looked.state, looked.version) == ("missing_symbol", "1.5") and "has no module 'madepkg'" in looked.note


def test_a_submodule_is_looked_for_without_importing_its_parent(site):
    site("made-pkg", madepkg____init__="raise SystemExit('imported')", madepkg__sub="def f(): pass")
    assert probe.look(needs("madepkg.sub")).state == "found"
    assert probe.look(needs("madepkg.other")).state == "missing_symbol"


def test_each_package_of_a_catalog_is_looked_at_and_the_best_of_its_forms_counts(site):
    site("made-pkg", madepkg="def f(): pass")
    kernels = tuple(Kernel(m, lambda c: None, needs=(needs(m),)) for m in ("madepkg.gone", "madepkg"))
    assert probe.look_all(Catalog({}, {"b": Backend("b", kernels=kernels)})) == {"made_pkg": Package("found", "1.0")}


# ---- proof

BROKEN = [
    ("raise ImportError('undefined symbol: _ZN3c10')", "ImportError: undefined symbol: _ZN3c10"),
    ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13: cannot open"),
    ("assert False, 'no driver'", "AssertionError: no driver"),
    ("raise SystemExit('exit 127')", "SystemExit: exit 127"),
    ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ("class Odd(BaseException): pass\nraise Odd('even this')", "Odd: even this"),
    ("raise RuntimeError('first line\\nsecond line')", "RuntimeError: first line"),
    ("1 +", "SyntaxError: invalid syntax"),
]


@pytest.mark.parametrize("code, said", BROKEN, ids=[s.split(":")[0] for _, s in BROKEN])
def test_whatever_an_import_raises_is_broken_with_its_message(site, code, said):
    site("made-pkg", madepkg=code)
    looked, proven = both(needs())
    assert looked.state == "found"
    assert (proven.state, proven.version) == ("broken", "1.0") and proven.note.startswith(said)


def test_only_ctrl_c_passes(site):
    site("made-pkg", madepkg="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        probe.prove(needs())


@pytest.mark.parametrize("code, symbol, state, said", [
    ("def g(): pass", "f", "missing_symbol", "madepkg has no f"),
    ("class a:\n  f = 1", "a.f", "usable", ""),
    ("class a:\n  g = 1", "a.f", "missing_symbol", "madepkg has no a.f"),
    ("", "", "usable", ""),
    ("def __getattr__(name): raise ImportError('lazy and broken')", "f", "broken", "ImportError: lazy and broken"),
    ("def __getattr__(name): raise OSError('libx.so')", "f", "broken", "OSError: libx.so"),
])  # fmt: skip
def test_the_very_symbol_is_proven(site, code, symbol, state, said):
    site("made-pkg", madepkg=code)
    proven = probe.prove(needs(symbol=symbol))
    assert (proven.state, proven.note) == (state, said)


@pytest.mark.parametrize("code, state", [
    ("def f(q, k, v, window_size): pass", "usable"),
    ("def f(q, k, v): pass", "wrong_distribution"),
    ("f = 3", "usable"),  # nothing to read: it is believed
])  # fmt: skip
def test_a_symbol_with_other_parameters_is_another_packages(site, code, state):
    site("made-pkg", madepkg=code)
    proven = probe.prove(needs(parameters=("q", "window_size")))
    assert proven.state == state
    assert state == "usable" or "madepkg.f takes no window_size" in proven.note


@pytest.mark.parametrize("end", ["", "raise ImportError('x')"])
def test_what_an_import_prints_and_sets_does_not_remain(site, capsys, end):
    site("made-pkg", madepkg=f"""
import os, sys
print("to stdout"); print("to stderr", file=sys.stderr)
os.environ["HAL_MADE"] = "new"; os.environ["HAL_KEPT"] = "changed"; os.environ.pop("HAL_GONE")
def f(): pass
{end}""")  # fmt: skip
    os.environ.update(HAL_KEPT="old", HAL_GONE="old")
    before = dict(os.environ)
    try:
        assert probe.prove(needs()).state == ("broken" if end else "usable")
        assert dict(os.environ) == before
    finally:
        del os.environ["HAL_KEPT"], os.environ["HAL_GONE"]
    assert capsys.readouterr() == ("", "")


# ---- settling: a chosen kernel's packages are proven, and the decision is made again


class Made(Platform):
    name = device_type = "made"
    order = (Prefer("best"), Prefer("next"))
    support = {"best": (Row("best.k"),), "next": (Row("next.k"),)}


def kernel(name, **more):
    return Kernel(name, lambda call: lambda *a: name, honours=FEATURES, **more)


CALL = Call.of(dtype="fp16", head_dim=64, heads=1, batch=1, q_len=4)


def settled(*requests, tensors=(), **best):
    catalog = Catalog(
        {"made": Made()},
        {"best": Backend("best", (kernel("best.k", **best),)), "next": Backend("next", (kernel("next.k"),))},
    )
    machine = Machine("made", (Device("a1"),)).with_packages(probe.look_all(catalog))
    return settle(CALL, machine, catalog, Policy(requests), tensors)


def test_what_proves_usable_stands(site):
    site("made-pkg", madepkg="def f(): pass")
    d = settled(needs=(needs(),))
    assert d.kernel == "best.k" and d.machine.packages[needs().proof].state == "usable"


def test_automatic_choice_goes_on_past_a_broken_package_and_tells_of_it(site):
    """Golden case 23."""
    site("made-pkg", madepkg="raise OSError('undefined symbol: x')")
    d = settled(needs=(needs(install="pip install made-pkg"),))
    assert d.kernel == "next.k"
    (r,) = d.candidates[0].reasons
    assert (r.id, r.message) == ("package.broken", "made_pkg is broken: OSError: undefined symbol: x")
    assert "reinstall" in r.fix and "pip install made-pkg" in r.fix


def test_an_explicit_request_is_refused_with_the_original_message(site):
    site("made-pkg", madepkg="raise OSError('undefined symbol: x')")
    d = settled(Request("best", source="--backend best"), needs=(needs(),))
    assert d.kernel is None and "OSError: undefined symbol: x" in d.error and "asked for by --backend best" in d.error


def test_only_what_is_chosen_is_imported(site):
    site("made-pkg", madepkg="raise SystemExit('imported')")
    assert settled(Request("next"), needs=(needs(),)).kernel == "next.k"
    assert "madepkg" not in sys.modules


def test_all_needs_of_the_chosen_are_proven(site):
    site("made-pkg", madepkg="def f(): pass")
    site("other-pkg", otherpkg="raise ImportError('no')")
    d = settled(needs=(needs(), needs("otherpkg", dist="other-pkg")))
    assert d.kernel == "next.k"
    proofs = {n.partition(":")[0]: p.state for n, p in d.machine.packages.items() if ":" in n}
    assert proofs == {"made_pkg": "usable", "other_pkg": "broken"}


def test_what_is_learnt_is_known_to_every_later_decision(site, monkeypatch):
    site("made-pkg", madepkg="raise ImportError('no')")
    monkeypatch.setattr(detect, "_machines", {"made": Machine("made", (Device("a1"),))})
    settled(needs=(needs(),))
    assert detect._machines["made"].packages[needs().proof].state == "broken"


def test_what_only_a_driver_knows_is_asked_once_and_becomes_a_reason():
    asked = []

    def confirm(q, k, v, mask, call):
        asked.append((q, call.head_dim))
        return "the driver said no"

    d = settled(confirm=confirm, tensors=("q", "k", "v", None))
    assert d.kernel == "next.k" and asked == [("q", 64)]
    assert [(r.id, r.message) for r in d.candidates[0].reasons] == [("refused", "the driver said no")]
    assert settled(Request("best"), confirm=confirm, tensors=("q", "k", "v", None)).kernel is None
    assert settled(confirm=confirm).kernel == "best.k", "without tensors there is nothing to ask about"
    assert settled(confirm=lambda *a: None, tensors=("q", "k", "v", None)).kernel == "best.k"


def test_every_package_that_a_kernel_of_ours_needs_can_be_looked_at_here():
    states = probe.look_all(plugins.catalog(detect.ignored()))
    assert states and all(isinstance(p, Package) for p in states.values())
    assert not {n for n in ("flash_attn", "aiter", "torch_npu") if n in sys.modules}
