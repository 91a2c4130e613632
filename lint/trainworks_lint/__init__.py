"""Finds mistakes in Dockerfiles: the text goes in, findings come out."""
