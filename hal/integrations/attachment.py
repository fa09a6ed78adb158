"""``hal.attach``: the attention of a diffusers pipeline or model, or of a transformers model, through hal."""

from __future__ import annotations

import copy
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import nn

from .. import choices, detect, models, plugins
from ..context import Place, number
from ..errors import AttachError, PolicyError
from ..layers import LocalAttention
from ..ledger import Ledger, Receipt, alive
from ..policy import AUTOMATIC, Policy, Request
from ..policy import Site as PolicySite
from . import denoising
from .disguise import put_on
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


_attached: WeakSet[Attachment] = WeakSet()


def attachments() -> list[Attachment]:
    """What is attached now, anywhere in the process."""
    return [a for a in alive(_attached) if a.attached]


class Attachment:
    """A model whose attention goes through hal until ``detach()``, or until the end of a ``with`` block."""

    def __init__(
        self,
        model: Any,
        parts: dict[str, nn.Module],
        components: dict[str, Component],
        places: dict[str, list[Place]],
        policy: Policy,
        ledger: Ledger,
        undo: ExitStack,
    ):
        self.model, self.parts, self.components = model, parts, components
        self.places = places  # of each component's sites
        self.policy = policy  # what was asked for, by the caller and by the model
        self.ledger = ledger  # what was decided for these sites and ran
        self._undo = undo
        self._attached = True
        _attached.add(self)

    def receipts(self) -> list[Receipt]:
        """What really ran while attached, most often first."""
        return self.ledger.receipts()

    @property
    def attached(self) -> bool:
        return self._attached

    def check_used(self) -> None:
        """Raises PolicyError for an override or a global choice that no attention layer of its target used although such
        layers ran.
        """
        if self.ledger.tallies:
            first: dict[Any, Request] = {}  # where the same is said of a target twice, the first counts
            for r in self.policy.requests:
                if r.kind in ("override", "global") and r.mode != "forbid":
                    first.setdefault((r.kind, r.target), r)
            self.ledger.check_used(first.values(), self.components)

    def detach(self) -> None:
        """Put everything back as it was, then :meth:`check_used`.  Doing it twice is no error."""
        before, self._attached = self._attached, False
        self._undo.close()
        if before:
            self.check_used()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.detach()
        except PolicyError:
            if error[0] is None:  # what went wrong inside is told, and not what could not be used because of it
                raise

    def __repr__(self) -> str:
        parts = [
            f"{c.name}: {len(c.reached)} reached" + (f", {len(c.unreached)} not" if c.unreached else "")
            for c in self.components.values()
        ]
        return f"<{'attached' if self._attached else 'detached'} {'; '.join(parts)}>"


def attach(model: Any, *, component: str | None = None, policy: Policy = AUTOMATIC, **words: Any) -> Attachment:
    """Route the attention of ``model`` through hal until the returned handle is detached.

    ``model`` is a diffusers pipeline (its components go by their names in ``model_index.json``), a diffusers model or a
    transformers model (``component`` names it; by default ``transformer``, ``unet``, ``vae``, ``controlnet`` or
    ``text_encoder``, as its class name says).  What may be said of the choice, all by keyword:

    - ``attention_backend``: the global choice; strict in a transformer's self-attention, elsewhere taken where it fits.
    - ``component_attention_backends``: ``{"text_encoder": "torch_sdpa", "transformer.cross": …, "transformer@0-2": …}``,
      strict; one that no attention layer of its target uses is an error.
    - ``attention_backend_config``: the backends' settings, as a file, a text or a mapping.
    - ``attention_fallback``: ``"refuse"`` (the default) or ``"declared"``: a backend that the machine cannot have gives
      way to the one that it declares, with a warning.
    - ``kernel``: one kernel by name.  ``forbid``: never these (``"fa"``, ``"vae=fa"``).
    - ``waive``: known-bad rules and budgets by their waiver.  ``fit``: fittings that hal does not make by itself.
    - ``native_only``: a backend that is asked for and has only its portable form here is refused.

    ``policy``, made beforehand, comes after these words.

    Set processors (IP-Adapter, fused projections) before: one that is put in while attached may bypass hal.
    Nothing that other models use is changed.  Attention that hal cannot reach is named in one warning per component;
    it runs as before.  Raises :class:`AttachError` for anything else than a model or pipeline, for one that has no
    attention that hal can reach, and for one that is attached already; PolicyError for an unknown name, and for an
    override whose target has no attention that hal can reach.
    """
    parts = _parts(model, component)
    catalog = plugins.catalog(detect.ignored())
    asked = choices.checked(words, components=_named(model, parts)).over(policy)
    components: dict[str, Component] = {}
    with ExitStack() as undo:
        found = {name: find(module) for name, module in parts.items()}
        for name, (sites, unreached) in found.items():
            components[name] = Component(name, type(parts[name]).__name__, tuple(sites), tuple(unreached))
        if not any(c.reached for c in components.values()):
            raise AttachError(_nothing(model, components))
        for request in asked.requests:
            _check_reached(request, components, model)
        cards = models.of(model, parts, catalog)
        policy = asked.over(models.policy(cards, catalog))
        ledger, owner = Ledger(), number()
        places: dict[str, list[Place]] = {}
        for name, (sites, _) in found.items():
            apart = {part for one in cards if one.component == name for part in one.card.apart}
            places[name] = _take_over(name, parts[name], sites, apart, policy, ledger, owner, undo)
        layers = {name: len({p.site.layer for p in mine if p.site.component == name}) for name, mine in places.items()}
        denoising.watch(model, parts, layers, undo)
        for one in components.values():
            if one.unreached:
                warnings.warn(_warning(one), stacklevel=2)
        return Attachment(model, parts, components, places, policy, ledger, undo.pop_all())
    raise AssertionError  # an ExitStack without callbacks that swallow errors ends here never


