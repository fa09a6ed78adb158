"""diffusers' own attention backends: a name given to ``set_attention_backend`` for one run, and all put back after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import detect, plugins
from ..errors import PolicyError, unknown
from ..policy import DENOISER
from .sites import DISPATCH, SDPA, find, uses


@dataclass(frozen=True)
class Passed:
    """What diffusers was told for a component: ``taking`` of its ``layers`` attention layers go by it."""

    component: str
    backend: str
    source: str
    taking: int
    layers: int


def backend_name(name: str, source: str) -> str:
    """diffusers' spelling of one of its backends.  Raises PolicyError; names of hal's are told apart."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    known = [str(b.value) for b in AttentionBackendName]
    plain = name.strip().lower()
    if plain in known:
        return plain
    catalog = plugins.catalog(detect.ignored())
    own = plain.replace("-", "_")
    hals = own in catalog.backends or own in catalog.aliases
    more = f"; {name} is a backend of hal, which runs it without --backend diffusers" if hals else ""
    raise PolicyError(f"{source}: {unknown('backend of diffusers', name, known)}{more}")


def active() -> str:
    """The backend that diffusers takes in this process where nothing else is said."""
    backend = _registry()._active_backend
    return str(getattr(backend, "value", backend))


@contextmanager
def passed(pipeline: Any, backend: str, source: str) -> Iterator[tuple[Passed, ...]]:
    """The denoiser's attention by ``backend``, one of diffusers', inside the block.

    Afterwards, and after an error, the processors and diffusers' process-wide active backend are what they were.
    Raises PolicyError before anything is set, where a denoiser does not go by it, and where diffusers refuses.
    """
    parts: dict[str, Any] = {
        name: part
        for name, part in pipeline.components.items()
        if isinstance(part, nn.Module) and DENOISER.fullmatch(name)
    }
    if not parts:
        raise PolicyError(f"{source} is not consumed: {type(pipeline).__name__} has no transformer and no unet")
    out = tuple(_consumed(name, part, backend, source) for name, part in parts.items())
    with ExitStack() as undo:
        undo.callback(_registry().set_active_backend, _registry()._active_backend)
        for name, part in parts.items():
            _remember(part, undo)
            try:
                part.set_attention_backend(backend)
            except Exception as e:  # a missing package, a kernel that cannot be downloaded, …
                raise PolicyError(f"{source}: diffusers cannot use it for {name}: {line(e)}") from e
        yield out


def _registry() -> Any:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return _AttentionBackendRegistry


def _consumed(name: str, part: nn.Module, backend: str, source: str) -> Passed:
    sites, unreached = find(part)
    names = [*(s.name for s in sites), *(u.name for u in unreached)]
    modules = [part.get_submodule(n) for n in names]
    taking = [m for m in modules if DISPATCH in _names(m)]
    if taking and hasattr(part, "set_attention_backend"):
        return Passed(name, backend, source, len(taking), len(modules))
    cls = type(part).__name__
    if not modules:
        why = f"{cls} has no attention"
    elif taking:
        why = f"{cls} has no set_attention_backend"
    else:
        others = dict.fromkeys(type(getattr(m, "processor", None) or m).__name__ for m in modules)
        itself = "calls PyTorch's SDPA itself" if all(SDPA in _names(m) for m in modules) else "computes it itself"
        why = f"the attention of {cls} is that of {', '.join(others)}, which {itself} and asks diffusers for no backend"
    raise PolicyError(
        f"{source} is not consumed: {name} ignores diffusers' backends, as {why}; "
        "drop --attention-backend, or drop --backend diffusers and let hal run it"
    )


def _names(module: nn.Module) -> Any:
    """The names that the code of a module and of its processor reads."""
    names, _ = uses(type(module), type(module).forward)
    processor = getattr(module, "processor", None)
    return names if processor is None else names + uses(type(processor), type(processor).__call__)[0]


def _remember(part: nn.Module, undo: ExitStack) -> None:
    for module in part.modules():
        processor = getattr(module, "processor", None)
        if processor is None or not hasattr(processor, "_attention_backend"):
            continue
        if "_attention_backend" in vars(processor):
            undo.callback(setattr, processor, "_attention_backend", vars(processor)["_attention_backend"])
        else:
            undo.callback(vars(processor).pop, "_attention_backend", None)


def line(e: BaseException) -> str:
    """An error in one line."""
    said = str(e).strip().splitlines()
    return f"{type(e).__name__}: {said[0]}" if said else type(e).__name__
