"""Messages between processes, and who is waited for."""
