"""What a vendor's team writes: a platform's rows, order, grammar and detection.  ``Platform`` is the interface."""

from __future__ import annotations

import sys
from functools import cached_property
from importlib import import_module

from .errors import FactError, PlatformError

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from .facts import Machine
    from .host import Detection, Host
    from .rows import Prefer, Row


class Platform:
    """A kind of accelerator with its software stack.

    A subclass begins with its declaration (class attributes) and overrides what its stack needs.  Where it lives in a
    package of its own, the package's modules say the rest, and are imported when they are asked: ``support`` (SUPPORT,
    ORDER, FAMILIES), ``arch`` (FORMS, parse), ``detection`` (detect, machine); beside them lie ``presets/*.json``
    (facts files) and ``known_bad.toml``.  ``import hal`` asks only detection, so this module stays light.
    """

    name: str = ""
    title: str = ""
    device_type: str = ""  # what a tensor's device says
    accelerator: bool = True  # False: what is left when no accelerator is here
    software: Mapping[str, str | None] = {}  # versions that a preset has unless it says otherwise
    included: Mapping[str, str] = {}  # packages that come with the platform's PyTorch
    dtypes: frozenset[str] = frozenset({"float16", "bfloat16", "float32", "float64"})
    distributed_backend: str = "gloo"
    visible_variable: str | None = None  # the environment variable that hides devices

    @cached_property
    def support(self) -> Mapping[str, tuple[Row, ...]]:
        """Backend -> rows, the better kernel first: the support matrix of this platform."""
        return self._part("support").SUPPORT

    @cached_property
    def order(self) -> tuple[Prefer, ...]:
        """The automatic order."""
        return self._part("support").ORDER

    @cached_property
    def families(self) -> Mapping[str, frozenset[str]]:
        """Family -> architectures, for people to read."""
        return self._part("support").FAMILIES

    @cached_property
    def arch_forms(self) -> str:
        """The forms that ``parse_arch`` reads, for errors and help."""
        return self._part("arch").FORMS

    @cached_property
    def _package(self) -> Any:
        """The package of the nearest class that lives in one of its own."""
        for cls in type(self).__mro__[:-2]:
            module = sys.modules[cls.__module__]
            if hasattr(module, "__path__"):
                return module
        return sys.modules[type(self).__module__]

    def _part(self, name: str) -> Any:
        return import_module(f"{self._package.__name__}.{name}")

    # ---- architectures

    def parse_arch(self, text: Any) -> str:
        """The one spelling of an architecture, from every form in which people write it.  Raises FactError."""
        if not hasattr(self._package, "__path__"):
            return str(text).strip()  # a platform of one file has no grammar: its names are opaque
        arch: str | None = self._part("arch").parse(text)
        if arch is None:
            raise FactError(f"{text!r} is no {self.title or self.name} architecture; write it as {self.arch_forms}")
        return arch

    def family(self, arch: str) -> str:
        return next((n for n, archs in self.families.items() if arch in archs), "")

    # ---- machines

    def describe(self, arch: Any, name: str = "", memory: int | None = None) -> Machine:
        """A simulated machine: one device of this architecture, current software, no optional package."""
        from .facts import Device, Machine

        arch = self.parse_arch(arch)
        device = Device(arch, 0, name, memory, self.dtypes_of(arch), self.shared_memory(arch))
        origin = f"simulated {self.name}:{device.arch}"
        return Machine(self.name, (device,), dict(self.software), {}, origin).with_packages(self.included)

    def dtypes_of(self, arch: str) -> frozenset[str]:
        """The dtypes that tensors may have on this architecture."""
        return self.dtypes

    def shared_memory(self, arch: str) -> int | None:
        return None

    @cached_property
    def folder(self) -> Path:
        """Where this platform's presets and known_bad.toml are."""
        from pathlib import Path

        return Path(str(self._package.__file__)).parent

    @cached_property
    def presets(self) -> dict[str, Path]:
        return {p.stem: p for p in sorted((self.folder / "presets").glob("*.json"))}

    def preset(self, name: str) -> Machine:
        """A facts file, over this platform's software and included packages."""
        import json

        from .facts import Machine

        data = json.loads(self.presets[name].read_text("utf-8"))
        data["software"] = {**self.software, **data.get("software", {})}
        data["packages"] = {**self.included, **data.get("packages", {})}
        return self.read(Machine.from_json(data, f"preset {name}"))

    def read(self, m: Machine) -> Machine:
        """The machine with architectures in the one spelling, and per-arch facts filled in."""
        from .facts import Device, Machine

        devices = []
        for d in m.devices:
            arch = self.parse_arch(d.arch)
            shared = d.shared_memory if d.shared_memory is not None else self.shared_memory(arch)
            devices.append(Device(arch, d.index, d.name, d.memory, d.dtypes or self.dtypes_of(arch), shared))
        return Machine(m.platform, tuple(devices), m.software, m.packages, m.origin)

    # ---- this machine: only called where it is asked for, so torch may be imported

    def detect(self, host: Host) -> Detection:
        """Whether this platform is here, by files and metadata alone: no torch, no driver call, no device context."""
        return self._part("detection").detect(self, host)

    def machine(self, host: Host) -> Machine:
        """The devices and the software that are really here.  Imports torch, and may create a device context."""
        return self._part("detection").machine(self, host)

    def module(self) -> Any:
        """``torch.<device_type>``."""
        import torch

        mod = getattr(torch, self.device_type, None)
        if mod is None:
            raise PlatformError(
                f"PyTorch has no torch.{self.device_type}; install the build for {self.title or self.name}"
            )
        return mod

    def capturing(self) -> bool:
        """Whether calls are being captured into a graph right now."""
        ask = getattr(self.module(), "is_current_stream_capturing", None)
        return bool(ask and ask())

    def synchronize(self, index: int | None = None) -> None:
        self.module().synchronize(index)

    def memory(self, index: int = 0) -> tuple[int, int]:
        """(free, total) bytes of the device.  This may create a device context."""
        free, total = self.module().mem_get_info(index)
        return int(free), int(total)

    def seed(self, value: int) -> None:
        self.module().manual_seed_all(value)
