"""What ``hal`` exports when it is used, and what type checkers are told, is one list."""

from __future__ import annotations

import ast
from pathlib import Path

import hal


def test_the_exports_and_what_type_checkers_see_agree() -> None:
    tree = ast.parse(Path(str(hal.__file__)).read_text("utf-8"))
    told = {
        name.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for name in node.names
    }
    del told["Platform"]  # for the signature of current_platform alone
    assert told == hal._EXPORTS
