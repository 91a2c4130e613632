"""The program that answers the questions of image checks from inside an image.

Runs once for all of them.

The sources of these modules are sent into a container and run there by the image's
``/usr/bin/python3``, which may be as old as 3.8 and has only the standard library: they import
nothing but it and each other, and use no newer syntax.
"""
