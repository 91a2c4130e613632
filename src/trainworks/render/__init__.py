"""Renders a plan: the Dockerfile, the files of its build context, the image's manifest.

Pure.
"""
