"""Fake packages: modules with a real package's recorded signatures, which compute the true result with the oracle.

    with fakes.installed("flash_attn-2.8.3.post1") as fake, fakes.workbench(BACKEND, flash_attn="2.8.3"):
        hal.attention(q, k, v, backend="fa")
        fake.calls[-1]   # the arguments as they were bound: {"q": …, "softmax_scale": 0.125, "causal": False, …}

A record (``signatures/NAME.json``, or a path) holds distribution, version, module, source, ``symbols`` (name -> parameters
as [name, kind, default as text or null]) and ``returns``: how the package hands over what it computed.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

SIGNATURES = Path(__file__).parent / "signatures"
Compute = Callable[[dict[str, Any]], Any]


class Record(NamedTuple):
    distribution: str
    version: str
    module: str
    source: str
    returns: Mapping[str, Any]
    symbols: Mapping[str, inspect.Signature]


def record(name: str | Path) -> Record:
    """A recorded package, by the name of its file or by a path."""
    path = Path(name) if str(name).endswith(".json") else SIGNATURES / f"{name}.json"
    data = json.loads(path.read_text("utf-8"))
    symbols = {s: _signature(parameters) for s, parameters in data.pop("symbols").items()}
    return Record(**data, symbols=symbols)


def _signature(parameters: list[list[Any]]) -> inspect.Signature:
    empty = inspect.Parameter.empty

    def parameter(name: str, kind: str, default: str | None) -> inspect.Parameter:
        value = empty if default is None else ast.literal_eval(default)
        return inspect.Parameter(name, getattr(inspect.Parameter, kind.upper()), default=value)

    return inspect.Signature([parameter(*p) for p in parameters])


class Function:
    """A function with a given signature: refuses what the real one refuses, and keeps what was bound."""

    def __init__(self, name: str, signature: inspect.Signature, compute: Compute, calls: list[dict[str, Any]]):
        self.__name__, self.__signature__, self.compute, self.calls = name, signature, compute, calls

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        bound = self.__signature__.bind(*args, **keywords)
        self.calls.append({"symbol": self.__name__, **bound.arguments})
        bound.apply_defaults()
        return self.compute(dict(bound.arguments))


class Fake(NamedTuple):
    record: Record
    functions: Mapping[str, Function]
    calls: list[dict[str, Any]]  # of all its functions, in order


def of(name: str | Path, compute: Mapping[str, Compute] | None = None, **returns: Any) -> Fake:
    """The functions of a record.  ``compute``: what they do, where it is no FlashAttention; ``returns`` overrides the record."""
    r = record(name)
    r = r._replace(returns={**r.returns, **returns})
    calls: list[dict[str, Any]] = []
    made = {s: (compute or {}).get(s) or flash_attention(signature, r.returns) for s, signature in r.symbols.items()}
    return Fake(r, {s: Function(s, r.symbols[s], f, calls) for s, f in made.items()}, calls)


@contextmanager
def installed(name: str | Path, compute: Mapping[str, Compute] | None = None, **returns: Any) -> Iterator[Fake]:
    """The fake of a record, importable as the real package's module."""
    fake = of(name, compute, **returns)
    with modules({fake.record.module: fake.functions}):
        yield fake


