"""Inference engine: scheduling, model runner, sampling, speculative decoding, text output."""
