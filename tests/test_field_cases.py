"""Every handed field case that concerns dense attention: rows of facts and answers, and what needs a run."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from field_cases import ALL, PLAIN, REFUSED, Case, Row, table

import hal
from hal import context, detect, oracle, plugins, probe, run, settlement
from hal.backend import Backend, Kernel, Needs
from hal.backends.fa import BACKEND as FA
from hal.catalog import Catalog
from hal.decision import Decision
from hal.errors import DeclarationError, PolicyError
from hal.facts import Call, Device, Machine
from hal.host import Host, visible_devices
from hal.platform import Platform
from hal.platform import Row as SupportRow
from hal.policy import Policy, Request, names
from hal.resolver import resolve
from hal.rows import Prefer
from hal.rules import limit_of, within
from hal.testing import fakes

TESTS = Path(__file__).parent
ROWS = [pytest.param(row, id=f"{case.id} {row.name}".replace(" ", "-")) for case in ALL for row in case.rows]


def decided(row: Row) -> Decision:
    c = plugins.catalog()
    if isinstance(row.on, str):
        machine = c.machine(row.on)
    else:
        machine = c.platform(row.on["platform"]).read(Machine.from_json(json.dumps(row.on), "the row"))
    given = dict(p.split("==") for p in row.packages.split()) if isinstance(row.packages, str) else row.packages
    machine = machine.with_packages({c.package(n): v for n, v in given.items()}).with_software(**row.software)
    mode = "prefer" if row.ask.startswith("prefer ") else "require"
    backend, _, kernel = row.ask.removeprefix("prefer ").partition("/")
    requests = (Request(c.backend_name(backend), mode, "the row", kernel and c.kernel_name(kernel)),) if backend else ()
    return resolve(Call.parse([PLAIN, row.call]), machine, c, Policy(requests, names(row.waive), names(row.fit)))


@pytest.mark.parametrize("row", ROWS)
def test_field_case(row: Row) -> None:
    d = decided(row)
    assert (f"{d.backend}/{d.kernel}" if d.chosen else REFUSED) == row.takes, str(d)
    assert (d.error is None) == (row.takes != REFUSED)
    if d.chosen:
        assert d.fittings == tuple(row.fittings.split())
        assert d.chosen.backend.quality == "exact"
    text = [*d.warnings, *d.advice, d.error or ""]
    for kernel, ids in row.against.items():
        mine = [c for c in d.candidates if c.kernel and c.kernel.name == kernel]
        assert mine, f"{kernel} is no candidate: {d}"
        found = [r for c in mine for r in c.reasons]
        assert {r.id + ("?" if r.verdict is None else "") for r in found} == set(ids.split())
        text += [x for r in found for x in (r.message, r.fix, r.citation)]
    for fragment in row.says:
        assert fragment in "\n".join(text)
    if row.warns is not None:
        assert bool(d.warnings) == row.warns, d.warnings


# ---- the list itself

HANDED = {
    "A": "1 2 3 4 6 7 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 37 39 40 41 42",
    "B": "1 2 3 4 5 6 8 10 11 12 13 14 15 17 18 19 20 21 22 24 26 27 28 29",
    "C": "1 2 4 5 7 8 9 10 12 13 14 15 16 18 20 21",
    "D": "1 2 3 5 7 10 11 12 14 15 16",
    "E": "1 2 3 4 6 7 8 9 10 11 12",
    "golden ": "1 2 3 5 6 7 8 9 11 13 14 16 17 18 19 20 21 22 23 24 25 26 27 28 31 32 34 36 37 38 40",
}


def test_every_handed_case_is_here_once() -> None:
    handed = [kind + n for kind, numbers in HANDED.items() for n in numbers.split()]
    assert [c.id for c in ALL] == handed


@pytest.mark.parametrize("case", ALL, ids=[c.id.replace(" ", "-") for c in ALL])
def test_every_case_has_rows_or_tests_or_a_time(case: Case) -> None:
    assert case.rows or case.tests or case.rows_of or case.later
    by_id = {c.id: c for c in ALL}
    for other in case.rows_of.split():
        assert by_id[other].rows
    for test in case.tests:
        file, _, function = test.partition("::")
        tree = ast.parse((TESTS / file).read_text("utf-8"))
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, test


def test_the_page_is_current() -> None:
    """After a change: python tests/field_cases/table.py"""
    assert (TESTS.parent / "docs" / "field-cases.md").read_text("utf-8") == table.page()


# ---- A: what was chosen is what runs


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    run.forget()
    yield
    run.forget()


def tensors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(dtype) for _ in range(3)]


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    some = want.isfinite()
    assert got.shape == want.shape and torch.equal(got[~some].double(), want[~some])
    assert bool(((got[some].double() - want[some]).abs() <= tolerance).all())


def test_a_padded_batch_equals_the_oracle_through_packing() -> None:
    q, k, v = tensors(3, 9, 2, 64, dtype=torch.bfloat16)
    keep = torch.arange(9) < torch.tensor([[9], [4], [0]])  # the last has no key at all
    with fakes.installed("flash_attn-2.8.3.post1") as fake, fakes.workbench(FA, flash_attn="2.8.3"):
        out, lse = hal.attention(q, k, v, attn_mask=keep, backend="fa", return_lse=True)
        d = hal.explain(q, k, v, attn_mask=keep, backend="fa", return_lse=True)
    want, want_lse = oracle.attention(q, k, v, attn_mask=keep[:, None, None])
    assert d.fittings == ("key_padding_to_varlen",)
    assert [c["symbol"] for c in fake.calls] == ["flash_attn_varlen_func"]
    assert fake.calls[0]["cu_seqlens_k"].tolist() == [0, 9, 13, 13]
    near(out, want, FA.tolerance["bfloat16"])
    near(lse, want_lse, 1e-4)
    assert not out[2].any() and (lse[2] == -torch.inf).all()


def test_receipts_tell_what_ran() -> None:
    q, k, v = tensors(1, 5, 2, 8)
    hal.clear_receipts()
    with hal.component("transformer"):
        for _ in range(3):
            hal.attention(q, k, v)
    hal.attention(q, k, v[..., :4], role="cross")
    ran = {(r.component, r.role, r.backend, r.kernel, r.runs) for r in hal.receipts()}
    assert ran == {("transformer", "self", "torch_sdpa", "sdpa.cpu", 3), ("", "cross", "torch_sdpa", "sdpa.math", 1)}
    assert all(r.quality == "exact" and r.source == "automatic" for r in hal.receipts())


@pytest.mark.parametrize("asked, meant", [("flash_atn", "flash_attn"), ("TORCH_SDAP", "torch_sdpa"), ("torch-cudnn-spda", "torch_cudnn_sdpa")])
def test_an_unknown_name_is_an_error_with_a_suggestion(asked: str, meant: str) -> None:
    q, k, v = tensors(1, 5, 2, 8)
    with pytest.raises(PolicyError, match=f"did you mean '{meant}'") as e:
        hal.attention(q, k, v, backend=asked)
    assert repr(asked) in str(e.value)
    assert all(b in str(e.value) for b in plugins.catalog().backends)


OPERATORS = [f"_scaled_dot_product_{n}" for n in (
    "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu", "fused_attention_overrideable",
    "attention_math",
)]  # fmt: skip


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Every call of one of PyTorch's attention operators, as (name, arguments); none is run."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def recorder(name: str) -> Any:
        def record(q: torch.Tensor, *rest: Any, **keywords: Any) -> list[Any]:
            calls.append((name, (q, *rest)))
            return [q.new_zeros(q.shape), q.new_zeros(q.shape[:3]), *(None,) * 7]

        return record

    for name in OPERATORS:
        monkeypatch.setattr(getattr(torch.ops.aten, name), "default", recorder(name))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorder("scaled_dot_product_attention"))
    return calls


PATHS = {
    "sdpa.flash": "_scaled_dot_product_flash_attention",
    "sdpa.efficient": "_scaled_dot_product_efficient_attention",
    "sdpa.cudnn": "_scaled_dot_product_cudnn_attention",
}
SWITCHES = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")


def switches() -> list[bool]:
    return [getattr(torch.backends.cuda, name)() for name in SWITCHES]


def bound(kernel: str, **call: Any) -> Any:
    c = plugins.catalog()
    backend = "torch_cudnn_sdpa" if kernel == "sdpa.cudnn" else "torch_sdpa"
    given = {"dtype": "bf16", "head_dim": 64, "heads": 2, "batch": 2, "q_len": 20, **call}
    d = resolve(Call.of(given), c.machine("h100"), c, Policy((Request(backend, kernel=kernel),)))
    assert d.kernel == kernel, d.error
    return d.bind()


@pytest.mark.parametrize("kernel, operator", PATHS.items())
def test_each_path_of_pytorch_is_called_by_its_own_operator(kernel: str, operator: str, operators: Any) -> None:
    q, k, v = tensors(2, 20, 2, 64, dtype=torch.bfloat16)
    before = switches()
    bound(kernel)(q, k, v, None, None)
    assert [name for name, _ in operators] == [operator]
    assert switches() == before, "a process-wide switch was used"


def test_the_math_path_calls_no_sdpa(operators: Any) -> None:
    q, k, v = tensors(2, 20, 2, 64, dtype=torch.bfloat16)
    out = bound("sdpa.math")(q, k, v, None, None)
    near(out, oracle.attention(q, k, v)[0], 3e-2)
    assert not operators


def test_a_bias_reaches_the_efficient_operator_aligned(operators: Any) -> None:
    for n in (1, 15, 16, 20):
        q, k, v = (t[:, :n] for t in tensors(2, 20, 2, 64, dtype=torch.bfloat16))
        for mask in (torch.ones(2, 1, n, n, dtype=torch.bool), torch.zeros(1, 1, 1, n, dtype=torch.float32)):
            bound("sdpa.efficient", q_len=n, mask="bool" if mask.dtype is torch.bool else "additive")(q, k, v, mask, None)
            bias = operators[-1][1][3]
            assert bias.shape == (2, 2, n, n) and bias.dtype is torch.bfloat16 and bias.stride(-1) == 1
            assert all(s % 8 == 0 for s in bias.stride()[:-1]) and bias.storage_offset() % 8 == 0


@pytest.mark.parametrize("causal", [False, True])
def test_causality_is_what_the_call_says(causal: bool) -> None:
    q, k, v = tensors(1, 6, 2, 64, dtype=torch.bfloat16)
    want, _ = oracle.attention(q, k, v, is_causal=causal)
    with fakes.installed("flash_attn-2.8.3.post1") as fake, fakes.workbench(FA, flash_attn="2.8.3"):
        out = hal.attention(q, k, v, attn_mask=None, is_causal=causal, backend="fa")
    assert fake.calls[0]["causal"] is causal
    near(out, want, FA.tolerance["bfloat16"])
    everything = torch.ones(6, 6, dtype=torch.bool)  # a mask says nothing of causality
    masked = hal.attention(q, k, v, attn_mask=everything, is_causal=causal)
    near(masked, want, FA.tolerance["bfloat16"])


def test_a_thousand_equal_calls_decide_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(1, 3, 1, 8)
    decisions = []
    monkeypatch.setattr(run, "settle", lambda *a: decisions.append(a) or settlement.settle(*a))
    hal.clear_receipts()
    for _ in range(1000):
        hal.attention(q.clone(), k, v)
    assert len(decisions) == 1
    assert [r.runs for r in hal.receipts()] == [1000]


# ---- B: right numbers


@pytest.mark.parametrize("kernel", ["sdpa.cpu", "sdpa.math"])
def test_heads_and_tokens_of_equal_number_are_not_mixed_up(kernel: str) -> None:
    q, k, v = tensors(2, 6, 6, 8)
    policy = Policy((Request("torch_sdpa", kernel=kernel),))
    for layout in ("bshd", "bhsd"):
        with context.changed(policy=policy):
            out = hal.attention(q, k, v, layout=layout, is_causal=True)
        want, _ = oracle.attention(q, k, v, layout=layout, is_causal=True)
        near(out, want, 2e-5)
    other, _ = oracle.attention(q, k, v, layout="bshd", is_causal=True)
    assert (want - other).abs().max() > 0.1, "a swap would not be seen"


class Anything(Platform):
    name = title = "anything"
    device_type = "cpu"
    folder = TESTS

    def parse_arch(self, text: Any) -> str:
        return str(text)


def test_lossy_and_near_backends_are_never_chosen_automatically() -> None:
    kernels = {q: Kernel(f"{q}.kernel", lambda call: None, honours=frozenset()) for q in ("lossy", "near", "exact")}
    backends = {q: Backend(q, (k,), quality=q) for q, k in kernels.items()}

    class Quick(Anything):
        order = tuple(Prefer(q) for q in kernels)
        support = {q: (SupportRow(k.name),) for q, k in kernels.items()}

    c, machine = Catalog({"anything": Quick()}, backends), Machine("anything", (Device("a"),))
    assert resolve(Call.of(heads=2, q_len=8), machine, c).backend == "exact"
    for q in kernels:
        assert resolve(Call.of(heads=2, q_len=8), machine, c, Policy((Request(q),))).backend == q
    forbidden = Policy((Request("exact", "forbid"),))
    assert resolve(Call.of(heads=2, q_len=8), machine, c, forbidden).error, "nothing exact serves it, so nothing does"


# ---- C: architectures


def test_no_row_says_at_least() -> None:
    for p in plugins.catalog().platforms.values():
        archs = {a for rows in p.support.values() for r in rows for a in r.on or ()}
        assert all(p.parse_arch(a) == a for a in archs)
    with pytest.raises(DeclarationError, match="never an order"):
        limit_of("arch", ">=sm80")


# ---- D: which platform is this


@pytest.mark.parametrize("raised", ["RuntimeError('no device')", "OSError('libvendor.so.1: not found')",
                                    "AttributeError('no torch.ops.vendor.attention')", "SystemExit(127)"])  # fmt: skip
@pytest.mark.parametrize("where", ["import", "detect"])
def test_a_plug_in_that_raises_is_an_error_that_names_it(python: Any, distribution: Any, raised: str, where: str) -> None:
    detect_it = f"""
