"""Whether an Ascend NPU, CANN and torch_npu are here: by files alone; then what they are, by PyTorch."""

from __future__ import annotations

from hal.errors import PlatformError
from hal.host import Detection, Host, visible_devices

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from typing import Any

    from hal.facts import Machine

PACKAGE = "torch_npu"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def detect(platform: Any, host: Host) -> Detection:
    nodes = [p.rsplit("/", 1)[-1] for p in host.glob("/dev/davinci[0-9]*")]
    plugin, version, cann = host.installed(PACKAGE), host.torch_build.get("version"), toolkit(host)
    found = [f"torch {version} is installed"] if version else []
    if plugin:
        found.append(f"{PACKAGE} is installed")
    if cann:
        found.append(f"CANN is at {cann}")
    if nodes:
        found.append(f"{', '.join(f'/dev/{n}' for n in nodes)}: {len(nodes)} Ascend NPU{'s' if len(nodes) > 1 else ''}")
    if not nodes and not plugin:
        return Detection("npu", "absent", (f"neither {PACKAGE} nor an NPU (/dev/davinci*) is here",))
    if not nodes:
        # Without CANN the plug-in that PyTorch loads by itself makes `import torch` raise.
        said = "no Ascend NPU is here (/dev/davinci*)" + (
            "" if cann else f"; without CANN {PACKAGE} makes `import torch` fail"
        )
        off = host.env.get(AUTOLOAD) == "0"
        fix = "pip uninstall torch-npu" + ("" if off else f", or set {AUTOLOAD}=0")
        return Detection("npu", "unusable", (*found, said), fix)
    if not version:
        return Detection("npu", "unusable", (*found, "torch is not installed"), "pip install torch torch-npu")
    if not plugin:
        minor = ".".join(version.split(".")[:2])
        return Detection(
            "npu", "unusable", (*found, f"{PACKAGE} is not installed"), f'pip install "torch-npu=={minor}.*"'
        )
    if not cann:
        fix = "source /usr/local/Ascend/ascend-toolkit/set_env.sh, or install CANN"
        return Detection("npu", "unusable", (*found, "CANN is not set up (libascendcl.so)"), fix)
    shown = visible_devices(host.env.get(VISIBLE))
    if shown is not None and not any(isinstance(d, int) for d in shown):
        return Detection(
            "npu", "hidden", (*found, f"{VISIBLE}={host.env[VISIBLE]} hides every NPU"), f"unset {VISIBLE}"
        )
    return Detection("npu", "present", tuple(found))


def toolkit(host: Host) -> str | None:
    """Where CANN is set up, if it is."""
    home = host.env.get("ASCEND_HOME_PATH") or host.env.get("ASCEND_TOOLKIT_HOME")
    return home if home and host.exists(home) else host.library("libascendcl.so")


def cann_version(host: Host) -> str | None:
    import re

    home = (
        host.env.get("ASCEND_HOME_PATH")
        or host.env.get("ASCEND_TOOLKIT_HOME")
        or "/usr/local/Ascend/ascend-toolkit/latest"
    )
    for where in ("aarch64-linux", "x86_64-linux"):
        m = re.search(r"^version=(\S+)", host.read(f"{home}/{where}/ascend_toolkit_install.info"), re.M)
        if m:
            return m[1]
    return None


def machine(platform: Any, host: Host) -> Machine:
    """The visible devices, as torch.npu lists them."""
    from hal.facts import Device, Machine

    from .arch import OTHER, parse

    npu = platform.module()
    if not npu.device_count():
        raise PlatformError(f"torch.npu lists no device ({'; '.join(detect(platform, host).found)}); see npu-smi info")
    import torch

    devices = []
    for i in range(npu.device_count()):
        p = npu.get_device_properties(i)
        arch = parse(p.name) or OTHER
        devices.append(Device(arch, i, p.name, p.total_memory, platform.dtypes_of(arch)))
    software = {"torch": torch.__version__, "cann": cann_version(host)}
    return Machine(platform.name, tuple(devices), software, {}, "detected")
