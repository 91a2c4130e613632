"""A job that hangs: it is seen, the rank that differs is named, and the stacks of all ranks are written down.

``stacks``, ``progress`` and ``naming`` are pure: texts of py-spy or faulthandler become stacks, two looks at a host
become a sign of life or none, rows of ranks become words; ``grid`` and ``chart`` draw them as text and as SVG.
``looking`` reads /proc and the stacks of this host's processes. ``watch`` looks now and then, agrees with the other
hosts that no rank makes progress, and reports.
"""
