"""Places of statements: the calls, loops and branches that lead to each."""

from __future__ import annotations

from typing import NamedTuple

import libcst as cst

from ampcompat.tools.migrate.native.file import File


class At(NamedTuple):
    """A statement on a path: the call of a function that led there, and the statement."""

    frame: int
    statement: cst.CSTNode


Path = tuple[At, ...]


def meeting(file: File, one: Path, other: Path) -> int:
    """The place in ``one`` of the statement that stands in the same block as the other path's, or holds both."""
    common = shared_length(one, other)
    if common == min(len(one), len(other)):
        return common - 1
    blocks = [file.parents.get(file.line_of(path[common].statement)) for path in (one, other)]
    return common if blocks[0] is blocks[1] else common - 1


def is_beside(place: Path, step: Path, file: File) -> bool:
    """Whether a step may be left out after ``unscale_``: the update then stands beside that call, for both cases."""
    index = meeting(file, place, step)
    same_block = index == len(place) - 1 and index < len(step)
    if not same_block:
        return False
    blocks = [file.parents.get(file.line_of(path[index].statement)) for path in (place, step)]
    return blocks[0] is blocks[1]


def innermost_loop(path: Path) -> int:
    """The place of the loop that a statement stands in; its own place where there is none."""
    for index in range(len(path) - 2, -1, -1):
        if isinstance(path[index].statement, cst.For | cst.While):
            return index
    return len(path) - 1


def start_of_function(path: Path) -> int:
    """The place of the first statement in the function that a path ends in."""
    return next(index for index, at in enumerate(path) if at.frame == path[-1].frame)


def shared_length(one: Path, other: Path) -> int:
    """How many statements two paths share from the beginning."""
    count = 0
    for first, second in zip(one, other, strict=False):
        if first.statement is not second.statement:
            break
        count += 1
    return count
