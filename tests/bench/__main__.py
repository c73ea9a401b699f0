"""``python -m tests.bench [--only SECTION ...]``: measure, and write ``docs/benchmarks/<hardware>.md`` or show."""

import argparse
import datetime
import os
import sys
from pathlib import Path

import torch

from . import compiled, footprint, hardware, own_cost, report, rules, steps
from .workers import KEEP_MEMORY, ORIGINAL

#: name -> function of (device, quick) that returns a Section, in the page's order
SECTIONS = {
    "native": steps.native,
    "native16": steps.native16,
    "small": steps.small,
    "original": steps.original,
    "own": own_cost.warm,
    "cold": own_cost.cold,
    "once": footprint.section,
    "ops": rules.section,
    "compiled": compiled.section,
}


def _measured(names, device, quick):
    found = []
    for name in names:
        report.progress(f"-- {name}")
        found.append(SECTIONS[name](device, quick))
    report.progress("done")
    return found


def _page(given, found, picture):
    name, sentence = hardware.describe(given.device)
    command = "python -m tests.bench" + " --quick" * given.quick + f" --device {given.device}"
    head = f"# Benchmarks: {name}\n\n{sentence}. torch {torch.__version__}, Python {sys.version.split()[0]}."
    head += f" {datetime.date.today()}, `{command}`. Variants take turns in one run; compare ratios, not times."
    if given.device == "cpu":
        head += " Times are processor time."
    head += f" Load average over the run's last 15 minutes: {os.getloadavg()[2]:.1f}.\n\n"
    if given.device == "cpu":
        head += "GPU rows: not measured. The same command measures them on a machine with one.\n\n"
    rows = [row for section in found for row in section.summary]
    head += "## Summary\n\n" + report.table(["what", "measured", "aim", ""], rows)
    return "\n".join([head + picture, *(section.text for section in found)])


def main():
    """Measure and write, or with ``--only`` show what was measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("--quick", action="store_true", help="fewer cases and turns")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--apex",
        nargs="+",
        metavar="FOLDER",
        help="for `original`: a checkout of NVIDIA/apex that this torch runs, and the folder of its compiled amp_C",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="folder of the page; not with --only")
    given = parser.parse_args()
    names = given.only or [name for name in SECTIONS if name != "original" or given.apex]
    if given.apex:
        os.environ[ORIGINAL] = os.pathsep.join(map(os.path.abspath, given.apex))
    elif "original" in names:
        parser.error("original: name a checkout of NVIDIA/apex by --apex")
    if not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **KEEP_MEMORY})
    torch.set_num_threads(1)
    found = _measured(names, given.device, given.quick)
    if given.only:
        sys.stdout.write(_page(given, found, ""))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    name, _ = hardware.describe(given.device)
    picture = ""
    if report.plot(given.out / f"{name}.svg", [bar for section in found for bar in section.bars]):
        picture += f"\n![Step time ratios]({name}.svg)\n"
    (given.out / f"{name}.md").write_text(_page(given, found, picture))


if __name__ == "__main__":
    main()
