"""Environments in worker processes, stepped through shared memory: what vectorised environments are made of."""
