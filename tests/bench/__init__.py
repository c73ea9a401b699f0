"""Benchmarks, as ratios within one run: ``python -m tests.bench [--quick]`` from the repository's root."""
