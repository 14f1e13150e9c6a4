"""`expert_mlp` of experts that stay quantised."""
