"""Values that facts take, and how people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import FactError, did_you_mean


class Absent:
    """Looked for and not there.  Meets no specification."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()

HALF = frozenset({"float16", "bfloat16"})
FLOATS = HALF | {"float32"}
DTYPES = FLOATS | {"float64", "float8_e4m3fn", "float8_e5m2"}
_DTYPE_ALIASES = {
    "fp16": "float16",
    "half": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
    "fp8": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
UNKNOWN_WORDS = frozenset({"?", "unknown", "null"})


def dtype_name(text: Any) -> str:
    """The one spelling of a dtype: ``bf16``, ``torch.bfloat16`` and ``BFloat16`` are ``bfloat16``."""
    t = str(text).strip().lower().removeprefix("torch.")
    t = _DTYPE_ALIASES.get(t, t)
    if t not in DTYPES:
        names = sorted({*DTYPES, *_DTYPE_ALIASES})
        raise FactError(f"{text!r} is no dtype{did_you_mean(t, names)} (known: {', '.join(sorted(DTYPES))})")
    return t


class Kind(NamedTuple):
    """What a fact of the call may be: how to read it from text, and how to say what is allowed."""

    read: Callable[[Any], Any]
    allowed: str
    schema: dict[str, Any]


def _bool(x: Any) -> bool:
    if isinstance(x, bool):
        return x
    t = str(x).strip().lower()
    if t in {"true", "yes", "on", "1"}:
        return True
    if t in {"false", "no", "off", "0"}:
        return False
    raise ValueError


def _whole(least: int) -> Callable[[Any], int]:
    def read(x: Any) -> int:
        if isinstance(x, (bool, float)):
            raise ValueError
        n = int(str(x).replace("_", ""))
        if n < least:
            raise ValueError
        return n

    return read


def _degree(x: Any) -> int:
    """A parallel degree; ``true`` means that the strategy is used, by two ranks at least."""
    if isinstance(x, bool) or str(x).strip().lower() in {"true", "yes", "on", "false", "no", "off"}:
        return 2 if _bool(x) else 1
    return max(1, _whole(0)(x))


def _number(low: float, high: float, open_high: bool = False) -> Callable[[Any], float]:
    def read(x: Any) -> float:
        if isinstance(x, bool):
            raise ValueError
        n = float(x)
        if not low <= n <= high or (open_high and n == high):
            raise ValueError
        return n

    return read


def _scale(x: Any) -> Any:
    if str(x).strip().lower() in {"default", "none"}:
        return "default"
    if isinstance(x, bool) or not 0 < float(x) < float("inf"):
        raise ValueError
    return float(x)


def _window(x: Any) -> tuple[int, int]:
    """(left, right) in tokens; -1 is unlimited; one number means both sides."""
    if isinstance(x, (tuple, list)):
        left, right = map(_whole(-1), x)
    else:
        t = str(x).strip().lower().strip("()[]")
        if t in {"false", "none", "no", "off"}:
            return -1, -1
        parts = [int(n) for n in t.replace(":", " ").replace("/", " ").replace(",", " ").split()]
        left, right = (parts[0], parts[0]) if len(parts) == 1 else parts
    if min(left, right) < -1:
        raise ValueError
    return left, right


def _one_of(*names: str) -> Kind:
    def read(x: Any) -> str:
        t = str(x).strip().lower()
        if t not in names:
            raise ValueError
        return t

    return Kind(read, f"one of {', '.join(names)}", {"type": "string", "enum": list(names)})


BOOL = Kind(_bool, "true or false", {"type": "boolean"})
COUNT = Kind(_whole(1), "a whole number from 1", {"type": "integer", "minimum": 1})
LENGTH = Kind(_whole(0), "a whole number from 0", {"type": "integer", "minimum": 0})
DEGREE = Kind(_degree, "a degree (1: not used; true means 2)", {"type": "integer", "minimum": 1})
DTYPE = Kind(dtype_name, "a dtype such as bfloat16", {"type": "string", "enum": sorted(DTYPES)})
DROPOUT = Kind(_number(0.0, 1.0, True), "a probability from 0 to below 1", {"type": "number", "minimum": 0})
SCALE = Kind(_scale, "'default' (head_dim ** -0.5) or a positive number", {"type": ["number", "string"]})
WINDOW = Kind(_window, "left:right in tokens, -1 for unlimited", {"type": "array", "items": {"type": "integer"}})
MASK = _one_of("none", "key_padding", "bool", "additive")
MASK_SHAPE = _one_of("none", "b11k", "b1qk", "bhqk", "11qk", "1hqk", "bh1k", "111k", "1h1k")
LAYOUT = _one_of("bshd", "bhsd", "thd")
ROLE = _one_of("self", "cross")
