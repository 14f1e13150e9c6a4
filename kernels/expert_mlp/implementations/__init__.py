"""The implementations of `expert_mlp` behind one signature: C, torch operations, Triton."""
