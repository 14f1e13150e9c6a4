"""Parts of the GPU benchmarks: `kernels.py`, `device_decode.py` and `device_training.py`."""
