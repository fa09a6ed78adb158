"""The Catalog: the immutable value of all that is declared.  resolve() sees nothing else, so a test can make its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import isfile  # unlike Path.is_file, never raises
from pathlib import Path
from typing import Any

from .backend import NAMED, Backend, Kernel, Needs
from .errors import DeclarationError, FactError, PlatformError, PolicyError, unknown
from .facts import CALL_FACTS, Machine
from .facts.flat import MACHINE_FACTS
from .facts.packages import Package, package_key
from .fittings import FITTINGS
from .models import Card
from .platform import Platform
from .plugins import Problem
from .rows import Prefer, Row
from .rules import VERSION_FACTS, Limits, Reason, Rule, Test, Verdict, check, compiled, limit_of, within


@dataclass(frozen=True)
class KnownBad:
    """A defect: where all of its conditions hold, these kernels must not run (or only with a warning)."""

    rule: Rule
    kernels: frozenset[str]
    owner: str  # platform cuda, backend fa
    platform: str = ""  # the platform that it is about; empty: any


class Line:
    """A support row with everything that bears on it, compiled: what the resolver examines."""

    def __init__(self, backend: Backend, kernel: Kernel, row: Row, bad: tuple[Rule, ...]):
        self.backend, self.kernel, self.row = backend, kernel, row
        limits: list[Test] = list(compiled({"arch": row.on}) if row.on is not None else ())
        if backend.roles != {"self", "cross"}:
            limits += compiled({"role": backend.roles})
        self.tests = (*limits, *compiled(kernel.limits), *compiled(row.limits))
        rules = (*kernel.rules, *row.rules, *bad)
        self.rules = tuple(r for r in rules if r.effect != "warn")
        self.warnings = tuple(r for r in rules if r.effect == "warn")
        self.honours = kernel.honours - frozenset(row.lacks)
        self.needs = kernel.needs

    def lacks_package(self, packages: Mapping[str, Package]) -> bool:
        """Whether a package that the kernel needs is not there: no call can be served then."""
        return any((p := n.state(packages)) is None or not p.available for n in self.needs)

    def reasons(
        self,
        facts: dict[str, Any],
        features: Iterable[tuple[str, Verdict]],
        packages: Mapping[str, Package],
        waive: frozenset[str],
    ) -> list[Reason]:
        """Every reason against this line; none: supported."""
        out: list[Reason] = []
        for n in self.needs:
            n.check(facts, packages, out)
        check(self.tests, facts, out)
        for feature, sure in features:
            if feature not in self.honours:
                out.append(self._not_honoured(feature, sure))
        for rule in self.rules:
            if rule.waiver not in waive or not rule.waiver:
                rule.check(facts, out)
        if facts["device_dtype"] is False:
            out.append(Reason("dtype.device", "dtype", facts["dtype"], "a dtype of this device", False))
        for kernel, said in facts["refused"]:
            if kernel == self.kernel.name:
                out.append(Reason("refused", "this call", "asked", "what PyTorch takes", note=said))
        return out

    def _not_honoured(self, feature: str, sure: bool | None) -> Reason:
        kernel, fix = self.kernel.name, _FEATURE_FIX.get(feature, "")
        note = f"{feature} is asked for; {kernel} does not honour it" if sure else f"whether {feature} is asked for"
        if feature == "mask.key_padding" and "varlen" in self.honours:
            fix += ", or pack the sequences and call hal.attention_varlen"
        return Reason(feature, feature, "asked for", f"not with {kernel}", False if sure else None, fix, note=note)


_FEATURE_FIX = {
    "mask.bool": "drop attn_mask",
    "mask.additive": "drop attn_mask",
    "mask.key_padding": "drop attn_mask",
    "dropout": "set dropout_p=0.0",
    "grad": "run under torch.no_grad()",
    "scale": "scale q beforehand and leave scale=None",
    "deterministic": "allow non-deterministic algorithms",
}


@dataclass(frozen=True, eq=False)
class Catalog:
    """Platforms, backends and model cards by name, and the plug-ins that failed."""

    platforms: Mapping[str, Platform]
    backends: Mapping[str, Backend]
    problems: tuple[Problem, ...] = ()
    partial: bool = False  # a plug-in is missing, so what is declared may name a kernel that is not here
    models: Mapping[str, Card] = field(default_factory=dict)
    _archs: dict[tuple[str, str], str] = field(default_factory=dict, init=False, repr=False)
    _lines: dict[tuple[str, str, str], tuple[Line, ...]] = field(default_factory=dict, init=False, repr=False)
    _orders: dict[str, tuple[tuple[Prefer, tuple[Test, ...]], ...]] = field(
        default_factory=dict, init=False, repr=False
    )

    # ---- names

    @cached_property
    def aliases(self) -> dict[str, str]:
        return {a: b.name for b in self.backends.values() for a in b.aliases}

    def backend_name(self, name: str) -> str:
        """The backend's own name for any spelling of it: FA3, fa-3 and fa3 are fa."""
        if not isinstance(name, str) or not name.strip():
            raise PolicyError(
                f"an attention backend is named by a text, not {name!r} (known: {', '.join(sorted(self.backends))})"
            )
        key = name.strip().lower().replace("-", "_")
        key = self.aliases.get(key) or self.aliases.get(key.replace("_", "")) or key
        if key not in self.backends:
            for p in self.problems:
                if p.name == key:
                    raise p.as_error()
            known = {*self.backends, *self.aliases}
            raise PolicyError(
                f"attention backend {name!r} is not in this release and no plug-in brings it (known: {', '.join(sorted(known))})"
                if key in NAMED
                else unknown("attention backend", name, known)
            )
        return key

    def per_request(self, name: str) -> str:
        """The backend's own name, where one request may switch to it.  Raises PolicyError."""
        able = ", ".join(sorted(b.name for b in self.backends.values() if b.per_request))
        if not isinstance(name, str):
            raise PolicyError(f"attention_backend_override is {name!r}; allowed: {able}")
        own = self.backend_name(name)
        if not self.backends[own].per_request:
            raise PolicyError(
                f"attention_backend_override={name!r}: {own} cannot be switched per request; allowed: {able}"
            )
        return own

    def kernels_of(self, backend: str) -> list[str]:
        """The names of a backend's kernels on any platform, its own first."""
        own = self.backends[backend]
        rows = [row for p in self.platforms.values() for row in p.support.get(backend, ())]
        rows += [row for of_platform in own.support.values() for row in of_platform]
        kernels = [*own.kernels, *((own.portable,) if own.portable else ()), *(row.kernel for row in rows)]
        return [n for n in dict.fromkeys(k if isinstance(k, str) else k.name for k in kernels) if n in self.kernels]

    def kernel_name(self, name: str) -> str:
        if name not in self.kernels:
            raise PolicyError(unknown("kernel", name, self.kernels))
        return name

    def platform(self, name: str) -> Platform:
        try:
            return self.platforms[name]
        except KeyError:
            raise PlatformError(unknown("platform", name, self.platforms)) from None

    @cached_property
    def presets(self) -> dict[str, str]:
        """Preset name -> platform name."""
        return {preset: p.name for p in self.platforms.values() for preset in p.presets}

    def machine(self, on: str) -> Machine:
        """A simulated machine: a preset's name, ``platform:arch``, or a facts file."""
        if on.lower() in self.presets:
            return self.platforms[self.presets[on.lower()]].preset(on.lower())
        if on.endswith(".json") or isfile(on):
            try:
                text = Path(on).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as e:
                raise FactError(f"the facts file {on} cannot be read: {getattr(e, 'strerror', None) or e}") from None
            m = Machine.from_json(text, f"file {on}")
            return self.platform(m.platform).read(m)
        name, colon, arch = on.partition(":")
        if colon:
            return self.platform(name.lower()).describe(arch)
        if name.lower() in self.platforms:
            known = ", ".join(n for n, p in self.presets.items() if p == name.lower())
            raise FactError(f"{on!r} names no device; write {name}:ARCH, or one of its presets: {known}")
        raise FactError(unknown("machine", on, self.presets) + "; platform:arch and a .json facts file are welcome too")

    def package(self, name: str) -> str:
        """The key of a package under any of its names (distribution or import name)."""
        return next(
            (n.package for k in self.kernels.values() for n in k.needs if n.answers_to(name)), package_key(name)
        )

    def changed(self, machine: Machine, packages: Mapping[str, Any], software: Mapping[str, str | None]) -> Machine:
        """The machine with packages set (version, Package, or None: absent) and software versions set.  Raises FactError."""
        for name in software:
            if name not in VERSION_FACTS and name not in machine.software and not name.startswith("env."):
                raise FactError(unknown("software", name, {*VERSION_FACTS, *machine.software}))
        new = {self.known_package(n, machine): _checked_version(n, p) for n, p in packages.items()}
        return machine.with_packages(new).with_software(**{n: _cudnn(n, x) for n, x in software.items()})

    def known_package(self, name: str, machine: Machine) -> str:
        """The key of a package that some kernel needs or that the machine has.  Raises FactError."""
        key = self.package(name)
        if key not in self.packages and key not in machine.packages:
            raise FactError(unknown("package", name, {*self.packages, *machine.packages}))
        return key

    def read(self, machine: Machine) -> Machine:
        """The machine with its architectures in the one spelling; itself where they are.  Raises FactError."""
        platform = self.platform(machine.platform)
        for d in machine.devices:
            key = machine.platform, d.arch
            if key not in self._archs:
                self._archs[key] = platform.parse_arch(d.arch)
            if self._archs[key] != d.arch:
                return platform.read(machine)
        return machine

    def check_request(self, backend: str, kernel: str) -> None:
        """Raises PolicyError where a request names what is not declared."""
        if backend and backend not in self.backends:
            raise PolicyError(unknown("attention backend", backend, self.backends))
        if kernel:
            self.kernel_name(kernel)

    def check_names(self, waive: frozenset[str], fit: frozenset[str]) -> None:
        """Raises PolicyError for a waiver or a fitting that does not exist."""
        for kind, given, known in (("waiver", waive, self.waivers if waive else ()), ("fitting", fit, FITTINGS)):
            for name in sorted(given - set(known)):
                raise PolicyError(unknown(kind, name, known))

    @cached_property
    def waivers(self) -> frozenset[str]:
        """The names by which rules may be overruled."""
        rows = (r for p in self.platforms.values() for rows in p.support.values() for row in rows for r in row.rules)
        declared = (*(b.rule for b in self.known_bad), *(r for k in self.kernels.values() for r in k.rules), *rows)
        return frozenset(r.waiver for r in declared if r.waiver)

    # ---- what is declared

    @cached_property
    def kernels(self) -> dict[str, Kernel]:
        own = (r.kernel for p in self.platforms.values() for rows in p.support.values() for r in rows)
        out: dict[str, Kernel] = {}
        for k in (*self._shared, *(k for k in own if isinstance(k, Kernel))):
            if out.setdefault(k.name, k) is not k:
                raise DeclarationError(f"two kernels are named {k.name!r}")
        return out

    @property
    def _shared(self) -> Iterator[Kernel]:
        for b in self.backends.values():
            yield from (*b.kernels, *((b.portable,) if b.portable else ()))
            yield from (r.kernel for rows in b.support.values() for r in rows if isinstance(r.kernel, Kernel))

    @cached_property
    def packages(self) -> tuple[str, ...]:
        return tuple(sorted({n.package for k in self.kernels.values() for n in k.needs}))

    def needs(self, package: str) -> list[Needs]:
        return [n for k in self.kernels.values() for n in k.needs if n.package == package]

    @cached_property
    def known_bad(self) -> tuple[KnownBad, ...]:
        """Every owner's defects, as one table."""
        out: list[KnownBad] = []
        for p in self.platforms.values():
            out += read_known_bad(p.folder / "known_bad.toml", f"platform {p.name}", p.name)
        for b in self.backends.values():
            if b.known_bad:
                out += read_known_bad(Path(b.known_bad), f"backend {b.name}")
        for bad in out:
            if (extra := sorted(bad.kernels - set(self.kernels))) and not self.partial:
                raise DeclarationError(
                    f"known-bad {bad.rule.id} of {bad.owner}: " + unknown("kernel", extra[0], self.kernels)
                )
        return tuple(out)

    def lines(self, platform: str, backend: str, arch: str = "") -> tuple[Line, ...]:
        """The rows of a backend on a platform, the better kernel first, its portable form last.

        With ``arch``, those that bear on it: a kernel's rows for other architectures are left out where it has one for
        this, and told as one where it has none.
        """
        key = platform, backend, arch
        if key not in self._lines and arch:
            self._lines[key] = tuple(self._bearing(platform, self.lines(platform, backend), arch))
        elif key not in self._lines:
            b = self.backends[backend]
            rows = [*self.platforms[platform].support.get(backend, ()), *b.support.get(platform, ())]
            if (
                self.partial
            ):  # rows may name kernels of a backend that is not here, or that another has taken the place of
                rows = [r for r in rows if isinstance(r.kernel, Kernel) or r.kernel in self.kernels]
            if b.portable and all(r.kernel not in (b.portable, b.portable.name) for r in rows):
                rows.append(Row(b.portable, tier="portable"))
            self._lines[key] = tuple(self._line(platform, b, r) for r in rows)
        return self._lines[key]

    def _bearing(self, platform: str, lines: tuple[Line, ...], arch: str) -> Iterator[Line]:
        rows: dict[str, list[Row]] = {}
        for line in lines:
            rows.setdefault(line.kernel.name, []).append(line.row)
        for line in lines:
            mine = rows[line.kernel.name]
            if len(mine) == 1 or line.row.on is None or arch in line.row.on:
                yield line
            elif line.row is mine[0] and not any(r.on is None or arch in r.on for r in mine):
                everywhere = frozenset(a for r in mine for a in r.on or ())
                yield self._line(
                    platform, line.backend, replace(line.row, on=everywhere, limits={}, rules=(), lacks=())
                )

    def _line(self, platform: str, b: Backend, row: Row) -> Line:
        kernel = row.kernel if isinstance(row.kernel, Kernel) else self.kernels.get(row.kernel)
        if kernel is None:
            raise DeclarationError(
                f"platform {platform}, backend {b.name}: " + unknown("kernel", row.kernel, self.kernels)
            )
        bad = tuple(k.rule for k in self.known_bad if kernel.name in k.kernels and k.platform in ("", platform))
        line = Line(b, kernel, row, bad)
        for limits in (
            kernel.limits,
            row.limits,
            *(part for r in (*kernel.rules, *row.rules) for part in (r.when, r.require)),
        ):
            self._check_facts(limits, f"platform {platform}, backend {b.name}, kernel {kernel.name}", platform)
        return line

    def _check_facts(self, limits: Limits, where: str, platform: str) -> None:
        for fact in limits:
            if not known_fact(fact) and fact not in self.platforms[platform].software:
                raise DeclarationError(
                    f"{where}: " + unknown("fact", fact, {*CALL_FACTS, *MACHINE_FACTS, *VERSION_FACTS})
                )

    def order(self, platform: str) -> tuple[tuple[Prefer, tuple[Test, ...]], ...]:
        """The automatic order of a platform, compiled; steps for backends that are not installed are left out."""
        if platform not in self._orders:
            steps = self.platforms[platform].order
            for p in steps:
                self._check_facts(p.when, f"platform {platform}, order, {p.backend}", platform)
            self._orders[platform] = tuple((p, compiled(p.when)) for p in steps if p.backend in self.backends)
        return self._orders[platform]

    def backends_in_order(self, platform: str) -> list[str]:
        """All backends, those of the platform's order first."""
        return list(dict.fromkeys([*(p.backend for p, _ in self.order(platform)), *self.backends]))


