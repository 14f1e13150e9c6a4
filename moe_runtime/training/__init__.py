"""Training of language models built on the drop-in layer.

`config` is what a run is made of, `text`, `tokens` and `batches` lead from files to batches,
`loop` takes the steps, `checkpoint` lets a killed run go on, `metrics` records it.
"""
