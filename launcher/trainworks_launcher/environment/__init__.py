"""What a host is given: platform, variables, files, image manifest, code, devices.

All of it is read once.

``environment`` puts it into one frozen value. What the job does with it is decided elsewhere.
"""
