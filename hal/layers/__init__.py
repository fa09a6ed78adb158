"""Attention layers for model authors: the backend is chosen by the layer, where the model is built."""

from .local import LocalAttention

__all__ = ["LocalAttention"]
