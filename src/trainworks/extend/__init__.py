"""Extends an image with a project's requirements and code."""