def _checked_version(name: str, p: Any) -> Any:
    if isinstance(p, str) and within(">=0", p) is None:
        raise FactError(f"{name} {p!r} is no PEP 440 version; write, say, 2.8.3")
    return p


def _cudnn(name: str, version: str | None) -> str | None:
    """torch.backends.cudnn.version() writes 9.19.0 as 91900, and 8.9.7 as 8907."""
    if name != "cudnn" or version is None or not version.isdigit() or int(version) < 1000:
        return version
    n = int(version)
    parts = (n // 10000, n // 100 % 100, n % 100) if n >= 90000 else (n // 1000, n // 100 % 10, n % 100)
    return ".".join(map(str, parts))


def read_known_bad(path: Path, owner: str, platform: str = "") -> list[KnownBad]:
    """Rules from TOML: ``[[rule]]`` with id, kernels, when, require, effect, note, fix, citation, waiver."""
    if not path.is_file():
        return []
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    out = []
    for entry in tomllib.loads(path.read_text("utf-8")).get("rule", []):
        known = {"id", "kernels", "when", "require", "effect", "note", "fix", "citation", "waiver"}
        if extra := sorted(set(entry) - known):
            raise DeclarationError(
                f"{path.name} of {owner}, rule {entry.get('id')}: " + unknown("key", extra[0], known)
            )
        for fact in (*entry.get("when", ()), *entry.get("require", ())):
            if not known_fact(fact):
                facts = {*CALL_FACTS, *MACHINE_FACTS, *VERSION_FACTS}
                raise DeclarationError(f"{path.name} of {owner}, rule {entry['id']}: " + unknown("fact", fact, facts))
        limits = {part: {f: limit_of(f, x) for f, x in entry.get(part, {}).items()} for part in ("when", "require")}
        rule = Rule(
            f"known_bad.{entry['id']}",
            limits["when"],
            limits["require"],
            waiver=entry.get("waiver", entry["id"]),
            **{k: entry[k] for k in ("effect", "note", "fix", "citation") if k in entry},
        )
        out.append(KnownBad(rule, frozenset(entry["kernels"]), owner, platform))
    return out


def known_fact(fact: str) -> bool:
    return fact in CALL_FACTS or fact in MACHINE_FACTS or fact in VERSION_FACTS or fact.startswith(("pkg.", "env."))
