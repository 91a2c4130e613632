"""Answers questions about targets and images."""
