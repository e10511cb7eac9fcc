"""Llama decoder; with other sizes, biases and norms it is Granite, Mistral or Qwen."""
