"""Training of language models built on the drop-in layer."""
