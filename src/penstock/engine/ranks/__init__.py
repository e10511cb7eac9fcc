"""One model on several processes of a machine: their parts, how they are run, and what they exchange."""
