"""``check_release.py [TAG]``: fails unless version, changelog, tag (by default the head's) and tree agree."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def problems(version: str, changelog: str, tag: str, changed: str) -> list[str]:
    """Say what keeps a tree from being released.

    Args:
        version: ``__version__`` of the package.
        changelog: the text of CHANGELOG.md.
        tag: the tag to release, as ``v1.2.3``.
        changed: what ``git status --short`` prints.
    """
    found = []
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        found.append(f"__version__ is {version!r}: a release is three numbers")
    if tag != f"v{version}":
        found.append(f"the tag is {tag!r} and __version__ is {version!r}: the tag of this tree is v{version}")
    heads = re.findall(r"^## \[(.+?)\](.*)$", changelog, re.MULTILINE)
    if not heads or heads[0][0] != version:
        found.append(
            f"CHANGELOG.md begins with {heads[0][0] if heads else 'no version'}: give it the entry of {version}"
        )
    elif not re.fullmatch(r" - \d{4}-\d\d-\d\d", heads[0][1]):
        found.append(f"CHANGELOG.md has no date for {version}: write '## [{version}] - YYYY-MM-DD'")
    if changed:
        found.append(f"files differ from the commit: {', '.join(line[3:] for line in changed.splitlines())}")
    return found


def git(*arguments: str) -> str:
    """Return what git prints, empty where it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.rstrip("\n") if done.returncode == 0 else ""


def main() -> int:
    """Print what is wrong; return the exit status."""
    text = (ROOT / "ampcompat" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)[1]
    tag = sys.argv[1] if len(sys.argv) > 1 else git("describe", "--tags", "--exact-match")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = problems(version, changelog, tag, git("status", "--short"))
    print("\n".join(found) or f"{tag}: version, changelog, tag and tree agree")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
