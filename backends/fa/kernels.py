"""The bind functions of FlashAttention's packages, each of which is imported when its kernel is bound."""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from hal.facts import Call
from hal.fittings import Run
from hal.flash import Function, flash, functions

HUB = "kernels-community/flash-attn3", "v1"  # repository and revision, as diffusers and transformers have them


def fa2(call: Call) -> Run:
    dense, packed = functions("flash_attn")

    def longer(max_seqlen_q: int, **arguments: Any) -> Any:
        # At 1, grouped heads are folded into the queries as if no sequence were empty.
        return packed(max_seqlen_q=max(max_seqlen_q, 2), **arguments)

    deterministic, lse = bool(call.deterministic), bool(call.lse)
    return flash(call, dense, longer, dropout_p=call.dropout, deterministic=deterministic, return_attn_probs=lse)


def fa2_vllm(call: Call) -> Run:
    packed = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func

    def longer(max_seqlen_q: int, **arguments: Any) -> Any:
        return packed(max_seqlen_q=max(max_seqlen_q, 2), **arguments)  # as in fa2

    return flash(call, None, longer, return_softmax_lse=bool(call.lse), fa_version=2)


def fa3(call: Call) -> Run:
    return _fa3(call, *functions("flash_attn_interface"))


def fa3_hub(call: Call) -> Run:
    module = hub_module()
    return _fa3(call, module.flash_attn_func, module.flash_attn_varlen_func)


def _fa3(call: Call, dense: Function, packed: Function) -> Run:
    flags: dict[str, Any] = {"deterministic": bool(call.deterministic)}
    if call.lse and "return_attn_probs" in inspect.signature(dense).parameters:
        flags["return_attn_probs"] = True
    return flash(call, dense, packed, **flags)


def fa3_sgl(call: Call) -> Run:
    packed = import_module("sgl_kernel.flash_attn").flash_attn_varlen_func
    return flash(call, None, packed, return_softmax_lse=bool(call.lse))


def fa4(call: Call) -> Run:
    left, right = call.window or (-1, -1)
    window = None if left < 0 else left, None if right < 0 else right  # only None is unlimited
    dense, packed = functions("flash_attn.cute")
    deterministic, lse = bool(call.deterministic), bool(call.lse)
    return flash(call, dense, packed, window_size=window, deterministic=deterministic, return_lse=lse)


# ---- what the packages alone know


def confirm_fa3(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    """Whether this build can be asked for the LSE.  Builds of before August 2025 cannot: some always return it, some never."""
    if not call.lse or "return_attn_probs" in inspect.signature(functions("flash_attn_interface")[0]).parameters:
        return None
    return "this build of flash_attn_3 takes no return_attn_probs; build hopper/ of github.com/Dao-AILab/flash-attention anew"


def confirm_hub(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> str | None:
    """Whether the kernel lies in the local cache, in a build for this PyTorch.  Nothing is downloaded here."""
    try:
        hub_module()
    except Exception as e:  # the package raises whatever the hub, the file system or the import raises
        said = "; ".join(line.strip() for line in str(e).splitlines() if line.strip()).rstrip(".") or type(e).__name__
        repository, revision = HUB
        fetch = f"from kernels import install_kernel; install_kernel('{repository}', revision='{revision}')"
        return f'{repository} cannot be loaded from the local cache: {said}; to fetch it: python -c "{fetch}"'
    return None


def hub_module() -> Any:
    kernels = import_module("kernels")
    return _loaded(kernels.install_kernel, kernels.get_local_kernel)


@cache
def _loaded(install: Function, load: Function) -> Any:
    """Once in a process; a failure is not kept, so that a kernel fetched afterwards is found."""
    repository, revision = HUB
    return load(install(repository, revision=revision, local_files_only=True))
