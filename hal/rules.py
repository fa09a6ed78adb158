"""Facts in, reasons out.

A *limit* says which values of a fact are allowed; a *rule* says so under a condition.  Both are data:

    "bhsd", 64, True       that value             {64, 128}              one of these
    range(8, 257, 8)       8..256 by 8            Versions(">=2.6,<3")   a PEP 440 set
    Mod(8), Mod(128, 64)   x % 8 == 0, == 64      Between(128)           128 and more
    Same("head_dim")       equal to another fact  Pairs("head_dim", {(192, 128)})
    OneOf(a, b)             one of several limits  Not(a)                 all but these

Answers are three-valued: True, False, or None where they depend on an unknown fact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from .errors import DeclarationError
from .facts.values import ABSENT

Facts = Mapping[str, Any]
Limits = Mapping[str, Any]
Verdict = bool | None


class Spec:
    """A limit that is more than a value, a set or a range."""

    needs_facts = False

    def meets(self, x: Any, facts: Facts) -> Verdict:
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self)


class Same(Spec):
    def __init__(self, fact: str):
        self.fact = fact

    def meets(self, x: Any, facts: Facts) -> Verdict:
        y = facts.get(self.fact)
        return None if y is None else bool(x == y)

    def __str__(self) -> str:
        return f"the same as {self.fact}"


class Pairs(Spec):
    """(other fact, this one) is one of the pairs: ``Pairs("head_dim", {(192, 128)})`` as a limit of ``v_head_dim``."""

    def __init__(self, fact: str, pairs: set[tuple[Any, Any]]):
        self.fact, self.pairs = fact, frozenset(pairs)

    def meets(self, x: Any, facts: Facts) -> Verdict:
        y = facts.get(self.fact)
        if y is None:
            return None if any(x == p[1] for p in self.pairs) else False
        return (y, x) in self.pairs

    def __str__(self) -> str:
        return " or ".join(f"{b} with {self.fact}={a}" for a, b in sorted(self.pairs))


class Mod(Spec):
    def __init__(self, n: int, rest: int = 0):
        self.n, self.rest = n, rest

    def meets(self, x: Any, facts: Facts) -> Verdict:
        return bool(x % self.n == self.rest)

    def __str__(self) -> str:
        return f"n % {self.n} = {self.rest}" if self.rest else f"a multiple of {self.n}"


class Between(Spec):
    """low <= x <= high; an open end is infinite."""

    def __init__(self, low: float = -math.inf, high: float = math.inf):
        self.low, self.high = low, high

    def meets(self, x: Any, facts: Facts) -> Verdict:
        return bool(self.low <= x <= self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{self.low} or more"
        return f"{self.high} or less" if self.low == -math.inf else f"{self.low} to {self.high}"


class Versions(Spec):
    """A PEP 440 set.  Pre-releases and local versions count by their place in the order: 4.0.0b22 is in >=4.0.0b20."""

    def __init__(self, text: str):
        self.text = text

    def meets(self, x: Any, facts: Facts) -> Verdict:
        return within(self.text, x)

    def __str__(self) -> str:
        return self.text or "any version"


class OneOf(Spec):
    def __init__(self, *limits: Any):
        self.limits = limits
        self._tests = [meeting(limit) for limit in limits]

    def meets(self, x: Any, facts: Facts) -> Verdict:
        answers = [meets(x, facts) for meets in self._tests]
        return True if True in answers else None if None in answers else False

    def __str__(self) -> str:
        return " or ".join(map(show, self.limits))


class Not(Spec):
    def __init__(self, limit: Any):
        self.limit = limit
        self._test = meeting(limit)

    def meets(self, x: Any, facts: Facts) -> Verdict:
        v = self._test(x, facts)
        return None if v is None else not v

    def __str__(self) -> str:
        return f"anything but {show(self.limit)}"


@lru_cache(4096)
def within(text: str, version: str) -> Verdict:
    """Whether the version is in the set; None where it is no PEP 440 version and so cannot be compared."""
    if not text:
        return True
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # 35 ms: only when a version is compared
    from packaging.version import InvalidVersion, Version

    try:
        spec = SpecifierSet(text)
    except InvalidSpecifier:
        raise DeclarationError(f"{text!r} is no PEP 440 version set; write, say, >=2.6,<3") from None
    try:
        found = Version(version)
    except InvalidVersion:
        return None
    # An alpha of 2.12 is a 2.12 for every practical limit: only a set that itself names a pre-release orders them.
    if not any(Version(s.version.removesuffix(".*")).is_prerelease for s in spec if s.operator != "==="):
        post = "" if found.post is None else f".post{found.post}"
        found = Version(found.base_version + post)
    return spec.contains(found, prereleases=True)


def show(x: Any) -> str:
    """A fact's value or a limit, for people."""
    if isinstance(x, (set, frozenset)):
        return ", ".join(sorted(map(show, x), key=lambda s: (len(s), s)))
    if isinstance(x, range):
        return f"{x[0]}..{x[-1]}" + (f" by {x.step}" if x.step != 1 else "")
    if isinstance(x, bool):
        return str(x).lower()
    return "unknown" if x is None else str(x)


