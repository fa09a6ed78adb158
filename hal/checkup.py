"""The doctor's examination of this machine.  Every kernel that has a row here is asked four things: is it installed, does
it import, has it code for this device, does it give right numbers.

Nothing here raises: what fails is told, and the rest is examined all the same.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import detect, plugins, probe
from .backend import Needs
from .catalog import Catalog, Line
from .decision import Decision
from .errors import CallError, PolicyError
from .facts import Call, Device, Machine, Package
from .host import Detection
from .platform import Platform
from .policy import AUTOMATIC, Policy, Request
from .resolver import resolve
from .settlement import settle

LEVELS = ("installed", "imports", "supported", "right")
# For a backend that declares no tolerance: the largest error of an element, on N(0, 1) data.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
TRIED = tuple({"dtype": t, "head_dim": d} for t in ("bfloat16", "float16", "float32") for d in (128, 64))
SMALL = {"batch": 2, "heads": 4, "q_len": 256}  # all different, so that swapped axes show


class Level(NamedTuple):
    """One of the four answers: yes, no, or None where it could not be asked; and what there is to say."""

    ok: bool | None = None
    note: str = ""


NOT_ASKED = Level()


@dataclass
class Check:
    """The four answers of one kernel on one device.  ``error`` is the largest of an element, against the oracle."""

    backend: str
    kernel: str
    tier: str
    device: int | None = None
    arch: str | None = None
    installed: Level = NOT_ASKED
    imports: Level = NOT_ASKED
    supported: Level = NOT_ASKED
    right: Level = NOT_ASKED
    fix: str = ""
    call: str = ""
    error: float | None = None
    tolerance: float | None = None

    @property
    def failed(self) -> Level | None:
        """The first level that is not a yes."""
        return next((x for x in (getattr(self, n) for n in LEVELS) if not x.ok), None)

    def to_json(self) -> dict[str, Any]:
        names = ("backend", "kernel", "tier", "device", "arch", "fix", "call", "tolerance")
        plain = {k: getattr(self, k) for k in names}
        error = self.error if self.error == self.error else "nan"
        return {**plain, "error": error, "levels": {name: getattr(self, name)._asdict() for name in LEVELS}}


class Default(NamedTuple):
    """What a plain call runs on a device by automatic choice, and whether that kernel passed."""

    device: int | None
    arch: str | None
    backend: str | None
    kernel: str | None
    ok: bool
    note: str = ""


@dataclass
class Checkup:
    """All that was found.  ``ok``: a plain call gives right numbers on every kind of device that is here."""

    torch: Package
    torch_fix: str = ""
    platform: str | None = None
    error: str = ""  # why no platform is chosen, or why its devices cannot be read
    detections: tuple[Detection, ...] = ()
    problems: list[str] = field(default_factory=list)  # plug-ins that failed
    machine: Machine | None = None
    packages: dict[str, Package] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    defaults: list[Default] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.defaults) and all(d.ok for d in self.defaults)

    def to_json(self) -> dict[str, Any]:
        from . import __version__

        return {
            "hal": __version__,
            "ok": self.ok,
            "platform": self.platform,
            "error": self.error or None,
            "torch": {**self.torch.to_json(), "fix": self.torch_fix or None},
            "detections": [{**d._asdict(), "found": list(d.found)} for d in self.detections],
            "problems": self.problems,
            "machine": self.machine.to_json() if self.machine else None,
            "packages": {n: p.to_json() for n, p in sorted(self.packages.items())},
            "checks": [c.to_json() for c in self.checks],
            "defaults": [d._asdict() for d in self.defaults],
        }


Said = Callable[[str], None]


def examine_here(said: Said = lambda text: None) -> Checkup:
    """Examine the machine that is really here.  ``said`` is told what is being done."""
    d = detect.detected()
    catalog = plugins.catalog(detect.ignored())
    said("importing torch")
    torch = _torch()
    out = Checkup(torch, torch_fix(torch), detections=d.detections)
    out.problems = [_told(p.error, str(p)) for p in catalog.problems]
    out.packages = dict(probe.look_all(catalog))
    try:
        platform = detect.real_platform()
    except Exception as e:
        out.error = str(e)
        return out
    out.platform = platform.name
    try:
        out.machine = detect.real_machine(platform.name)
    except Exception as e:
        out.error = f"the devices cannot be read: {_short(e)}"
    examine_machine(out, platform, catalog, said)
    return out


def examine_machine(out: Checkup, platform: Platform, catalog: Catalog, said: Said = lambda text: None) -> None:
    """Prove the packages and run the kernels; one device of each architecture speaks for those like it."""
    backends = catalog.backends_in_order(platform.name)
    found: dict[Needs, Package] = {}
    for n in {n: None for b in backends for line in catalog.lines(platform.name, b) for n in line.needs}:
        found[n] = before = out.packages[n.package]
        if before.state == "found" and out.torch.available:
            said(f"importing {n.module}")
            found[n] = probe.prove(n, before)
    for n, p in found.items():
        if out.packages[n.package].state != "usable":
            out.packages[n.package] = p
    proofs = {n.proof: p for n, p in found.items()}
    detect.learn(proofs)
    devices: dict[str, Device | None] = {}
    for d in out.machine.devices if out.machine else ():
        devices.setdefault(d.arch, d)
    if out.machine:
        out.machine = out.machine.with_packages({**out.packages, **proofs})
    for arch, device in (devices or {"": None}).items():
        bed = _Bed(platform, device, out.machine, catalog, out.torch, found)
        mine = []
        for line in (line for b in backends for line in catalog.lines(platform.name, b, arch)):
            said(f"running {line.backend.name} by {line.kernel.name}")
            mine.append(bed.check(line))
        out.checks += mine
        out.defaults.append(bed.default(mine))


class _Bed:
    """One device under examination; None where the devices cannot be read."""

    def __init__(
        self,
        platform: Platform,
        device: Device | None,
        machine: Machine | None,
        catalog: Catalog,
        torch: Package,
        found: dict[Needs, Package],
    ):
        self.platform, self.device, self.catalog, self.torch, self.found = platform, device, catalog, torch, found
        self.machine = machine

    def check(self, line: Line) -> Check:
        out = Check(line.backend.name, line.kernel.name, line.row.tier)
        if self.device:
            out.device, out.arch = self.device.index, self.device.arch
        out.installed, out.imports, out.fix = self._packages(line)
        out.supported = self._supported(line)
        if out.imports.ok and out.supported.ok:
            self._run(out, line)
        return out

    def _packages(self, line: Line) -> tuple[Level, Level, str]:
        if self.torch.state == "absent":
            return Level(False, "torch is absent"), NOT_ASKED, ""
        states = [(n, self.found[n]) for n in line.needs]
        for n, p in states:
            if p.state == "absent":
                return Level(False, f"{n.package} is absent"), NOT_ASKED, n.install
        here = Level(True, ", ".join(f"{n.package} {p.version or ''}".strip() for n, p in states))
        if not self.torch.available:
            return here, Level(False, "torch does not import"), ""
        for n, p in states:
            if not p.available:
                return here, Level(False, p.note or f"{n.package} is {p.state.replace('_', ' ')}"), n.install
        return here, Level(True), ""

    def _supported(self, line: Line) -> Level:
        """What speaks against the row whatever the call is: all but packages, for a call of which nothing is known."""
        if self.device is None or self.machine is None:
            return Level(None, "the device is unknown")
        decision = resolve(Call(device=self.device.index), self.machine, self.catalog)
        against = [r for r in decision.examine(line).reasons if r.verdict is False and not r.id.startswith("package.")]
        return Level(not against, "; ".join(r.message for r in against))

    def _run(self, out: Check, line: Line) -> None:
        policy = Policy((Request(line.backend.name, "require", "hal doctor", line.kernel.name),))
        try:
            decision, tensors = self._decided(policy)
            if decision.chosen is None:
                reasons = (r for c in decision.candidates if c.line is line for r in c.reasons)
                out.right = Level(None, "refused: " + "; ".join(f"{r.id}: {r.message}" for r in reasons))
                return
            dtype, out.call = str(decision.call.dtype), str(decision.call)
            out.tolerance = line.backend.tolerance.get(dtype, TOLERANCE.get(dtype))
            out.error, wrong = self._error(decision, tensors)
        except KeyboardInterrupt:
            raise
        except (PolicyError, CallError) as e:  # it needs settings, a grid, packed rows: more than a small call has
            out.right = Level(None, f"not tried: {_short(e)}")
            return
        except BaseException as e:  # a kernel may do anything, even leave by sys.exit
            out.right = Level(False, f"raised {_short(e)}")
            return
        text = wrong or f"{dtype}: error {out.error:.1e}, allowed {out.tolerance:.1e}"
        out.right = Level(not wrong and out.error <= (out.tolerance or 0.0), text)  # an error of nan is no yes

    def _calls(self) -> list[Call]:
        assert self.device
        fit = [t for t in TRIED if self.device.dtypes is None or t["dtype"] in self.device.dtypes]
        return [Call.of(SMALL, **t, device=self.device.index) for t in fit]

    def _decided(self, policy: Policy) -> tuple[Decision, tuple[Any, ...]]:
        """The decision for the first small call that is served, with its tensors; else for the first of all."""
        assert self.machine
        refused: Decision | None = None
        for call in self._calls():
            decision, tensors = resolve(call, self.machine, self.catalog, policy), ()
            if decision.chosen:
                tensors = self._tensors(call)
                decision = settle(call, self.machine, self.catalog, policy, (*tensors, None))
            if decision.chosen:
                return decision, tensors
            refused = refused or decision
        if refused is None:
            raise TypeError("this device takes no dtype of attention")
        return refused, ()

    def _tensors(self, call: Call) -> tuple[Any, ...]:
        import torch

        random = torch.Generator().manual_seed(0)
        shape = [int(n or 0) for n in (call.batch, call.q_len, call.heads, call.head_dim)]
        to = {"device": torch.device(self.platform.device_type, call.device), "dtype": getattr(torch, str(call.dtype))}
        return tuple(torch.randn(shape, generator=random).to(**to) for _ in range(3))

    def _error(self, decision: Decision, tensors: tuple[Any, ...]) -> tuple[float, str]:
        """The largest error against the oracle, which computes on the CPU; or what is wrong with the result as such."""
        import torch

        from . import oracle

        q, k, v = tensors
        with torch.no_grad():
            out = decision.bind()(q, k, v, None, None)
            self.platform.synchronize(decision.call.device)
        wanted, _ = oracle.attention(q.cpu(), k.cpu(), v.cpu())
        if out.shape != wanted.shape or out.dtype != q.dtype:
            shapes = f"{tuple(out.shape)} of {out.dtype} where {tuple(wanted.shape)} of {q.dtype} is due"
            return float("nan"), f"returned {shapes}"
        return float((out.cpu().double() - wanted).abs().max()), ""

    def default(self, checks: list[Check]) -> Default:
        """A plain call by automatic choice: the kernel that it takes must have passed."""
        if self.device is None or self.machine is None:
            return Default(None, None, None, None, False, "the devices cannot be read")
        here = self.device.index, self.device.arch
        try:
            if self.torch.available:
                d, _ = self._decided(AUTOMATIC)
            else:
                d = resolve(self._calls()[0], self.machine, self.catalog)
        except Exception as e:
            return Default(*here, None, None, False, f"raised {_short(e)}")
        if d.chosen is None:
            return Default(*here, None, None, False, (d.error or "").partition("\n")[0])
        mine = next(c for c in checks if (c.backend, c.kernel) == (d.backend, d.kernel))
        note = (mine.failed.note or "could not be run") if mine.failed else mine.right.note
        return Default(*here, d.backend, d.kernel, mine.failed is None, note)


# ---- torch itself


def _torch() -> Package:
    """Absent, usable, or broken with the message of what importing it raised."""
    needs = Needs("torch", "torch", "nn.functional.scaled_dot_product_attention")
    found = probe.look(needs)
    return probe.prove(needs, found) if found.available else found


def torch_fix(torch: Package) -> str:
    if torch.available:
        return ""
    if torch.state == "absent":
        return "install PyTorch for this machine (https://pytorch.org/get-started)"
    extension = re.search(r"backend extension: (\w+)", torch.note)  # a vendor's package that PyTorch loads by itself
    if extension:
        name = extension[1].replace("_", "-")
        return f"set TORCH_DEVICE_BACKEND_AUTOLOAD=0, or take the package away: pip uninstall {name}"
    return "install PyTorch again for this machine (https://pytorch.org/get-started)"


def _short(e: BaseException) -> str:
    said = str(e).strip().splitlines()
    return f"{type(e).__name__}: {said[0]}" if said else type(e).__name__


def _told(e: BaseException, text: str) -> str:
    """A plug-in's failure, with the place in its code."""
    frames = traceback.extract_tb(e.__traceback__)
    return f"{text} (at {frames[-1].filename}:{frames[-1].lineno})" if frames else text
