"""What this CPU is, by /proc and the Python build; a CPU is always here."""

from __future__ import annotations

from hal.host import Detection, Host

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from typing import Any

    from hal.facts import Machine


def detect(platform: Any, host: Host) -> Detection:
    build = host.torch_build.get("version")
    return Detection("cpu", "present", (f"torch {build} is installed" if build else "torch is not installed",))


def machine(platform: Any, host: Host) -> Machine:
    import platform as python

    from hal.facts import Device, Machine

    arch = "armv8.0" if python.machine().lower() in ("aarch64", "arm64") else f"x86-64-v{_level(host)}"
    device = Device(arch, 0, _model(host), memory(host).get("MemTotal"), platform.dtypes)
    return Machine("cpu", (device,), {"torch": host.torch_build.get("version")}, {}, "detected")


def _level(host: Host) -> int:
    """The x86-64 micro-architecture level of this processor, by its flags."""
    flags = set(_field(host, "flags").split())
    if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        return 4
    if {"avx2", "bmi1", "bmi2", "fma"} <= flags:
        return 3
    return 2 if {"sse4_2", "popcnt"} <= flags else 1


def _model(host: Host) -> str:
    import platform as python

    return _field(host, "model name") or python.processor() or python.machine()


def _field(host: Host, name: str) -> str:
    for line in host.read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def memory(host: Host) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    rows = (line.split() for line in host.read("/proc/meminfo").splitlines())
    return {r[0].rstrip(":"): int(r[1]) * 1024 for r in rows if len(r) > 1}
