"""What a vendor's team writes: a platform's rows, order, grammar and detection.  ``Platform`` is the interface."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .backend import Kernel
from .errors import DeclarationError, FactError, PlatformError
from .facts import Device, Machine
from .facts.flat import FEATURES
from .rules import Limits, Rule

if TYPE_CHECKING:
    from pathlib import Path

    from .host import Detection, Host

TIERS = ("native", "in-tree", "portable", "experimental")


@dataclass(frozen=True, eq=False)
class Row:
    """A line of the support matrix: this kernel runs on these chips.  It may narrow the kernel, never widen it."""

    kernel: str | Kernel  # a backend's, by name; or the vendor's own
    on: Iterable[str] | None = None  # architectures; None: all that the platform has
    limits: Limits = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()  # limits under a condition
    lacks: Iterable[str] = frozenset()  # features that the kernel has elsewhere and not here
    tier: str = "native"
    cite: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.on, str):
            raise DeclarationError(f"row {self.kernel}: on={self.on!r}; architectures are a set")
        object.__setattr__(self, "on", None if self.on is None else frozenset(self.on))
        object.__setattr__(self, "lacks", frozenset(self.lacks))
        if self.tier not in TIERS:
            raise DeclarationError(f"row {self.kernel}: tier {self.tier!r}; allowed: {', '.join(TIERS)}")
        if extra := sorted(set(self.lacks) - FEATURES):
            raise DeclarationError(f"row {self.kernel}: lacks {', '.join(extra)}, which is no feature")


@dataclass(frozen=True, eq=False)
class Prefer:
    """A step of the automatic order: this backend, for calls such as these.  A call that misses ``when`` is not refused."""

    backend: str
    when: Limits = field(default_factory=dict)
    why: str = ""


class Platform:
    """A kind of accelerator with its software stack.

    A subclass begins with its declaration (class attributes) and overrides what its stack needs.  It lives in a folder
    of its own, with ``presets/*.json`` (facts files) and ``known_bad.toml`` beside it.
    """

    name: str = ""
    title: str = ""
    device_type: str = ""  # what a tensor's device says
    accelerator: bool = True  # False: what is left when no accelerator is here
    order: tuple[Prefer, ...] = ()
    support: Mapping[str, tuple[Row, ...]] = {}  # backend -> rows, the better kernel first
    arch_forms: str = ""  # the forms that ``parse_arch`` reads, for errors and help
    families: Mapping[str, frozenset[str]] = {}  # name -> architectures, for people to read
    software: Mapping[str, str | None] = {}  # versions that a preset has unless it says otherwise
    included: Mapping[str, str] = {}  # packages that come with the platform's PyTorch
    dtypes: frozenset[str] = frozenset({"float16", "bfloat16", "float32", "float64"})
    distributed_backend: str = "gloo"
    visible_variable: str | None = None  # the environment variable that hides devices

    # ---- architectures

    def parse_arch(self, text: Any) -> str:
        """The one spelling of an architecture, from every form in which people write it.  Raises FactError."""
        raise NotImplementedError

    def no_arch(self, text: Any) -> FactError:
        return FactError(f"{text!r} is no {self.title or self.name} architecture; write it as {self.arch_forms}")

    def family(self, arch: str) -> str:
        return next((n for n, archs in self.families.items() if arch in archs), "")

    # ---- machines

    def describe(self, arch: Any, name: str = "", memory: int | None = None) -> Machine:
        """A simulated machine: one device of this architecture, current software, no optional package."""
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

        return Path(str(sys.modules[type(self).__module__].__file__)).parent

    @cached_property
    def presets(self) -> dict[str, Path]:
        return {p.stem: p for p in sorted((self.folder / "presets").glob("*.json"))}

    def preset(self, name: str) -> Machine:
        """A facts file, over this platform's software and included packages."""
        import json

        data = json.loads(self.presets[name].read_text("utf-8"))
        data["software"] = {**self.software, **data.get("software", {})}
        data["packages"] = {**self.included, **data.get("packages", {})}
        return self.read(Machine.from_json(data, f"preset {name}"))

    def read(self, m: Machine) -> Machine:
        """The machine with architectures in the one spelling, and per-arch facts filled in."""
        devices = []
        for d in m.devices:
            arch = self.parse_arch(d.arch)
            shared = d.shared_memory if d.shared_memory is not None else self.shared_memory(arch)
            devices.append(Device(arch, d.index, d.name, d.memory, d.dtypes or self.dtypes_of(arch), shared))
        return Machine(m.platform, tuple(devices), m.software, m.packages, m.origin)

    # ---- this machine: only called where it is asked for, so torch may be imported

    def detect(self, host: Host) -> Detection:
        """Whether this platform is here, by files and metadata alone: no torch, no driver call, no device context."""
        raise NotImplementedError

    def machine(self, host: Host) -> Machine:
        """The devices and the software that are really here.  May import torch; makes no device context."""
        raise NotImplementedError

    def module(self) -> Any:
        """``torch.<device_type>``."""
        import torch

        mod = getattr(torch, self.device_type, None)
        if mod is None:
            raise PlatformError(f"PyTorch has no torch.{self.device_type}; install the build for {self.title or self.name}")
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
