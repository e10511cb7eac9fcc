"""Train a model: a recipe becomes live objects (setup), and a loop a user may copy runs them."""
