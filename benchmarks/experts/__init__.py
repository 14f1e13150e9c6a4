"""A layer's routed experts: what is measured, beside whom, and when results agree."""
