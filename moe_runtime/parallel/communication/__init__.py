"""Messages between processes, and detection of missing ranks."""
