"""Run the unchanged digits script at every opt_level, each in a process of its own, and print one table.

Exit status 1 when a level fails, or when O0, O1 and O2 do not all reach 97 % within half a point of each other.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).with_name("digits.py")
COLUMNS = ["opt_level", "test accuracy", "steps", "skipped", "final scale", "seconds", "weights"]
LEAST_ACCURACY, LARGEST_SPREAD = 97.0, 0.5


def run(level, script_args, folder, verbose=False):
    """The result of the script at ``level``, or None when it failed; its output is shown then, or if ``verbose``."""
    result = Path(folder) / f"{level}.json"
    command = [sys.executable, "-m", "ampcompat", "run", str(SCRIPT), "--opt-level", level, "--result", str(result)]
    print(f"{level} ...", flush=True)
    kept = {} if verbose else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([*command, *script_args], **kept)
    if done.returncode:
        print((done.stdout or b"").decode(errors="replace"), end="", file=sys.stderr)
        print(f"{level}: the script ended with status {done.returncode}", file=sys.stderr)
        return None
    return json.loads(result.read_text())


def row(result):
    return [
        result["opt_level"],
        f"{result['accuracy']:.2f} %",
        str(result["steps"]),
        str(result["skipped_steps"]),
        f"{result['loss_scale']:g}",
        f"{result['seconds']:.1f}",
        result["weights"],
    ]


def table(rows):
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    lines = [COLUMNS, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def verdict(results):
    """What is wrong with the accuracies of the levels that must agree, in one line; empty when nothing is."""
    accuracies = {r["opt_level"]: r["accuracy"] for r in results if r["opt_level"] in ("O0", "O1", "O2")}
    low = [level for level, accuracy in accuracies.items() if not accuracy >= LEAST_ACCURACY]
    if low:
        return f"below {LEAST_ACCURACY:g} %: {', '.join(low)}"
    spread = max(accuracies.values(), default=0.0) - min(accuracies.values(), default=0.0)
    return f"O0, O1 and O2 are {spread:.2f} points apart" if spread > LARGEST_SPREAD else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Other arguments go to digits.py.")
    parser.add_argument("--opt-levels", default="O0,O1,O2,O3", help="comma-separated")
    parser.add_argument("--verbose", action="store_true", help="show what the script prints")
    args, script_args = parser.parse_known_args()
    levels = args.opt_levels.split(",")
    with tempfile.TemporaryDirectory() as folder:
        results = [run(level, script_args, folder, args.verbose) for level in levels]
    done = [result for result in results if result]
    print("\n" + table([row(result) for result in done]), flush=True)
    if len(done) < len(levels):
        sys.exit(1)
    if problem := verdict(done):
        print(problem, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