@contextmanager
def modules(contents: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Modules of these names with these attributes, and their parents, in ``sys.modules`` while inside."""
    new: dict[str, ModuleType] = {}
    for name, attributes in contents.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            full = ".".join(parts[:n])
            if full not in new:
                new[full] = ModuleType(full)
                new[full].__path__ = []
                if n > 1:
                    setattr(new[".".join(parts[: n - 1])], parts[n - 1], new[full])
        vars(new[name]).update(attributes)
    before = {name: sys.modules.get(name) for name in new}
    sys.modules.update(new)
    try:
        yield
    finally:  # only these: what else was imported inside stays
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


# ---- what a FlashAttention computes

_DENSE = {"q", "k", "v", "softmax_scale", "causal", "window_size"}
_PACKED = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
_NO_MATTER = {"deterministic", "fa_version"}  # the oracle is deterministic


def flash_attention(signature: inspect.Signature, returns: Mapping[str, Any]) -> Compute:
    """The true result in float64, rounded to q's dtype, in the package's own form.  Any other argument must be as by default.

    ``returns``: ``lse`` the keyword that asks for the LSE; ``always``: a tuple whether asked or not; ``values`` in that
    tuple; ``rows_without_keys``: their LSE; ``packed_lse``: "ht" or "th"; ``lse_grad``: the LSE has a gradient;
    ``grad_needs_lse``: the package asserts that it was asked for the LSE where a gradient is needed.
    """
    import torch

    from hal import oracle

    flag, values = returns.get("lse"), returns.get("values", 2)
    packed = "max_seqlen_q" in signature.parameters
    free = {flag} | _NO_MATTER | _DENSE | (_PACKED if packed else set())

    def compute(a: dict[str, Any]) -> Any:
        for name, p in signature.parameters.items():
            if name not in free and a[name] is not p.default and a[name] != p.default:
                raise NotImplementedError(f"the fake computes nothing for {name}={a[name]!r}")
        q, k, v = a["q"], a["k"], a["v"]
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("only fp16 and bf16 are supported")
        options = {
            "is_causal": a["causal"],
            "scale": a["softmax_scale"],
            "window": _window(a["window_size"], signature),
        }
        assert q.ndim == k.ndim == v.ndim == (3 if packed else 4), "q, k and v have the wrong number of axes"
        if packed:
            for side in "qk":
                cu, longest = a[f"cu_seqlens_{side}"], a[f"max_seqlen_{side}"]
                assert cu.dtype is torch.int32 and int(cu[-1]) == a[side].shape[0], f"cu_seqlens_{side}"
                assert int(cu.diff().max()) <= longest, f"max_seqlen_{side} is too small"
            out, lse = oracle.attention_varlen(q, k, v, a["cu_seqlens_q"], a["cu_seqlens_k"], **options)
        else:
            out, lse = oracle.attention(q, k, v, **options)
        out, lse = out.to(q.dtype), lse.float()
        lse = lse.masked_fill(lse == -torch.inf, float(returns.get("rows_without_keys", "-inf")))
        if not returns.get("lse_grad"):
            lse = lse.detach()
        if packed and returns.get("packed_lse") == "th":
            lse = lse.transpose(0, 1).contiguous()
        asked = bool(flag and a[flag])
        needed = out.requires_grad
        assert asked or not (needed and returns.get("grad_needs_lse")), f"a gradient needs {flag}"
        if values == 1 or not (asked or returns.get("always")):
            return out
        return (out, lse if asked or needed or flag is None else None, *(None,) * (values - 2))

    return compute


def _window(given: Any, signature: inspect.Signature) -> tuple[int, int]:
    if given is None:
        return -1, -1
    left, right = given[:2]
    if signature.parameters["window_size"].default == (None, None):
        assert all(side is None or side >= 0 for side in (left, right)), f"window_size {given}: unlimited is None here"
    return -1 if left is None else left, -1 if right is None else right


# ---- installed distributions


def distribution(folder: Path, name: str, version: str, files: Mapping[str, str]) -> None:
    """A distribution as pip leaves it in ``folder``: files (path -> text) and metadata.  Put the folder on ``sys.path``."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


# ---- a machine on which everything declared runs


@contextmanager
def workbench(*backends: Any, arch: str = "any", shared_memory: int | None = None, **packages: Any) -> Iterator[Any]:
    """A simulated machine on which every kernel of these backends has a row, with these packages and no others.

    Calls of ``hal.attention`` on CPU tensors inside are decided for it, and bind whatever module is importable.
    """
    import hal
    from hal import plugins
    from hal.facts import Device, Machine
    from hal.platform import Platform
    from hal.rows import Prefer, Row

    class Workbench(Platform):
        name, title, device_type, accelerator = "workbench", "a workbench", "cpu", False
        order = tuple(Prefer(b.name) for b in backends)
        support = {b.name: tuple(Row(k.name) for k in b.kernels) for b in backends}
        folder = Path(__file__).parent

        def parse_arch(self, text: Any) -> str:
            return str(text)

    catalog = hal.Catalog({"workbench": Workbench()}, {b.name: b for b in backends})
    machine = Machine("workbench", (Device(arch, shared_memory=shared_memory),), {"torch": "2.13.0"}, {}, "workbench")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(plugins, "catalog", lambda ignore=frozenset(): catalog))
        yield stack.enter_context(hal.simulate(machine, packages=packages))
