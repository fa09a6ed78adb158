"""Which platform is this?  Asked of every platform at ``import hal``, by files and metadata alone; never raises there."""

from __future__ import annotations

import os

from . import plugins
from .errors import PlatformError, PolicyError, unknown
from .host import Detection, Host
from .platform import Platform

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .facts import Machine, Package

ENVIRONMENT = "HAL_PLATFORM"
IGNORE = "HAL_IGNORE_PLUGIN"


# Every variable that hal or its own suites read; another of that prefix is told, as it may be misspelt or long gone.
VARIABLES = (
    ENVIRONMENT,
    IGNORE,
    "HAL_ATTENTION_BACKEND",
    "HAL_ATTENTION_FALLBACK",
    "HAL_SETTINGS",
    "HAL_HARDWARE",
    "HAL_CONTRACTS_LARGE",
)


def strangers(env: Mapping[str, str]) -> list[str]:
    """What to say of variables that look like ours and that nothing reads."""
    return [
        f"{unknown('environment variable', n, VARIABLES)}: nothing reads it; unset it"
        for n in sorted(env)
        if n.startswith("HAL_") and n not in VARIABLES
    ]


def ignored() -> frozenset[str]:
    """Plug-ins that the environment says to go on without."""
    return frozenset(n.strip() for n in os.environ.get(IGNORE, "").split(",") if n.strip())


def detections(
    platforms: Mapping[str, Platform], host: Host, raised: dict[str, BaseException] | None = None
) -> tuple[Detection, ...]:
    """What each platform says, with its evidence.  One that raises is told as unusable, and never hides another."""
    out = []
    for p in platforms.values():
        try:
            d = p.detect(host)
            if not isinstance(d, Detection):
                raise TypeError(f"{type(d).__name__} is no Detection")
        except (Exception, SystemExit) as e:
            if raised is not None:
                raised[p.name] = e
            d = Detection(p.name, "unusable", (f"its detection raised {type(e).__name__}: {e}",))
        out.append(d)
    return tuple(out)


def choose(
    platforms: Mapping[str, Platform],
    found: tuple[Detection, ...],
    host: Host,
    raised: Mapping[str, BaseException] = {},
) -> str:
    """The name of the one platform to use.  Raises PlatformError where a person must choose."""
    asked = host.env.get(ENVIRONMENT, "").strip().lower()
    if asked:
        if asked not in platforms:
            raise PlatformError(unknown(f"platform in {ENVIRONMENT}", asked, platforms))
        return asked
    for name, error in raised.items():
        if plugins.outside(name):
            raise plugins.Problem(plugins.PLATFORMS, name, plugins.distribution_of(name), error).as_error()
    present = [d.platform for d in found if d.present and platforms[d.platform].accelerator]
    theirs = [n for n in present if plugins.outside(n)]
    for group in (theirs, present):
        if len(group) == 1:
            return group[0]
        if group:
            raise PlatformError(
                f"{len(group)} platforms are active here: {', '.join(group)}; choose one with {ENVIRONMENT}={group[0]}"
            )
    rest = [d.platform for d in found if d.present]
    if not rest:
        raise PlatformError("no platform is here: " + "; ".join(f"{d.platform}: {d.state}" for d in found))
    return rest[0]


class _Detected:
    """What import found: a platform's name, or the error to raise on use."""

    def __init__(self, host: Host):
        self.host = host
        self.platforms, self.problems = plugins.platforms(ignored())
        raised: dict[str, BaseException] = {}
        self.detections = detections(self.platforms, host, raised)
        self.strangers = strangers(host.env)
        self.error: Exception | None = None
        self.name = ""
        try:
            if self.problems:
                raise self.problems[0].as_error()
            self.name = choose(self.platforms, self.detections, host, raised)
        except Exception as e:
            self.error = e


_detected: _Detected | None = None


def detected(again: bool = False) -> _Detected:
    """The result of detection, made once; ``again`` looks anew (the environment has changed)."""
    global _detected
    if _detected is None or again:
        _machines.clear()
        _detected = _Detected(Host())
    return _detected


def real_platform() -> Platform:
    """The platform that is really here.  Raises what went wrong with detection."""
    d = detected()
    if d.strangers:
        raise PolicyError(d.strangers[0])
    if d.error is not None:
        raise d.error
    return d.platforms[d.name]


_machines: dict[str, Machine] = {}


def real_machine(platform: str) -> Machine:
    """The devices, software and packages that are really here, for one platform; read at first use."""
    if platform not in _machines:
        from . import probe

        d = detected()
        m = d.platforms[platform].machine(d.host)
        _machines[platform] = m.with_packages(probe.look_all(plugins.catalog(ignored())))
    return _machines[platform]


def learn(shown: Mapping[str, Package]) -> None:
    """Importing a package has shown its true state: every later decision knows it."""
    for name, m in list(_machines.items()):
        _machines[name] = m.with_packages(shown)


def platform_for(device_type: str) -> Platform:
    """The platform of a tensor's device type: the current one where it fits, else the one that claims the type."""
    here, d = real_platform(), detected()
    everyone = d.platforms.values()
    seen = [d.platforms[x.platform] for x in d.detections if x.state != "absent"]  # two platforms may share a type
    for p in (here, *seen, *everyone):
        if p.device_type == device_type:
            return p
    known = ", ".join(f"{p.name} ({p.device_type})" for p in everyone)
    raise PlatformError(f"no platform serves tensors on {device_type!r}; installed: {known}")
