"""Replays traces with caching policies, predictors and prefetching."""
