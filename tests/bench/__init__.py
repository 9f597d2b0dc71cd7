"""Slow studies, run by hand: ``python -m tests.bench.NAME --help``."""
