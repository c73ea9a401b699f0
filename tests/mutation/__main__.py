"""Count the mutants of ``ampcompat/amp`` that the tests kill.

    python -m tests.mutation map [PYTEST ARGUMENTS]    # which test runs which line: once, in pieces if you like
    python -m tests.mutation run [--count 240] [--seed 18] [--part 1/4]
    python -m tests.mutation copy --mutant TEXT PYTEST ARGUMENTS
    python -m tests.mutation report

A process imports torch and collects the tests once. For each mutant it forks a child, puts the changed code into the
functions, and runs the tests that cover the line, the quick and specific first, until one fails. Survivors of the
default tests then meet the slow ones that are in the map: these say what the default run gave up. A test that kills is
run once without the mutant too: if it fails, it is no evidence.

Children that tests start do not see the mutant, and nor does torch's compiler: what only they notice counts as
survived. ``copy`` changes a copy of the repository instead, and runs the tests that it is told to in a new process. It
costs seconds, and is for a few mutants: those whose line contains TEXT, as ``report`` prints them.
"""

import argparse
import collections
import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType

import coverage
import pytest

from tests.mutation.mutants import Mutant, changed, codes, every, sample

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "ampcompat" / "amp"
WORK = ROOT / "build" / "mutation"


class MapLines:
    """Plugin that writes down the lines of the core that each test runs, and how long it takes."""

    def __init__(self) -> None:
        self.cover = coverage.Coverage(data_file=None, config_file=False, include=[f"{CORE}/*"])
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begin = time.process_time()
        self.cover.switch_context(item.nodeid)
        found = yield
        self.seconds[item.nodeid] = round(time.process_time() - begin, 3)
        return found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def write(self, file: Path) -> None:
        data, lines = self.cover.get_data(), {}
        for measured in data.measured_files():
            name = Path(measured).relative_to(ROOT).as_posix()
            for line, contexts in data.contexts_by_lineno(measured).items():
                lines[f"{name}:{line}"] = sorted(set(contexts) & set(self.seconds) - self.failed)
        text = json.dumps({"seconds": self.seconds, "lines": lines})
        file.write_text(text, encoding="utf-8")


class RunMutants:
    """Plugin that runs mutants instead of the tests that were collected."""

    def __init__(self, mutants: list[Mutant], covering: "Covering", results: Path, budget: float) -> None:
        self.mutants, self.covering, self.results, self.budget = mutants, covering, results, budget
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self.covering.slow = {name for name, item in items.items() if item.get_closest_marker("slow")}
        gc.unfreeze()  # what the tests' conftest.py hid from the collector
        functions: dict[tuple[str, str, int], list[FunctionType]] = collections.defaultdict(list)
        for thing in gc.get_objects():
            # Not isinstance: some of torch's objects warn when they are asked for their class.
            if type(thing) is FunctionType and thing.__code__.co_filename.startswith(f"{CORE}/"):
                code = thing.__code__
                functions[code.co_filename, code.co_name, code.co_firstlineno].append(thing)
        gc.freeze()
        control: dict[str, str] = {}
        for mutant in self.mutants:
            changed = codes(ROOT / mutant.file, mutant)
            swaps = [
                (function, code)
                for (name, line), code in changed.items()
                for function in functions[str(ROOT / mutant.file), name, line]
            ]
            begin, tried, end, killer = time.perf_counter(), 0, "survived", ""
            for slow in (False, True):
                names = [n for n in self.covering.of(mutant, slow, self.budget) if n in items]
                tried += len(names)
                end, killer = self.fork(swaps, [items[n] for n in names])
                if end != "survived":
                    if killer not in control:
                        control[killer] = self.fork([], [items[killer]])[0]
                    if control[killer] != "survived":
                        end = "no evidence"
                    break
            line = {
                "mutant": str(mutant), "end": end, "killer": killer, "slow": slow and end != "survived",
                "tests": tried, "all": self.covering.count(mutant), "functions": len(swaps),
                "seconds": round(time.perf_counter() - begin, 1),
            }  # fmt: skip
            with self.results.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
        return True

    def fork(self, swaps: list[tuple[FunctionType, object]], items: list[pytest.Item]) -> tuple[str, str]:
        """Return how a child with the changed functions ends, and the test that it was in."""
        if not items:
            return "survived", ""
        now_in = self.results.with_suffix(".now")
        now_in.write_text(items[0].nodeid, encoding="utf-8")
        child = os.fork()
        if not child:
            status = 70  # the change could not be made
            try:
                os.setsid()
                status = self.run(swaps, items, now_in)
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what a killed test had started
        if os.WIFSIGNALED(status):
            end = "timeout" if os.WTERMSIG(status) == signal.SIGALRM else "crash"
        else:
            end = {0: "survived", 1: "killed", 70: "no evidence"}.get(os.WEXITSTATUS(status), "crash")
        return end, "" if end == "survived" else now_in.read_text(encoding="utf-8")

    def run(self, swaps: list[tuple[FunctionType, object]], items: list[pytest.Item], now_in: Path) -> int:
        config = items[0].config
        config.pluginmanager.unregister(name="terminalreporter")
        for function, code in swaps:
            function.__code__ = code
        for item, following in zip(items, [*items[1:], None], strict=True):
            now_in.write_text(item.nodeid, encoding="utf-8")
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(20 + 20 * self.covering.seconds[item.nodeid]))
            try:
                config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            except BaseException:
                return 1
            if self.failed:
                return 1
        return 0


