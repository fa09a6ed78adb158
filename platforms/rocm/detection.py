"""Is an AMD GPU here, and may PyTorch use it?  By files and metadata; devices are read when they are asked for."""

from __future__ import annotations

import os

from hal.errors import PlatformError
from hal.host import Detection, Host, visible_devices

from . import VARIABLE

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from hal.facts import Machine

    from . import ROCm

KFD = "/dev/kfd"
TOPOLOGY = "/sys/class/kfd/kfd/topology/nodes"
WSL, WINDOWS = "/opt/rocm/lib/librocdxg.so", "/Windows/System32/amdhip64*.dll"
# All three hide devices from PyTorch: the first in the driver's library, the others in HIP.
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/rocm7.2"


def detect(platform: ROCm, host: Host) -> Detection:
    def told(state: str, *more: str, fix: str = "") -> Detection:
        return Detection(platform.name, state, (host.torch_words, *more), fix)

    seen = hardware(host)
    if not seen:
        return told("absent", f"no AMD GPU: neither {KFD} nor {WSL} is here")
    if not host.torch_build.get("hip"):
        more = ["this PyTorch cannot use AMD GPUs"] if host.torch_build else []
        return told("unusable", *seen, *more, fix=INSTALL)
    for name in VISIBLE:
        visible = visible_devices(host.env.get(name))
        if visible == ():
            fix = f"unset {name}, or name devices in it"
            return told("hidden", *seen, f"{name}={host.env[name]!r} hides every device", fix=fix)
        if visible:
            seen.append(f"{name} shows {', '.join(map(str, visible))}")
    if host.exists(KFD) and not os.access(os.path.join(host.root, KFD[1:]), os.R_OK | os.W_OK):
        why = f"this user may not open {KFD}"
        return told("unusable", *seen, why, fix="add the user to the groups render and video, and log in again")
    return told("present", *seen)


def hardware(host: Host) -> list[str]:
    """What speaks for an AMD GPU, a sentence each.  The kernel driver is also loaded where there is no GPU for it."""
    out = []
    if host.exists(KFD):
        from .arch import from_kernel

        archs = [from_kernel(v) for v in gfx_versions(host)]
        if archs or not host.exists(TOPOLOGY):  # a container may have the device without the topology
            out.append(f"{KFD} exists" + (f" ({', '.join(archs)})" if archs else ""))
    if host.exists("/dev/dxg") and host.exists(WSL):
        out.append(f"/dev/dxg and {WSL} exist (WSL)")
    if host.system == "win32" and (found := host.glob(WINDOWS)):
        out.append(f"{found[0]} exists")
    return out


def gfx_versions(host: Host) -> list[int]:
    """``gfx_target_version`` of every GPU; a processor's own node has 0."""
    import re

    out = []
    for i in range(256):
        text = host.read(f"{TOPOLOGY}/{i}/properties")
        if not text:
            break
        m = re.search(r"^gfx_target_version (\d+)", text, re.MULTILINE)
        if m and int(m[1]):
            out.append(int(m[1]))
    return out


def machine(platform: ROCm, host: Host) -> Machine:
    """What torch.cuda says, which is HIP in a ROCm build and heeds the visible-device variables."""
    import torch

    from hal.facts import Device, Machine

    if not torch.version.hip:
        raise PlatformError(f"{host.torch_words}; for {platform.title}: {INSTALL}")
    devices = []
    try:
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            arch = platform.parse_arch(p.gcnArchName)
            shared = getattr(p, "shared_memory_per_block", None) or platform.shared_memory(arch)
            devices.append(Device(arch, i, p.name, p.total_memory, platform.dtypes, shared))
    except (RuntimeError, AssertionError) as e:
        raise PlatformError(f"PyTorch cannot use {platform.title}: {e}") from e
    if not devices:
        d = detect(platform, host)
        raise PlatformError(
            f"{platform.title}: no device is here: {'; '.join(d.found)}" + (f"; {d.fix}" if d.fix else "")
        )
    versions = software(host, str(torch.__version__), torch.version.hip)
    return Machine(platform.name, tuple(devices), versions, {}, "detected")


def software(host: Host, torch: str, hip: str) -> dict[str, str | None]:
    import re

    release = re.match(r"\d+(\.\d+)*", hip)  # 7.0.51831-a3e329ad8 is no PEP 440 version
    return {
        "torch": torch,
        "runtime": release[0] if release else None,
        "aotriton": aotriton(host),
        "triton": host.version("triton", "triton-rocm", "pytorch-triton-rocm"),
        f"env.{VARIABLE}": host.env.get(VARIABLE, "unset"),
    }


def aotriton(host: Host) -> str | None:
    """The AOTriton inside PyTorch, by its library's name: libaotriton_v2.so.0.12.1."""
    import glob
    import re

    for folder in host.path:
        for path in glob.glob(os.path.join(folder, "torch", "lib", "libaotriton_v2.so.*")):
            if m := re.search(r"\.so\.(\d+(?:\.\d+)+)$", path):
                return m[1]
    return None
