"""The decoder that is the network of every family; families differ in its config."""
