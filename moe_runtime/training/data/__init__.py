"""Text, tokens and the batches that are drawn from them."""
