"""Network interfaces of a machine, and the settings of gloo and NCCL for them; no torch."""
