"""What the tests of CUDA and ROCm share: decisions from text, over everything that is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hal import plugins
from hal.catalog import Catalog
from hal.decision import Candidate, Decision
from hal.facts import Call
from hal.policy import Policy, Request
from hal.resolver import resolve

PLAIN = "dtype=bf16,head_dim=128,heads=24,batch=1,q_len=4096"


def catalog() -> Catalog:
    return plugins.catalog()


def decide(
    on: str,
    call: str = "",
    packages: str = "",
    backend: str = "",
    kernel: str = "",
    mode: str = "require",
    waive: str = "",
    **software: str,
) -> Decision:
    """A plain call with these changes, on a preset or platform:arch with these packages (``name==version …``)."""
    c = catalog()
    given = dict(p.split("==") for p in packages.split())
    machine = c.machine(on).with_packages({c.package(n): v for n, v in given.items()}).with_software(**software)
    requests = (Request(backend, mode, "the test", kernel),) if backend or kernel else ()
    return resolve(Call.parse([PLAIN, call]), machine, c, Policy(requests, frozenset(waive.split())))


def took(d: Decision) -> str:
    return f"{d.backend}/{d.kernel}" if d.chosen else "nothing"


def candidate(d: Decision, kernel: str) -> Candidate:
    """The candidate of a kernel; of several rows, the first."""
    return next(c for c in d.candidates if c.kernel and c.kernel.name == kernel)


def reasons(d: Decision, kernel: str) -> set[str]:
    return {r.id for c in d.candidates if c.kernel and c.kernel.name == kernel for r in c.reasons}


def fake_torch(
    devices: list[dict[str, Any]], version: str, cuda: str | None = None, hip: str | None = None
) -> SimpleNamespace:
    """As much of torch as reading devices takes.  Anything else that is touched is an AttributeError."""
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(
            device_count=lambda: len(devices), get_device_properties=lambda i: SimpleNamespace(**devices[i])
        ),
        _C=SimpleNamespace(_cudnn=SimpleNamespace(getRuntimeVersion=lambda: (9, 20, 0))),
    )


def run_every_accepted_kernel(platform: str, dtype: str, call: dict[str, Any], device: str = "cuda") -> None:
    """On this machine's GPU: all that may serve the call, each by name, against the oracle."""
    import torch

    import hal
    from hal import oracle

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 256, 8, 64, device=device, dtype=getattr(torch, dtype)) for _ in range(3))
    expected, _ = oracle.attention(q, k, v, **{name: x for name, x in call.items() if name != "return_lse"})
    decision = hal.explain(q, k, v, **call)
    accepted = [c for c in decision.candidates if c.verdict is True]
    assert decision.machine.platform == platform and accepted
    for c in accepted:
        assert c.kernel
        only = Policy((Request(c.backend.name, kernel=c.kernel.name),))
        out = resolve(decision.call, decision.machine, catalog(), only).bind()(q, k, v, None, None)
        out = out[0] if call.get("return_lse") else out
        assert (out.double() - expected).abs().max() <= c.backend.tolerance[dtype], str(c)
