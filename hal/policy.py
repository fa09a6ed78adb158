"""Who asked for what.  A Policy is a value: the requests in their order of strength, and what the user allows."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PolicyError
from .facts.packages import package_key

MODES = ("require", "prefer", "forbid")


@dataclass(frozen=True)
class Request:
    """A backend (and perhaps one kernel of it) that somebody requires, prefers or forbids; ``source`` says who."""

    backend: str = ""
    mode: str = "require"
    source: str = "call"
    kernel: str = ""
    asked: str = ""  # the name as it was written, where it says more than the backend: fa3 is a generation of fa

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PolicyError(f"request mode {self.mode!r}; allowed: {', '.join(MODES)}")

    def __str__(self) -> str:
        return " / ".join(x for x in (self.backend, self.kernel) if x)

    def means(self, backend: str, kernel: str | None) -> bool:
        """Whether a row is meant; ``kernel`` None: the platform has no row for the backend at all."""
        if kernel is None:
            return self.backend == backend
        return self.backend in ("", backend) and self.kernel in ("", kernel)


@dataclass(frozen=True)
class Policy:
    """``requests``, the strongest first; ``waive``: rules overruled by name; ``fit``: fittings asked for by name."""

    requests: tuple[Request, ...] = ()
    waive: frozenset[str] = frozenset()
    fit: frozenset[str] = frozenset()

    def with_request(self, request: Request) -> Policy:
        """This policy under a stronger request."""
        return Policy((request, *self.requests), self.waive, self.fit)

    def forbids(self, backend: str, kernel: str) -> Request | None:
        for r in self.requests:
            if r.mode == "forbid" and r.means(backend, kernel):
                return r
        return None


AUTOMATIC = Policy()


def names(text: str | tuple[str, ...] | list[str] | frozenset[str] | None) -> frozenset[str]:
    """Names given as one text with commas, or as several."""
    if not text:
        return frozenset()
    many = [text] if isinstance(text, str) else list(text)
    return frozenset(n.strip() for t in many for n in t.split(",") if n.strip())


def release(text: str) -> tuple[str, str]:
    """``NAME==VERSION`` as (package key, version)."""
    name, eq, version = text.partition("==")
    if not eq or not name.strip() or not version.strip():
        raise PolicyError(f"{text!r} is no NAME==VERSION; write, say, flash-attn==2.8.3")
    return package_key(name), version.strip()
