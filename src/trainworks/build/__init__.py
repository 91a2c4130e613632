"""Builds images: base, context, engine, checks, record."""
