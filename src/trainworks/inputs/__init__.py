"""Finds and downloads the inputs of a build that the checkout does not have."""
