"""A checkpoint of transformers: headers, where its experts lie, loading and writing of weights."""
