"""Platforms and backends of others: found without an edit, and never quietly lost when they fail."""

from __future__ import annotations

import zipfile

import pytest
import torch
from calls import close

import hal
from hal import detect, matrix, oracle, plugins, run
from hal.errors import HalError, PlatformError, PluginError

STRANGER = '''
"""A stranger's backend: a portable form in PyTorch, and a kernel with a row on a platform that is not theirs."""
from hal.backend import Backend, Kernel, Needs
from hal.rows import Row

def portable(call):
    import torch
    scale = None if call.scale == "default" else call.scale
    def run(q, k, v, mask, varlen):
        s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        return s.softmax(-1) @ v
    return run

ONLY = Kernel("stranger.cuda", "stranger_cuda:bind", honours={"grad"}, limits={"dtype": {"bfloat16"}, "head_dim": {64}},
              needs=(Needs("stranger-kernels", "stranger_kernels", "f", install="pip install stranger-kernels"),))
ANY = Kernel("stranger.torch", portable, layout="bhsd", honours={"grad", "rectangular", "scale"})
BACKEND = Backend("stranger", kernels=(ONLY,), portable=ANY, aliases=("odd",), support={"cuda": (Row("stranger.cuda", {"sm90"}),)})
'''
PLATFORM = """
from pathlib import Path
from hal.facts import Device, Machine
from hal.host import Detection
from hal.platform import Platform
from hal.rows import Prefer, Row
class Vendor(Platform):
    name = device_type = {name!r}
    title = "Vendor's"
    order = (Prefer("torch_sdpa"),)
    support = {{"torch_sdpa": (Row("sdpa.fused", {{"v1"}}),)}}
    arch_forms = "v1"
    folder = Path("/nowhere")
    def parse_arch(self, text):
        if text != "v1":
            raise self.no_arch(text)
        return text
    def detect(self, host):
        return Detection(self.name, {state!r}, ("a card",))
    def machine(self, host):
        return Machine(self.name, (Device("v1"),), {{}}, {{}}, "detected")
PLATFORM = Vendor
"""


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Entry points are looked for again, before and after."""
    caches = plugins.entry_points, plugins.platforms, plugins.catalog

    def forget():
        run.forget()
        for c in caches:
            c.cache_clear()

    forget()
    monkeypatch.setattr(detect, "_detected", None)
    monkeypatch.setattr(detect, "_machines", {})
    yield forget
    forget()


@pytest.fixture
def installed(distribution, monkeypatch, anew):
    """``installed("name", files, backends={...})``, and hal has looked."""

    def install(name, files=None, **points):
        monkeypatch.syspath_prepend(distribution(name, files=files, **points))
        for module in files or {}:
            monkeypatch.delitem(__import__("sys").modules, module.removesuffix(".py"), raising=False)
        anew()
        monkeypatch.setattr(detect, "_detected", None)

    return install


@pytest.fixture
def stranger(installed):
    installed("stranger-attention", {"stranger.py": STRANGER}, backends={"stranger": "stranger:BACKEND"})


def qkv(**more):
    return [torch.randn(2, 5, 3, 64, **more) for _ in range(3)]


# ---- a stranger's backend


def test_a_strangers_backend_runs_by_request_under_its_names_and_leaves_receipts(stranger):
    q, k, v = qkv()
    hal.clear_receipts()
    for name in ("stranger", "odd", "ODD"):
        close(hal.attention(q, k, v, backend=name, scale=0.2), oracle.attention(q, k, v, scale=0.2)[0], 2e-5)
    told = [(r.backend, r.kernel, r.source, r.runs) for r in hal.receipts()]
    assert sorted(told) == [
        ("stranger", "stranger.torch", f"backend={n!r} of the call", 1) for n in ("ODD", "odd", "stranger")
    ]


def test_it_is_never_taken_without_being_asked_for(stranger):
    assert hal.explain(*qkv()).backend == "torch_sdpa"


def test_what_it_does_not_honour_is_refused(stranger):
    with pytest.raises(HalError, match="causal is asked for; stranger.torch does not honour it"):
        hal.attention(*qkv(), backend="stranger", is_causal=True)


def test_its_row_on_another_platform_counts_there(stranger):
    half = qkv(dtype=torch.bfloat16)
    for on, kernel in (("h100", "stranger.cuda"), ("a100", "stranger.torch"), ("mi300x", "stranger.torch")):
        with hal.simulate(on, packages={"stranger-kernels": "1.0"}):
            assert hal.explain(*half, backend="stranger").kernel == kernel
    with hal.simulate("h100"):
        d = hal.explain(*half, backend="stranger")
        assert d.kernel == "stranger.torch"
        assert (
            "installing stranger_kernels (pip install stranger-kernels) would allow stranger/stranger.cuda" in d.advice
        )


def test_it_is_in_the_matrix_and_in_every_explanation(stranger):
    catalog = plugins.catalog(detect.ignored())
    rows = {(e.platform, e.kernel) for e in matrix.entries(catalog) if e.backend == "stranger"}
    assert rows == {("cuda", "stranger.cuda"), *((p, "stranger.torch") for p in catalog.platforms)}
    assert "stranger/stranger.torch" in str(hal.explain(*qkv()))


# ---- a stranger's platform


def test_a_vendors_platform_that_is_here_is_the_platform(installed):
    installed(
        "vendor-hal",
        {"vendor_p.py": PLATFORM.format(name="vendor", state="present")},
        platforms={"vendor": "vendor_p:PLATFORM"},
    )
    assert hal.current_platform().name == "vendor"
    d = hal.explain(*qkv())
    assert d.machine.platform == "cpu", "a CPU tensor asks the CPU platform"
    with hal.simulate("vendor:v1"):
        assert hal.explain(*qkv()).kernel == "sdpa.fused"


def test_two_active_vendor_platforms_are_an_error_that_says_how_to_choose(installed, monkeypatch):
    for name in ("one", "two"):
        installed(
            f"{name}-hal",
            {f"{name}_p.py": PLATFORM.format(name=name, state="present")},
            platforms={name: f"{name}_p:PLATFORM"},
        )
    with pytest.raises(PlatformError, match="2 platforms are active here: one, two; choose one with HAL_PLATFORM=one"):
        hal.current_platform()
    monkeypatch.setenv("HAL_PLATFORM", "two")
    monkeypatch.setattr(detect, "_detected", None)
    assert hal.current_platform().name == "two"


# ---- those that fail

FAILS = {
    "raise RuntimeError('no driver')": "RuntimeError: no driver",
    "raise OSError('libvendor.so: cannot open')": "OSError: libvendor.so: cannot open",
    "raise SystemExit('127')": "SystemExit: 127",
    "import nowhere_at_all": "ModuleNotFoundError: No module named 'nowhere_at_all'",
    "x = 1": "AttributeError: module 'bad' has no attribute 'THING'",
    "THING = 5": "TypeError: bad:THING is int, not a ",
    "from hal.backend import Backend\nclass THING(Backend):\n  def __init__(self): raise ValueError('not so')": "",
}


@pytest.mark.parametrize("group", ["backends", "platforms"])
@pytest.mark.parametrize(
    "code, said", FAILS.items(), ids=[s.split(":")[0] or "in its constructor" for s in FAILS.values()]
)
def test_one_that_fails_is_an_error_that_names_its_distribution_and_how_to_go_on(
    installed, monkeypatch, group, code, said
):
    installed("bad-hal", {"bad.py": code}, **{group: {"bad": "bad:THING"}})
    with pytest.raises(PluginError) as e:
        hal.attention(*qkv())
    for text in (
        f"{group[:-1]} 'bad' of the distribution 'bad-hal' failed: {said}",
        "--ignore-plugin bad or HAL_IGNORE_PLUGIN=bad",
    ):
        assert text in str(e.value)
    assert e.value.__cause__ is not None
    with hal.simulate("h100"):
        assert hal.explain(*qkv(dtype=torch.bfloat16)).backend, "another machine is explained all the same"
        if group == "backends":
            with pytest.raises(PluginError, match="bad-hal"):
                hal.explain(*qkv(), backend="bad")
    for name in ("bad", "bad-hal", "bad-hal:bad", " other, bad "):
        monkeypatch.setenv("HAL_IGNORE_PLUGIN", name)
        monkeypatch.setattr(detect, "_detected", None)
        assert hal.explain(*qkv()).kernel == "sdpa.cpu"


def test_one_that_calls_itself_otherwise_than_its_entry_point_is_refused(installed):
    installed("bad-hal", {"bad.py": STRANGER}, backends={"strange": "bad:BACKEND"})
    with pytest.raises(PluginError, match="bad:BACKEND calls itself 'stranger', its entry point 'strange'"):
        hal.explain(*qkv())


@pytest.mark.parametrize(
    "ignored, whose", [("mine-hal:torch_sdpa", "sdpa.cpu"), ("attention-hal:torch_sdpa", "stranger.torch")]
)
def test_a_name_that_is_ours_is_an_error_that_says_how_to_keep_one(installed, monkeypatch, ignored, whose):
    text = STRANGER.replace('Backend("stranger"', 'Backend("torch_sdpa"')
    installed("mine-hal", {"mine.py": text}, backends={"torch_sdpa": "mine:BACKEND"})
    with pytest.raises(PluginError) as e:
        hal.explain(*qkv())
    assert "the name 'torch_sdpa' is taken by the distribution 'attention-hal'" in str(e.value)
    assert "--ignore-plugin mine-hal:torch_sdpa or --ignore-plugin attention-hal:torch_sdpa" in str(e.value)
    monkeypatch.setenv("HAL_IGNORE_PLUGIN", ignored)
    monkeypatch.setattr(detect, "_detected", None)
    assert hal.explain(*qkv()).kernel == whose


# ---- how entry points are read


def test_of_a_distribution_that_lies_twice_on_the_path_the_first_counts(tmp_path, distribution):
    first = distribution("twice", backends={"a": "m:A"})
    second = tmp_path / "later"
    (second / "twice-2.0.dist-info").mkdir(parents=True)
    (second / "twice-2.0.dist-info" / "entry_points.txt").write_text("[hal.backends]\nb = m:B\n")
    found = plugins.entry_points((str(first), str(second)))
    assert [(e.name, e.target, e.distribution) for e in found] == [("a", "m:A", "twice")]


def test_other_groups_extras_and_comments_are_passed_over(tmp_path):
    (tmp_path / "x-1.dist-info").mkdir()
    (tmp_path / "x-1.dist-info" / "entry_points.txt").write_text(
        "[console_scripts]\nx = x:main\n\n# hal's\n[hal.platforms]\np = m.n:P [gpu]  # with an extra\n\n[hal.backends]\n"
    )
    assert plugins.entry_points((str(tmp_path),)) == (plugins.EntryPoint("hal.platforms", "p", "m.n:P", "x"),)


def test_a_zip_on_the_path_is_read_too(tmp_path):
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as z:
        z.writestr("zipped-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: zipped\nVersion: 1.0\n")
        z.writestr("zipped-1.0.dist-info/entry_points.txt", "[hal.backends]\nz = m:Z\n")
    assert [e.name for e in plugins.entry_points((str(tmp_path / "z.zip"),))] == ["z"]


def test_whatever_lies_on_the_path_is_no_error(tmp_path):
    (tmp_path / "a-1.dist-info").mkdir()
    (tmp_path / "a-1.dist-info" / "entry_points.txt").write_bytes(b"[hal.backends]\nb = m:\xff\xfe\n")
    (tmp_path / "b.egg-info").write_text("a file, and no folder")
    (tmp_path / "c-1.dist-info").mkdir()
    (tmp_path / "not a zip").write_text("x")
    found = plugins.entry_points((str(tmp_path), "", str(tmp_path / "nowhere"), str(tmp_path / "not a zip")))
    assert {e.distribution for e in found} <= {"a", plugins.OURS}


def test_ours_are_found_as_any_others_are():
    assert {e.name for e in plugins.entry_points() if e.distribution == plugins.OURS} >= {
        "cpu",
        "cuda",
        "rocm",
        "torch_sdpa",
        "fa",
    }
    assert not plugins.outside("cpu")


# ---- import never raises


@pytest.mark.parametrize("setting", [{"HAL_PLATFORM": "cup"}, {}])
def test_importing_never_raises_and_using_tells(python, distribution, setting):
    path = []
    if not setting:
        path = [distribution("bad-hal", files={"bad.py": "raise SystemExit(3)"}, platforms={"bad": "bad:P"})]
    code = "import hal\nprint('imported')\ntry: hal.current_platform()\nexcept hal.HalError as e: print(e)"
    ran = python(code, path=path, **{"HAL_IGNORE_PLUGIN": "", **setting})
    assert (ran.code, ran.err) == (0, "")
    said = (
        "unknown platform in HAL_PLATFORM 'cup'; did you mean 'cpu'?"
        if setting
        else "platform 'bad' of the distribution 'bad-hal' failed: SystemExit: 3"
    )
    assert ran.out.startswith("imported\n" + said)
