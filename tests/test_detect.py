"""Which platform is this?  One answer with its evidence, or an error that says how to choose."""

from __future__ import annotations

import pytest

from hal import detect, plugins
from hal.errors import PlatformError, PluginError, PolicyError
from hal.host import STATES, Detection, Host, visible_devices
from hal.platform import Platform


def made(name, accelerator=True, device_type=None, says="absent"):
    def detection(self, host):
        if isinstance(says, BaseException):
            raise says
        return Detection(name, says, (f"{name} is {says}",)) if says in STATES else says

    kind = type(
        name,
        (Platform,),
        {"name": name, "device_type": device_type or name, "accelerator": accelerator, "detect": detection},
    )
    return kind()


def chosen(*platforms, theirs=(), monkeypatch=None, **env):
    """The name that is chosen among these; ``theirs`` come from another distribution, vendor-x."""
    everyone = {p.name: p for p in (*platforms, made("cpu", accelerator=False, says="present"))}
    if monkeypatch:
        points = [
            plugins.EntryPoint("hal.platforms", n, f"x:{n}", "vendor-x" if n in theirs else plugins.OURS)
            for n in everyone
        ]
        monkeypatch.setattr(plugins, "entry_points", lambda: points)
    host, raised = Host(env=env), {}
    return detect.choose(everyone, detect.detections(everyone, host, raised), host, raised)


def test_the_one_accelerator_that_is_present_is_chosen():
    assert chosen(made("a"), made("b", says="present"), made("c", says="hidden")) == "b"


@pytest.mark.parametrize("state", ["absent", "hidden", "unusable"])
def test_without_an_accelerator_that_works_the_cpu_is_left(state):
    assert chosen(made("a", says=state)) == "cpu"


def test_two_active_platforms_are_an_error_that_says_how_to_choose():
    with pytest.raises(PlatformError, match="2 platforms are active here: a, b; choose one with HAL_PLATFORM=a"):
        chosen(made("a", says="present"), made("b", says="present"))


def test_the_environment_chooses():
    two = made("a", says="present"), made("b", says="present")
    assert chosen(*two, HAL_PLATFORM="b") == "b"
    assert chosen(*two, HAL_PLATFORM=" CPU ") == "cpu"
    with pytest.raises(
        PlatformError, match=r"unknown platform in HAL_PLATFORM 'cup'; did you mean 'cpu'\? \(known: a, b, cpu\)"
    ):
        chosen(*two, HAL_PLATFORM="cup")


def test_a_vendors_own_platform_goes_before_ours_and_two_of_them_are_an_error(monkeypatch):
    ours, x, y = made("ours", says="present"), made("x", says="present"), made("y", says="present")
    assert chosen(ours, x, theirs={"x"}, monkeypatch=monkeypatch) == "x"
    with pytest.raises(PlatformError, match="2 platforms are active here: x, y; choose one with HAL_PLATFORM=x"):
        chosen(ours, x, y, theirs={"x", "y"}, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "says", [RuntimeError("no driver"), OSError("libx.so"), SystemExit(3), None, "present, I think"], ids=repr
)
def test_a_vendors_detection_that_fails_is_an_error_that_names_its_distribution(monkeypatch, says):
    with pytest.raises(
        PluginError,
        match="platform 'x' of the distribution 'vendor-x' failed: .*--ignore-plugin x or HAL_IGNORE_PLUGIN=x",
    ) as e:
        chosen(made("x", says=says), theirs={"x"}, monkeypatch=monkeypatch)
    assert e.value.__cause__ is says or isinstance(e.value.__cause__, TypeError)


def test_one_that_fails_hides_no_other():
    everyone = {p.name: p for p in (made("a", says=RuntimeError("no driver")), made("b", says="present"))}
    a, b = detect.detections(everyone, Host(env={}))
    assert (a.state, b.state) == ("unusable", "present")
    assert a.found == ("its detection raised RuntimeError: no driver",)


def test_where_no_platform_is_here_each_says_what_it_saw():
    everyone = {p.name: p for p in (made("a", says="hidden"), made("b", says="unusable"))}
    host = Host(env={})
    with pytest.raises(PlatformError, match="no platform is here: a: hidden; b: unusable"):
        detect.choose(everyone, detect.detections(everyone, host), host)


