"""What is kept of sequences and of beginnings of texts: keys, values, running states."""
