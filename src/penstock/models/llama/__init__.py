"""The Llama decoder, which with other numbers, biases and norms is Granite, Mistral and Qwen."""
