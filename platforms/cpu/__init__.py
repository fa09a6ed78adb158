"""Plain CPUs.  Owner: the hal core team."""

from __future__ import annotations

from typing import Any

from hal.facts import Device, Machine
from hal.host import Detection, Host
from hal.platform import Platform, Prefer

from .arch import ARM, X86, parse
from .support import SUPPORT


class CPU(Platform):
    name = device_type = "cpu"
    title = "CPU"
    accelerator = False
    order = (Prefer("torch_sdpa"),)
    support = SUPPORT
    families = {"x86-64": X86, "Arm": ARM}
    arch_forms = "x86-64, x86-64-v1 to x86-64-v4, armv8, armv8.0 to armv8.9, armv9, armv9.0 to armv9.7"
    software = {"torch": "2.13.0"}

    def parse_arch(self, text: Any) -> str:
        arch = parse(text)
        if arch is None:
            raise self.no_arch(text)
        return arch

    def detect(self, host: Host) -> Detection:
        build = host.torch_build.get("version")
        return Detection(self.name, "present", (f"torch {build} is installed" if build else "torch is not installed",))

    def machine(self, host: Host) -> Machine:
        import platform as _python

        arch = "armv8" if _python.machine().lower() in ("aarch64", "arm64") else f"x86-64-v{_level(host)}"
        device = Device(arch, 0, _model(host), _memory(host), self.dtypes)
        return Machine(self.name, (device,), {"torch": host.torch_build.get("version")}, {}, "detected")

    def module(self) -> Any:
        import torch

        return torch.cpu

    def synchronize(self, index: int | None = None) -> None:
        return None

    def memory(self, index: int = 0) -> tuple[int, int]:
        info = _meminfo(Host())
        return info.get("MemAvailable", 0), info.get("MemTotal", 0)

    def seed(self, value: int) -> None:
        import torch

        torch.default_generator.manual_seed(value)


def _level(host: Host) -> int:
    """The x86-64 micro-architecture level of this processor, by its flags."""
    flags = set(_field(host, "flags").split())
    if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        return 4
    if {"avx2", "bmi1", "bmi2", "fma"} <= flags:
        return 3
    return 2 if {"sse4_2", "popcnt"} <= flags else 1


def _model(host: Host) -> str:
    import platform as _python

    return _field(host, "model name") or _python.processor() or _python.machine()


def _field(host: Host, name: str) -> str:
    for line in host.read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _meminfo(host: Host) -> dict[str, int]:
    rows = (line.split() for line in host.read("/proc/meminfo").splitlines())
    return {r[0].rstrip(":"): int(r[1]) * 1024 for r in rows if len(r) > 1}


def _memory(host: Host) -> int | None:
    return _meminfo(host).get("MemTotal")


PLATFORM = CPU()