def _named(model: Any, parts: dict[str, nn.Module]) -> list[str]:
    """The names that an override may use: every component of the pipeline, also those without attention."""
    return list(getattr(model, "components", None) or parts) if not isinstance(model, nn.Module) else list(parts)


def _check_reached(request: Request, components: dict[str, Component], model: Any) -> None:
    """An override for a component whose attention hal cannot reach would never be used."""
    name = request.target.component
    if not name or request.mode == "forbid" or (name in components and components[name].reached):
        return
    if name not in components:
        same = [n for n, part in components.items() if getattr(model, name, None) is getattr(model, n, model)]
        why = f"it is the same object as {same[0]!r}; name that" if same else "it is no model with attention"
    elif components[name].unreached:
        first = components[name].unreached[0]
        why = f"its attention is fixed ({first.cls}: {first.why})"
    else:
        why = f"{components[name].cls} has no attention"
    able = ", ".join(n for n, c in components.items() if c.reached)
    raise PolicyError(
        f"{request.source} cannot be used: hal reaches no attention in {name!r}, as {why}; it reaches {able}"
    )


def compiled(model: nn.Module) -> bool:
    """Whether torch.compile has been put on a model or a part of it."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in model.modules())


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
    name: str,
    model: nn.Module,
    sites: dict[Site, nn.Module],
    apart: set[str],
    policy: Policy,
    ledger: Ledger,
    owner: int,
    undo: ExitStack,
) -> list[Place]:
    places: list[Place] = []
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    layers: dict[tuple[str, int], int] = {}
    for site, module in sites.items():
        cls = type(module)
        within = site.name.replace("_orig_mod.", "")  # torch.compile's wrapper
        part = next((p for p in apart if within == p or within.startswith(f"{p}.")), name)
        number = layers.setdefault((part, site.layer), sum(p == part for p, _ in layers))
        if isinstance(module, LocalAttention):
            own = module.place  # what surrounded its construction comes after what is said now
            undo.callback(setattr, module, "attached", module.attached)
            layer = number if own.site.layer is None else own.site.layer
            here = own.site._replace(component=part, layer=layer)
            module.attached = Place(policy.over(own.policy), here, ledger, owner)
            places.append(module.attached)
            continue
        place = Place(policy, PolicySite(part, layer=number), ledger, owner)
        places.append(place)
        route = Route(place, other_sequence(cls), "call" in site.doors)
        vars(module)["_hal_route"] = route
        if cls not in classes:
            classes[cls] = routed(cls)
        undo.callback(vars(module).pop, "_hal_route", None)
        put_on(module, classes[cls], undo)
        if "backend" in site.doors:
            _set_backend(module.processor, undo)
    _set_interface(model, [module for site, module in sites.items() if "interface" in site.doors], undo)
    return places


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
