"""Fully sharded data parallelism (FSDP2), and the private parts of torch that it uses."""
