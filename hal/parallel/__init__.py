"""Attention over several ranks.  ``agree`` makes sure that all of them run the same thing."""

from __future__ import annotations

from .agreement import agree

__all__ = ["agree"]
