"""Whether a Moore Threads GPU, its driver and torch_musa are here: by files alone; then what they are, by PyTorch."""

from __future__ import annotations

from hal.errors import PlatformError
from hal.host import Detection, Host, visible_devices

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from typing import Any

    from hal.facts import Machine

PACKAGE = "torch_musa"
VISIBLE = "MUSA_VISIBLE_DEVICES"
INSTALL = "install the wheels of torch and torch_musa from https://github.com/MooreThreads/torch_musa/releases"


def detect(platform: Any, host: Host) -> Detection:
    nodes = [p.rsplit("/", 1)[-1] for p in host.glob("/dev/mtgpu.[0-9]*")]
    plugin, version = host.installed(PACKAGE), host.torch_build.get("version")
    library = host.library("libmusart.so") or host.library("libmusa.so")
    if not library and host.exists("/usr/local/musa/lib/libmusart.so"):
        library = "/usr/local/musa/lib/libmusart.so"
    found = [f"torch {version} is installed"] if version else []
    if plugin:
        found.append(f"{PACKAGE} is installed")
    if library:
        found.append(f"the MUSA runtime is at {library}")
    if nodes:
        found.append(
            f"{', '.join(f'/dev/{n}' for n in nodes)}: {len(nodes)} Moore Threads GPU{'s' if len(nodes) > 1 else ''}"
        )
    if not nodes and not plugin:
        return Detection("musa", "absent", (f"neither {PACKAGE} nor a GPU (/dev/mtgpu.*) is here",))
    if not nodes:
        fix = "install the driver, or start the container with MTHREADS_VISIBLE_DEVICES=all"
        return Detection("musa", "unusable", (*found, "no Moore Threads GPU is here (/dev/mtgpu.*)"), fix)
    if not version:
        return Detection("musa", "unusable", (*found, "torch is not installed"), INSTALL)
    if not plugin:
        return Detection("musa", "unusable", (*found, f"{PACKAGE} is not installed"), INSTALL)
    if not library:
        fix = "install the MUSA SDK, or add its lib folder to LD_LIBRARY_PATH"
        return Detection("musa", "unusable", (*found, "the MUSA runtime is not here (libmusart.so)"), fix)
    shown = visible_devices(host.env.get(VISIBLE))
    if shown is not None and not shown:
        return Detection(
            "musa", "hidden", (*found, f"{VISIBLE}={host.env[VISIBLE]} hides every GPU"), f"unset {VISIBLE}"
        )
    return Detection("musa", "present", tuple(found))


def sdk_version(host: Host) -> str | None:
    """The version that the MUSA SDK's own tool tells."""
    import re

    tool = f"{host.env.get('MUSA_HOME', '/usr/local/musa')}/bin/musa_runtime_version"
    import subprocess  # only where there is something to ask: it is slow to import

    try:
        said = subprocess.run([tool], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    m = re.search(r'"(\d+\.\d+\.\d+)"', said)
    return m[1] if m else None


def machine(platform: Any, host: Host) -> Machine:
    """The visible devices, as torch.musa lists them."""
    from hal.facts import Device, Machine

    from .arch import OTHER, parse

    musa = platform.module()
    if not musa.device_count():
        raise PlatformError(f"torch.musa lists no device ({'; '.join(detect(platform, host).found)}); see mthreads-gmi")
    import torch

    devices = []
    for i in range(musa.device_count()):
        p = musa.get_device_properties(i)
        arch = parse((p.major, p.minor)) or parse(p.name) or OTHER
        devices.append(Device(arch, i, p.name, p.total_memory, platform.dtypes))
    software = {"torch": torch.__version__, "runtime": sdk_version(host)}
    return Machine(platform.name, tuple(devices), software, {}, "detected")
