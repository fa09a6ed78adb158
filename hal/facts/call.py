"""Call: everything about one attention call that a decision may depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import CallError, FactError, unknown
from . import values as v

_SAME: Any = type("Same", (), {"__repr__": lambda self: "the same"})()


@dataclass(frozen=True)
class Call:
    """One attention call, as facts.  ``None`` means unknown.

    ``v_head_dim``, ``kv_heads`` and ``kv_len`` are those of the query where they are not given.  Lengths are tokens;
    of a varlen call they are the longest sequences, and ``batch`` counts the sequences.  ``scale`` is ``"default"``
    (``head_dim ** -0.5``) or the number.  ``window`` is (left, right), -1 unlimited.  A tensor is contiguous when its
    rows are: the head_dim axis has stride 1.
    """

    dtype: str | None = None
    head_dim: int | None = None
    v_head_dim: int | None = _SAME
    heads: int | None = None
    kv_heads: int | None = _SAME
    batch: int | None = None
    q_len: int | None = None
    kv_len: int | None = _SAME
    causal: bool | None = False
    mask: str | None = "none"  # none | key_padding | bool | additive
    mask_shape: str | None = _SAME  # which of batch, heads, query the mask has; the rest is broadcast
    dropout: float | None = 0.0
    window: tuple[int, int] | None = (-1, -1)
    scale: float | str | None = "default"
    layout: str | None = "bshd"
    q_contiguous: bool | None = True
    k_contiguous: bool | None = True
    v_contiguous: bool | None = True
    role: str | None = "self"
    varlen: bool | None = False
    lse: bool | None = False
    grad: bool | None = False
    mask_grad: bool | None = False
    deterministic: bool | None = False
    compile: bool | None = False
    graph: bool | None = False
    ring: int | None = 1
    ulysses: int | None = 1
    kv_gather: int | None = 1
    step: int | None = None
    layer: int | None = None
    device: int = 0
    refused: tuple[tuple[str, str], ...] = ()  # (kernel, what PyTorch or a driver said) for exactly this call

    def __post_init__(self) -> None:
        for name, of in (("v_head_dim", "head_dim"), ("kv_heads", "heads"), ("kv_len", "q_len")):
            if getattr(self, name) is _SAME:
                object.__setattr__(self, name, getattr(self, of))
        for name, kind in KINDS.items():
            x = getattr(self, name)
            if x is None or x is _SAME or x == _PLAIN[name] or (type(x) is int and x == 0):
                continue  # unknown, as it is, or an empty tensor
            read = _read(name, x, kind)
            if read is not x:
                object.__setattr__(self, name, read)
        if self.mask_shape is _SAME:
            object.__setattr__(self, "mask_shape", _USUAL_SHAPE.get(self.mask))

    @staticmethod
    def of(given: Mapping[str, Any] | None = None, /, **more: Any) -> Call:
        """From keyword values, read and checked; text is welcome (``dtype="bf16"``, ``causal="true"``, ``head_dim="?"``)."""
        given = {**(given or {}), **more}
        out: dict[str, Any] = {}
        for key, value in given.items():
            name = key.strip().lower().replace(".", "_").replace("-", "_")
            targets = CONTIGUOUS if name == "contiguous" else (name,)
            kind = KINDS.get(targets[0])
            if kind is None:
                raise FactError(unknown("call key", key, KEYS))
            for t in targets:
                out[t] = _read(key, value, kind)
        return Call(**out).checked()

    @staticmethod
    def parse(text: str | Iterable[str], base: Mapping[str, Any] | None = None) -> Call:
        """From ``key=value,…`` text, over the values in ``base``."""
        given: dict[str, Any] = dict(base or {})
        for piece in (p for t in ([text] if isinstance(text, str) else text) for p in t.split(",")):
            if not piece.strip():
                continue
            key, eq, value = piece.partition("=")
            if not eq:
                raise FactError(
                    f"{piece.strip()!r} is no key=value; write, say, head_dim=128 (keys: {', '.join(KEYS)})"
                )
            given[key.strip()] = value.strip()
        return Call.of(given)

    def checked(self) -> Call:
        """The call itself, or the contradiction in it."""
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise CallError(
                f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}; "
                "every key head serves the same number of query heads"
            )
        if (
            self.mask is not None
            and self.mask_shape is not None
            and (self.mask == "none") != (self.mask_shape == "none")
        ):
            raise CallError(f"mask={self.mask} contradicts mask_shape={self.mask_shape}")
        if self.mask == "key_padding" and self.mask_shape not in (None, "b11k", "111k"):
            raise CallError(f"mask=key_padding contradicts mask_shape={self.mask_shape}; key padding is b11k or 111k")
        return self

    @property
    def softmax_scale(self) -> float:
        """The number, always: a kernel's own default is no part of the call.  head_dim must be known."""
        return self.head_dim**-0.5 if self.scale == "default" else self.scale  # type: ignore[operator, return-value]

    def but(self, **changes: Any) -> Call:
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Every key that a user may give."""
        out = {k: getattr(self, k) for k in KINDS}
        out["window"] = None if self.window is None else list(self.window)
        return out

    def __str__(self) -> str:
        """What differs from a plain call, as ``key=value`` text that ``parse`` reads."""
        said = []
        plain = {
            **_PLAIN,
            **{k: getattr(self, of) for k, of in _FOLLOWS.items()},
            "mask_shape": _USUAL_SHAPE.get(self.mask),
        }
        for k in KINDS:
            x = getattr(self, k)
            if x != plain[k]:
                said.append(f"{k}={'?' if x is None else ':'.join(map(str, x)) if isinstance(x, tuple) else x}")
        return ",".join(said).replace("=True", "=true").replace("=False", "=false")


KINDS: dict[str, v.Kind] = {
    "dtype": v.DTYPE,
    "head_dim": v.COUNT,
    "v_head_dim": v.COUNT,
    "heads": v.COUNT,
    "kv_heads": v.COUNT,
    "batch": v.LENGTH,
    "q_len": v.LENGTH,
    "kv_len": v.LENGTH,
    "causal": v.BOOL,
    "mask": v.MASK,
    "mask_shape": v.MASK_SHAPE,
    "dropout": v.DROPOUT,
    "window": v.WINDOW,
    "scale": v.SCALE,
    "layout": v.LAYOUT,
    "q_contiguous": v.BOOL,
    "k_contiguous": v.BOOL,
    "v_contiguous": v.BOOL,
    "role": v.ROLE,
    "varlen": v.BOOL,
    "lse": v.BOOL,
    "grad": v.BOOL,
    "mask_grad": v.BOOL,
    "deterministic": v.BOOL,
    "compile": v.BOOL,
    "graph": v.BOOL,
    "ring": v.DEGREE,
    "ulysses": v.DEGREE,
    "kv_gather": v.DEGREE,
    "step": v.LENGTH,
    "layer": v.LENGTH,
    "device": v.LENGTH,
}
CONTIGUOUS = ("q_contiguous", "k_contiguous", "v_contiguous")
KEYS = (*KINDS, "contiguous")
_FOLLOWS = {"v_head_dim": "head_dim", "kv_heads": "heads", "kv_len": "q_len"}
_USUAL_SHAPE: dict[str | None, str] = {"none": "none", "key_padding": "b11k", "bool": "b1qk", "additive": "b1qk"}
_PLAIN = {f.name: f.default for f in fields(Call)}


def _read(key: str, value: Any, kind: v.Kind) -> Any:
    if value is None or (isinstance(value, str) and value.strip().lower() in v.UNKNOWN_WORDS):
        return None
    try:
        return kind.read(value)
    except FactError:
        raise
    except (ValueError, TypeError):
        raise FactError(f"call key {key!r} is {value!r}; allowed: {kind.allowed}, or ? for unknown") from None
