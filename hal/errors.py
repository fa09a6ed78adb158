"""One family of errors.  Each text says what was asked, what was found, what is allowed, and the one change that helps."""

from __future__ import annotations

from collections.abc import Iterable

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from typing import Any


class HalError(Exception):
    """Everything that hal raises on purpose: before anything runs, but for a package that breaks its own contract."""


class FactError(HalError, ValueError):
    """A text or a value that is no fact: an architecture, dtype, call key, preset or facts file."""


class CallError(HalError, ValueError):
    """Tensors and arguments that do not make one attention call."""


class DeclarationError(HalError, TypeError):
    """A platform, backend, kernel or rule whose declaration contradicts itself or names what does not exist."""


class PlatformError(HalError, RuntimeError):
    """No platform, several, or one that could not be detected."""


class PluginError(PlatformError):
    """An entry point that failed to load; names its distribution."""


class PolicyError(HalError, ValueError):
    """A request that names what does not exist, or that contradicts another."""


class AgreementError(PolicyError):
    """Ranks that decided differently, or one that could not decide.  Raised on every rank."""


class NoKernelError(HalError, RuntimeError):
    """No kernel may serve the call under the policy.  ``decision`` has every candidate with every reason."""

    def __init__(self, text: str, decision: Any = None):
        super().__init__(text)
        self.decision = decision


class RefusedError(NoKernelError, PolicyError):
    """What was asked for cannot serve the call, or may not."""


class GuardError(HalError, RuntimeError):
    """A bound decision was given tensors other than those it was decided on."""


class SimulationError(HalError, RuntimeError):
    """A decision for a simulated machine cannot run here."""


class AttachError(HalError, RuntimeError):
    """A model or pipeline whose attention hal cannot take over, or that cannot be loaded."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``; did you mean 'x'?`` or the empty string."""
    from difflib import get_close_matches

    by_lower = {str(n).lower(): str(n) for n in names}
    close = get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def unknown(kind: str, name: object, names: Iterable[str]) -> str:
    """The text for a name that is not among ``names``."""
    known = sorted(map(str, names))
    return f"unknown {kind} {name!r}{did_you_mean(str(name), known)} (known: {', '.join(known)})"
