"""The block-sparse kernel in Triton: what it runs on (``tiles``), its code (``kernel``), its launch, its compile check.

``tiles`` is plain data.  ``launch`` and ``compilation`` import Triton; nothing here does so before it is asked for.
"""
