"""Whether an Intel GPU and a PyTorch for it are here: by files alone; then what they are, by PyTorch."""

from __future__ import annotations

from hal.errors import PlatformError
from hal.host import Detection, Host, visible_devices

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from typing import Any

    from hal.facts import Machine

INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/xpu"
IPEX = "intel_extension_for_pytorch"


def detect(platform: Any, host: Host) -> Detection:
    version, built = torch_build(host)
    gpus, ipex = intel_gpus(host), host.installed(IPEX)
    found = [f"{node} is an Intel GPU ({arch}, device {number})" for node, arch, number in gpus]
    if built:
        found.insert(0, f"torch {version} is built for XPU")
    elif version:
        found.insert(0, f"torch {version} is not built for XPU")
    if ipex:
        found.append(f"{IPEX} is installed")
    if host.system == "win32" or host.exists("/dev/dxg"):  # no device nodes to look at: PyTorch lists the devices
        return Detection("xpu", "present" if built else "absent", tuple(found))
    if not gpus:
        if built:
            fix = "install Intel's GPU driver, or pass /dev/dri into the container"
            return Detection("xpu", "unusable", (*found, "no Intel GPU is here: /sys/class/drm lists none"), fix)
        found.append("no Intel GPU is here" + (": the package alone makes no XPU" if ipex else ""))
        return Detection("xpu", "absent", tuple(found))
    if not version:
        return Detection("xpu", "unusable", (*found, "torch is not installed"), INSTALL)
    if not built:
        return Detection("xpu", "unusable", tuple(found), INSTALL)
    lacking = [node for node, _, _ in gpus if not host.exists(f"/dev/dri/{node}")]
    if len(lacking) == len(gpus):
        return Detection(
            "xpu", "unusable", (*found, f"/dev/dri/{lacking[0]} is not here"), "pass /dev/dri into the container"
        )
    if said := hidden(host, len(gpus)):
        return Detection("xpu", "hidden", (*found, said), f"unset {said.partition('=')[0]}")
    return Detection("xpu", "present", tuple(found))


def torch_build(host: Host) -> tuple[str, bool]:
    """(version, whether it is an XPU build)."""
    build = host.torch_build
    version = build.get("version") or ""
    return version, bool(build.get("xpu")) or "+xpu" in version


def intel_gpus(host: Host) -> list[tuple[str, str, str]]:
    """(render node, architecture, device id) of every Intel GPU that the kernel lists."""
    out = []
    for path in host.glob("/sys/class/drm/renderD*"):
        node = path.rsplit("/", 1)[-1]
        if host.read(f"/sys/class/drm/{node}/device/vendor").strip() == "0x8086":
            from .arch import OTHER, parse

            number = host.read(f"/sys/class/drm/{node}/device/device").strip()
            out.append((node, (parse(number) if number else None) or OTHER, number or "unknown"))
    return out


def hidden(host: Host, count: int) -> str:
    """The setting that hides every GPU, or the empty text.  An empty ZE_AFFINITY_MASK hides nothing."""
    mask = host.env.get("ZE_AFFINITY_MASK", "")
    if mask:
        roots = [str(d).partition(".")[0] for d in visible_devices(mask) or ()]
        if not any(r.isdigit() and int(r) < count for r in roots):
            return f"ZE_AFFINITY_MASK={mask} hides it"
    selector = host.env.get("ONEAPI_DEVICE_SELECTOR", "")
    terms = [t.strip().lower() for t in selector.split(";") if t.strip() and not t.strip().startswith("!")]
    if terms and not any(t.partition(":")[0] in ("level_zero", "*") and t.partition(":")[2] != "cpu" for t in terms):
        return f"ONEAPI_DEVICE_SELECTOR={selector} hides it"
    return ""


def machine(platform: Any, host: Host) -> Machine:
    """The visible devices, as torch.xpu lists them."""
    from hal.facts import Device, Machine, Package

    from .arch import OTHER, of_device, parse

    xpu = platform.module()
    if not xpu.device_count():
        said = "; ".join(detect(platform, host).found)
        raise PlatformError(f"torch.xpu lists no device ({said}); see `python -m torch.utils.collect_env`")
    import torch

    devices, driver = [], None
    for i in range(xpu.device_count()):
        p = xpu.get_device_properties(i)
        number = getattr(p, "device_id", None)
        arch = (of_device(number) if number else None) or parse(p.name) or OTHER
        dtypes = platform.dtypes if getattr(p, "has_fp64", True) else platform.dtypes - {"float64"}
        devices.append(Device(arch, i, p.name, p.total_memory, dtypes))
        driver = getattr(p, "driver_version", None)
    software = {"torch": torch.__version__, "runtime": getattr(torch.version, "xpu", None), "driver": driver}
    packages = {}
    if host.installed(IPEX):  # looked at, never imported: on a version mismatch it ends the process
        packages[IPEX] = Package("found", host.version("intel-extension-for-pytorch"))
    return Machine(platform.name, tuple(devices), software, packages, "detected")
