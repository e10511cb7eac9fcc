"""Train heads that guess the tokens after the next one, on a model that stays as it is."""
