"""Evaluation on tasks by lm-eval: tasks, the model that answers them, results and their differences."""
