"""JSON schemas of requests and responses, as in the OpenAI API; no torch."""
