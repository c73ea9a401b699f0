"""Run every training scenario and compare it with the recording of apex.

``python tests/parity/replay_training.py`` prints, per run, what is bitwise the same and how far the rest is off.
"""

import json
import math
from pathlib import Path

import scenarios

RECORDED = json.loads(Path(__file__).with_name("apex_training.json").read_text())

#: The key third of this bias has a gradient of exactly zero; its norm is rounding noise. See docs/parity.md.
NOISE = {("block", 1)}


def run(name, kwargs):
    """One run, as the JSON data it was recorded as."""
    from ampcompat import amp

    return json.loads(json.dumps(getattr(scenarios, name)(amp, **kwargs)))


def off_by(got, want):
    """Relative differences, element by element; NaN equals NaN; not a number against one is infinitely far."""
    pairs = zip(got, want, strict=True)
    return [_off(a, b) for a, b in pairs]


def _off(a, b):
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b), 1e-3) if math.isfinite(a - b) else math.inf


def norm_differences(name, got, want):
    """Differences of the master norms: of the ordinary parameters, and of those in ``NOISE``."""
    differences = off_by(got["norms"], want["norms"])
    noisy = [d for i, d in enumerate(differences) if (name, i) in NOISE]
    return [d for i, d in enumerate(differences) if (name, i) not in NOISE], noisy


def main():
    import sys

    import torch

    sys.path.append(str(Path(__file__).parents[1]))
    from internals import reset

    torch.set_num_threads(1)
    bitwise = 0
    print(f"{'run':70} {'bitwise':>8} {'losses':>8} {'norms':>8} {'noise':>8}  skips and scales")
    for name, kwargs in scenarios.RUNS:
        key = scenarios.key(name, kwargs)
        got, want = run(name, kwargs), RECORDED[key]
        reset()
        norms, noise = norm_differences(name, got, want)
        losses = off_by(got["loss"], want["loss"])
        same = all(repr(got[field]) == repr(want[field]) for field in want)
        bitwise += same
        exact = all(got[field] == want[field] for field in want if field in ("scale", "skipped"))
        columns = f"{max(losses):8.1e} {max(norms):8.1e} {max(noise, default=0.0):8.1e}"
        print(f"{key:70} {'yes' if same else 'no':>8} {columns}  {'exact' if exact else 'DIFFER'}")
    print(f"{bitwise} of {len(scenarios.RUNS)} runs bitwise; torch {torch.__version__}")


if __name__ == "__main__":
    main()
