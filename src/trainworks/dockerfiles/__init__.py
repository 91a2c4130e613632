"""Any Dockerfile: whether its versions go together, and whether it installs what it names (docs/adr/0037)."""
