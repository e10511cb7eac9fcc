"""Operator of TrainingRuns on Kubernetes: reconciles each run: reads, decides, acts; it remembers nothing."""
