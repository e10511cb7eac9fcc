"""One model over many devices."""
