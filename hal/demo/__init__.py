"""The main job on a fresh machine: ``python -m hal.demo``."""
