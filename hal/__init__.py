"""hal: which attention kernel runs for this call on this machine, why, and what it returns.

``hal.attention(q, k, v)`` runs; ``hal.explain(q, k, v)`` tells; ``hal doctor`` looks at the machine.
Importing hal decides which platform is here by files alone: it imports no torch and touches no device.
"""

from __future__ import annotations

from . import detect as _detect
from .errors import HalError

__version__ = "0.1.0"

_EXPORTS = {
    "AttachError": "errors",
    "AttentionBackend": "names",
    "Call": "facts",
    "CallError": "errors",
    "Catalog": "catalog",
    "Decision": "decision",
    "DeclarationError": "errors",
    "Device": "facts",
    "FactError": "errors",
    "GuardError": "errors",
    "LocalAttention": "layers.local",
    "Machine": "facts",
    "NoKernelError": "errors",
    "Package": "facts",
    "PlatformError": "errors",
    "PluginError": "errors",
    "Policy": "policy",
    "PolicyError": "errors",
    "Receipt": "ledger",
    "RefusedError": "errors",
    "Request": "policy",
    "SimulationError": "errors",
    "attach": "integrations.attachment",
    "attention": "run",
    "attention_varlen": "run",
    "bind": "run",
    "clear_receipts": "ledger",
    "component": "context",
    "explain": "run",
    "force": "context",
    "forget": "run",
    "grid": "context",
    "hooks": "log",
    "position": "context",
    "receipts": "ledger",
    "request": "requests",
    "resolve": "resolver",
    "scope": "choices",
    "simulate": "context",
    "step": "context",
}

__all__ = ["HalError", "current_platform", *_EXPORTS]

TYPE_CHECKING = False  # as typing has it, which is slow to import
if TYPE_CHECKING:
    from typing import Any

    from .catalog import Catalog
    from .choices import scope
    from .context import component, force, grid, position, simulate, step
    from .decision import Decision
    from .errors import (
        AttachError,
        CallError,
        DeclarationError,
        FactError,
        GuardError,
        NoKernelError,
        PlatformError,
        PluginError,
        PolicyError,
        RefusedError,
        SimulationError,
    )
    from .facts import Call, Device, Machine, Package
    from .integrations.attachment import attach
    from .layers.local import LocalAttention
    from .ledger import Receipt, clear_receipts, receipts
    from .log import hooks
    from .names import AttentionBackend
    from .platform import Platform
    from .policy import Policy, Request
    from .requests import request
    from .resolver import resolve
    from .run import attention, attention_varlen, bind, explain, forget

_detect.detected()  # never raises: what went wrong is kept, and raised on use


def current_platform() -> Platform:
    """The active platform: of the simulated machine in force, else the one that is here.  Raises what detection met."""
    from . import plugins
    from .context import current

    machine = current.get().machine
    return _detect.real_platform() if machine is None else plugins.catalog(_detect.ignored()).platform(machine.platform)


def __getattr__(name: str) -> Any:
    if name in ("difference", "layers", "models", "parallel", "sparse"):  # parts with names of their own
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hal' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
