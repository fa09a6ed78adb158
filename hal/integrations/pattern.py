"""What a sparse backend attends to, as masks to draw: on a grid alone, or in a call of a real generation."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .. import config, context, detect, plugins
from ..backend import Backend
from ..errors import CallError, PolicyError
from ..facts import Call
from ..sparse.selected import Seen, Watched, watched_masks

STEPS = 1000  # looked through for the first one that is not dense


def backend_of(name: str) -> Backend:
    """A backend that attends to blocks.  Raises PolicyError for an unknown one, or one that does not."""
    catalog = plugins.catalog(detect.ignored())
    backend = catalog.backends[catalog.backend_name(name)]
    if "sparse" not in backend.traits:
        sparse = ", ".join(sorted(b.name for b in catalog.backends.values() if "sparse" in b.traits))
        raise PolicyError(
            f"{backend.name} attends to everything, so it has no blocks to draw; those that have: {sparse}"
        )
    return backend


def settings_of(backend: Backend, text: str | None) -> config.Config | None:
    """The settings in a text as of ``--attention-backend-config``; else the backend's defaults.  Raises PolicyError."""
    if text is not None:
        catalog = plugins.catalog(detect.ignored())
        for s in config.settings(config.read(text, "--config"), catalog, backend.name):
            if s.backend == backend.name:
                return s.config
    return config.defaults(backend)


def of_grid(
    name: str,
    grid: context.Grid,
    settings: config.Config | None,
    *,
    step: int | None = None,
    layer: int = 0,
    heads: int | None = None,
) -> list[Watched]:
    """What its portable form attends to on a grid, whatever the data.  Nothing is computed.

    ``step`` None: the first one that is not dense.  ``heads`` None: those of the settings, else 1.
    Raises PolicyError for a backend whose choice depends on the data, and what the backend raises.
    """
    backend = backend_of(name)
    kernel = backend.portable
    if kernel is None:
        raise PolicyError(f"{backend.name} has no portable form, so nothing tells its blocks; give --prompt")
    heads = heads or getattr(settings, "heads", None) or 1
    call = Call(dtype="float32", head_dim=8, heads=heads, batch=1, q_len=grid.tokens + grid.text, layout="bhsd")
    run = kernel.binder()(call) if settings is None else kernel.binder()(call, settings)
    first, *others = (_first(run, kernel.layout, call, grid, step, layer, seed) for seed in (0, 1))
    if not first:
        raise PolicyError(f"{backend.name} tells no blocks of a grid alone; give --prompt, for a call of a generation")
    for other in others:
        if len(other) != len(first) or any(a.heads != b.heads or not _same(a, b) for a, b in zip(first, other)):
            raise PolicyError(
                f"what {backend.name} attends to depends on the data, so a grid alone does not tell it; give --prompt, and it is "
                "taken from a call of a generation"
            )
    return first


def _first(
    run: Any, layout: str, call: Call, grid: context.Grid, step: int | None, layer: int, seed: int
) -> list[Watched]:
    g = torch.Generator().manual_seed(seed)
    shape = (
        (1, call.heads, call.q_len, call.head_dim) if layout == "bhsd" else (1, call.q_len, call.heads, call.head_dim)
    )
    q, k, v = (torch.randn(shape, generator=g) for _ in range(3))  # type: ignore[arg-type]
    found: list[Watched] = []  # of the first step
    for at in range(STEPS) if step is None else (step,):
        try:
            with watched_masks(stop=True) as seen, suppress(Seen), context.position(step=at, layer=layer, grid=grid):
                run(q, k, v, None, None)
        except CallError as e:
            if not found:
                raise
            raise CallError(f"by these settings every step before {at} attends to everything, and then: {e}") from None
        found = found or seen
        if not seen or any(x.mask is not None for x in seen):
            return seen
    return found  # all are dense: the first


def _same(a: Watched, b: Watched) -> bool:
    if a.mask is None or b.mask is None:
        return a.mask is b.mask
    return a.mask.keep.equal(b.mask.keep)


def of_generation(
    name: str,
    prompt: str,
    settings: str | Mapping[str, Any] | None,
    *,
    model_path: str | None = None,
    step: int | None = None,
    layer: int = 0,
    **arguments: Any,
) -> list[Watched]:
    """What a backend attends to in a call of a generation, which ends there.  ``arguments`` as of ``generate``.

    ``step`` None: the first one that is not dense.  Raises PolicyError where there is no such call, and what ``generate``
    raises.
    """
    from .generation import generate

    backend = backend_of(name)
    words: dict[str, Any] = {} if settings is None else {"attention_backend_config": settings}
    steps: set[int] = set()
    layers: set[int] = set()

    def wanted(x: Watched) -> bool:
        if x.backend != backend.name:
            return False
        steps.update(() if x.position.step is None else (x.position.step,))
        layers.update(() if x.position.layer is None else (x.position.layer,))
        return x.position.layer == layer and (x.mask is not None if step is None else x.position.step == step)

    with tempfile.TemporaryDirectory() as folder, watched_masks(wanted, stop=True) as seen, suppress(Seen):
        out = Path(folder) / "unused.png"
        generate(model_path, prompt, out=out, attention_backend=backend.name, **words, **arguments)
    if seen:
        return seen
    if not layers:
        raise PolicyError(
            f"no kernel of {backend.name} told what it attends to; a package's own may not, and --kernel names another"
        )
    what = f"step {step}" if step is not None else "a step that is not dense"
    raise PolicyError(
        f"the generation has no call of {backend.name} at {what} and layer {layer}; it has steps {min(steps, default=0)} to "
        f"{max(steps, default=0)} and layers {min(layers)} to {max(layers)}"
    )
