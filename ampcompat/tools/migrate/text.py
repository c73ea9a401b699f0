"""The source text of a node."""

from __future__ import annotations

import libcst as cst

EMPTY = cst.Module([])


def code_of(node: cst.CSTNode) -> str:
    """The source text of a node."""
    return EMPTY.code_for_node(node)
