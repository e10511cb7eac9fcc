"""The parts of the GPU kit (`benchmarks/gpu.py`), each a script of its own that files its rows as it goes."""
