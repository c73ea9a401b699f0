"""Decide what the suspects of each file come to, by the calls of ``amp.initialize`` that govern them.

Such a call stands in the file of a suspect, or else in a file that imports that file or that it imports. No other file
has any influence: a file has the same findings alone and among others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ampcompat.tools.check.facts import Facts
from ampcompat.tools.check.findings import Finding
from ampcompat.tools.check.mistakes import Surroundings
from ampcompat.tools.check.programs import Programs
from ampcompat.tools.check.values import Values


def judged(files: Mapping[str, Facts]) -> Iterator[tuple[str, list[Finding]]]:
    """The traps of each file that has some.

    Args:
        files: What is known of each file, by its path.
    """
    programs = Programs({path: facts.imports for path, facts in files.items()})
    for path, facts in files.items():
        if facts.suspects:
            program = [files[other] for other in programs.program(path)]
            relatives = [files[other] for other in programs.relatives(path)]
            yield path, list(_of_file(facts, program, relatives))


def _of_file(facts: Facts, program: Sequence[Facts], relatives: Sequence[Facts]) -> Iterator[Finding]:
    """The traps of one file.

    Args:
        facts: What is known of it.
        program: The facts of the files of its programs, its own among them.
        relatives: The facts of the files that import it or that it imports.
    """
    if not any(other.is_mixed for other in program):
        return
    options = _options(facts, program)
    calls = facts.initializations or [call for other in relatives for call in other.initializations]
    around = Surroundings(
        calls=[call.looked_up(options) for call in calls],
        float_sigmoid=any(other.float_sigmoid for other in program),
        scales_elsewhere=any(other.scales for other in relatives),
        is_half_by_hand=any(other.is_half_by_hand for other in program),
    )
    for suspect in facts.suspects:
        finding = suspect.judged(around)
        if finding is not None:
            yield finding


def _options(facts: Facts, program: Sequence[Facts]) -> dict[str, Values]:
    """The options of the command line that a file can read: its own, or else those of its program."""
    found: dict[str, Values] = {}
    for other in program:
        for name, values in other.options.items():
            is_other_one = name in found and found[name] != values
            found[name] = Values() if is_other_one else values
    return {**found, **facts.options}
