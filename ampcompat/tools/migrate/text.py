"""The source text of a node."""

from __future__ import annotations

import re

import libcst as cst

#: Texts that tell a user to install apex.
INSTALL_APEX = re.compile(
    r"install[^.]{0,60}\bapex\b|\bapex\b[^.]{0,60}\b(not|isn't)\b[^.]{0,20}\binstalled", re.IGNORECASE
)
EMPTY = cst.Module([])


def code_of(node: cst.CSTNode) -> str:
    """The source text of a node."""
    # Most are names, and libcst takes its time.
    if type(node) is cst.Name and not node.lpar:
        return node.value
    return EMPTY.code_for_node(node)
