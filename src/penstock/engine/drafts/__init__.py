"""Where guessed tokens come from: an answer's own text, a small model, or heads on the model itself."""
