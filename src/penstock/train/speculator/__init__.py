"""Training of speculator heads, which draft the tokens after the next one, on a frozen model."""
