"""From logits to tokens: grammars and penalties move them, filters and a random number choose."""