class Covering:
    """The tests of each line, from the files that ``map`` wrote."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.seconds: dict[str, float] = {}
        self.slow: set[str] = set()  # known once the tests are collected
        self.lines: dict[str, list[str]] = collections.defaultdict(list)
        for file in files:
            one = json.loads(file.read_text(encoding="utf-8"))
            self.seconds |= one["seconds"]
            for line, names in one["lines"].items():
                self.lines[line] += names
        self.breadth = collections.Counter(name for names in self.lines.values() for name in names)

    def count(self, mutant: Mutant) -> int:
        return len(self.lines.get(f"{mutant.file}:{mutant.line}", ()))

    def of(self, mutant: Mutant, slow: bool, budget: float) -> list[str]:
        """Return the tests of the line, first one case of each test function; together they take ``budget`` seconds."""
        cases: dict[str, list[str]] = collections.defaultdict(list)
        for name in sorted(set(self.lines.get(f"{mutant.file}:{mutant.line}", ())), key=self.price):
            if (name in self.slow) == slow:
                cases[name.partition("[")[0]].append(name)
        rounds = [(at, self.price(name), name) for names in cases.values() for at, name in enumerate(names)]
        chosen: list[str] = []
        for _, _, name in sorted(rounds):
            budget -= self.seconds[name]
            if budget < 0 and chosen:
                break
            chosen.append(name)
        return chosen

    def price(self, name: str) -> float:
        return (0.005 + self.seconds[name]) * self.breadth[name]


def run_in_copies(mutants: list[Mutant], arguments: list[str], results: Path) -> int:
    """Run pytest on a copy of the repository for each of ``mutants``, and once without; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, "copy")
        shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".*", "build", "dist", "__pycache__"))
        command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-q", "-p", "no:cacheprovider", *arguments]

        def test() -> tuple[str, str]:
            """Return how the tests end, and what they print."""
            environment = {**os.environ, "PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1"}
            with Path(folder, "out").open("w+", encoding="utf-8") as out:
                child = subprocess.Popen(command, cwd=copied, env=environment, stdout=out, start_new_session=True)
                try:
                    status = child.wait(timeout=limit)
                    end = {0: "survived", 1: "killed"}.get(status, "crash")
                except subprocess.TimeoutExpired:
                    end = "timeout"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                out.seek(0)
                return end, out.read()

        limit, begin = 600.0, time.perf_counter()
        end, out = test()
        if end != "survived":
            print(out)
            return 1
        limit = 20 + 4 * (time.perf_counter() - begin)
        for mutant in mutants:
            file, begin = copied / mutant.file, time.perf_counter()
            source = file.read_text(encoding="utf-8")
            file.write_text(changed(source, mutant), encoding="utf-8")
            end, out = test()
            file.write_text(source, encoding="utf-8")
            failed = [line.split()[1] for line in out.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            line = {
                "mutant": str(mutant), "end": end, "killer": failed[0] if failed else "", "slow": False, "tests": 0,
                "all": 0, "seconds": round(time.perf_counter() - begin, 1),
            }  # fmt: skip
            print(end, mutant, line["killer"], flush=True)
            with results.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")
    return 0


def main() -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser("python -m tests.mutation", description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["map", "run", "copy", "report"])
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--part", default="1/1", help="2/4: the second quarter of the mutants")
    parser.add_argument("--budget", type=float, default=30, help="seconds of tests for one mutant")
    parser.add_argument("--mutant", action="append", default=[], help="a part of the mutant's line; several times")
    parser.add_argument("--again", action="store_true", help="run those that survived, with the tests of new maps")
    parser.add_argument("--work", type=Path, default=WORK)
    options, rest = parser.parse_known_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.command == "report":
        return report(options.work)
    common = ["-n", "0", "-q", "-p", "no:cacheprovider", "-p", "no:cov", "-r", "fE"]
    if options.command == "map":
        plugin = MapLines()
        plugin.cover.start()
        pytest.main([*common, *rest], plugins=[plugin])
        plugin.cover.stop()
        plugin.write(options.work / f"map-{os.getpid()}.json")
        return 0
    if options.command == "copy":
        named = [m for m in every(CORE, ROOT) if any(text in str(m) for text in options.mutant)]
        return run_in_copies(named, rest, options.work / "results-copy.jsonl")
    part, parts = map(int, options.part.split("/"))
    mutants = sample(CORE, ROOT, options.count, options.seed)[part - 1 :: parts]
    results = options.work / f"results-{part}-{parts}.jsonl"
    known = [m for m, line in latest([results]).items() if not (options.again and line["end"] == "survived")]
    covering = Covering(sorted(options.work.glob("map-*.json")))
    plugin = RunMutants([m for m in mutants if str(m) not in known], covering, results, options.budget)
    return pytest.main([*common, "-m", "not gpu and not integrations", *rest], plugins=[plugin])


def latest(files: Iterable[Path]) -> dict[str, dict[str, object]]:
    """Return the last result of each mutant."""
    lines = [json.loads(line) for file in files if file.exists() for line in file.read_text("utf-8").splitlines()]
    return {line["mutant"]: line for line in lines}


def report(folder: Path) -> int:
    """Print the figures and the survivors."""
    found = latest(sorted(folder.glob("results-[0-9]*.jsonl")))
    found |= {mutant: line for mutant, line in latest([folder / "results-copy.jsonl"]).items() if mutant in found}
    lines = list(found.values())
    ends = collections.Counter(("slow: " if line["slow"] else "") + line["end"] for line in lines)
    print(f"{len(lines)} mutants:", ", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    for line in sorted(lines, key=lambda line: line["mutant"]):
        if line["end"] in ("survived", "no evidence", "timeout") or line["slow"]:
            print(f"{line['end']}{' by slow' * line['slow']}: {line['mutant']}  ({line['tests']}/{line['all']} tests)")
            if line["killer"]:
                print(f"    {line['killer']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
