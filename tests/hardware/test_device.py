"""For real hardware: ``HAL_HARDWARE=1 tox -e cuda`` (or rocm, xpu, musa, mps, npu).  Skipped everywhere else.

Every backend that has a kernel for the device is run against the float64 oracle; what hal predicts is what PyTorch takes.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest

PLATFORMS = ("cuda", "rocm", "xpu", "musa", "mps", "npu")
here = pytest.mark.skipif(
    os.environ.get("HAL_HARDWARE") != "1", reason="needs an accelerator: set HAL_HARDWARE=1 there"
)
platforms = pytest.mark.parametrize("name", [pytest.param(n, marks=getattr(pytest.mark, n)) for n in PLATFORMS])
pytestmark = here


@platforms
def test_the_platform_is_detected_and_has_devices(name: str) -> None:
    import hal

    assert hal.current_platform().name == name
    assert hal.current_platform().machine(hal.detect.detected().host).devices


@platforms
def test_every_backend_here_computes_what_the_oracle_computes(name: str) -> None:
    import torch

    import hal
    from hal import detect, oracle, plugins
    from hal.errors import NoKernelError

    torch.manual_seed(0)
    platform = hal.current_platform()
    machine, catalog = detect.real_machine(name), plugins.catalog()
    ran, refused = set(), {}
    grid = itertools.product(("float16", "bfloat16", "float32"), (64, 128), (False, True), (8, 2), (False, True))
    for dtype, head_dim, causal, kv_heads, lse in grid:
        q, k, v = (
            torch.randn(2, 257, heads, head_dim, dtype=getattr(torch, dtype)).to(platform.device_type)
            for heads in (8, kv_heads, kv_heads)
        )
        wanted, wanted_lse = oracle.attention(q.cpu(), k.cpu(), v.cpu(), is_causal=causal)
        for backend in catalog.backends.values():
            if not any(catalog.lines(name, backend.name, d.arch) for d in machine.devices):
                continue
            try:
                out = hal.attention(
                    q, k, v, is_causal=causal, enable_gqa=kv_heads != 8, return_lse=lse, backend=backend.name
                )
            except NoKernelError as e:
                refused[backend.name] = str(e)
                continue
            out, stats = out if lse else (out, None)
            assert (out.cpu().double() - wanted).abs().max() < backend.tolerance[dtype], (backend.name, dtype, head_dim)
            if stats is not None:
                assert (stats.cpu().double() - wanted_lse).abs().max() < 0.02, (backend.name, dtype, head_dim)
            ran.add(backend.name)
    for backend, why in refused.items():
        print(f"{backend} refused a call: {why}")  # shown where the test fails, or with -s
    assert ran >= expected(name, machine, catalog)


def expected(name: str, machine: Any, catalog: Any) -> set[str]:
    """PyTorch, and every backend with a kernel of its own for a device here whose packages are installed."""
    archs = {d.arch for d in machine.devices}
    with_kernel = {
        line.backend.name
        for backend in catalog.backends
        for line in catalog.lines(name, backend)
        if line.row.tier == "native" and (line.row.on is None or archs <= line.row.on)
        if not line.lacks_package(machine.packages)
    }
    return {"torch_sdpa"} | with_kernel


@pytest.mark.cuda
@pytest.mark.rocm
def test_the_predicted_path_is_the_one_that_pytorch_takes() -> None:
    import torch

    import hal

    paths = {0: "sdpa.math", 1: "sdpa.flash", 2: "sdpa.efficient"}
    for dtype, head_dim, masked in itertools.product((torch.float16, torch.float32), (40, 64, 128), (False, True)):
        q, k, v = (torch.randn(1, 4, 256, head_dim, dtype=dtype, device="cuda") for _ in range(3))
        mask = torch.ones(1, 1, 256, 256, dtype=torch.bool, device="cuda") if masked else None
        taken = paths.get(torch._fused_sdp_choice(q, k, v, mask, 0.0, False))
        decision = hal.explain(q, k, v, attn_mask=mask, layout="bhsd", backend="torch_sdpa")
        assert taken in (None, decision.kernel), (dtype, head_dim, masked)


@platforms
def test_the_doctor_is_satisfied(name: str) -> None:
    from click.testing import CliRunner

    from hal.cli import main

    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
