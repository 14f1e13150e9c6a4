"""One eviction policy a module."""
