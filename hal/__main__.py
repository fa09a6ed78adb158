"""``python -m hal`` is the ``hal`` command."""

from .cli import main

main()
