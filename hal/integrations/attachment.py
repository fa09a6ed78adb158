"""``hal.attach``: the attention of a diffusers pipeline or model, or of a transformers model, through hal."""

from __future__ import annotations

import copy
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import detect, plugins
from ..errors import AttachError
from .routing import Route, acquire, release, routed
from .sites import Site, Unreached, find, other_sequence


@dataclass(frozen=True)
class Component:
    """What hal found in one component of a pipeline."""

    name: str
    cls: str
    reached: tuple[Site, ...]
    unreached: tuple[Unreached, ...]

    @property
    def layers(self) -> int:
        """Number of layers whose attention hal runs."""
        return len({site.layer for site in self.reached})


class Attachment:
    """A model whose attention goes through hal until ``detach()``, or until the end of a ``with`` block."""

    def __init__(self, components: dict[str, Component], undo: ExitStack):
        self.components = components
        self._undo = undo
        self._attached = True

    @property
    def attached(self) -> bool:
        return self._attached

    def detach(self) -> None:
        """Put everything back as it was.  Doing it twice is no error."""
        self._attached = False
        self._undo.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        parts = [
            f"{c.name}: {len(c.reached)} reached" + (f", {len(c.unreached)} not" if c.unreached else "")
            for c in self.components.values()
        ]
        return f"<{'attached' if self._attached else 'detached'} {'; '.join(parts)}>"


def attach(model: Any, *, component: str | None = None, backend: str | None = None) -> Attachment:
    """Route the attention of ``model`` through hal until the returned handle is detached.

    ``model`` is a diffusers pipeline (its components go by their names in ``model_index.json``), a diffusers model or a
    transformers model (``component`` names it; by default ``transformer``, ``unet``, ``vae``, ``controlnet`` or
    ``text_encoder``, as its class name says).  ``backend`` is passed to hal with every call.

    Set processors (IP-Adapter, fused projections) before: one that is put in while attached may bypass hal.
    Nothing that other models use is changed.  Attention that hal cannot reach is named in one warning per component;
    it runs as before.  Raises :class:`AttachError` for anything else than a model or pipeline, for one that has no
    attention that hal can reach, and for one that is attached already; PolicyError for an unknown backend.
    """
    parts = _parts(model, component)
    policy = {} if backend is None else {"backend": backend_name(backend)}
    components: dict[str, Component] = {}
    with ExitStack() as undo:
        for name, module in parts.items():
            sites, unreached = find(module)
            components[name] = Component(name, type(module).__name__, tuple(sites), tuple(unreached))
            _take_over(name, module, sites, policy, undo)
        if not any(c.reached for c in components.values()):
            raise AttachError(_nothing(model, components))
        for found in components.values():
            if found.unreached:
                warnings.warn(_warning(found), stacklevel=2)
        return Attachment(components, undo.pop_all())
    raise AssertionError  # an ExitStack without callbacks that swallow errors ends here never


def backend_name(name: str) -> str:
    """The backend's own name for any spelling of it.  Raises PolicyError for an unknown one."""
    return plugins.catalog(detect.ignored()).backend_name(name)


def _parts(model: Any, component: str | None) -> dict[str, nn.Module]:
    """The components of ``model`` by name; a module that stands under two names counts once."""
    parts: dict[str, nn.Module] = {}
    if isinstance(model, nn.Module):
        parts[component or _usual_name(model)] = model
    elif isinstance(getattr(model, "components", None), dict):
        if component is not None:
            raise AttachError(
                f"component={component!r} names a single model, but a {type(model).__name__} has its own component "
                f"names; attach its component alone: hal.attach(pipeline.{component})"
            )
        for name, part in model.components.items():
            if isinstance(part, nn.Module) and not any(part is known for known in parts.values()):
                parts[name] = part
    else:
        raise AttachError(
            f"hal.attach takes a diffusers pipeline, a diffusers model or a transformers model, not a "
            f"{type(model).__name__}"
        )
    for name, part in parts.items():
        if any("_hal_route" in vars(module) for module in part.modules()):
            raise AttachError(
                f"component {name!r} ({type(part).__name__}) is attached to hal already; "
                "call detach() on the handle that hal.attach returned first"
            )
    return parts