from pathlib import Path
from hal.platform import Platform
class Vendor(Platform):
    name = device_type = "vendor"
    folder = Path(__file__).parent
    def detect(self, host):
        raise {raised}
PLATFORM = Vendor()
"""
    folder = distribution(
        "vendor-hal", files={"vendor_hal.py": f"raise {raised}" if where == "import" else detect_it},
        platforms={"vendor": "vendor_hal:PLATFORM"},
    )  # fmt: skip
    told = python(
        "import hal\ntry: print(hal.current_platform().name)\n"
        "except hal.HalError as e: print(type(e).__name__, e, '|', repr(e.__cause__))",
        path=[folder],
    )
    assert told.code == 0, told.err
    assert "PluginError" in told.out and "vendor" in told.out and "--ignore-plugin vendor" in told.out
    kind, text = raised.split("(")[0], raised.split("(")[1].strip("')")
    assert kind in told.out and text in told.out
    if where == "import":
        assert "vendor-hal" in told.out and told.out.split("|")[1].strip().startswith(kind)
    on = python("import hal; print(hal.current_platform().name)", path=[folder], HAL_IGNORE_PLUGIN="vendor")
    assert on.out.strip() == "cpu", on.err


def host(root: Path, torch_build: dict[str, Any], files: Mapping[str, str], modules: tuple[str, ...] = (), **env: str) -> Host:
    """A machine that is a folder: these files, this torch build, these importable packages."""
    for path, text in files.items():
        (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (root / path.lstrip("/")).write_text(text)
    site = root / "site"
    for name in ("torch", *modules):
        (site / name).mkdir(parents=True)
    values = {"__version__": "2.13.0", "cuda": None, "hip": None, "xpu": None, **torch_build}
    (site / "torch" / "version.py").write_text("".join(f"{k} = {x!r}\n" for k, x in values.items()))
    h = Host(env, [str(site)], str(root))
    h.system, h.processor = "linux", "x86_64"
    return h


NVIDIA = {"/dev/nvidiactl": "", "/dev/nvidia0": "", "/proc/driver/nvidia/version": "Kernel Module  580.65.06  x"}


def told(h: Host) -> dict[str, detect.Detection]:
    return {d.platform: d for d in detect.detections(plugins.catalog().platforms, h)}


def test_every_platform_says_what_it_found(tmp_path: Path) -> None:
    all_of_them = told(host(tmp_path, {}, {}))
    assert set(all_of_them) == set(plugins.catalog().platforms)
    assert all(d.found for d in all_of_them.values()), "one says nothing"
    assert {n for n, d in all_of_them.items() if d.present} == {"cpu"}


def test_a_cpu_build_of_torch_on_a_machine_with_a_gpu_is_the_cpu(tmp_path: Path) -> None:
    h = host(tmp_path, {"__version__": "2.13.0+cpu"}, NVIDIA)
    d = told(h)
    assert d["cuda"].state == "unusable" and "pip install torch" in d["cuda"].fix
    assert detect.choose(plugins.catalog().platforms, tuple(d.values()), h) == "cpu"


@pytest.mark.parametrize("text", ["", "-1"])
def test_hidden_is_not_absent(tmp_path: Path, text: str) -> None:
    h = host(tmp_path, {"cuda": "13.0"}, NVIDIA, CUDA_VISIBLE_DEVICES=text)
    d = told(h)
    assert d["cuda"].state == "hidden" and d["rocm"].state == "absent"
    assert any("CUDA_VISIBLE_DEVICES" in f for f in d["cuda"].found) and "unset" in d["cuda"].fix
    assert told(host(tmp_path / "seen", {"cuda": "13.0"}, NVIDIA))["cuda"].state == "present"


def test_a_package_without_a_device_is_no_platform(tmp_path: Path) -> None:
    h = host(tmp_path, {"__version__": "2.8.0+cpu"}, {}, modules=("intel_extension_for_pytorch",))
    d = told(h)
    assert d["xpu"].state == "absent" and any("the package alone makes no XPU" in f for f in d["xpu"].found)
    assert detect.choose(plugins.catalog().platforms, tuple(d.values()), h) == "cpu"


GPU, MIG = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2"


@pytest.mark.parametrize("text, seen", [
    (None, None), ("", ()), ("-1", ()), ("0,1", (0, 1)), (" 2 , 0 ", (2, 0)), ("0,-1,1", (0,)),
    (GPU, (GPU,)), (f"{GPU},1", (GPU, 1)), (MIG, (MIG,)), ("MIG-8932f937-d72c-4106-c12f-20bd9faed9f6",) * 2,
])  # fmt: skip
def test_visible_devices(text: str | None, seen: Any) -> None:
    assert visible_devices(text) == ((seen,) if isinstance(seen, str) else seen)


# ---- E: packages


GOOD = "def flash_attn_func(q, k, v, window_size=None, deterministic=False): ...\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path, forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    probe._owners.cache_clear()
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] == "flash_attn"]:
        del sys.modules[name]
    probe._owners.cache_clear()


def needs() -> Needs:
    (n,) = next(k for k in FA.kernels if k.name == "fa2").needs
    return n


@pytest.mark.parametrize("line, kept", [
    ("raise ImportError('wants xformers < 1')", "ImportError: wants xformers < 1"),
    ("raise OSError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')", "OSError: flash_attn_2_cuda.so: undefined symbol: _ZN3c10"),
    ("import torch.ops.no_such_vendor", "ModuleNotFoundError"),
    ("raise SystemExit(127)", "SystemExit: 127"),
])  # fmt: skip
def test_a_package_that_cannot_be_imported_is_broken_and_says_why(site: Path, line: str, kept: str) -> None:
    fakes.distribution(site, "flash-attn", "2.8.3", {"flash_attn/__init__.py": line})
    assert probe.look(needs()).state == "found"
    state = probe.prove(needs(), probe.look(needs()))
    assert state.state == "broken" and state.version == "2.8.3" and kept in state.note
    c = plugins.catalog()
    machine = c.machine("a100").with_packages({"flash_attn": state})
    plain = Call.parse(PLAIN)
    assert resolve(plain, machine, c).backend == "torch_sdpa"
    refused = resolve(plain, machine, c, Policy((Request("fa", kernel="fa2"),)))
    assert kept in refused.error and "reinstall flash_attn for the installed torch" in refused.error


def test_a_namespace_is_no_package(site: Path) -> None:
    fakes.distribution(site, "other-thing", "1.0", {"flash_attn/cute/notes.txt": ""})
    fa4 = next(k for k in FA.kernels if k.name == "fa4").needs[0]
    assert probe.look(fa4).state in ("missing_symbol", "absent") and not probe.look(fa4).available
    assert not probe.look(needs()).available
    fakes.distribution(site, "flash-attn-4", "4.0.0b36", {"flash_attn/cute/__init__.py": "nothing = 1"})
    state = probe.prove(fa4, probe.look(fa4))
    assert state.state == "missing_symbol" and "flash_attn_func" in state.note


def test_a_package_is_proven_by_its_public_function(site: Path) -> None:
    fakes.distribution(site, "flash-attn", "2.8.3", {"flash_attn/__init__.py": GOOD})
    assert probe.prove(needs(), probe.look(needs())).state == "usable"  # no private symbol is there
    assert all(not part.startswith("_") for c in [plugins.catalog()] for p in c.packages for n in c.needs(p) for part in n.symbol.split("."))


OLD_TO_NEW = ["2.8.3", "2.8.3+cu130torch2.9", "2.8.3.post1", "2.9.0.dev20260101", "2.9.0", "2.10.0", "2.12.0a0+nv26", "2.12.0"]


def test_versions_are_ordered_as_pep_440_does() -> None:
    from packaging.version import Version

    assert sorted(reversed(OLD_TO_NEW), key=Version) == OLD_TO_NEW
    for text, version, answer in [
        (">=2.9", "2.10.0", True), ("<2.9", "2.10.0", False), ("<2.10", "2.9.1", True),
        (">=2.8,<3", "2.8.3+cu130torch2.9", True), ("==2.8.3", "2.8.3+cu130torch2.9", True),
        (">=4.0.0b20", "4.0.0b22", True), (">=4.0.0b20", "4.0.0b9", False), (">=4.0.0b20", "4.0.0", True),
        (">=2.12", "2.12.0a0+nv26", True), (">=2.9", "2.9.0.dev20260101", True), ("<2.9", "2.9.0.dev20260101", False),
        (">=2.9", "not a version", None),
    ]:  # fmt: skip
        assert within(text, version) is answer, (text, version)


def test_hal_is_imported_and_explains_without_triton_or_torch(python: Any) -> None:
    ran = python(
        "import sys; sys.modules.update({n: None for n in ('torch', 'triton', 'torch_npu', 'numpy')})\n"
        "import hal; from hal import plugins\n"
        "c = plugins.catalog(); assert not c.problems\n"
        "d = hal.resolve(hal.Call.parse('dtype=bf16,head_dim=64,heads=2,batch=1,q_len=64,ring=2'), c.machine('910b'), c)\n"
        "print(d.kernel, len(d.candidates), bool(d.explain('json')))"
    )
    assert ran.code == 0, ran.err
    assert ran.out.split()[0] == "ascend_fa"


POISON = """
import torch, torch.cuda
touched = []
def poisoned(name):
    def function(*a, **k):
        touched.append(name)
        raise AssertionError(f"torch.cuda.{name} was called")
    return function
