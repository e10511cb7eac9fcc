"""How long a step takes and what it costs before anything runs: machines and a job in, a prediction out."""
