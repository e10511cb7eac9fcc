"""Reading of a run's files, in local folders and object stores: records, columns, ranks, events, hangs."""