def _usual_name(model: nn.Module) -> str:
    """The name a model has in most pipelines, by its class; policy goes by component names."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    name = type(model).__name__
    for part, usual in (("ControlNet", "controlnet"), ("UNet", "unet"), ("Autoencoder", "vae")):
        if part in name:
            return usual
    return "text_encoder" if hasattr(model, "_supports_sdpa") else "transformer"


def _take_over(
    name: str, model: nn.Module, sites: dict[Site, nn.Module], policy: dict[str, Any], undo: ExitStack
) -> None:
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for site, module in sites.items():
        cls = type(module)
        route = Route(name, site.layer, other_sequence(cls), "call" in site.doors, policy)
        vars(module)["_hal_route"] = route
        if cls not in classes:
            classes[cls] = routed(cls)
        module.__class__ = classes[cls]
        undo.callback(_give_back, module, cls, classes[cls])
        if "backend" in site.doors:
            _set_backend(module.processor, undo)
    _set_interface(model, [module for site, module in sites.items() if "interface" in site.doors], undo)


def _give_back(module: nn.Module, cls: type[nn.Module], ours: type[nn.Module]) -> None:
    vars(module).pop("_hal_route", None)
    if type(module) is ours:  # else someone put a class on top; without a route ours does nothing
        module.__class__ = cls


def _set_backend(processor: Any, undo: ExitStack) -> None:
    """Set a diffusers processor's own backend.  ``model.set_attention_backend`` would set the process's, too."""
    name = acquire("backend")
    undo.callback(release, "backend")
    before = vars(processor).get("_attention_backend", _MISSING)

    def restore() -> None:
        if processor._attention_backend is not name:
            return  # changed while attached, by someone who meant it
        if before is _MISSING:
            del processor._attention_backend
        else:
            processor._attention_backend = before

    processor._attention_backend = name
    undo.callback(restore)


_MISSING = object()


def _set_interface(model: nn.Module, modules: list[nn.Module], undo: ExitStack) -> None:
    """Set the implementation of transformers modules, on configs of their own: models may share a config object."""
    if not modules:
        return
    from transformers import PretrainedConfig

    name = acquire("interface")
    undo.callback(release, "interface")
    own: dict[int, Any] = {}

    def twin(config: Any) -> Any:
        if id(config) not in own:
            own[id(config)] = made = copy.copy(config)
            for key in config.sub_configs:
                if isinstance(vars(config).get(key), PretrainedConfig):
                    vars(made)[key] = twin(vars(config)[key])
            undo.callback(_write_back, config, made)
        return own[id(config)]

    chosen = [twin(module.config) for module in modules]
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, PretrainedConfig):
                vars(module)[key] = twin(value)
                undo.callback(vars(module).__setitem__, key, value)
    for config in chosen:
        config._attn_implementation_internal = name


def _write_back(config: Any, made: Any) -> None:
    """Keep what was set on a model's config while it was attached, but for the implementation."""
    skip = {"_attn_implementation_internal", *config.sub_configs}
    vars(config).update({key: value for key, value in vars(made).items() if key not in skip})


def _warning(found: Component) -> str:
    why: dict[tuple[str, str], list[str]] = {}
    for one in found.unreached:
        why.setdefault((one.cls, one.why), []).append(one.name)
    told = "; ".join(f"{cls} ({len(n)} x, first: {n[0]!r}): {text}" for (cls, text), n in why.items())
    return (
        f"hal does not reach all attention of component {found.name!r} ({found.cls}); that part runs as before: {told}"
    )


def _nothing(model: Any, components: dict[str, Component]) -> str:
    told = "; ".join(_warning(c) for c in components.values() if c.unreached) or "no attention was found"
    return f"hal reaches no attention in this {type(model).__name__}: {told}"
