"""Doctor: examines the machines of a run before it starts; reports faults and remedies."""
