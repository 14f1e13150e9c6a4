"""Shared parts of the benchmark scripts."""
