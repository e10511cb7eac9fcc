"""Linear layers: packed for CPUs, quantized, float8."""
