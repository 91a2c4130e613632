"""Any Dockerfile: whether its versions go together (docs/adr/0037)."""
