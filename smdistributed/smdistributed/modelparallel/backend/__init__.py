"""Has the module of exceptions that launchers look into; there is no backend."""