class Reason(NamedTuple):
    """A rule that failed (verdict False) or that depends on something unknown (None)."""

    id: str
    fact: str
    observed: Any
    allowed: Any
    verdict: Verdict = False
    fix: str = ""
    citation: str = ""
    note: str = ""  # replaces the made sentence where the declaration has a better one
    waiver: str = ""
    soft: bool = False  # automatic choice may pass it, with a warning, when nothing else fits

    @property
    def message(self) -> str:
        if self.verdict is None:
            return f"depends on {self.fact}" + (f" ({self.note})" if self.note else f" (allowed: {show(self.allowed)})")
        return self.note or f"{self.fact} is {show(self.observed)}; allowed: {show(self.allowed)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "observed": plain(self.observed),
            "allowed": plain(self.allowed),
            "message": self.message,
            "fix": self.fix or None,
            "citation": self.citation or None,
            "waiver": self.waiver or None,
            "depends": self.verdict is None,
        }


def plain(x: Any) -> Any:
    """A value as JSON."""
    if isinstance(x, (set, frozenset)):
        return sorted(x, key=lambda e: (isinstance(e, str), e))
    if isinstance(x, range):
        return show(x)
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, (tuple, list)):
        return [plain(e) for e in x]
    return str(x)


class Test(NamedTuple):
    fact: str
    limit: Any
    meets: Callable[[Any, Facts], Verdict]


def compiled(limits: Limits) -> tuple[Test, ...]:
    """Done once per declaration, so that a check is one lookup and one call per fact."""
    return tuple(Test(f, limit, meeting(limit)) for f, limit in limits.items())


def meeting(limit: Any) -> Callable[[Any, Facts], Verdict]:
    if isinstance(limit, Spec):
        return limit.meets
    if isinstance(limit, (set, frozenset, range)):
        contains = limit.__contains__
        return lambda x, facts: contains(x)
    return lambda x, facts: bool(x == limit)


def check(tests: tuple[Test, ...], facts: Facts, out: list[Reason]) -> None:
    """Append a reason for every limit that the facts break or leave open.  Supported means: nothing was appended."""
    for fact, limit, meets in tests:
        x = facts.get(fact)
        v = None if x is None else False if x is ABSENT else meets(x, facts)
        if v is not True:
            out.append(Reason(fact, fact, x, limit, v))


class Rule:
    """Where all of ``when`` holds, all of ``require`` must; without ``require``: never.

    ``effect``: ``reject``; ``warn`` (the kernel is taken, with a warning); ``budget`` (refused on request, and in automatic
    choice taken with a warning when nothing else fits).  ``waiver`` is the name by which a user may overrule it.
    """

    def __init__(
        self,
        id: str,
        when: Limits | None = None,
        require: Limits | None = None,
        *,
        note: str = "",
        fix: str = "",
        citation: str = "",
        waiver: str = "",
        effect: str = "reject",
    ):
        if effect not in ("reject", "warn", "budget"):
            raise DeclarationError(f"rule {id}: effect is {effect!r}; allowed: reject, warn, budget")
        if not when and not require:
            raise DeclarationError(f"rule {id}: says neither when it applies nor what it requires")
        self.id, self.when, self.require, self.effect = id, dict(when or {}), dict(require or {}), effect
        self.note, self.fix, self.citation, self.waiver = note, fix, citation, waiver
        self._when, self._require = compiled(self.when), compiled(self.require)

    def check(self, facts: Facts, out: list[Reason]) -> None:
        sure: Verdict = True
        for fact, _, meets in self._when:
            x = facts.get(fact)
            v = None if x is None else False if x is ABSENT else meets(x, facts)
            if v is False:
                return
            if v is None:
                sure = None
        found: list[Reason] = []
        check(self._require, facts, found)
        if not self.require:
            seen = ", ".join(f"{f}={show(facts.get(f))}" for f in self.when)
            found.append(Reason(self.id, ", ".join(self.when), seen, "any other combination"))
        for r in found:
            verdict = r.verdict if sure else None
            out.append(
                r._replace(id=self.id, verdict=verdict, fix=self.fix, citation=self.citation, waiver=self.waiver,
                           note=self.note, soft=self.effect == "budget")
            )  # fmt: skip


_BOUND = re.compile(r"(<=|>=|<|>)\s*(-?\d+)$")


def limit_of(fact: str, value: Any) -> Any:
    """A limit as TOML writes it: a list is a set; ``"% 128 = 64"``; ``">=8,<64"``; versions as PEP 440; ``"not x"``."""
    if isinstance(value, list):
        return frozenset(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("not "):
        return Not(limit_of(fact, text[4:]))
    if m := re.fullmatch(r"%\s*(\d+)\s*=\s*(\d+)", text):
        return Mod(int(m[1]), int(m[2]))
    if text.startswith("same as "):
        return Same(text[8:].strip())
    if text[:1] in "<>=!~":
        if fact == "arch":
            raise DeclarationError(f"arch {text!r}: an architecture is one of a set, never an order")
        if fact.startswith("pkg.") or fact in VERSION_FACTS:
            return Versions(text)
        low, high = -math.inf, math.inf
        for part in text.split(","):
            m = _BOUND.fullmatch(part.strip())
            if not m:
                raise DeclarationError(f"{fact} = {text!r} is no bound; write, say, >=8,<64")
            n = int(m[2])
            if m[1][0] == ">":
                low = max(low, n + (m[1] == ">"))
            else:
                high = min(high, n - (m[1] == "<"))
        return Between(low, high)
    return text


VERSION_FACTS = frozenset({"torch", "runtime", "driver", "cudnn", "triton", "aotriton", "os", "cann", "ipex"})
