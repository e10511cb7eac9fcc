"""Operator of TrainingRuns on Kubernetes: looks at a run, decides, acts; it remembers nothing."""
