"""What layers do for one token of each sequence, or a few: a file an operation, or `prepared`."""
