"""The degree of expert slicing chosen anew for every batch (Tutel)."""
