"""Wheels that no index gives: built in the base image, kept in a cache, or downloaded from an address."""
