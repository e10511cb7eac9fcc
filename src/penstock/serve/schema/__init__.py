"""The JSON of requests and answers, as the OpenAI API writes it; no torch."""
