"""Cases of ``moe-runtime bench``, and what their commands share."""
