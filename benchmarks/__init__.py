"""Benchmarks behind the figures that the documentation quotes, with one command each."""
