"""Is an NVIDIA GPU here, and may PyTorch use it?  By files and metadata; devices are read when they are asked for."""

from __future__ import annotations

from hal.errors import PlatformError
from hal.host import Detection, Host, visible_devices

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from hal.facts import Machine

    from . import CUDA

VARIABLE = "CUDA_VISIBLE_DEVICES"
NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvhost-gpu", "/dev/nvgpu")  # the last two: Jetson
DRIVER = "/proc/driver/nvidia/version"
WSL, WINDOWS = "/usr/lib/wsl/lib/libcuda.so.1", "/Windows/System32/nvcuda.dll"
COMPAT = ("/usr/local/cuda*/compat/libcuda.so*", "/usr/local/cuda*/compat/lib*/libcuda.so*")
# CUDA major -> the oldest driver (docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility).
OLDEST = {11: 450, 12: 525, 13: 580}
INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cu130"


def detect(platform: CUDA, host: Host) -> Detection:
    def told(state: str, *more: str, fix: str = "") -> Detection:
        return Detection(platform.name, state, (host.torch_words, *more), fix)

    cuda = host.torch_build.get("cuda")
    seen = hardware(host)
    if not seen:
        return told("absent", f"no NVIDIA device: none of {', '.join((*NODES[:2], DRIVER))} is here")
    if not cuda:
        more = ["this PyTorch cannot use NVIDIA GPUs"] if host.torch_build else []
        return told("unusable", *seen, *more, fix=INSTALL)
    text = host.env.get(VARIABLE)
    visible = visible_devices(text)
    if visible == ():
        fix = f"unset {VARIABLE}, or name devices in it"
        return told("hidden", *seen, f"{VARIABLE}={text!r} hides every device", fix=fix)
    if visible:
        seen.append(f"{VARIABLE} shows {', '.join(map(str, visible))}")
    version = driver(host)
    oldest = OLDEST.get(int(cuda.split(".")[0]), 0)
    if version and int(version.split(".")[0]) < oldest:
        if not any(host.glob(pattern) for pattern in COMPAT):
            why = f"driver {version} is too old for CUDA {cuda}: it needs {oldest} or newer"
            fix = f"upgrade the driver to {oldest} or newer, or install PyTorch for an older CUDA"
            return told("unusable", *seen, why, fix=fix)
        seen.append(f"driver {version} is older than CUDA {cuda} needs; CUDA's compatibility libraries are here")
    return told("present", *seen)


def hardware(host: Host) -> list[str]:
    """What speaks for an NVIDIA GPU, a sentence each."""
    out = [f"{node} exists" for node in NODES if host.exists(node)]
    if version := driver(host):
        out.append(f"driver {version} ({DRIVER})")
    if host.exists("/dev/dxg") and host.exists(WSL):
        out.append(f"/dev/dxg and {WSL} exist (WSL)")
    if host.system == "win32" and host.exists(WINDOWS):
        out.append(f"{WINDOWS} exists")
    return out


def driver(host: Host) -> str | None:
    """The driver's version; also of the open kernel module, whose line names the processor as well."""
    import re

    m = re.search(r"Kernel Module\D+?(?:for \S+\s+)?(\d+(?:\.\d+)+)", host.read(DRIVER))
    return m[1] if m else None


def machine(platform: CUDA, host: Host) -> Machine:
    """What torch.cuda says, which heeds CUDA_VISIBLE_DEVICES.  Reading properties initialises CUDA in this process."""
    import torch

    from hal.facts import Device, Machine

    if not torch.version.cuda:
        raise PlatformError(f"{host.torch_words}; for {platform.title}: {INSTALL}")
    devices = []
    try:
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            arch = platform.parse_arch((p.major, p.minor))
            shared = getattr(p, "shared_memory_per_block_optin", None) or platform.shared_memory(arch)
            devices.append(Device(arch, i, p.name, p.total_memory, platform.dtypes, shared))
    except (RuntimeError, AssertionError) as e:
        raise PlatformError(f"PyTorch cannot use {platform.title}: {e}") from e
    if not devices:
        d = detect(platform, host)
        raise PlatformError(
            f"{platform.title}: no device is here: {'; '.join(d.found)}" + (f"; {d.fix}" if d.fix else "")
        )
    software = {
        "torch": str(torch.__version__),
        "runtime": torch.version.cuda,
        "driver": driver(host),
        "cudnn": cudnn(),
        "triton": host.version("triton"),
    }
    return Machine(platform.name, tuple(devices), software, {}, "detected")


def cudnn() -> str | None:
    """The cuDNN that is loaded: an older one on the library path hides the wheel's own (transformers PR#48163)."""
    import torch

    try:
        return ".".join(map(str, torch._C._cudnn.getRuntimeVersion()))
    except (AttributeError, RuntimeError):
        return None
