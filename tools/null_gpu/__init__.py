"""A GPU that computes nothing: launches, waits and copies of Penstock are counted on any machine."""
