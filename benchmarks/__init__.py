"""Benchmarks: ratios against a peer or a limit, measured interleaved in one run.  ``python -m benchmarks.NAME --json``."""
