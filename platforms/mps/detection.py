"""Whether an Apple GPU and a PyTorch for it are here."""

from __future__ import annotations

from hal.errors import PlatformError
from hal.host import Detection, Host

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from typing import Any

    from hal.facts import Machine

_VERSION = "/System/Library/CoreServices/SystemVersion.plist"


def detect(platform: Any, host: Host) -> Detection:
    if host.system != "darwin":
        return Detection("mps", "absent", (f"this is {host.system}, not macOS",))
    found = [f"this is macOS {os_version(host) or 'of an unknown version'} on {host.processor}"]
    if host.processor != "arm64":
        found.append("PyTorch has no MPS for Macs with Intel processors, nor for x86-64 Python under Rosetta")
        return Detection("mps", "absent", tuple(found), "on an Apple chip, install Python and torch for arm64")
    version = host.torch_build.get("version")
    if not version:
        return Detection("mps", "unusable", (*found, "torch is not installed"), "pip install torch")
    return Detection("mps", "present", (*found, f"torch {version} is installed; every macOS arm64 build has MPS"))


def os_version(host: Host) -> str | None:
    import re

    m = re.search(r"<key>ProductVersion</key>\s*<string>([\d.]+)</string>", host.read(_VERSION))
    return m[1] if m else None


def machine(platform: Any, host: Host) -> Machine:
    import torch

    from hal.facts import Device, Machine

    from .arch import OTHER, parse

    if not torch.backends.mps.is_available():
        why = "macOS is too old for it" if torch.backends.mps.is_built() else "this build of torch has no MPS"
        raise PlatformError(f"torch.backends.mps.is_available() says no: {why}")
    name = _sysctl("machdep.cpu.brand_string")
    device = Device(parse(name) or OTHER, 0, name, int(_sysctl("hw.memsize") or 0) or None, platform.dtypes)
    return Machine(platform.name, (device,), {"torch": torch.__version__, "os": os_version(host)}, {}, "detected")


def _sysctl(name: str) -> str:
    import subprocess  # only where there is something to ask: it is slow to import

    try:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
