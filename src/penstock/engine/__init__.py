"""Generation: a model, a cache, a sampler, and a stream of text."""
