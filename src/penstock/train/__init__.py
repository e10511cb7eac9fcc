"""Training: a recipe becomes live objects (setup), and a loop that users may copy runs them."""
