"""From a plan to bytes: the Dockerfile, the files of its build context, the image's manifest.

Pure.
"""