for name in dir(torch.cuda):
    if callable(getattr(torch.cuda, name)) and not isinstance(getattr(torch.cuda, name), type) and name != "is_initialized":
        setattr(torch.cuda, name, poisoned(name))
for name in [n for n in dir(torch._C) if n.startswith("_cuda_")]:
    setattr(torch._C, name, poisoned(name))
def flags():
    b = torch.backends
    return (
        [getattr(b.cuda, n)() for n in ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")],
        b.cuda.matmul.allow_tf32, b.cudnn.enabled, b.cudnn.benchmark, b.cudnn.deterministic, torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.get_num_threads(), torch.initial_seed(),
        torch.nn.functional.scaled_dot_product_attention, torch.get_float32_matmul_precision(),
    )
before = flags()
import hal
from hal import plugins
c = plugins.catalog()
for name in c.presets:
    d = hal.resolve(hal.Call.parse("dtype=fp16,head_dim=64,heads=2,batch=1,q_len=64"), c.machine(name), c)
    assert d.chosen and d.explain()
hal.current_platform()
q = torch.randn(1, 4, 2, 8)
hal.explain(q, q, q); hal.attention(q, q, q)
assert flags() == before, "a flag changed"
assert not touched and not torch.cuda.is_initialized()
print("untouched")
"""


def test_importing_hal_touches_no_device_and_no_flag(python: Any) -> None:
    ran = python(POISON)
    assert ran.out.strip() == "untouched", ran.err


