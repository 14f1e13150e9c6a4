"""Parts that the benchmark programs beside this folder share."""
