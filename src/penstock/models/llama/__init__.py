"""The Llama decoder, which with other numbers is Granite and Mistral."""
