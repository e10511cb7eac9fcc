"""Planner: predicts the time and memory of a training step from data sheets of machines, before it runs."""
