"""A subclass of an object's own class, of the same name, put on for as long as an attachment lasts.

FSDP2 and torch's parametrisations work the same way.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


def subclass(cls: Any, methods: dict[str, Any]) -> Any:
    """A subclass that looks like ``cls`` and has these methods."""
    return type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__, "__doc__": cls.__doc__})


def put_on(thing: Any, ours: type, undo: ExitStack) -> None:
    """``thing`` is of class ``ours``, a subclass of its own, until ``undo`` is closed."""
    cls = type(thing)

    def take_off() -> None:
        if type(thing) is ours:  # else someone put a class on top, and what is ours is to do nothing by itself
            thing.__class__ = cls

    thing.__class__ = ours
    undo.callback(take_off)
