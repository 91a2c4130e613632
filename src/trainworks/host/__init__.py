"""This machine: its pip and apt settings, its trusted CAs and proxies, its
local wheels, its bootstrap tool.

What holds for the user's own pip and apt outside a build holds inside as well (ADR 0006): settings
go in as secrets, local files through the build context. Nothing read here reaches a layer, a label
or a cache key.
"""
