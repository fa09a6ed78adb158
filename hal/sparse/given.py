"""What a model hands to the attention inside beside q, k and v: gates, a linear branch's inputs, how rows are packed.

    with hal.sparse.given(gate=gate):  # [B, S, H, Dv]
        out = hal.attention(q, k, v)

A backend takes by name what it computes with.  What nothing took is an error when the block ends: the output would lack
what the model was trained with.  A value that only says where tokens lie (``hal.sparse.PackedRows``) is none that an output
could lack, and holds inside inner blocks too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..errors import CallError


class _Given:
    __slots__ = ("taken", "values")

    def __init__(self, values: dict[str, Any]):
        self.values, self.taken = values, set[str]()


_given: ContextVar[_Given | None] = ContextVar("hal_given", default=None)


@contextmanager
def given(**values: Any) -> Iterator[None]:
    """Attention inside may compute with these; None is as not given.  An inner block stands in for the outer one.

    Raises CallError when it ends for a value that no attention inside took.
    """
    outer = _given.get()
    around = {} if outer is None else {name: x for name, x in outer.values.items() if _describes(x)}
    held = _Given({**around, **{name: x for name, x in values.items() if x is not None}})
    token = _given.set(held)
    try:
        yield
    finally:
        _given.reset(token)
    if left := sorted(name for name, x in held.values.items() if name not in held.taken and not _describes(x)):
        raise CallError(
            f"{', '.join(left)} {'was' if len(left) == 1 else 'were'} given, and no attention inside computes with "
            f"{'it' if len(left) == 1 else 'them'}; choose the backend that the model was trained with, or leave "
            f"{'it' if len(left) == 1 else 'them'} out"
        )


def _describes(value: Any) -> bool:
    return getattr(type(value), "describes", False) is True


def is_given(name: str) -> bool:
    held = _given.get()
    return held is not None and name in held.values


def take(name: str) -> Any:
    """The value given here under that name, from now on one that was used; None: not given."""
    held = _given.get()
    if held is None or name not in held.values:
        return None
    held.taken.add(name)
    return held.values[name]