def test_every_platform_tells_of_this_machine_in_words():
    found = detect.detected().detections
    assert len(found) == len(detect.detected().platforms) >= 7
    assert all(d.state in STATES and d.found and all(d.found) for d in found)
    cpu = next(d for d in found if d.platform == "cpu")
    assert cpu.present and "torch" in cpu.found[0]


def test_a_tensors_device_type_selects_the_platform(monkeypatch):
    cuda, rocm, cpu = made("cuda"), made("rocm", device_type="cuda"), made("cpu", accelerator=False)
    everyone = {p.name: p for p in (cuda, rocm, cpu)}
    for here in (cuda, rocm):
        monkeypatch.setattr(
            detect,
            "_detected",
            type(
                "D", (), {"strangers": (), "platforms": everyone, "name": here.name, "error": None, "detections": ()}
            )(),
        )
        assert detect.platform_for("cuda") is here
        assert detect.platform_for("cpu") is cpu
    with pytest.raises(
        PlatformError,
        match=r"no platform serves tensors on 'tpu'; installed: cuda \(cuda\), rocm \(cuda\), cpu \(cpu\)",
    ):
        detect.platform_for("tpu")


def test_what_import_met_is_raised_on_use(monkeypatch):
    error = PlatformError("two are here")
    monkeypatch.setattr(
        detect, "_detected", type("D", (), {"strangers": (), "platforms": {}, "name": "", "error": error})()
    )
    with pytest.raises(PlatformError, match="two are here"):
        detect.real_platform()


@pytest.mark.parametrize("text, seen", [
    (None, None), ("", ()), ("-1", ()), ("0,1", (0, 1)), (" 2 , 0", (2, 0)), ("0,-1,1", (0,)), ("GPU-8932f937", ("GPU-8932f937",)),
    ("MIG-GPU-1/2/3", ("MIG-GPU-1/2/3",)), ("0,,1", (0,)),
])  # fmt: skip
def test_visible_devices_are_read_in_every_form(text, seen):
    assert visible_devices(text) == seen


# ---- the torch build is read from its file

BUILD = """from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '2.13.0+cu130'
debug = False
cuda: Optional[str] = '13.0'
hip: Optional[str] = None
xpu: Optional[str] = None
"""


def test_a_build_of_torch_is_known_without_importing_it(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(BUILD)
    assert Host(path=[str(tmp_path / "none"), str(tmp_path)]).torch_build == {
        "version": "2.13.0+cu130",
        "cuda": "13.0",
        "hip": None,
        "xpu": None,
    }
    assert Host(path=[str(tmp_path / "none")]).torch_build == {}


def test_a_host_reads_files_under_its_root_alone(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "made0").write_text("x")
    host = Host(env={"LD_LIBRARY_PATH": "/opt/lib"}, path=[], root=str(tmp_path))
    assert host.exists("/dev/made0") and not host.exists("/dev/null")
    assert [p.removeprefix(str(tmp_path)) for p in host.glob("/dev/made*")] == ["/dev/made0"]
    assert host.read("/dev/made0") == "x" and host.read("/dev/made1") == ""
    assert host.library("libmade.so") is None
    (tmp_path / "opt" / "lib").mkdir(parents=True)
    (tmp_path / "opt" / "lib" / "libmade.so").write_text("")
    assert host.library("libmade.so") == "/opt/lib/libmade.so"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("HAL_PLATFROM", r"; did you mean 'HAL_PLATFORM'\?"),
        ("HAL_ATTENTION_BACKEN", r"; did you mean 'HAL_ATTENTION_BACKEND'\?"),
        ("HAL_XYZZY", r" \(known: HAL_ATTENTION_BACKEND, .*\): nothing reads it; unset it"),
    ],
)
def test_a_variable_that_nothing_reads_is_an_error(monkeypatch, name, said):
    """Field case A21, golden case 40."""
    monkeypatch.setattr(detect, "_detected", None)
    monkeypatch.setenv(name, "x")
    for _ in range(2):
        with pytest.raises(PolicyError, match=f"unknown environment variable '{name}'{said}"):
            detect.real_platform()
    assert detect.detected().name == "cpu", "what tells of this machine still can"
