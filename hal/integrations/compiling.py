"""A pipeline's denoiser under torch.compile, and its graphs."""

from __future__ import annotations

from typing import Any

import torch

from .. import detect
from ..errors import AttachError, PolicyError
from ..policy import DENOISER

COMPILE: dict[str, Any] = {}
GRAPHS: dict[str, Any] = {"mode": "reduce-overhead"}


def check_graphs(device: str, said: Any) -> None:
    platform = detect.platform_for(device.partition(":")[0])
    if not hasattr(platform.module(), "is_current_stream_capturing"):
        raise PolicyError(
            f"{said('cuda_graph', True)}: {platform.name} cannot capture graphs (PyTorch has no stream capture for "
            f"{device!r} devices); {said('compile', True)} compiles without them"
        )


def compiled(pipeline: Any, graphs: bool) -> tuple[str, ...]:
    """Put the denoiser under torch.compile, in place."""
    parts = {n: p for n, p in pipeline.components.items() if isinstance(p, torch.nn.Module) and DENOISER.fullmatch(n)}
    if not parts:
        raise AttachError(f"{type(pipeline).__name__} has no transformer and no unet to compile")
    for part in parts.values():
        part.compile(**(GRAPHS if graphs else COMPILE))
        if graphs:
            _keep_outputs(part)
    return tuple(parts)


def _keep_outputs(part: torch.nn.Module) -> None:
    """A captured graph writes its next output over the last one, and guidance holds two at once: hand out copies."""
    from torch.utils._pytree import tree_map_only

    replay: Any = part._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return tree_map_only(torch.Tensor, torch.Tensor.clone, replay(*args, **kwargs))

    part._compiled_call_impl = call
