"""OpenAI-compatible HTTP server over the inference engine."""
